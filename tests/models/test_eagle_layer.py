import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import LanguageModel, TransformerConfig
from specjax.models.eagle_layer import EagleConfig, measure_feature_scale, most_frequent, split_params
from specjax.models.transformer import apply

DOUBLE = dict(dtype="float64", param_dtype="float64")
TARGET = TransformerConfig(9, 8, 2, 2, num_kv_heads=1, d_ff=16, context_length=32, head_bias=True, tied_head=False,
                           **DOUBLE)  # fmt: skip
EAGLE1, EAGLE3 = EagleConfig(TARGET), EagleConfig(TARGET, 3)
REDUCED = EagleConfig(TARGET, 3, draft_vocab=3)
IDS = jnp.array([7, 2, 4], jnp.int32)
TEXT = jnp.array([[1, 2, 3]], jnp.int32)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, target_params, features, tokens, cache, **options):
    return model.run(params, target_params, features, tokens, cache, **options)


@functools.cache
def params_of(model):
    return model.init_params(jax.random.key(3), None, None if model.draft_vocab is None else IDS)


@pytest.fixture(scope="module")
def target():
    with jax.enable_x64(True):
        return LanguageModel.init(TARGET, jax.random.key(0))


def pairs(width=6, batch=2):
    features = jax.random.normal(jax.random.key(1), (batch, width, 8), jnp.float64)
    return features, jax.random.randint(jax.random.key(2), (batch, width), 0, 9)


@pytest.mark.parametrize("model", [EAGLE1, EAGLE3])
def test_an_output_depends_on_its_pair_and_those_before(model, target):
    params = params_of(model)
    features, tokens = pairs()

    @jax.jit
    def output(features, embedding):
        lent = {**target.params, "embedding": {"embedding": embedding}}
        return model.run(params, lent, features, tokens, model.init_cache(2, 6))[0][0, 3].sum()

    by_feature, by_token = jax.grad(output, (0, 1))(features, target.params["embedding"]["embedding"])
    assert np.any(by_feature[0, :4], -1).all() and not np.any(by_feature[0, 4:]) and not np.any(by_feature[1])
    read = np.flatnonzero(np.any(by_token, -1))
    assert set(read) == set(tokens[0, :4].tolist())


@pytest.mark.parametrize("model", [EAGLE1, EAGLE3])
def test_a_cache_changes_nothing_and_positions_matter(model, target):
    params = params_of(model)
    features, tokens = pairs()
    whole, cache = run(model, params, target.params, features, tokens, model.init_cache(2, 6))
    assert cache.length.tolist() == [6, 6]
    first, cache = run(model, params, target.params, features[:, :2], tokens[:, :2], model.init_cache(2, 8))
    rest, _ = run(model, params, target.params, features[:, 2:], tokens[:, 2:], cache)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), whole, atol=1e-12)
    moved, _ = run(model, params, target.params, features, tokens, model.init_cache(2, 6),
                         positions=jnp.broadcast_to(2 * jnp.arange(6), (2, 6)))  # fmt: skip
    assert np.abs(moved - whole)[:, 1:].max() > 1e-6


def test_version_1_reads_features_behind_the_final_norm(target):
    """The true feature, put where a predicted one goes, gives the target's own law."""
    params = params_of(EAGLE1)

    @jax.jit
    def read(target_params):
        logits, _, features = apply(TARGET, target_params, TEXT, feature_layers=EAGLE1.feature_layers)
        start = EAGLE1.start(params, target_params, features)
        return logits, *(EAGLE1.logits(params, target_params, x) for x in (start, features))

    logits, of_start, bare = read(target.params)
    np.testing.assert_allclose(of_start, logits, atol=1e-12)
    assert np.abs(bare - logits).max() > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_version_3_can_start_from_the_targets_ends(tied):
    config = dataclasses.replace(TARGET, tied_head=tied, head_bias=not tied)
    target = LanguageModel.init(config, jax.random.key(0))
    logits, _, last = jax.jit(apply, static_argnums=0, static_argnames="feature_layers")(
        config, target.params, TEXT, feature_layers=(2,)
    )
    for reduced in (None, 3):
        model = EagleConfig(config, 3, draft_vocab=reduced)
        params = model.init_params(jax.random.key(3), target.params, None if reduced is None else IDS)
        same = jax.jit(model.draft_logits)(params, target.params, last)
        np.testing.assert_allclose(same, logits if reduced is None else logits[..., IDS], atol=1e-12)


