import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.models.config import TransformerConfig
from specjax.models.transformer import LanguageModel
from specjax.training.flops import forward_flops, training_flops

CONFIG = TransformerConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, context_length=64)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, mlp="gelu", tied_head=False),
        dataclasses.replace(CONFIG, head_dim=16, num_kv_heads=4, d_ff=40),
    ],
)
def test_forward_flops_are_those_xla_counts(config):
    """XLA counts every operation, so its number is larger, by the element-wise work only."""
    context = 64
    params = LanguageModel.init(config, jax.random.key(0)).params
    run = jax.jit(lambda p, t: LanguageModel(config, p)(t)[0])
    counted = run.lower(params, jnp.zeros((1, context), jnp.int32)).compile().cost_analysis()["flops"] / context
    assert forward_flops(config, context) <= counted <= 1.35 * forward_flops(config, context)


def test_weights_count_twice_and_training_three_times():
    model = LanguageModel.init(dataclasses.replace(CONFIG, tied_head=False), jax.random.key(0))
    matrices = sum(x.size for x in jax.tree.leaves(model.params) if x.ndim == 2)
    embedding = CONFIG.vocab_size * CONFIG.d_model
    assert forward_flops(CONFIG, 0) == 2 * (matrices - embedding)
    assert training_flops(CONFIG, 10) == 3 * forward_flops(CONFIG, 10)
    assert forward_flops(CONFIG, 10) - forward_flops(CONFIG, 0) == 2 * 4 * 32 * 10
