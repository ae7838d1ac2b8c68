"""The ends read from the parameters are those that the model itself has; a forward in two halves is the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import LanguageModel, TransformerConfig, ends, init_cache

SHAPE = dict(vocab_size=7, d_model=8, num_layers=3, num_heads=2, num_kv_heads=1, d_ff=12)
CONFIGS = [
    TransformerConfig(**SHAPE),
    TransformerConfig(**SHAPE, tied_head=False, head_bias=True, norm="layernorm"),
    TransformerConfig(**SHAPE, final_norm=False, positions="learned", dtype="bfloat16"),
    TransformerConfig(**SHAPE, positions="sinusoidal", norm_position="post"),
]
TOKENS = jnp.array([[1, 2, 3, 4, 5], [6, 0, 6, 0, 1]])


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_head_of_the_last_features_gives_the_logits(config):
    model = LanguageModel.init(config, jax.random.key(0))
    logits, _, features = model(TOKENS, feature_layers=(0, config.num_layers))
    first, last = jnp.split(features, 2, -1)
    again = ends.head(config, model.params, ends.normalise(config, model.params, last))
    np.testing.assert_allclose(again.astype("f"), logits.astype("f"), atol=1e-6)
    assert again.dtype == logits.dtype
    if config.positions == "rotary":  # the other kinds add something to the embedding
        np.testing.assert_array_equal(ends.embed(config, model.params, TOKENS), first)


@pytest.mark.parametrize("config", [*CONFIGS, TransformerConfig(**SHAPE, head_bias=True)], ids=range(len(CONFIGS) + 1))
def test_an_untied_head_gives_the_models_logits(config):
    """Also of a tied model whose config asks for a bias, which only the untied head then has."""
    model, untied = LanguageModel.init(config, jax.random.key(0)), dataclasses.replace(config, tied_head=False)
    params = ends.untied_head(config, model.params)
    wanted = jax.eval_shape(lambda: LanguageModel.init(untied, jax.random.key(0)).params["head"])
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    x = jax.random.normal(jax.random.key(1), (2, 3, config.d_model), config.dtype)
    own = ends.head(untied, {"head": params}, x)
    np.testing.assert_allclose(own.astype("f"), ends.head(config, model.params, x).astype("f"), atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("split", [1, 2])
def test_two_halves_are_the_whole(config, split):
    """The lower layers first, then the others on their hidden states, on one cache."""
    model = LanguageModel.init(config, jax.random.key(1))
    whole, cache, _ = model(TOKENS, init_cache(config, 2, 9))
    start = init_cache(config, 2, 9)
    _, lower, hidden = model(TOKENS, start, layers=(0, split), feature_layers=(split,))
    for i in range(split, config.num_layers):
        assert not lower.keys[i].any()  # the upper layers' caches are untouched
    halves, upper, _ = model(TOKENS, lower.rollback(start.length), layers=(split, config.num_layers), hidden=hidden)
    np.testing.assert_array_equal(halves, whole)
    for ours, theirs in zip(jax.tree.leaves(upper), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_halves_without_hidden_states_are_refused():
    config = CONFIGS[0]
    model = LanguageModel.init(config, jax.random.key(0))
    for layers, hidden in (((1, 3), None), ((0, 3), jnp.zeros((2, 5, 8))), ((2, 1), jnp.zeros((2, 5, 8)))):
        with pytest.raises(ValueError, match="must lie within 0 to 3"):
            model(TOKENS, layers=layers, hidden=hidden)
