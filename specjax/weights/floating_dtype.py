"""The dtype that a model is loaded in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def floating_dtype(given: Any) -> np.dtype:
    """A dtype from its name or anything else that `jnp.dtype` takes.

    Raises:
        ValueError: no dtype, not a floating-point one, or one that JAX makes with jax_enable_x64 only.
    """
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        named = repr(given) if dtype is None else dtype.name
        raise ValueError(f"dtype must be a floating-point one, such as float32, bfloat16 or float16; got {named}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype {dtype} needs jax_enable_x64; enable it, or give another dtype")
    return dtype
