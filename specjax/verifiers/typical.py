"""Typical acceptance: whatever the target finds probable enough is kept. Lossy."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Float, Int

from specjax.keys import Stream
from specjax.protocol import Proposal
from specjax.verifiers.chain import ANY_SIBLINGS, target_law
from specjax.verifiers.round_stream import Arithmetic, drafted_probabilities, verify_round
from specjax.verifiers.tree_walk import deepest, last_node, path_to, whole_paths


@dataclasses.dataclass(frozen=True)
class LossyTypical:
    """Lossy. Accepts x where p(x) > min(ε, δ exp(-H(p))), and keeps the longest path of which that is true.

    H is the entropy in nats of the target's law at x's parent, after temperature and filters; where the target is
    unsure, less probable tokens will do. The next token comes from p. At temperature 0 it is greedy exact match.

    Attributes:
        epsilon: ε, in [0, 1).
        delta: δ, above 0; its authors advise sqrt(ε). Both defaults are those of their implementation.

    Raises:
        ValueError: a value outside its range.

    Reference:
        Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, 2024
        (arXiv 2401.10774), section on typical acceptance.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name: ClassVar[str] = "lossy_typical"
    lossless: ClassVar[bool] = False
    stream: ClassVar[Stream] = Stream.ROUND
    siblings: ClassVar[frozenset[str]] = ANY_SIBLINGS
    greedy_only: ClassVar[bool] = False
    trees: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon must be in [0, 1); got {self.epsilon}")
        if not 0 < self.delta < float("inf"):
            raise ValueError(f"delta must be a finite number above 0; got {self.delta}")

    def arithmetic(self, p: Float[Array, "B M V"], proposal: Proposal) -> Arithmetic:
        """Thresholds 1 for acceptable nodes and 0 for the others: no coin matters."""
        p_x, _ = drafted_probabilities(p, proposal)
        entropy = jnp.sum(entr(p), -1)
        entropy = jnp.take_along_axis(entropy, jnp.broadcast_to(proposal.node_parents, p_x.shape), 1)
        acceptable = p_x > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        return Arithmetic(accept=(acceptable & proposal.valid).astype(p_x.dtype))

    def decide(
        self, arithmetic: Arithmetic, proposal: Proposal, uniforms: Float[Array, "B N"]
    ) -> tuple[Int[Array, "B"], Int[Array, "B D"]]:
        """The deepest node whose whole path is acceptable, the first one on ties."""
        acceptable = uniforms < arithmetic.accept
        return path_to(deepest(whole_paths(acceptable, proposal), proposal), proposal)

    def next_law(
        self,
        p: Float[Array, "B M V"],
        proposal: Proposal,
        arithmetic: Arithmetic,
        num_accepted: Int[Array, "B"],
        path: Int[Array, "B D"],
    ) -> Float[Array, "B V"]:
        """p."""
        return target_law(p, last_node(num_accepted, path))

    verify = verify_round