def test_a_reduced_vocabulary_fills_the_rest_with_minus_infinity(target):
    params = params_of(REDUCED)
    out = jax.random.normal(jax.random.key(4), (5, 8))
    few, all_of_them = (jax.jit(f)(params, target.params, out) for f in (REDUCED.draft_logits, REDUCED.logits))
    np.testing.assert_array_equal(all_of_them[:, IDS], few)
    assert np.isneginf(np.delete(np.asarray(all_of_them), IDS, -1)).all()
    assert REDUCED.target_ids(params, jnp.array([[2, 0]])).tolist() == [[4, 7]]
    trained, fixed = split_params(params)
    assert set(fixed) == {"draft_to_target"} and {**trained, **fixed}.keys() == params.keys()
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(trained))


def test_most_frequent_tokens_come_in_rising_order():
    assert most_frequent(np.array([[5, 5, 1], [3, 3, 1], [3, 8, 5]]), 3, 9).tolist() == [1, 3, 5]
    assert most_frequent(np.array([4, 4]), 3, 9).tolist() == [0, 1, 4]  # ties by id


@pytest.mark.parametrize("model", [EAGLE1, EAGLE3])
def test_dtypes_are_the_targets(model):
    config = dataclasses.replace(TARGET, dtype="bfloat16", param_dtype="float32")
    model = dataclasses.replace(model, target=config)
    target = LanguageModel.init(config, jax.random.key(0))
    params = model.init_params(jax.random.key(3))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}

    @jax.jit
    def draft(params, target_params):
        raw = apply(config, target_params, TEXT, feature_layers=model.feature_layers)[2]
        start = model.start(params, target_params, raw)
        out, cache = model.run(params, target_params, start, TEXT, model.init_cache(1, 3))
        return out, cache.keys[0], model.logits(params, target_params, out)

    drafted = draft(params, target.params)
    assert {x.dtype for x in drafted} == {jnp.dtype("bfloat16")}
    chex.assert_tree_all_finite(drafted)


def test_its_layer_has_rotary_positions_and_its_own_heads():
    learned = dataclasses.replace(TARGET, positions="learned", norm="layernorm", norm_position="post", mlp="gelu")
    layer = EagleConfig(learned, num_heads=4, d_ff=10).layer
    assert (layer.positions, layer.norm_position, layer.norm, layer.mlp) == ("rotary", "pre", "layernorm", "gelu")
    assert (layer.num_layers, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.d_ff) == (1, 4, 4, 2, 10)
    assert EAGLE1.layer.num_kv_heads == 1


