"""Both families of prediction heads against a slow head written out in numpy, round by round."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters import Hydra, Medusa
from specjax.drafters.heads import counted_positions
from specjax.keys import Noise, Stream, row_keys
from specjax.models.transformer import apply
from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT, Committed, Context
from specjax.sampling import Sampling
from specjax.topology import Topology
from tests.decoding.tiny_pair import PROMPTS, TARGET, VOCAB, Pair
from tests.drafters import cyclic_target
from tests.drafters.families import spread

FAMILIES = [Medusa, Hydra]
CHAIN, TREE = Topology.chain(3), Topology.from_shape((2, 2, 1))


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(scope="module")
def target(pair):
    return pair.target


def random_heads(drafter):
    return spread(drafter.init_params(jax.random.key(5)), 1.0, 5)


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + TARGET.norm_eps) * np.asarray(scale)


WIDTH = 20  # of all texts here, padded, so that one compiled forward serves all
_features = jax.jit(lambda params, tokens: apply(TARGET, params, tokens, feature_layers=(TARGET.num_layers,))[2])
_propose = jax.jit(lambda drafter, *arguments: drafter.propose(*arguments), static_argnums=0)
_law = jax.jit(Sampling.law)
_commit = jax.jit(lambda drafter, *arguments: drafter.commit(*arguments), static_argnums=0)


def features(target, text):
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, : len(text)] = text
    return np.asarray(_features(target.params, padded))[0, : len(text)]


def slow_logits(drafter, params, target, text, drafted):
    """Logits of the head behind the pending token text[-1] and the drafted ones, from the whole text at once."""
    head = jax.tree.map(np.asarray, params)[f"head_{len(drafted) + 1}"]
    tied = jax.tree.map(np.asarray, target.params)
    f = rms(features(target, text)[len(text) - 2], tied["final_norm"]["scale"])
    seen = f
    if drafter.sequential:
        path = [rms(tied["embedding"]["embedding"][t], head["path_norm"]["scale"]) for t in (text[-1], *drafted)]
        seen = np.concatenate([f, *path])
        f = f + seen @ head["mix"]["kernel"]
    f = f + silu(seen @ head["block_0"]["update"]["kernel"])
    return f @ tied["head"]["kernel"]


class Rounds:
    """Drives a drafter over given texts, as the loop would, without a verifier."""

    def __init__(self, drafter, params, target, texts, sampling, seed=0):
        self.drafter, self.params, self.target, self.texts = drafter, params, target, [list(t) for t in texts]
        self.sampling, self.keys = sampling.per_row(len(texts)), row_keys(seed, len(texts))
        padded = np.stack([np.pad(features(target, t), ((0, WIDTH - len(t)), (0, 0))) for t in self.texts])
        self.state = drafter.init(params, self.context(jnp.asarray(padded)))

    def context(self, features=None):
        tokens = jnp.asarray([np.pad(t, (0, WIDTH - len(t))) for t in self.texts], jnp.int32)
        length = jnp.asarray([len(t) for t in self.texts], jnp.int32)
        return Context(tokens, length, self.sampling, features, self.target.params, None, WIDTH)

    def propose(self):
        context = self.context()
        noise = Noise(self.keys, context.length, Stream.ROUND)
        proposal, self.state, _ = _propose(self.drafter, self.params, self.state, context, noise)
        return proposal

    def commit(self, emitted):
        """Append to each row what a round emitted there; an empty list is a finished row."""
        width = self.drafter.draft_length + 1
        tokens, new = np.zeros((len(emitted), width), np.int32), np.full((len(emitted), width, TARGET.d_model), 7.0)
        for row, run in enumerate(emitted):
            before = len(self.texts[row])
            self.texts[row] += run
            tokens[row, : len(run)] = run
            new[row, : len(run)] = features(self.target, self.texts[row])[before - 1 : before - 1 + len(run)]
        count = jnp.asarray([len(run) for run in emitted], jnp.int32)
        committed = Committed(jnp.asarray(tokens), jnp.asarray(new), count, jnp.zeros(tokens.shape, jnp.int32))
        self.state = _commit(self.drafter, self.params, self.state, committed)


def check_laws(rounds, rows):
    """Every node's law is the slow head's along its own path, without what earlier siblings took."""
    drafter, proposal = rounds.drafter, rounds.propose()
    topology = drafter.topology
    for row in rows:
        tokens = np.asarray(proposal.tokens[row])
        for node in range(1, topology.num_nodes + 1):
            parent = topology.parents[node - 1]
            above = [n for n in np.flatnonzero(topology.ancestors[parent]) if n > 0]
            logits = slow_logits(
                drafter, rounds.params, rounds.target, rounds.texts[row], [tokens[n - 1] for n in above]
            )
            law = np.array(_law(rounds.sampling, np.tile(logits, (len(rounds.texts), 1)))[row])
            if drafter.siblings == WITHOUT_REPLACEMENT:
                earlier = [n for n in range(1, node) if topology.parents[n - 1] == parent]
                law[[tokens[n - 1] for n in earlier]] = 0
                law = law / law.sum()
            np.testing.assert_allclose(proposal.law[row, node - 1], law, atol=1e-9)
    assert proposal.valid[jnp.asarray(rows)].all()


@pytest.mark.parametrize("topology, siblings", [(CHAIN, IID), (TREE, WITHOUT_REPLACEMENT)], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_laws_are_those_of_a_slow_head_after_any_number_of_accepted_tokens(family, topology, siblings, target):
    drafter = family(TARGET, topology, siblings)
    rounds = Rounds(drafter, random_heads(drafter), target, PROMPTS[1:4], Sampling.of(1.3, top_k=6))
    check_laws(rounds, [0, 1, 2])
    rounds.commit([[3], [4, 1, 10, 0], [7, 2]])
    check_laws(rounds, [0, 1, 2])
    rounds.commit([[], [5, 5], [1, 2, 3]])  # the first row has finished: its state stays
    check_laws(rounds, [0, 1, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_siblings_are_the_tokens_of_a_slow_head_by_rank(family, target):
    for siblings, temperature in ((FIXED, 1.0), (IID, 0.0)):
        drafter = family(TARGET, TREE, siblings)
        rounds = Rounds(drafter, random_heads(drafter), target, PROMPTS[1:3], Sampling.of(temperature))
        proposal = rounds.propose()
        assert proposal.law is None and proposal.siblings == FIXED
        for row, text in enumerate(rounds.texts):
            tokens = np.asarray(proposal.tokens[row])
            for node, parent in enumerate(TREE.parents, start=1):
                above = [tokens[n - 1] for n in np.flatnonzero(TREE.ancestors[parent]) if n > 0]
                logits = slow_logits(drafter, rounds.params, target, text, above)
                assert tokens[node - 1] == np.argsort(-logits)[TREE.ranks[node - 1]]


def test_medusa_draws_independently_under_different_parents(target):
    """The chance that all rows agree by accident is far below 1e-9: 64 rows, laws close to uniform over 11 tokens."""
    drafter = Medusa(TARGET, Topology.from_shape((2, 1)), IID)
    rounds = Rounds(drafter, drafter.init_params(jax.random.key(0)), target, [[1, 2, 3]] * 64, Sampling.of(50.0))
    tokens = np.asarray(rounds.propose().tokens)
    assert np.mean(tokens[:, 2] == tokens[:, 3]) < 0.5 and np.mean(tokens[:, 0] == tokens[:, 2]) < 0.5


@pytest.mark.parametrize("own_output", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_head_gives_the_law_that_emitted_the_pending_token(family, own_output, pair, target):
    drafter = family(TARGET, CHAIN, hidden_width=5, num_blocks=2, own_output=own_output)
    params = drafter.init_params(jax.random.key(0), target.params)
    rounds = Rounds(drafter, params, target, PROMPTS[1:3], Sampling.of(0.8))
    proposal = rounds.propose()
    for row, text in enumerate(rounds.texts):
        law = rounds.sampling.law(jnp.asarray(pair.logits(text)[-2][None].repeat(2, 0)))[0]
        np.testing.assert_allclose(proposal.law[row], np.tile(law, (3, 1)), atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_one_token_nothing_is_proposed_until_a_feature_is_known(family, target):
    drafter = family(TARGET, TREE)
    rounds = Rounds(drafter, random_heads(drafter), target, [[3], [1, 2]], Sampling.of(1.0))
    proposal = rounds.propose()
    assert not proposal.valid[0].any() and proposal.valid[1].all()
    rounds.commit([[], [4]])
    assert not rounds.propose().valid[0].any()
    rounds.commit([[6], [4]])
    check_laws(rounds, [0, 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_forced_logits_are_those_of_decoding_at_every_position(family, target):
    drafter = family(TARGET, CHAIN)
    params, text = random_heads(drafter), [1, 7, 2, 9, 4, 4, 0]
    tokens = jnp.asarray([text], jnp.int32)
    forced = drafter.teacher_forced(params, target.params, jnp.asarray(features(target, text))[None], tokens)
    assert [x.shape for x in forced] == [(1, 4, VOCAB)] * 3
    for depth, logits in enumerate(forced, start=1):
        for s in range(4):
            slow = slow_logits(drafter, params, target, text[: s + 2], text[s + 2 : s + 1 + depth])
            np.testing.assert_allclose(logits[0, s], slow, atol=1e-9)
    with pytest.raises(ValueError, match="3 heads need texts longer than 3 tokens; got 3"):
        drafter.teacher_forced(params, target.params, jnp.zeros((1, 3, 8)), tokens[:, :3])


def test_counted_positions_have_all_their_labels_in_the_text():
    mask = np.random.default_rng(0).random((50, 9)) < 0.8
    counted = np.asarray(counted_positions(jnp.asarray(mask), 2))
    slow = [[all(row[s + 1 + k] for k in (1, 2)) for s in range(9 - 1 - 2)] for row in mask]
    np.testing.assert_array_equal(counted, slow)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_know_the_language_are_always_right_in_bfloat16_too(family):
    """The features of every round, the depths of the heads and the shift between them, end to end."""
    with jax.enable_x64(False):
        config = dataclasses.replace(cyclic_target.CONFIG, dtype="bfloat16", param_dtype="bfloat16")
        drafter = family(config, CHAIN)
        language, params = cyclic_target.target(config), cyclic_target.knowing_heads(drafter)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
        run = lambda params: generate(  # noqa: E731
            language, [[2, 3], [5, 6, 0, 1]], max_new_tokens=12, drafter=drafter, drafter_params=params,
            sampling=Sampling.of(0.0), verifier="greedy",
        )  # fmt: skip
        result = run(params)
        assert [row.tolist() for row in result.tokens] == [[(t + i) % 7 for i in range(12)] for t in (4, 2)]
        assert result.counts.rounds.tolist() == [3, 3]  # of 4 tokens each
        wrong = run(jax.tree.map(lambda x: jnp.roll(x, 1, -1), params))
        assert [row.tolist() for row in wrong.tokens] == [row.tolist() for row in result.tokens]
        assert wrong.counts.accepted.tolist() == [0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shallower_tree_uses_the_first_of_the_heads(family, target):
    deep = family(TARGET, CHAIN)
    shallow = dataclasses.replace(deep, topology=Topology.chain(2))
    assert shallow.num_heads == 3 and shallow.draft_length == 2 and shallow.widths == (3,)
    params = random_heads(deep)
    shallow.check_params(params)
    one, other = (Rounds(d, params, target, PROMPTS[1:3], Sampling.of(1.0)).propose() for d in (deep, shallow))
    chex.assert_trees_all_close(one.law[:, :2], other.law)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_that_do_not_fit_are_named(family):
    drafter = family(TARGET, CHAIN)
    params = drafter.init_params(jax.random.key(0))
    drafter.check_params(params)
    with pytest.raises(ValueError, match="lack head_3/"):
        drafter.check_params({name: head for name, head in params.items() if name != "head_3"})
    with pytest.raises(ValueError, match="hold head_4/.*, which its config does not know; it has 3 heads"):
        drafter.check_params({**params, "head_4": params["head_3"]})
    with pytest.raises(ValueError, match=r"head_1/\S+ must be float64\[.*\]; got float32\["):
        drafter.check_params(jax.tree.map(lambda x: x.astype(jnp.float32), params))
    with pytest.raises(ValueError, match="lack head_1/"):
        drafter.check_params(None)
    with pytest.raises(ValueError, match="got float; it has 3 heads"):
        drafter.check_params(jax.tree.map(lambda x: 0.0, params))


@pytest.mark.parametrize("family", FAMILIES)
def test_bad_settings_are_named(family):
    for options, message in [
        ({"num_heads": 2}, "3 deep needs as many heads; got num_heads 2"),
        ({"num_blocks": 0}, "num_blocks must be at least 1; got 0"),
        ({"hidden_width": 0}, "hidden_width must be at least 1; got 0"),
        ({"siblings": "twins"}, "siblings must be .*'twins'"),
        ({"topology": Topology(())}, "at least one node"),
    ]:
        with pytest.raises(ValueError, match=message):
            family(**{"target": TARGET, "topology": CHAIN, **options})
    assert hash(family(TARGET)) == hash(family(TARGET)) and family(TARGET).draft_length == 4
