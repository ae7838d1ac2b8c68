"""The block drafter in the loop: its cached laws are those of a plain forward, and the text stays the target's."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.decoding.round import drafting_context
from specjax.decoding.run import Run, decode
from specjax.drafters import BlockDrafter
from specjax.keys import Noise
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.transformer import apply
from specjax.protocol import Committed, Context, Drafter
from specjax.sampling import Sampling, draw
from specjax.verifiers import VERIFIERS
from tests.decoding.test_compiled_loop import cache_copies, operations
from tests.decoding.tiny_pair import LIMITS, PROMPTS, VOCAB
from tests.drafters.families import make_target, spread, target_config

DRAFT_LENGTH = 3
TARGET = target_config(VOCAB)
DRAFTER = BlockDrafter(TARGET, 2, (0, 3), DRAFT_LENGTH)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def pair():
    """(target, drafter parameters)."""
    with jax.enable_x64(True):
        return make_target(VOCAB), spread(DRAFTER.init_params(jax.random.key(3)), 0.4, 4)


@pytest.fixture(scope="module")
def plain(pair):
    """(text) -> [γ, V] logits of the block behind it, by one forward of target and drafter without any cache."""
    target, params = pair

    @jax.jit
    def forward(tokens, length):
        features = apply(TARGET, target.params, tokens, feature_layers=DRAFTER.feature_layers)[2]
        return DRAFTER.logits(params, target.params, features, tokens, length[:, None] - 1)[0, 0]

    def logits(text):
        padded = np.random.default_rng(0).integers(0, VOCAB, (1, 40))  # what lies behind the text must not matter
        padded[0, : len(text)] = text
        return forward(jnp.asarray(padded, jnp.int32), jnp.array([len(text)], jnp.int32))

    return logits


def run(pair, prompts, limits, start=False, **options):
    options = {"buffer_length": 32, "drafter": DRAFTER, "drafter_params": pair[1], "seed": 5} | options
    return (Run.start if start else generate)(pair[0], prompts, max_new_tokens=limits, **options)


# Temperature 3 brings a drafter that learned nothing close enough to its target for all lengths to be accepted.
@pytest.mark.parametrize("verifier, temperature", [("block", 3.0), ("coupled", 2.0), ("token", 0.0)])
def test_q_is_the_law_of_a_plain_forward_in_every_round(pair, plain, verifier, temperature):
    sampling = Sampling.of(temperature, top_k=None if temperature == 0 else 9)
    call = run(pair, PROMPTS[:3], LIMITS[:3], start=True, sampling=sampling, verifier=verifier)
    stream = VERIFIERS[verifier]().stream

    @jax.jit
    def propose(inputs, state):
        noise = Noise(state.row_keys, state.length, stream)
        context = drafting_context(call.decoder, inputs, state)
        return DRAFTER.propose(inputs.drafter_params, state.draft_state, context, noise)[0], noise.draft(DRAFT_LENGTH)

    accepted, before = set(), None
    while not call.finished:
        state = jax.device_get(call.state.replace(row_keys=None))
        proposal, sources = propose(call.inputs, call.state)
        np.testing.assert_array_equal(state.draft_state.length, state.length - 1)
        for row in range(3):
            if before is not None:
                accepted.add(int(state.counts.accepted[row] - before[row]))
            logits = plain(state.tokens[row, : state.length[row]])
            if temperature == 0:
                assert proposal.law is None
                np.testing.assert_array_equal(proposal.tokens[row], np.argmax(logits, -1))
            else:
                np.testing.assert_allclose(proposal.law[row], sampling.law(logits), atol=1e-10)
        if temperature > 0:
            for d in range(DRAFT_LENGTH):
                drawn = draw(proposal.law[:, d], jax.tree.map(lambda x, d=d: x[d], sources))
                np.testing.assert_array_equal(proposal.tokens[:, d], drawn)
        before = state.counts.accepted
        call.advance(1)
    assert temperature == 0 or accepted == {0, 1, 2, 3}


def test_an_entry_that_is_missing_or_one_too_many_would_be_noticed(pair, plain):
    """The comparison above is sharp: blocks that see one position more or less have other laws."""
    target, params = pair
    text = jnp.asarray([[4, 1, 8, 2, 7, 3]], jnp.int32)
    features = apply(TARGET, target.params, text, feature_layers=DRAFTER.feature_layers)[2]
    context = Context(text, jnp.array([6]), Sampling.of(), features, target.params, buffer_length=16)
    cache = DRAFTER.init(params, context)
    for length, equal in ((4, False), (5, True), (6, False)):
        logits = DRAFTER.decode_logits(params, target.params, cache.rollback(jnp.array([length])), text[:, -1])[0]
        assert np.allclose(logits, plain(np.asarray(text[0])), atol=1e-8) == equal


def test_a_finished_row_keeps_its_entries(pair):
    target, params = pair
    text = jnp.asarray([[4, 1, 8, 2], [3, 3, 5, 9]], jnp.int32)
    features = apply(TARGET, target.params, text, feature_layers=DRAFTER.feature_layers)[2]
    before = DRAFTER.init(params, Context(text, jnp.array([4, 3]), Sampling.of(), features, buffer_length=8))
    more = jax.random.normal(jax.random.key(0), (2, DRAFT_LENGTH + 1, features.shape[-1]))
    tokens = jnp.zeros((2, DRAFT_LENGTH + 1), jnp.int32)
    after = DRAFTER.commit(params, before, Committed(tokens, more, jnp.array([0, 2]), tokens))
    assert after.length.tolist() == [3, 4]
    for row, kept in ((0, 3), (1, 2)):
        entries = lambda cache, row=row, kept=kept: [x[row, :, :kept] for x in cache.keys + cache.values]  # noqa: E731
        chex.assert_trees_all_equal(entries(before), entries(after))


def test_a_prompt_of_one_token_drafts_from_the_pending_token_alone(pair, plain):
    target, params = pair
    empty = Context(
        jnp.array([[7, 0]]), jnp.array([1]), Sampling.of(), jnp.full((1, 2, 16), 9.0), target.params, buffer_length=8
    )
    cache = DRAFTER.init(params, empty)
    assert cache.length.tolist() == [0]
    logits = DRAFTER.decode_logits(params, target.params, cache, jnp.array([7]))[0]
    np.testing.assert_allclose(logits, plain([7]), atol=1e-10)
    np.testing.assert_array_less(0, np.ptp(logits, 0))


def test_another_kind_of_target_in_bfloat16():
    options = dict(positions="learned", norm_position="post", norm="layernorm", tied_head=True)
    config = dataclasses.replace(TARGET, dtype="bfloat16", param_dtype="bfloat16", **options)
    target, drafter = LanguageModel.init(config, jax.random.key(0)), dataclasses.replace(DRAFTER, target=config)
    params = drafter.init_params(jax.random.key(1))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    result = generate(target, PROMPTS[:3], max_new_tokens=8, drafter=drafter, drafter_params=params, verifier="block")
    assert result.lengths.tolist() == [8, 8, 8] and result.counts.accepted.sum() > 0
    assert all(np.isfinite(x).all() for x in result.logprobs)


def test_no_cache_is_copied_in_the_loop():
    with jax.enable_x64(False):
        config = TransformerConfig(101, 32, 2, 4, num_kv_heads=2, context_length=256)
        target, drafter = LanguageModel.init(config, jax.random.key(0)), BlockDrafter(config, 1, (1, 2), 4)
        params = drafter.init_params(jax.random.key(1))
        for prompts in ([[1, 2]], [[1, 2], [3], [4, 5, 6]]):
            call = Run.start(
                target, prompts, max_new_tokens=99, drafter=drafter, drafter_params=params, buffer_length=173
            )
            hlo = decode.lower(call.decoder, call.inputs, call.state, np.int32(9)).compile().as_text()
            sizes = {math.prod(x.shape) for x in call.state.draft_state.keys + call.state.target_cache.keys}
            assert sizes <= {size for _, size in operations(hlo)} and len(sizes) == 2
            assert not cache_copies(hlo, sizes)


def test_parameters_are_checked_before_anything_is_compiled(pair):
    target, params = pair
    DRAFTER.check_params(params)
    with pytest.raises(ValueError, match=r"lack final_norm/scale, float64\[8\]; see .*init_params"):
        DRAFTER.check_params({name: x for name, x in params.items() if name != "final_norm"})
    with pytest.raises(ValueError, match=r"fuse/kernel must be float64\[24, 8\]; got float64\[16, 8\]"):
        dataclasses.replace(DRAFTER, feature_layers=(0, 1, 2)).check_params(params)
    with pytest.raises(ValueError, match="hold .*, which its config does not know"):
        dataclasses.replace(DRAFTER, num_layers=1).check_params(params)
    other = dataclasses.replace(DRAFTER, target=dataclasses.replace(TARGET, d_ff=8))
    with pytest.raises(ValueError, match="made for another target: its d_ff is 8, here it is 16"):
        run(pair, PROMPTS[:1], 4, drafter=other)


def test_a_drafter_is_static_and_names_bad_settings():
    assert isinstance(DRAFTER, Drafter) and hash(DRAFTER) == hash(BlockDrafter(TARGET, 2, [0, 3], 3))
    assert DRAFTER.topology.is_chain and DRAFTER.widths == (4,)
    for options, message in [
        (dict(draft_length=0), "draft_length must be at least 1; got 0"),
        (dict(num_layers=0), "num_layers must be at least 1; got 0"),
        (dict(feature_layers=()), r"feature_layers must be different layers from 0 .* to 3, at least one; got \(\)"),
        (dict(feature_layers=(1, 4)), r"got \(1, 4\)"),
        (dict(feature_layers=(1, 1)), r"got \(1, 1\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(DRAFTER, **options)
