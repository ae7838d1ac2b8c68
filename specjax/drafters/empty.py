"""The drafter that proposes nothing: with it, the loop is target-only decoding."""

import dataclasses

import jax.numpy as jnp

from specjax.protocol import IID, Proposal
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Empty:
    """γ = 0, no parameters, no state."""

    draft_length = 0
    topology = Topology(())
    siblings = IID
    feature_layers = ()
    context_length = None
    vocab_size = None
    target = None
    widths = (1,)

    def check_params(self, params) -> None:
        if params is not None:
            raise ValueError("the empty drafter takes no parameters; give drafter_params=None")

    def init(self, params, context):
        return None

    def propose(self, params, state, context, noise):
        none = jnp.zeros((context.tokens.shape[0], 0), jnp.int32)
        return Proposal(none, None, none.astype(bool), self.topology), state, context.target_cache

    def commit(self, params, state, committed):
        return state
