"""Drafters of every kind that the speculators format holds, with parameters that no initialisation gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import BlockDrafter, Eagle, EagleDynamic, EagleTree, Medusa
from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.config import RotaryScaling
from specjax.models.eagle_layer import EagleConfig
from specjax.protocol import FIXED
from specjax.topology import Topology
from specjax.weights.speculators import save_speculator

VOCAB, MASK = 11, 7
LLAMA = TransformerConfig(
    VOCAB, 16, 4, 4, num_kv_heads=2, d_ff=24, context_length=64, norm_eps=1e-5, rotary_base=500.0,
    rotary_scaling=RotaryScaling(4.0, 1.0, 4.0, 32), tied_head=False,
)  # fmt: skip
QWEN2 = dataclasses.replace(LLAMA, qkv_bias=True, tied_head=True, rotary_scaling=None)
QWEN3 = dataclasses.replace(LLAMA, qk_norm=True, head_dim=8)
TREE = Topology.from_paths([(0, 0), (0, 1), (1,)])
KEPT = jnp.array([1, 2, 4, 7, 9, 10], jnp.int32)
TEXT = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])

CASES = {
    "eagle1": EagleTree(EagleConfig(QWEN2, input_norm=False), TREE, FIXED),
    "eagle1_other_heads": Eagle(EagleConfig(LLAMA, num_heads=2, d_ff=12, input_norm=False), 2),
    "eagle3": Eagle(EagleConfig(LLAMA, 3, (1, 2, 4)), 3),
    "eagle3_first_layers": Eagle(EagleConfig(LLAMA, 3, (0, 1, 3)), 2),
    "eagle3_reduced": EagleTree(EagleConfig(LLAMA, 3, (1, 2, 3), 2, d_ff=12, draft_vocab=6), TREE, FIXED),
    "eagle3_biased": EagleDynamic(EagleConfig(QWEN2, 3, (1, 2, 3), num_heads=4), 6, 3, 2),
    "eagle3_qk_norm": Eagle(EagleConfig(QWEN3, 3, (1, 2, 3), num_kv_heads=4), 1),
    "block": BlockDrafter(QWEN3, 2, (0, 2, 4), 3),
    "block_of_llama": BlockDrafter(LLAMA, 1, (2, 3), 2, qk_norm=True),
    "block_biased": BlockDrafter(dataclasses.replace(QWEN3, qkv_bias=True, tied_head=True), 1, (1, 3), 2),
    "medusa": Medusa(QWEN2, TREE, num_heads=3, num_blocks=2),
    "medusa_own_output": Medusa(LLAMA, Topology.chain(2), FIXED, own_output=True),
}
REDUCED = CASES["eagle3_reduced"]
SCALED = dataclasses.replace(REDUCED, model=dataclasses.replace(REDUCED.model, feature_scale=(2.0, 4.0, 8.0)))
EVERY = pytest.mark.parametrize("name", CASES)


def in_dtype(config, dtype):
    """The same drafter for the target in another dtype."""
    change = lambda c: dataclasses.replace(c, dtype=dtype, param_dtype=dtype)  # noqa: E731
    if isinstance(config, EagleDrafter):
        return dataclasses.replace(config, model=dataclasses.replace(config.model, target=change(config.target)))
    return dataclasses.replace(config, target=change(config.target))


@functools.cache
def trained(drafter):
    """(parameters, the target's parameters): numbers that no initialisation gives, norms and biases included."""
    eagle = isinstance(drafter, EagleDrafter)
    shapes = jax.eval_shape(drafter.model._init_layer if eagle else drafter.init_params, jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(x):
        numbers = rng.normal(size=x.shape)
        return jnp.asarray(0.4 * numbers if x.ndim > 1 else 1 + 0.3 * numbers, x.dtype)

    params = jax.tree.map(draw, dict(shapes))
    if eagle and drafter.model.draft_vocab:
        params["draft_to_target"] = KEPT
    drafter.check_params(params)
    target = jax.eval_shape(lambda key: LanguageModel.init(drafter.target, key).params, jax.random.key(0))
    return params, jax.tree.map(draw, dict(target))


def saved(folder, drafter, verifier="some/target"):
    params, target_params = trained(drafter)
    save_speculator(folder, drafter, params, verifier, target_params=target_params, mask_token_id=MASK)
    return params, target_params


def assert_bit_equal(a, b):
    same = lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, dict(a), dict(b)))


def fails(match, call, *args, **options):
    with pytest.raises(ValueError, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
