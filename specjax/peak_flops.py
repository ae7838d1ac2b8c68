"""How many floating-point operations per second this machine can do, right now."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np


def measure_peak_flops(size: int = 1024, repeats: int = 6) -> float:
    """FLOPs per second of float32 products of two [size, size] matrices, best of `repeats`, in this very moment.

    The peak of a shared machine drifts by a factor of two within a day, so it belongs beside every figure. Full float32
    precision, where an accelerator would otherwise round its inputs. Takes well under a second on a CPU of 50 GFLOP/s.
    """
    # Several products per call, or an accelerator would be timed on its dispatch.
    chain = 1 if jax.default_backend() == "cpu" else 32
    matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    product = jax.jit(lambda a: functools.reduce(lambda x, _: matmul(a, x), range(chain), a))
    # Random entries, because zeros save power and so run faster; scaled so that products neither grow nor vanish.
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)) / np.sqrt(size), jnp.float32)
    product(matrix).block_until_ready()
    return chain * 2 * size**3 / min(_seconds(product, matrix) for _ in range(repeats))


def _seconds(function, argument) -> float:
    start = time.perf_counter()
    function(argument).block_until_ready()
    return time.perf_counter() - start
