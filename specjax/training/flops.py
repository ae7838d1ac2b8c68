"""Floating-point operations of a model, and how many this machine can do, for the FLOP utilisation."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import TransformerConfig


def forward_flops(config: TransformerConfig, context: int) -> int:
    """Matrix-product FLOPs per token of one forward over texts of `context` tokens.

    Two per weight of every matrix (the output head counts whether tied or not, the embedding look-up does not) and
    4 · heads · head width · context per layer for the attention's two products, the convention of PaLM (Chowdhery et
    al. 2022, arXiv 2204.02311, appendix B), which does not halve it for causality.
    """
    query = config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    attention = config.d_model * (2 * query + key_value)
    mlp = config.d_model * config.d_ff * (3 if config.mlp == "swiglu" else 2)
    weights = config.num_layers * (attention + mlp) + config.d_model * config.vocab_size
    return 2 * weights + config.num_layers * 4 * query * context


def training_flops(config: TransformerConfig, context: int) -> int:
    """FLOPs per token of forward and backward: three forwards. Recomputation (remat) is work, not model FLOPs."""
    return 3 * forward_flops(config, context)


def measure_peak_flops(size: int = 1024, repeats: int = 6) -> float:
    """FLOPs per second of float32 products of two [size, size] matrices, best of `repeats`, in this very moment.

    The peak of a shared machine drifts by a factor of two within a day, so it belongs beside every figure. Takes well
    under a second on a CPU of 50 GFLOP/s.
    """
    # Several products per call, or an accelerator would be timed on its dispatch.
    chain = 1 if jax.default_backend() == "cpu" else 32
    with jax.default_matmul_precision("float32"):
        product = jax.jit(lambda a: functools.reduce(lambda x, _: a @ x, range(chain), a))
        matrix = jnp.asarray(np.eye(size, dtype=np.float32))
        product(matrix).block_until_ready()
        best = min(_seconds(product, matrix) for _ in range(repeats))
    return chain * 2 * size**3 / best


def _seconds(function, argument) -> float:
    start = time.perf_counter()
    function(argument).block_until_ready()
    return time.perf_counter() - start
