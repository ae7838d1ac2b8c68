"""What a block may depend on: the context before its anchor and all of itself, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import TransformerConfig
from specjax.models.block_layers import BlockAttention, BlockTransformer

MASKS, WIDTH, TEXT, FEATURE = 3, 4, 7, 10
ANCHORS = jnp.array([[0, 4, 2], [6, 3, 3]])  # a block without context, unsorted ones, and two at one anchor
CONFIG = TransformerConfig(
    11, 8, 2, 4, num_kv_heads=2, d_ff=12, qk_norm=True, qkv_bias=True, dtype="float64", param_dtype="float64"
)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    """(parameters, features [2, T, F], pending embeddings [2, A, D])."""
    with jax.enable_x64(True):
        features, pending = (
            jax.random.normal(jax.random.key(1), (2, TEXT, FEATURE)),
            jax.random.normal(jax.random.key(2), (2, 3, 8)),
        )
        params = BlockTransformer(CONFIG).init(jax.random.key(0), features, pending, ANCHORS, MASKS)["params"]
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(3), len(leaves))
        spread = [x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, spread), features, pending


def denoise(params, features, blocks, anchors=ANCHORS):
    def run(module):
        positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
        return module.denoise(blocks, module.inject(features, positions), anchors)

    return BlockTransformer(CONFIG).apply({"params": params}, method=run)


@pytest.fixture(scope="module")
def influence(model):
    """Which input moves which output: [2, A, W] outputs against [2, T] features and [2, A, W] block inputs."""
    params, features, pending = model
    with jax.enable_x64(True):
        blocks = jax.random.normal(jax.random.key(4), (2, 3, WIDTH, 8))
        project = jax.random.normal(jax.random.key(5), (8,))
        jacobian = jax.jit(jax.jacrev(lambda f, b: denoise(params, f, b) @ project, argnums=(0, 1)))
        of_features, of_blocks = jacobian(features, blocks)
    moves = lambda x: np.abs(np.asarray(x)).max(-1) > 1e-12  # noqa: E731
    return moves(of_features), moves(of_blocks)


def test_a_block_sees_the_features_before_its_anchor_and_no_others(influence):
    expected = np.zeros((2, 3, WIDTH, 2, TEXT), bool)
    for row in range(2):
        for block, anchor in enumerate(np.asarray(ANCHORS)[row]):
            expected[row, block, :, row, :anchor] = True
    np.testing.assert_array_equal(influence[0], expected)


def test_every_position_of_a_block_sees_the_whole_block_and_no_other_block(influence):
    expected = np.zeros((2, 3, WIDTH, 2, 3, WIDTH), bool)
    for row in range(2):
        for block in range(3):
            expected[row, block, :, row, block] = True
    np.testing.assert_array_equal(influence[1], expected)


def test_blocks_side_by_side_equal_blocks_alone(model):
    params, features, pending = model
    module = BlockTransformer(CONFIG)
    forward = jax.jit(lambda f, p, a: module.apply({"params": params}, f, p, a, MASKS))
    together = forward(features, pending, ANCHORS)
    assert together.shape == (2, 3, MASKS, 8)
    for row in range(2):
        for block in range(3):
            one = (slice(row, row + 1), slice(block, block + 1))
            alone = forward(features[one[0]], pending[one], ANCHORS[one])
            np.testing.assert_allclose(together[one], alone, atol=1e-12)


def test_attention_is_that_of_a_plain_softmax_over_joined_keys(model):
    """One layer of attention without rotation, written out by head."""
    params = model[0]["layers_0"]["attention"]
    still = dataclasses.replace(CONFIG, qk_norm=False, rotary_base=1.0)  # base 1 turns every pair alike
    params = {name: value for name, value in params.items() if not name.endswith("norm")}
    x, context = (jax.random.normal(jax.random.key(i), (1, n, 8)) for i, n in ((6, WIDTH), (7, TEXT)))

    def run(module):
        entries = module.keys_values(context, jnp.arange(TEXT)[None])
        return module(x[:, None], entries, jnp.array([[5]]))

    got = BlockAttention(still).apply({"params": params}, method=run)[0, 0]

    def turned(v, at):  # rotary with frequency 1: the head of two dimensions is a plane
        cos, sin = np.cos(at)[:, None], np.sin(at)[:, None]
        return np.concatenate([v[:, :1] * cos - v[:, 1:] * sin, v[:, 1:] * cos + v[:, :1] * sin], 1)

    dense = lambda name, v: np.asarray(v) @ params[name]["kernel"] + params[name]["bias"]  # noqa: E731
    seen = np.concatenate([context[0, :5], x[0]])
    out = []
    for h in range(4):
        own, shared = slice(2 * h, 2 * h + 2), slice(2 * (h // 2), 2 * (h // 2) + 2)
        q = turned(dense("query", x[0])[:, own], 5.0 + np.arange(WIDTH))
        k = turned(dense("key", seen)[:, shared], np.arange(5.0 + WIDTH))
        scores = np.exp(q @ k.T / np.sqrt(2))
        out.append(scores / scores.sum(-1, keepdims=True) @ dense("value", seen)[:, shared])
    np.testing.assert_allclose(got, np.concatenate(out, 1) @ params["output"]["kernel"], atol=1e-10)
