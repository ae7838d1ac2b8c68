"""EAGLE drafting a chain (arXiv 2401.15077, and 2503.01840 for version 3)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.drafters.arguments import check_draft_length
from specjax.drafters.eagle_pairs import EagleDrafter, Pairs
from specjax.models.cache import KVCache
from specjax.models.eagle_layer import EagleConfig
from specjax.protocol import IID, Proposal
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class Eagle(EagleDrafter):
    """Drafts γ tokens, each from the output for the pair of the last output and the last token.

    Attributes:
        model: the drafter's network.
        draft_length: γ >= 1.
    """

    draft_length: int

    siblings = IID

    def __post_init__(self):
        check_draft_length(self.draft_length)

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.draft_length)

    def propose(self, params, state: Pairs, context, noise):
        out, cache, valid = self.catch_up(params, state, context.target_params)
        tokens, law, cache = draft_chain(self.model, params, context, out, cache, noise.draft(self.draft_length))
        return Proposal(tokens, law, valid, self.topology), self.put_back(state, cache), context.target_cache


def draft_chain(model: EagleConfig, params, context, out: Float[Array, "B D"], cache: KVCache, sources):
    """(tokens [B, S], their laws [B, S, V] or None, cache): one token per source, each behind the one before.

    Args:
        model, params: the network.
        context: lends the sampling and the target's parameters.
        out: output behind the pending token.
        cache: up to that pair.
        sources: of the draws, [S] by depth.
    """
    target_params, sampling = context.target_params, context.sampling

    def choose(out: Float[Array, "B D"], source):
        return sampling.choose(model.logits(params, target_params, out), source)

    def step(carry, source):
        out, token, cache = carry
        out, cache = model.run(params, target_params, out[:, None], token[:, None], cache)
        token, law = choose(out[:, 0], source)
        return (out[:, 0], token, cache), (token, law)

    first = choose(out, jax.tree.map(lambda x: x[0], sources))
    (_, _, cache), rest = jax.lax.scan(step, (out, first[0], cache), jax.tree.map(lambda x: x[1:], sources))
    tokens, law = jax.tree.map(lambda one, more: jnp.concatenate([one[:, None], more.swapaxes(0, 1)], 1), first, rest)
    return tokens, law, cache
