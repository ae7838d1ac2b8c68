"""The coupled rule: drafter and target draw with the same noise, and a draft is right or wrong."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import sampling
from specjax.keys import Noise, Stream
from specjax.protocol import Proposal, Verdict
from specjax.verifiers.chain import ANY_SIBLINGS
from specjax.verifiers.exact_match import follow


@dataclasses.dataclass(frozen=True)
class CoupledRule:
    """Accepts while the draft equals argmax(log p + g), g being the Gumbel noise of the token's absolute position.

    The text is a function of the target and the noise alone: token for token what target-only decoding emits with the
    same key, at any temperature, whatever was drafted. A draft drawn with the same noise from q is accepted with
    probability Σ_x 1 / Σ_j max(p_j / p_x, q_j / q_x) (`specjax.theory.coupled_acceptance`), at most the token rule's.

    Reference:
        Daliri et al., Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024
        (arXiv 2408.07978).
    """

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True
    stream: ClassVar[Stream] = Stream.POSITION
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = True

    def target_tokens(self, p: Float[Array, "B M V"], gumbel: Float[Array, "B M V"]) -> Int[Array, "B M"]:
        """The token that the target emits behind the root and each node."""
        return sampling.gumbel_max(p, gumbel)

    def decide(self, target_tokens: Int[Array, "B M"], proposal: Proposal) -> Verdict:
        """The longest path of drafts that agree with the target's tokens, and the target's token behind it."""
        return follow(target_tokens, proposal)

    def verify(self, p: Float[Array, "B M V"], proposal: Proposal, noise: Noise) -> Verdict:
        """The verdict for target laws p of the root and the N nodes (M = N + 1)."""
        deepest = proposal.topology.max_depth
        gumbel = noise.gumbel(jnp.arange(deepest + 1), p.shape[-1])  # one vector per depth, whatever the nodes
        if not proposal.topology.is_chain:
            depths = jnp.minimum(jnp.asarray(proposal.node_depths), deepest)  # passengers may lie deeper
            gumbel = jnp.take_along_axis(gumbel, depths[..., None], 1)
        return self.decide(self.target_tokens(p, gumbel), proposal)
