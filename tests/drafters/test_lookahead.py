"""Lookahead: its tree, its window against plain Python, its pool in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.decoding.run import Run
from specjax.drafters.lookahead import Lookahead
from specjax.protocol import Committed
from specjax.sampling import Sampling
from specjax.topology import DynamicTopology
from tests.decoding.tiny_pair import CONTEXT, PROMPTS, Pair
from tests.drafters.proposing import context_of, propose
from tests.drafters.training_free import OPTIONS, target

W, N, G = 3, 4, 2
DRAFTER = Lookahead(W, N, G)
init, commit = jax.jit(Lookahead.init, static_argnums=0), jax.jit(Lookahead.commit, static_argnums=0)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def committed_of(tokens, count, outputs):
    """What a round hands back; the outputs behind all levels but the last are not to be looked at."""
    wrong = jnp.full((len(tokens), W * (N - 2)), 10)
    return Committed(
        jnp.array(tokens), None, jnp.array(count), jnp.zeros((len(tokens), N), jnp.int32),
        jnp.concatenate([wrong, jnp.array(outputs)], 1),
    )  # fmt: skip


def test_the_tree():
    """Candidates are chains on the root, the window's first level is one, and every column hangs on its token there."""
    topology = DRAFTER.layout
    candidates = G * (N - 1)
    assert DRAFTER.topology == DynamicTopology(topology.num_nodes, topology.max_depth, topology.passengers)
    assert topology.num_nodes == candidates + W * (N - 1) and topology.passengers == W * (N - 1)
    assert topology.max_depth == DRAFTER.draft_length == N - 1
    assert topology.parents == (0, 0, 1, 2, 3, 4, 0, 7, 8, 7, 8, 9, 10, 11, 12)
    depths = topology.depths[candidates + 1 :].reshape(N - 1, W)
    assert (depths == 1 + np.arange(N - 1)[:, None] + np.arange(W)).all()
    for level in range(N - 1):
        for column in range(W):
            chain = [7 + i for i in range(column + 1)] + [7 + W * j + column for j in range(1, level + 1)]
            assert set(np.flatnonzero(topology.ancestors[7 + W * level + column])) == {0, *chain}
    assert Lookahead(2, 2, 3).layout.parents == (0, 0, 0, 0, 4)


def test_the_window_moves_with_the_text():
    """Guesses keep their positions: after k tokens, level j of column i is what level j + 1 of column i + k - 1 was."""
    context = context_of([[1, 2, 3]] * 4)
    state = init(DRAFTER, None, context)
    window = jnp.arange(4 * 9).reshape(4, 3, 3)
    state = state.replace(window=window)
    outputs = 100 + np.arange(12).reshape(4, 3)
    after = commit(DRAFTER, None, state, committed_of([[5, 6, 7, 8]] * 4, [0, 1, 2, 4], outputs))
    levels = np.concatenate([window[:, 1:], outputs[:, None]], 1)
    np.testing.assert_array_equal(after.window[0], window[0])  # a finished row
    np.testing.assert_array_equal(after.window[1], levels[1])
    np.testing.assert_array_equal(after.window[2], levels[2][:, [1, 2, 0]])
    np.testing.assert_array_equal(after.window[3], levels[3][:, [0, 1, 2]])  # 3 columns further, all of them new
    assert after.tail.tolist() == [[1, 2, 3], [2, 3, 5], [3, 5, 6], [6, 7, 8]]


@pytest.mark.parametrize("from_text", [True, False])
def test_columns_and_text_become_n_grams(from_text):
    drafter = Lookahead(W, N, G, pool_size=16, from_text=from_text)
    state = init(drafter, None, context_of([[1, 2], [0, 1, 2, 3, 4, 5]]))
    held = lambda state, row: {tuple(g) for g in state.pool.grams[row].tolist() if g[0] >= 0}  # noqa: E731
    prompt = {(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)} if from_text else set()
    assert held(state, 0) == set() and held(state, 1) == prompt
    state = state.replace(window=jnp.arange(9).reshape(1, 3, 3) + jnp.array([10, 30])[:, None, None])
    outputs = [[50, 51, 52], [60, 61, 62]]
    after = commit(drafter, None, state, committed_of([[7, 8, 9, 9]] * 2, [3, 0], outputs))
    columns = {(10, 13, 16, 50), (11, 14, 17, 51), (12, 15, 18, 52)}
    text = {(1, 2, 7, 8), (2, 7, 8, 9)} if from_text else set()
    assert held(after, 0) == columns | text
    assert held(after, 1) == held(state, 1)  # a finished row


def test_candidates_begin_with_the_pending_token():
    texts = [[4, 1, 2, 3, 4, 5, 6, 7, 4], [4, 1, 2, 3, 5], [4]]
    context = context_of(texts)
    state = init(DRAFTER, None, context)
    proposal = propose(DRAFTER, None, state, context)
    candidates = np.asarray(proposal.tokens)[:, : G * (N - 1)].reshape(3, N - 1, G)
    assert candidates[0].T.tolist() == [[5, 6, 7], [1, 2, 3]]  # the later one first
    valid = np.asarray(proposal.valid)
    assert valid[0, : G * (N - 1)].all() and not valid[1:].any() and not valid[:, G * (N - 1) :].any()
    for row, text in enumerate(texts):
        assert set(np.asarray(state.window[row]).ravel().tolist()) <= set(text)
    np.testing.assert_array_equal(proposal.tokens[:, G * (N - 1) :], state.window.reshape(3, -1))


