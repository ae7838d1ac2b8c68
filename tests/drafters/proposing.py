"""Calls a drafter on given texts, without a target."""

import functools

import jax
import jax.numpy as jnp

from specjax.keys import Noise, Stream, row_keys
from specjax.protocol import Context
from specjax.sampling import Sampling


def context_of(texts, width=32, fill=0):
    """A context of texts padded to `width` with the token `fill`."""
    tokens = jnp.array([list(text) + [fill] * (width - len(text)) for text in texts], jnp.int32)
    return Context(tokens, jnp.array([len(text) for text in texts], jnp.int32), Sampling.of(), buffer_length=width)


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, params, state, context):
    """The proposal of one round."""
    noise = Noise(row_keys(0, context.tokens.shape[0]), context.length, Stream.ROUND)
    return drafter.propose(params, state, context, noise)[0]


def drafts(drafter, texts, params=None, **options):
    """Per row of a chain, the valid tokens; checks that they come first."""
    context = context_of(texts, **options)
    proposal = propose(drafter, params, drafter.init(params, context), context)
    assert proposal.law is None and proposal.topology.is_chain
    rows = []
    for tokens, valid in zip(proposal.tokens.tolist(), proposal.valid.tolist(), strict=True):
        count = sum(valid)
        assert valid == [True] * count + [False] * (len(valid) - count)
        rows.append(tokens[:count])
    return rows
