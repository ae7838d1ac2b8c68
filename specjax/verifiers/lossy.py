"""Two widespread mistakes, kept for comparison. Neither keeps the target's law; the audit measures by how much."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.keys import Stream
from specjax.protocol import Proposal, node_laws
from specjax.sampling import first_max
from specjax.verifiers.chain import ANY_SIBLINGS, target_law
from specjax.verifiers.round_stream import Arithmetic, first_rejection, verify_round
from specjax.verifiers.token import TokenRule


@dataclasses.dataclass(frozen=True)
class LossyFixedAcceptance:
    """Lossy. Accepts the target's most probable token always and any other with probability α, whatever p and q say.

    Attributes:
        alpha: α in [0, 1].

    Raises:
        ValueError: α outside [0, 1].
    """

    alpha: float = 0.8

    name: ClassVar[str] = "lossy_fixed_acceptance"
    lossless: ClassVar[bool] = False
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1]; got {self.alpha}")

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Thresholds 1 and α."""
        best = proposal.tokens == first_max(node_laws(p, proposal))
        accept = jnp.where(best, jnp.ones((), p.dtype), self.alpha)
        return Arithmetic(accept=jnp.where(proposal.valid, accept, 0))

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B N"],
    ) -> Float[Array, "B V"]:
        """p, after a failure too."""
        return target_law(p, num_accepted)

    decide = staticmethod(first_rejection)
    verify = verify_round


@dataclasses.dataclass(frozen=True)
class LossyResampleFromTarget(TokenRule):
    """Lossy. Accepts like the token rule, but draws the replacement from p instead of norm(max(p - q, 0))."""

    name: ClassVar[str] = "lossy_resample_from_target"
    lossless: ClassVar[bool] = False

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B N"],
    ) -> Float[Array, "B V"]:
        """p, after a failure too."""
        return target_law(p, num_accepted)