def test_candidates_that_begin_alike_are_one_path():
    """Without that a rule that judges siblings one by one never follows the later of two that begin with one token."""
    drafter = Lookahead(W, N, 3)
    context = context_of([[4, 5, 6, 7, 4, 5, 6, 9, 4, 5, 8, 9, 4], [4, 5, 6, 7, 4, 1, 6, 7, 4], [4]])
    proposal = propose(drafter, None, init(drafter, None, context), context)
    valid, parents, tokens = (np.asarray(x)[:, :9] for x in (proposal.valid, proposal.parents, proposal.tokens))
    assert tokens[0].reshape(3, 3).T.tolist() == [[5, 8, 9], [5, 6, 9], [5, 6, 7]]
    assert valid[0].tolist() == [True, False, False, True, True, False, True, True, True]
    assert parents[0].tolist() == [0, 0, 0, 1, 1, 1, 4, 5, 5]
    assert valid[1].reshape(3, 3).T.tolist() == [[True] * 3, [True] * 3, [False] * 3]  # ends are alike
    assert parents[1].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6] and not valid[2].any()
    np.testing.assert_array_equal(proposal.parents[:, 9:], np.tile(drafter.layout.parents[9:], (3, 1)))


@pytest.mark.parametrize("verifier", ["greedy", "multi_round", "traversal"])
def test_every_rule_follows_the_path_among_those_that_begin_alike(verifier):
    """At temperature 0 all of them accept what the greedy tree rule accepts."""
    drafter, limits = Lookahead(2, 3, 4), [CONTEXT - len(prompt) for prompt in PROMPTS[:3]]
    options = dict(max_new_tokens=limits, buffer_length=CONTEXT, sampling=Sampling.of(0.0), drafter=drafter)
    wanted, run = (generate(target(), PROMPTS[:3], verifier=rule, **options) for rule in ("greedy", verifier))
    assert run.counts.rounds.tolist() == wanted.counts.rounds.tolist() and (run.counts.accepted > 0).all()


def test_the_window_is_the_jacobi_iteration_of_the_target():
    """The window's new tokens are those of plain forwards over the text and each column's own past."""
    pair, drafter = Pair(), Lookahead(W, N, G)
    run = Run.start(
        pair.target, PROMPTS[:3], max_new_tokens=24, drafter=drafter, verifier="greedy", sampling=Sampling.of(0.0),
        buffer_length=32,
    )  # fmt: skip
    moved = set()
    while not run.finished:
        before = jax.device_get(run.state.replace(row_keys=None))
        run.advance(1)
        after = jax.device_get(run.state.replace(row_keys=None))
        for row in np.flatnonzero(before.finish == 0):
            window, shift = before.draft_state.window[row], int(after.length[row] - before.length[row]) - 1
            outputs = []
            for column in range(W):
                text = [*before.tokens[row, : before.length[row]], *window[0, : column + 1], *window[1:, column]]
                outputs.append(int(pair.logits(text)[-1].argmax()))
            new = after.draft_state.window[row, -1]
            assert new.tolist() == [outputs[(i + shift) % W] for i in range(W)]
            moved.add(shift)
    assert len(moved) > 1


def test_it_finds_a_repeated_n_gram():
    """A text that goes round in circles up to the end of the context, with and without its own n-grams in the pool."""
    greedy, limits = Sampling.of(0.0), [CONTEXT - len(prompt) for prompt in PROMPTS[:3]]
    options = dict(max_new_tokens=limits, buffer_length=CONTEXT, sampling=greedy)
    alone = generate(target(), PROMPTS[:3], **options)
    for from_text in (True, False):
        drafter = Lookahead(W, N, G, from_text=from_text)
        run = generate(target(), PROMPTS[:3], drafter=drafter, verifier="greedy", **options)
        for got, want in zip(run.tokens, alone.tokens, strict=True):
            np.testing.assert_array_equal(got, want)
        assert (run.counts.rounds < limits).all() and run.counts.emitted.sum() / run.counts.rounds.sum() > 1.5


def test_refused_arguments():
    for name, given in (("window", (0, 3, 2)), ("ngram", (3, 1, 2)), ("candidates", (3, 3, 0))):
        with pytest.raises(ValueError, match=f"{name} must be at least"):
            Lookahead(*given)
    with pytest.raises(ValueError, match=r"pool_size must be at least 9 \(window \+ ngram, candidates\); got 8"):
        Lookahead(5, 4, 2, pool_size=8)
    with pytest.raises(ValueError, match="takes no parameters"):
        DRAFTER.check_params({})
    with pytest.raises(ValueError, match="takes chains only"):
        generate(target(), PROMPTS, drafter=DRAFTER, verifier="block", **OPTIONS)
