"""Draft and verify share the target's layers and its cache: nothing is run twice, and nothing changes but the speed."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.decoding.forward import target_forward
from specjax.decoding.prefill import prefill
from specjax.decoding.round import Inputs, decode_round, drafting_context
from specjax.decoding.run import Run, decode
from specjax.decoding.state import Decoder
from specjax.drafters import EarlyExit
from specjax.keys import Noise, Stream, row_keys
from specjax.models import LanguageModel, Transformer, TransformerConfig, init_cache
from specjax.models.transformer import apply
from specjax.protocol import Context
from specjax.sampling import Sampling, draw
from specjax.verifiers import TokenRule
from tests.decoding.test_compiled_loop import cache_copies, operations

VOCAB, LAYERS, GAMMA = 11, 3, 3
DOUBLE = dict(dtype="float64", param_dtype="float64")
TARGET = TransformerConfig(VOCAB, 8, LAYERS, 2, num_kv_heads=1, d_ff=14, context_length=32, **DOUBLE)
DRAFTER = EarlyExit(TARGET, 1, GAMMA)
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7], [9, 0, 9, 0]]
LIMITS = [12, 25, 20]  # the second row ends where its context and its buffers do
KINDS = {
    "shared": DRAFTER,
    "adapter": dataclasses.replace(DRAFTER, exit_layer=2, trained_exit=True),
    "own head": dataclasses.replace(DRAFTER, trained_exit=True, own_head=True),
}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def moved(params, by, seed):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree, [x + by * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    )


@pytest.fixture(scope="module")
def target():
    """The upper layers change the text little, so that drafts are accepted and refused."""
    with jax.enable_x64(True):
        params = moved(LanguageModel.init(TARGET, jax.random.key(1)).params, 0.5, 2)
        for layer in range(1, LAYERS):
            params[f"layer_{layer}"] = jax.tree.map(lambda x: 0.6 * x, params[f"layer_{layer}"])
        return LanguageModel(TARGET, params)


@pytest.fixture(scope="module")
def exits(target):
    """Parameters of every kind of exit, none at its start."""
    with jax.enable_x64(True):
        return {
            name: None if not kind.trained_exit else moved(kind.init_params(jax.random.key(3), target.params), 0.1, 4)
            for name, kind in KINDS.items()
        }


def run(target, name, params, prompts=PROMPTS, **options):
    options = {"max_new_tokens": LIMITS[: len(prompts)], "buffer_length": 32} | options
    drafter = {} if name is None else {"drafter": KINDS[name], "drafter_params": params}
    return generate(target, prompts, **drafter, **options)


FORWARD = jax.jit(apply, static_argnums=0, static_argnames="feature_layers")
VERIFY = jax.jit(functools.partial(target_forward, TARGET, feature_layers=(LAYERS,)))
SAMPLING = Sampling.of(1.3, top_k=5)


@pytest.fixture(scope="module", params=KINDS)
def drafted(request, target, exits):
    """(drafter, its parameters, state, noise, proposal, cache) of a ragged batch, after two rounds."""
    drafter, params = KINDS[request.param], exits[request.param]
    with jax.enable_x64(True):
        going = Run.start(
            target, PROMPTS, max_new_tokens=LIMITS, drafter=drafter, drafter_params=params, draft_sampling=SAMPLING,
            verifier="token", buffer_length=32, seed=3,
        )  # fmt: skip
        going.advance(2)
        noise = Noise(going.state.row_keys, going.state.length, Stream.ROUND)
        context = drafting_context(going.decoder, going.inputs, going.state)
        proposal, state, cache = jax.jit(drafter.propose)(params, going.state.draft_state, context, noise)
        assert state is None
        return drafter, params, going.state, noise, proposal, cache


def dot_products(jaxpr, features, times=1):
    """{tokens per row: number of products} with kernels of so many output features, loops counted by their trips."""
    found = {}
    for equation in jaxpr.eqns:
        product = equation.primitive.name == "dot_general"
        *rows, last = equation.outvars[0].aval.shape if product else (0,)
        if product and equation.invars[1].aval.ndim == 2 and last == features:
            width = math.prod(rows) // len(PROMPTS)
            found[width] = found.get(width, 0) + times
        trips = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                for width, count in dot_products(inner, features, trips).items():
                    found[width] = found.get(width, 0) + count
    return found


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_every_layer_sees_every_position_once_in_a_round(target, exit_layer):
    drafter = EarlyExit(TARGET, exit_layer, GAMMA)
    going = Run.start(target, PROMPTS, max_new_tokens=9, drafter=drafter, buffer_length=32)
    jaxpr = jax.make_jaxpr(lambda state: decode_round(going.decoder, going.inputs, state))(going.state)
    # A layer has two products of d_ff features: gate and up.
    up = {width: count / 2 for width, count in dot_products(jaxpr.jaxpr, TARGET.d_ff).items()}
    assert up == {1: exit_layer * (GAMMA + 1), GAMMA + 1: LAYERS - exit_layer}
    assert sum(width * count for width, count in up.items()) == LAYERS * (GAMMA + 1)
    # The head: at the γ drafting positions, and in the verify. (The last pass of the lower layers has no logits.)
    heads = {width: count for width, count in dot_products(jaxpr.jaxpr, VOCAB).items() if width}
    assert heads == {1: GAMMA, GAMMA + 1: 1}


def test_the_verify_from_hidden_states_equals_the_whole_forward(target, drafted):
    _, _, state, _, proposal, cache = drafted
    forward = functools.partial(VERIFY, target.params, state.pending)
    logits, after, features = forward(proposal, cache.rollback(state.length - 1))
    plain, plain_after, plain_features = forward(
        proposal.replace(hidden=None, first_layer=0), state.target_cache.rollback(state.length - 1)
    )
    np.testing.assert_allclose(logits, plain, atol=1e-12)
    np.testing.assert_allclose(features, plain_features, atol=1e-12)
    np.testing.assert_array_equal(after.length, state.length + GAMMA)
    for row, length in enumerate(np.asarray(after.length)):
        for one, other in zip(after.keys + after.values, plain_after.keys + plain_after.values, strict=True):
            np.testing.assert_allclose(one[row, :, :length], other[row, :, :length], atol=1e-12)
    # The hidden states matter: those of another token give other logits.
    wrong, _, _ = forward(proposal.replace(hidden=jnp.roll(proposal.hidden, 1, 1)), cache.rollback(state.length - 1))
    assert float(jnp.max(jnp.abs(wrong - plain))) > 0.01


def test_q_is_the_exits_law_of_the_whole_text(target, drafted):
    drafter, params, state, noise, proposal, _ = drafted
    sources = noise.draft(GAMMA)
    for row, length in enumerate(np.asarray(state.length)):
        text = np.zeros((1, 32), np.int32)
        text[0, : length + GAMMA] = [*state.tokens[row, :length], *np.asarray(proposal.tokens[row])]
        hidden = FORWARD(TARGET, target.params, text, feature_layers=(drafter.exit_layer,))[2]
        hidden = hidden[0, length - 1 : length + GAMMA]
        law = SAMPLING.law(drafter.logits(params, target.params, hidden[:-1]))
        np.testing.assert_allclose(proposal.law[row], law, atol=1e-10)
        np.testing.assert_allclose(proposal.hidden[row], hidden, atol=1e-10)
    for depth in range(GAMMA):
        source = jax.tree.map(lambda x, depth=depth: x[depth], sources)
        np.testing.assert_array_equal(proposal.tokens[:, depth], draw(proposal.law[:, depth], source))
    assert proposal.valid.all() and proposal.topology.is_chain


def test_the_shared_exit_is_the_model_cut_off_behind_the_exit_layer(target):
    tokens = jnp.arange(10).reshape(2, 5)
    cut, _, hidden = apply(TARGET, target.params, tokens, layers=(0, 2), feature_layers=(2,))
    np.testing.assert_allclose(KINDS["shared"].logits(None, target.params, hidden), cut, atol=1e-12)


def test_trained_exits_start_at_the_shared_one(target):
    hidden = jax.random.normal(jax.random.key(0), (2, 5, TARGET.d_model), jnp.float64)
    shared = DRAFTER.logits(None, target.params, hidden)
    for name in ("adapter", "own head"):
        start = KINDS[name].init_params(jax.random.key(1), target.params)
        np.testing.assert_allclose(KINDS[name].logits(start, target.params, hidden), shared, atol=1e-12)
    fresh = KINDS["own head"].init_params(jax.random.key(1))
    assert float(jnp.max(jnp.abs(KINDS["own head"].logits(fresh, target.params, hidden) - shared))) > 0.1


@pytest.mark.parametrize("name", ["shared", "own head"])
def test_greedy_text_is_the_target_only_text(target, exits, name):
    greedy = Sampling.of(0.0)
    result, plain = run(target, name, exits[name], sampling=greedy), run(target, None, None, sampling=greedy)
    for one, other in zip(result.tokens, plain.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(result.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
    counts = result.counts
    assert 0 < counts.accepted.sum() < counts.drafted.sum()  # so caches were rolled back, and were not


def test_a_row_of_a_batch_is_its_own_run(target, exits):
    name = "adapter"
    together = run(target, name, exits[name], seed=[5, 6, 7], draft_sampling=SAMPLING)
    for row, prompt in enumerate(PROMPTS):
        options = {"max_new_tokens": LIMITS[row], "seed": [5 + row], "draft_sampling": SAMPLING}
        alone = run(target, name, exits[name], [prompt], **options)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        np.testing.assert_allclose(together.logprobs[row], alone.logprobs[0], atol=1e-10)
    assert len({int(n) for n in together.counts.accepted}) > 1


def test_an_exit_behind_the_last_layer_agrees_with_the_target(target):
    last = EarlyExit(TARGET, LAYERS, GAMMA)
    result = generate(
        target, PROMPTS, max_new_tokens=LIMITS, drafter=last, sampling=Sampling.of(0.0), buffer_length=32
    )
    np.testing.assert_array_equal(result.counts.accepted, result.counts.drafted)
    assert result.counts.accepted.sum() > GAMMA


def test_activations_keep_their_dtype_and_laws_are_wide():
    config = dataclasses.replace(TARGET, dtype="bfloat16", param_dtype="float32")
    drafter = EarlyExit(config, 1, 2, trained_exit=True)
    sampling = Sampling.of(1.0)
    model = jax.eval_shape(lambda: LanguageModel.init(config, jax.random.key(0)))
    params = jax.eval_shape(drafter.init_params, jax.random.key(1))
    assert params["linear"]["kernel"].dtype == jnp.float32

    def propose(model, params):
        length = jnp.ones(2, jnp.int32)
        context = Context(
            jnp.zeros((2, 8), jnp.int32), length, sampling, target_params=model.params,
            target_cache=init_cache(config, 2, 11),
        )  # fmt: skip
        return drafter.propose(params, None, context, Noise(row_keys(0, 2), length, Stream.ROUND))

    proposal, _, cache = jax.eval_shape(propose, model, params)
    assert proposal.hidden.dtype == cache.keys[0].dtype == jnp.bfloat16 and proposal.law.dtype == jnp.float32


def test_no_cache_is_copied_in_the_loop():
    batch = 1
    config = TransformerConfig(vocab_size=101, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2)
    drafter = EarlyExit(config, 1, GAMMA, trained_exit=True)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    sampling = Sampling.of(0.8, top_p=0.9).per_row(batch)
    exit_params = jax.eval_shape(drafter.init_params, jax.random.key(0))
    inputs = Inputs(params["params"], exit_params, sampling, sampling, jnp.full(8, -1))
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    decoder = Decoder(config, drafter, TokenRule())
    state, _ = jax.eval_shape(
        functools.partial(prefill, decoder, 173),
        inputs, ids(batch, 16), ids(batch), ids(batch), jax.eval_shape(lambda: row_keys(0, batch)),
    )  # fmt: skip
    size = math.prod(state.target_cache.keys[0].shape)
    hlo = decode.lower(decoder, inputs, state, np.int32(9)).compile().as_text()
    assert size in {elements for _, elements in operations(hlo)}
    assert not cache_copies(hlo, {size})


def test_what_does_not_fit_is_refused(target, exits):
    with pytest.raises(ValueError, match="exit_layer must be 1 to 3.*got 4"):
        EarlyExit(TARGET, 4, GAMMA)
    with pytest.raises(ValueError, match="exit_layer must be 1 to 3.*got 0"):
        EarlyExit(TARGET, 0, GAMMA)
    with pytest.raises(ValueError, match="draft_length must be at least 1; got 0"):
        EarlyExit(TARGET, 1, 0)
    with pytest.raises(ValueError, match="set trained_exit=True"):
        EarlyExit(TARGET, 1, GAMMA, own_head=True)
    with pytest.raises(ValueError, match="takes no parameters"):
        run(target, "shared", exits["adapter"])
    with pytest.raises(ValueError, match=r"lack linear/bias, float64\[8\]"):
        run(target, "adapter", None)
    with pytest.raises(ValueError, match="hold head/kernel, which its config does not know"):
        run(target, "adapter", exits["adapter"] | {"head": exits["own head"]["head"]})
    other = dataclasses.replace(TARGET, num_layers=4)
    with pytest.raises(ValueError, match="another target: its num_layers is 4, here it is 3"):
        generate(target, [[1]], max_new_tokens=2, drafter=EarlyExit(other, 1, GAMMA))
