"""Nothing in, nothing out."""

import jax.numpy as jnp
import pytest

from specjax.drafters import Empty
from specjax.keys import Noise, Stream, row_keys
from specjax.protocol import Context
from specjax.sampling import Sampling


def test_it_proposes_no_node_and_hands_the_cache_back():
    context = Context(jnp.ones((3, 5), jnp.int32), jnp.array([1, 5, 2]), Sampling.of(), target_cache="the cache")
    drafter = Empty()
    noise = Noise(row_keys(0, 3), context.length, Stream.ROUND)
    proposal, state, cache = drafter.propose(None, drafter.init(None, context), context, noise)
    assert proposal.tokens.shape == proposal.valid.shape == (3, 0) and proposal.law is None
    assert state is None and cache == "the cache" and drafter.commit(None, state, None) is None


def test_it_takes_no_parameters():
    with pytest.raises(ValueError, match="the empty drafter takes no parameters"):
        Empty().check_params({})
