"""The reported q is the law the tokens were drawn from, in every round, whatever the round before accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.round import drafting_context
from specjax.decoding.run import Run
from specjax.drafters import Independent
from specjax.keys import Noise
from specjax.sampling import Sampling, draw
from specjax.verifiers import VERIFIERS
from tests.decoding.tiny_pair import DRAFTER, LIMITS, PROMPTS, VOCAB, Pair

DRAFT_LENGTH = 3


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def proposals(pair, sampling, verifier):
    """(state, noise, proposal) at the start of every round of a ragged batch."""
    drafter = Independent(DRAFTER, DRAFT_LENGTH)
    run = Run.start(
        pair.target, PROMPTS[:3], max_new_tokens=LIMITS[:3], drafter=drafter, drafter_params=pair.drafter.params,
        draft_sampling=sampling, verifier=verifier, buffer_length=32, seed=3,
    )  # fmt: skip
    stream = VERIFIERS[verifier]().stream

    @jax.jit
    def propose(inputs, state):
        noise = Noise(state.row_keys, state.length, stream)
        return drafter.propose(
            inputs.drafter_params, state.draft_state, drafting_context(run.decoder, inputs, state), noise
        )[0]

    while not run.finished:
        state = jax.device_get(run.state.replace(row_keys=None))
        yield state, Noise(run.state.row_keys, jnp.asarray(state.length), stream), propose(run.inputs, run.state)
        run.advance(1)


@pytest.mark.parametrize("sampling, verifier", [(Sampling.of(1.3, top_k=5), "token"), (Sampling.of(0.7), "coupled")])
def test_q_is_the_law_of_a_plain_forward_in_every_round(pair, sampling, verifier):
    accepted, before = set(), None
    for state, noise, proposal in proposals(pair, sampling, verifier):
        sources = noise.draft(DRAFT_LENGTH)
        for row in range(3):
            if before is not None:
                accepted.add(int(state.counts.accepted[row] - before[row]))
            text = [*state.tokens[row, : state.length[row]], *np.asarray(proposal.tokens[row])]
            logits = pair.logits(text, pair.drafter)[state.length[row] - 1 : -1]
            np.testing.assert_allclose(proposal.law[row], sampling.law(jnp.asarray(logits)), atol=1e-10)
        for d in range(DRAFT_LENGTH):
            drawn = draw(proposal.law[:, d], jax.tree.map(lambda x, d=d: x[d], sources))
            np.testing.assert_array_equal(proposal.tokens[:, d], drawn)
        assert proposal.law.shape == (3, DRAFT_LENGTH, VOCAB) and proposal.valid.all()
        before = state.counts.accepted
    assert accepted == {0, 1, 2, 3}  # so rounds followed a bonus (one position to catch up) and every kind of rejection


def test_a_greedy_drafter_reports_a_one_hot_law(pair):
    """None stands for one-hot; a batch with sampled rows beside it writes the law out."""
    for state, _, proposal in proposals(pair, Sampling.of(0.0), "token"):
        assert proposal.law is None
        for row in range(3):
            text = [*state.tokens[row, : state.length[row]], *np.asarray(proposal.tokens[row])]
            best = pair.logits(text, pair.drafter)[state.length[row] - 1 : -1].argmax(-1)
            assert best.tolist() == proposal.tokens[row].tolist()
    for _, _, proposal in proposals(pair, Sampling.of([0.0, 1.0, 0.0]), "token"):
        laws = np.asarray(proposal.law)
        np.testing.assert_array_equal(laws[[0, 2]], np.eye(VOCAB)[np.asarray(proposal.tokens)][[0, 2]])
        assert (laws[1] > 0).all()


def test_a_drafter_needs_a_token_to_draft():
    with pytest.raises(ValueError, match="draft_length must be at least 1; got 0"):
        Independent(DRAFTER, 0)
    assert Independent(DRAFTER, 2) == Independent(DRAFTER, 2) and Independent(DRAFTER, 2).topology.is_chain