@pytest.mark.parametrize("layers, chosen", [(1, (0, 0, 1)), (4, (1, 2, 4)), (8, (2, 4, 5)), (32, (2, 16, 29))])
def test_default_features_are_low_middle_and_high(layers, chosen):
    deep = dataclasses.replace(TARGET, num_layers=layers)
    assert EagleConfig(deep, 3).feature_layers == chosen and EagleConfig(deep).feature_layers == (layers,)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(version=2), r"version must be 1 \(EAGLE and EAGLE-2\) or 3"),
        (dict(feature_layers=(1,)), r"version 1 reads the target's last layer, 2; got \(1,\)"),
        (dict(version=3, feature_layers=(1, 3)), r"feature_layers must be target layers from 0 to 2; got \(1, 3\)"),
        (dict(version=3, feature_layers=()), "feature_layers must be"),
        (dict(draft_vocab=3), "version 1 drafts with the target's head"),
        (dict(version=3, draft_vocab=10), "draft_vocab must be 1 to 9; got 10"),
        (dict(num_heads=3), "d_model 8 must be a multiple of num_heads 3"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        EagleConfig(TARGET, **settings)


def test_parameters_of_another_drafter_are_named():
    params = params_of(EAGLE3)
    EAGLE3.check_params(params)
    other = EagleConfig(TARGET, 3, feature_layers=(2,)).init_params(jax.random.key(3))
    with pytest.raises(ValueError, match=r"fusion/kernel must be float64\[24, 8\]; got float64\[8, 8\]"):
        EAGLE3.check_params(other)
    with pytest.raises(ValueError, match=r"lack draft_to_target, int32\[3\]"):
        REDUCED.check_params(split_params(params_of(REDUCED))[0])
    for bad in ([7, 2, 2], [0, 1, 9]):
        with pytest.raises(ValueError, match="must hold 3 different ids from 0 to 8"):
            REDUCED.check_params(params_of(REDUCED) | {"draft_to_target": jnp.array(bad, jnp.int32)})
    with pytest.raises(ValueError, match="the config has no draft_vocab"):
        EAGLE3.init_params(jax.random.key(3), None, IDS)


def test_a_feature_scale_is_the_size_of_most_dimensions_and_can_be_folded_away(target):
    layers, texts = (0, 1, 2), jax.random.randint(jax.random.key(5), (3, 8), 0, 9)
    scale = measure_feature_scale(TARGET, target.params, texts, layers)
    features = np.asarray(apply(TARGET, target.params, texts, feature_layers=layers)[2])
    sizes = np.sqrt(np.mean(features[:, 1:] ** 2, (0, 1))).reshape(3, 8)
    np.testing.assert_allclose(scale, np.median(sizes, 1), rtol=6e-3)

    scaled = EagleConfig(TARGET, 3, layers, feature_scale=scale)
    params = scaled.init_params(jax.random.key(3), target.params)
    divided = features / np.repeat(scale, 8)
    plain, folded = scaled.without_scale(params)
    expected = divided @ params["fusion"]["kernel"]
    for model, own in ((scaled, params), (plain, folded)):
        np.testing.assert_allclose(model.start(own, target.params, jnp.asarray(features)), expected, atol=1e-12)
    assert plain == EagleConfig(TARGET, 3, layers) and plain.without_scale(folded) == (plain, folded)


@pytest.mark.parametrize("changes", [dict(version=1), dict(feature_scale=(1.0,)), dict(feature_scale=(1.0, 0.0, 1.0))])
def test_a_feature_scale_that_does_not_fit(changes):
    with pytest.raises(ValueError, match="feature_scale must be . positive numbers, one per feature layer"):
        EagleConfig(**(dict(target=TARGET, version=3, feature_scale=(1.0, 1.0, 1.0)) | changes))


def test_attention_begins_at_the_own_position():
    """So the token just drawn, one key among all before it, is seen from the first step of training on."""
    wide = dataclasses.replace(TARGET, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, context_length=64)
    target = LanguageModel.init(wide, jax.random.key(0))
    model = EagleConfig(wide, 3)
    attention = model.init_params(jax.random.key(3), target.params)["attention"]
    embedded = jax.random.normal(jax.random.key(4), (50, 64))
    embedded /= jnp.sqrt(jnp.mean(embedded**2, -1, keepdims=True))
    x = jnp.concatenate([embedded, jax.random.normal(jax.random.key(5), (50, 64))], -1)
    query = (x @ attention["query"]["kernel"]).reshape(50, 2, 2, 16)
    key = (x @ attention["key"]["kernel"]).reshape(50, 2, 16)
    weights = jax.nn.softmax(jnp.einsum("qkgh,skh->kgqs", query, key) / 4.0)
    own = jnp.mean(jnp.diagonal(weights, axis1=2, axis2=3), -1)  # [K, groups]
    assert (own[0] > 0.7).all() and (own[1] < 0.1).all()
