"""One forward for everything: whatever the route through the cache, the logits are those of the whole text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.models import LanguageModel, RotaryScaling, Transformer, TransformerConfig, init_cache
from specjax.models.transformer import apply, check_params
from specjax.topology import Topology

VOCAB, TEXT, ROWS = 13, 24, 3
BASE = dict(vocab_size=VOCAB, d_model=16, num_layers=2, num_heads=4, d_ff=24, context_length=64)
DOUBLE = dict(dtype="float64", param_dtype="float64")
MINIGPT = dict(
    norm="layernorm", norm_position="post", positions="sinusoidal", mlp="relu", qkv_bias=True, attention_bias=True,
    mlp_bias=True, head_bias=True, tied_head=False,
)  # fmt: skip
OPTIONS = {
    "llama": dict(num_kv_heads=2, tied_head=False),
    "llama3": dict(num_kv_heads=1, rotary_scaling=RotaryScaling(4.0, 1.0, 4.0, 16), rotary_base=100.0),
    "minigpt": MINIGPT,
    "gpt2": dict(norm="layernorm", positions="learned", mlp="gelu", qkv_bias=True, attention_bias=True, mlp_bias=True),
    "phi": dict(rotary_fraction=0.5, mlp="gelu", qkv_bias=True, norm="layernorm", head_dim=8, tied_head=False),
    "qwen": dict(qk_norm=True, num_kv_heads=2, qkv_bias=True, final_norm=False),
    "mistral": dict(num_kv_heads=2, sliding_window=5, tied_head=False),
    "gemma": dict(
        mlp="geglu", norm_position="sandwich", norm_offset=1.0, embedding_scale=4.0, sliding_window=5,
        sliding_layers=(0,), sliding_rotary_base=50.0, qk_norm=True, attention_scale=0.3, num_kv_heads=1,
    ),
}  # fmt: skip


def model(seed=0, **options) -> LanguageModel:
    """A random model whose every parameter matters: biases and norms are not left at 0 and 1."""
    made = LanguageModel.init(TransformerConfig(**(BASE | DOUBLE | options)), jax.random.key(seed))
    leaves, tree = jax.tree.flatten(made.params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    return made.replace(params=jax.tree.unflatten(tree, leaves))


RUN = jax.jit(apply, static_argnums=0, static_argnames=("feature_layers", "train"))
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(ROWS, TEXT))


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def piece(starts, width, tokens=TOKENS):
    return np.stack([row[s : s + width] for row, s in zip(tokens, starts, strict=True)])


@pytest.mark.parametrize("name", OPTIONS)
def test_any_split_into_steps_equals_the_whole_text(name):
    """Ragged rows, random widths, and rejected tokens that are rolled back and overwritten on the way."""
    lm = model(**(dict(num_layers=1 if name in ("llama3", "qwen", "phi") else 2) | OPTIONS[name]))
    whole, none, _ = RUN(lm.config, lm.params, TOKENS)
    assert none is None and whole.dtype == jnp.float64 and float(jnp.std(whole)) > 0.1

    @settings(max_examples=6)
    @given(
        st.lists(st.integers(0, 8), min_size=ROWS, max_size=ROWS),
        st.lists(st.tuples(st.sampled_from([1, 4]), st.booleans()), min_size=1, max_size=4),
        st.integers(0, 99),
    )
    def check(prompt_lengths, steps, seed):
        # Prompts are right-padded with other tokens: what stands in the padding must not matter.
        rng, lengths = np.random.default_rng(seed), np.array(prompt_lengths, np.int32)
        padded = np.where(np.arange(8) < lengths[:, None], TOKENS[:, :8], rng.integers(VOCAB, size=(ROWS, 8)))
        logits, cache, _ = RUN(lm.config, lm.params, padded, init_cache(lm.config, ROWS, TEXT))
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(logits[row, :n], whole[row, :n], atol=1e-10)
        assert cache.length.tolist() == [8] * ROWS
        cache = cache.rollback(jnp.asarray(lengths))
        for width, rejected in steps:
            if rejected:
                wrong = rng.integers(VOCAB, size=(ROWS, 4))
                _, cache, _ = RUN(lm.config, lm.params, wrong, cache)
                cache = cache.rollback(jnp.asarray(lengths))
            logits, cache, _ = RUN(lm.config, lm.params, piece(lengths, width), cache)
            for row, n in enumerate(lengths):
                np.testing.assert_allclose(logits[row], whole[row, n : n + width], atol=1e-10)
            lengths = lengths + width
            assert cache.length.tolist() == lengths.tolist()

    check()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma"])
def test_every_path_of_a_tree_equals_its_own_chain(name):
    lm, nodes = model(**OPTIONS[name]), 5
    lengths = np.array([8, 3, 5], np.int32)
    _, prompt, _ = RUN(lm.config, lm.params, TOKENS[:, :8], init_cache(lm.config, ROWS, TEXT))
    prompt = prompt.rollback(jnp.asarray(lengths))
    options = lambda topology: dict(  # noqa: E731
        positions=jnp.asarray(lengths[:, None] + topology.depths), mask=jnp.asarray(topology.ancestors)
    )

    @settings(max_examples=8)
    @given(st.tuples(*(st.integers(0, i) for i in range(nodes))), st.integers(0, 99))
    def check(parents, seed):
        topology = Topology(parents)
        tokens = np.random.default_rng(seed).integers(VOCAB, size=(ROWS, nodes + 1))
        logits, _, _ = RUN(lm.config, lm.params, tokens, prompt, **options(topology))
        for node in range(1, nodes + 1):
            path = [node]
            while path[-1]:
                path.append(parents[path[-1] - 1])
            path = path[::-1]
            chain = tokens[:, path + [0] * (nodes + 1 - len(path))]  # padded on the right, which must not matter
            alone, _, _ = RUN(lm.config, lm.params, chain, prompt, **options(Topology.chain(nodes)))
            np.testing.assert_allclose(logits[:, path], alone[:, : len(path)], atol=1e-10)

    check()


def test_a_chain_mask_is_the_default():
    lm = model(**OPTIONS["llama"])
    _, cache, _ = RUN(lm.config, lm.params, TOKENS[:, :8], init_cache(lm.config, ROWS, TEXT))
    cache = cache.rollback(jnp.array([8, 3, 5]))
    causal = jnp.tri(4, dtype=bool)
    plain, *_ = RUN(lm.config, lm.params, TOKENS[:, 8:12], cache)
    for mask in (causal, jnp.tile(causal, (ROWS, 1, 1))):
        masked, *_ = RUN(lm.config, lm.params, TOKENS[:, 8:12], cache, mask=mask)
        np.testing.assert_allclose(plain, masked, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "minigpt", "gpt2"])
def test_causality_through_gradients(name):
    """The logits at t depend on the embeddings of tokens 0..t, on all of them, and on no later one."""
    lm = model(**OPTIONS[name], dropout=0.0)
    distinct = jnp.arange(6)[None]

    def embedded(table):
        params = {**lm.params, "embedding": {"embedding": table}}
        logits = apply(lm.config, params, distinct)[0][0]
        if lm.config.tied_head:  # the table is the head as well; look at what only the body contributes
            logits = apply(lm.config, params, distinct, feature_layers=(2,))[2][0]
        return jnp.sum(logits * jnp.arange(1, logits.shape[-1] + 1), -1)

    gradient = jax.jit(jax.jacrev(embedded))(lm.params["embedding"]["embedding"])  # [T, V, D]
    reached = np.abs(gradient[:, :6]).sum(-1) > 0
    np.testing.assert_array_equal(reached, np.tri(6, dtype=bool))
    assert not np.abs(gradient[:, 6:]).any()


@pytest.mark.parametrize("size, expected", [(dict(d_model=32, num_heads=2, num_layers=2), 26_772),
                                            (dict(d_model=64, num_heads=4, num_layers=4), 202_644)])  # fmt: skip
def test_minigpt_has_exactly_the_parameters_of_the_textbook(size, expected):
    config = TransformerConfig(**(dict(vocab_size=20) | size | MINIGPT))
    assert LanguageModel.init(config, jax.random.key(0)).num_params == expected


def test_feature_layers_are_the_blocks_outputs_in_the_order_asked_for():
    lm = model(**OPTIONS["llama"])
    logits, _, features = RUN(lm.config, lm.params, TOKENS, feature_layers=(2, 0, 1))
    _, _, turned = RUN(lm.config, lm.params, TOKENS, feature_layers=(0, 1, 2))
    last, embedding, middle = jnp.split(features, 3, -1)
    np.testing.assert_array_equal(turned, jnp.concatenate([embedding, middle, last], -1))
    np.testing.assert_allclose(embedding, lm.params["embedding"]["embedding"][TOKENS], atol=1e-12)
    scale = lm.params["final_norm"]["scale"]
    normed = last / jnp.sqrt(jnp.mean(last**2, -1, keepdims=True) + lm.config.norm_eps) * scale
    np.testing.assert_allclose(normed @ lm.params["head"]["kernel"], logits, atol=1e-10)
    assert float(jnp.abs(middle - last).max()) > 0.1
    # Asking does not change the logits, and the features of a step through the cache are the same ones.
    np.testing.assert_allclose(RUN(lm.config, lm.params, TOKENS)[0], logits, atol=1e-10)
    _, cache, first = RUN(lm.config, lm.params, TOKENS[:, :8], init_cache(lm.config, ROWS, TEXT), feature_layers=(1,))
    np.testing.assert_allclose(first, middle[:, :8], atol=1e-10)


def test_logits_where_they_are_wanted():
    lm = model(**OPTIONS["qwen"])
    logits, _, _ = RUN(lm.config, lm.params, TOKENS)
    at = np.array([[5, 0], [1, 1], [23, 22]])
    some, _, _ = RUN(lm.config, lm.params, TOKENS, logits_at=at)
    np.testing.assert_allclose(some, np.take_along_axis(np.asarray(logits), at[..., None], 1), atol=1e-12)
    assert RUN(lm.config, lm.params, TOKENS, logits_at=np.zeros((ROWS, 0), int))[0].shape == (ROWS, 0, VOCAB)


@pytest.mark.parametrize("name", ["llama", "minigpt"])
def test_remat_has_the_same_loss_and_gradients(name):
    lm = model(**OPTIONS[name])
    remat = dataclasses.replace(lm.config, remat=True)

    def loss(params, config, **kwargs):
        logits, _, _ = apply(config, params, jnp.asarray(TOKENS[:, :8]), **kwargs)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    results = [jax.jit(jax.value_and_grad(loss), static_argnums=1)(lm.params, c) for c in (lm.config, remat)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), *results)
    jaxprs = [str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(lm.params, c)) for c in (lm.config, remat)]
    assert ["remat" in jaxpr or "checkpoint" in jaxpr for jaxpr in jaxprs] == [False, True]


def test_dropout_acts_in_training_alone():
    lm = model(**OPTIONS["llama"], dropout=0.5)
    plain = dataclasses.replace(lm.config, dropout=0.0)
    expected, _, _ = RUN(plain, lm.params, TOKENS)
    np.testing.assert_allclose(RUN(lm.config, lm.params, TOKENS)[0], expected, atol=1e-10)
    run = jax.jit(
        lambda key, config: Transformer(config).apply(
            {"params": lm.params}, jnp.asarray(TOKENS), train=True, rngs={"dropout": key}
        )[0],
        static_argnums=1,
    )
    a, b, again = (run(jax.random.key(k), lm.config) for k in (0, 1, 0))
    np.testing.assert_array_equal(a, again)
    assert float(jnp.abs(a - b).max()) > 0.1 and float(jnp.abs(a - expected).max()) > 0.1
    np.testing.assert_allclose(run(jax.random.key(0), plain), expected, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "minigpt"])
def test_bfloat16_runs_and_stays_near(name):
    lm = model(**OPTIONS[name])
    wide = RUN(lm.config, lm.params, TOKENS)[0]
    config = dataclasses.replace(lm.config, dtype="bfloat16")
    logits, cache, _ = RUN(config, lm.params, TOKENS, init_cache(config, ROWS, TEXT))
    assert logits.dtype == jnp.bfloat16 and cache.keys[0].dtype == jnp.bfloat16
    error = jnp.abs(logits.astype(jnp.float32) - wide)
    assert 0 < float(error.max()) < 0.1 * float(jnp.abs(wide).max())


def test_positions_past_the_context_do_not_spoil_what_comes_before():
    """The last verify of a text reaches past the context; a learned table has no row there."""
    lm = model(**OPTIONS["gpt2"], context_length=TEXT)
    whole = RUN(lm.config, lm.params, TOKENS)[0]
    cache = init_cache(lm.config, ROWS, TEXT + 4)
    _, cache, _ = RUN(lm.config, lm.params, TOKENS[:, :20], cache)
    beyond = np.concatenate([TOKENS[:, 20:], TOKENS[:, :4]], 1)
    for _ in range(2):  # the second time the slots past the context hold what the first one left there
        logits, after, _ = RUN(lm.config, lm.params, beyond, cache)
        np.testing.assert_allclose(logits[:, :4], whole[:, 20:], atol=1e-10)
        cache = after.rollback(jnp.full(ROWS, 20))


def test_wrong_parameters_are_named():
    lm = model(**OPTIONS["llama"])
    check_params(lm.config, lm.params, "target")
    missing = {k: v for k, v in lm.params.items() if k != "head"}
    extra = {**lm.params, "surplus": jnp.zeros(1)}
    kernel = lm.params["head"]["kernel"]
    cases = [
        (missing, "the target's parameters lack head/kernel"),
        (extra, "the target's parameters hold surplus"),
        ({**lm.params, "head": {"kernel": kernel.T}}, r"head/kernel must be float64\[16, 13\]; got float64\[13, 16\]"),
        ({**lm.params, "head": {"kernel": kernel.astype("f")}}, r"must be float64\[16, 13\]; got float32\[16, 13\]"),
        ({**lm.params, "head": {"kernel": 3}}, r"head/kernel must be float64\[16, 13\]; got int"),
        ({}, "the target's parameters lack"),
        (None, "the target's parameters lack"),
    ]
    for params, message in cases:
        with pytest.raises(ValueError, match=message):
            check_params(lm.config, params, "target")
