"""Products are the plain ones, in value and in gradient, and leave no copy of a table behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import TransformerConfig
from specjax.models.layers import make_dense
from specjax.models.linear import attend_to_table, product
from tests.decoding.test_compiled_loop import operations

LAST_BY_FIRST = (((2,), (0,)), ((), ()))
HEADS = (((3,), (3,)), ((0, 1), (0, 1)))
SHAPES = [
    ((1, 1, 96), (96, 40), LAST_BY_FIRST),
    ((1, 0, 96), (96, 40), LAST_BY_FIRST),
    ((3, 2, 96), (96, 40), LAST_BY_FIRST),
    ((2, 65, 96), (96, 40), LAST_BY_FIRST),
    ((96,), (96, 40), (((0,), (0,)), ((), ()))),
    ((96, 1), (96, 40), (((0,), (0,)), ((), ()))),
    ((2, 3, 1, 64), (2, 3, 9, 64), HEADS),
    ((2, 3, 5, 64), (2, 3, 9, 64), HEADS),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("left, right, dimensions", SHAPES)
def test_the_product_is_that_of_jax(left, right, dimensions, dtype):
    """Against float64: within one rounding of the result's dtype, and half of one for the summing."""
    lhs, rhs = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate((left, right)))
    out = jax.jit(lambda lhs, rhs: product(lhs, rhs, dimensions))(lhs, rhs)
    plain = jax.lax.dot_general(lhs, rhs, dimensions)
    assert (out.shape, out.dtype) == (plain.shape, plain.dtype)
    exact = jax.lax.dot_general(*(np.asarray(x, np.float64) for x in (lhs, rhs)), dimensions)
    error = {"float32": 1e-4, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=error, atol=error)


@pytest.mark.parametrize("left, right, dimensions", SHAPES)
def test_gradients_are_those_of_the_plain_product(left, right, dimensions):
    """Of bfloat16 operands, against float64; an axis that is summed and one that is kept are told apart."""
    operands = [jax.random.normal(jax.random.key(i), shape, "bfloat16") for i, shape in enumerate((left, right))]
    shape = jax.eval_shape(lambda *x: product(*x, dimensions), *operands).shape
    weights = jax.random.normal(jax.random.key(2), shape)

    def weighted_sum(lhs, rhs, f):
        return jnp.sum(f(lhs, rhs, dimensions).astype(weights.dtype) * weights.astype("bfloat16"))

    found = jax.jit(jax.grad(lambda *x: weighted_sum(*x, product), (0, 1)))(*operands)
    exact = jax.grad(lambda *x: weighted_sum(*x, jax.lax.dot_general), (0, 1))(*(x.astype("f") for x in operands))
    for one, other, operand in zip(found, exact, operands, strict=True):
        assert (one.dtype, one.shape) == (operand.dtype, operand.shape)
        np.testing.assert_allclose(one.astype("f"), other, rtol=2.0**-7, atol=2.0**-7)


def test_gradients_of_bfloat16_take_no_product_of_float32():
    """A product of float32 costs twice as much; all three of a training step are of bfloat16."""
    lhs, rhs = jnp.ones((2, 16, 32), "bfloat16"), jnp.ones((32, 8), "bfloat16")
    step = jax.grad(lambda lhs, rhs: jnp.sum(jnp.sin(product(lhs, rhs, LAST_BY_FIRST)).astype("f")), (0, 1))
    text = jax.jit(step).lower(lhs, rhs).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all("xbf16>, tensor" in line and line.count("xbf16>") == 2 for line in products)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_tied_head_copies_no_table(rows, dtype):
    """As the loop of one row has it: the next embedding comes from the logits."""

    def loop(table, hidden):
        step = lambda i, x: table[jnp.argmax(attend_to_table(x, table), -1)] + x  # noqa: E731
        return jax.lax.fori_loop(0, 4, step, hidden)

    table, hidden = jnp.ones((1000, 64), dtype), jnp.ones((1, rows, 64), dtype)
    found = operations(jax.jit(loop).lower(table, hidden).compile().as_text())
    assert found
    assert not [op for op in found if op[0] in ("copy", "transpose") and op[1] == table.size]


@pytest.mark.parametrize("shape", [(3,), (2, 0, 3), (2, 5, 3)])
def test_a_tied_head_of_any_number_of_rows(shape):
    hidden, table = jax.random.normal(jax.random.key(0), shape), jax.random.normal(jax.random.key(1), (7, 3))
    np.testing.assert_allclose(attend_to_table(hidden, table), hidden @ table.T, atol=1e-6)


def test_a_layer_may_begin_at_zero():
    config = TransformerConfig(vocab_size=3, d_model=8, num_layers=1, num_heads=1)
    x = jnp.ones((1, 8))
    for zero in (True, False):
        layer = make_dense(config, 5, True, None, zero=zero)
        out = layer.apply(layer.init(jax.random.key(0), x), x)
        assert bool(jnp.any(out)) != zero
