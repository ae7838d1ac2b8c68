"""The signature check is really on: it refuses wrong shapes and leaves structs alone."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from specjax import protocol, topology


@pytest.fixture
def proposal():
    tokens = jnp.zeros((2, 3), jnp.int32)
    return protocol.Proposal(tokens, None, jnp.ones((2, 3), bool), topology.Topology.chain(3))


def test_wrong_shape_is_refused(proposal):
    with pytest.raises(jaxtyping.TypeCheckError):
        protocol.node_laws(jnp.zeros((2, 3)), proposal)


def test_disagreeing_axes_are_refused():
    with pytest.raises(jaxtyping.TypeCheckError):
        protocol.token_probabilities(jnp.zeros((2, 3, 5)), jnp.zeros((2, 4), jnp.int32))


def test_wrong_shape_is_refused_while_tracing():
    with pytest.raises(jaxtyping.TypeCheckError):
        jax.jit(protocol.token_probabilities)(jnp.zeros((2, 3, 5)), jnp.zeros((2, 4), jnp.int32))


def test_structs_may_be_rebuilt_around_anything(proposal):
    shapes = jax.tree.map(lambda leaf: leaf.shape, proposal)
    assert shapes.tokens == shapes.valid == (2, 3)
    assert jax.eval_shape(lambda: proposal).tokens.shape == (2, 3)
    assert jax.vmap(lambda row: row.tokens.sum())(proposal).shape == (2,)
