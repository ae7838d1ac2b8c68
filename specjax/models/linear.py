"""Matrix products of few rows, as decoding has them, in the forms that are fast on every machine."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEW_ROWS = 64


def product(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
    """`jax.lax.dot_general`: its arguments, and its result up to rounding.

    A bfloat16 product of at most `FEW_ROWS` rows (per batch entry) is rounded from float32 sums: asked for bfloat16,
    XLA on CPU may convert all of `rhs` first. With more rows that is nothing, and a wider output would make the
    products of the gradients wider too.
    """
    multiply = lambda lhs, kind: jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, kind)  # noqa: E731
    contracted, batched = dimension_numbers[0][0], dimension_numbers[1][0]
    rows = lhs.size // max(1, math.prod(lhs.shape[i] for i in (*contracted, *batched)))
    narrow = lhs.dtype == rhs.dtype == jnp.bfloat16 and preferred_element_type is None and rows <= FEW_ROWS
    if not narrow:
        return multiply(lhs, preferred_element_type)
    rounded = lambda lhs: multiply(lhs, jnp.float32).astype(lhs.dtype)  # noqa: E731
    if rows != 1 or batched or lhs.ndim == len(contracted):
        return rounded(lhs)
    axis = next(i for i in range(lhs.ndim) if i not in contracted)
    return jax.lax.platform_dependent(lhs, cpu=lambda lhs: _one_of_two(rounded, lhs, axis), default=rounded)


def attend_to_table(hidden: Float[Array, "*B D"], table: Float[Array, "V D"]) -> Float[Array, "*B V"]:
    """Logits by a tied head: two matrices, none of them transposed, or XLA on CPU may copy the table in every step."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return product(rows, table, (((1,), (1,)), ((), ()))).reshape(*hidden.shape[:-1], table.shape[0])


def _one_of_two(multiply, lhs, axis: int):
    """A single row given twice: XLA on CPU takes another way for one row than for two, and for bfloat16 a slower one.

    The free axes of `lhs` come first in the result, in order.
    """
    twice = multiply(jnp.concatenate([lhs, lhs], axis))
    return jax.lax.slice_in_dim(twice, 0, 1, axis=0)
