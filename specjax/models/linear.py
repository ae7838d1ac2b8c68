"""Matrix products in forms that are fast on a CPU, where other machines keep XLA's: single rows, and bfloat16."""

import functools
import math
import string

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
    """`jax.lax.dot_general`: its arguments, and its result up to rounding.

    A bfloat16 product is rounded from float32 sums, and so are its gradients: asked for bfloat16, XLA on CPU may
    convert all of `rhs` first, or leave the processor's bfloat16 instructions alone.
    """
    narrow = lhs.dtype == rhs.dtype == jnp.bfloat16 and preferred_element_type is None
    if not narrow:
        return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    freeze = lambda axes: tuple(tuple(int(i) for i in pair) for pair in axes)  # noqa: E731
    return _bfloat16_product(lhs, rhs, tuple(freeze(axes) for axes in dimension_numbers))


def attend_to_table(hidden: Float[Array, "*B D"], table: Float[Array, "V D"]) -> Float[Array, "*B V"]:
    """Logits by a tied head: two matrices, none of them transposed, or XLA on CPU may copy the table in every step."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    return product(rows, table, (((1,), (1,)), ((), ()))).reshape(*hidden.shape[:-1], table.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _bfloat16_product(lhs, rhs, dimension_numbers):
    multiply = lambda lhs: jax.lax.dot_general(lhs, rhs, dimension_numbers)  # noqa: E731
    cpu = functools.partial(_product_on_cpu, rhs=rhs, dimension_numbers=dimension_numbers)
    return jax.lax.platform_dependent(lhs, cpu=cpu, default=multiply)


def _forward(lhs, rhs, dimension_numbers):
    return _bfloat16_product(lhs, rhs, dimension_numbers), (lhs, rhs)


def _backward(dimension_numbers, operands, gradient):
    """Autodiff would give these too, but as products of float32, to which the rounded sums lead back."""
    lhs, rhs = operands
    left, right, out = _subscripts(lhs.ndim, rhs.ndim, dimension_numbers)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    to_lhs, to_rhs = einsum(f"{out},{right}->{left}", gradient, rhs), einsum(f"{left},{out}->{right}", lhs, gradient)
    return to_lhs.astype(lhs.dtype), to_rhs.astype(rhs.dtype)


_bfloat16_product.defvjp(_forward, _backward)


def _subscripts(left_rank: int, right_rank: int, dimension_numbers) -> tuple[str, str, str]:
    """The product as an einsum: a letter per axis of both operands, and those of the result."""
    (left_summed, right_summed), (left_batch, right_batch) = dimension_numbers
    left, right = list(string.ascii_lowercase[:left_rank]), list(string.ascii_uppercase[:right_rank])
    for i, j in zip((*left_summed, *left_batch), (*right_summed, *right_batch), strict=True):
        right[j] = left[i]
    free = lambda names, used: [name for i, name in enumerate(names) if i not in used]  # noqa: E731
    out = [left[i] for i in left_batch]
    out += free(left, (*left_summed, *left_batch)) + free(right, (*right_summed, *right_batch))
    return "".join(left), "".join(right), "".join(out)


def _product_on_cpu(lhs, rhs, dimension_numbers):
    """A single row is given twice: XLA on CPU takes another way for one row than for two, for bfloat16 a slower one.

    The free axes of `lhs` come first in the result, in order, where there is no batch.
    """
    rounded = lambda lhs: jax.lax.dot_general(  # noqa: E731
        lhs, rhs, dimension_numbers, preferred_element_type=jnp.float32
    ).astype(lhs.dtype)
    contracted, batched = dimension_numbers[0][0], dimension_numbers[1][0]
    rows = lhs.size // max(1, math.prod(lhs.shape[i] for i in contracted))
    if rows != 1 or batched or lhs.ndim == len(contracted):
        return rounded(lhs)
    axis = next(i for i in range(lhs.ndim) if i not in contracted)
    return jax.lax.slice_in_dim(rounded(jnp.concatenate([lhs, lhs], axis)), 0, 1, axis=0)
