"""EAGLE-2: a tree that grows where the drafter is confident (arXiv 2406.16858; EAGLE-3 uses it too)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.eagle_pairs import EagleDrafter, Pairs
from specjax.protocol import FIXED, Proposal
from specjax.sampling import top_tokens
from specjax.topology import DynamicTopology


@dataclasses.dataclass(frozen=True)
class EagleDynamic(EagleDrafter):
    """Expands the most confident nodes of each depth, then keeps the most confident of all that were seen.

    A node's confidence is the product of the drafter's probabilities along its path, of raw logits at temperature 1,
    whatever the sampling: at temperature 0 the tree would collapse. With a beam of k:

        depth 1     k children of the root, all expanded
        depth d     k children of each expanded node; of those k² the k most confident are expanded   (section 4.1)
        at last     of all k + (max_depth - 1) k² candidates the N most confident are proposed        (section 4.2)

    A child is at most as confident as its parent, and of two equals the one seen first goes first, so the N kept ones
    hold the parents of all, each before its children. Tokens are chosen, not drawn: siblings are `fixed`, the more
    confident first.

    Attributes:
        model: the drafter's network.
        num_nodes: N.
        max_depth: depth of the deepest candidate.
        beam: k, nodes expanded at each depth, and children of each.

    Raises:
        ValueError: more nodes than candidates, fewer than the depth, or a beam wider than the drafter's vocabulary.
    """

    num_nodes: int
    max_depth: int
    beam: int

    siblings = FIXED

    def __post_init__(self):
        if self.max_depth < 1:
            raise ValueError(f"max_depth must be at least 1; got {self.max_depth}")
        if not 1 <= self.beam <= self.model.num_draft_tokens:
            raise ValueError(
                f"beam must be 1 to {self.model.num_draft_tokens}, the tokens that can be drafted; got {self.beam}"
            )
        candidates = self.beam + (self.max_depth - 1) * self.beam**2
        if not self.max_depth <= self.num_nodes <= candidates:
            raise ValueError(
                f"num_nodes must be {self.max_depth}, the depth, to {candidates}, the candidates of a beam of "
                f"{self.beam}; got {self.num_nodes}"
            )

    @property
    def draft_length(self) -> int:
        return self.topology.max_depth

    @property
    def topology(self) -> DynamicTopology:
        return DynamicTopology(self.num_nodes, self.max_depth)

    @property
    def drafted_slots(self) -> int:
        return self.beam * (self.max_depth - 1)

    def propose(self, params, state: Pairs, context, noise):
        model, k = self.model, self.beam
        out, cache, valid = self.catch_up(params, state, context.target_params)
        batch, last_pair = out.shape[0], cache.length[:, None] - 1

        def children_of(out: Float[Array, "B M D"], score: Float[Array, "B M"]):
            """(tokens, scores), [B, M * k], of the k most probable children of each node; a score is a log."""
            logits = model.draft_logits(params, context.target_params, out)
            log_q = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
            columns = top_tokens(log_q, k)
            scores = score[..., None] + jnp.take_along_axis(log_q, columns, -1)
            return model.target_ids(params, columns).reshape(batch, -1), scores.reshape(batch, -1)

        tokens, scores = children_of(out[:, None], jnp.zeros((batch, 1)))
        # Of the nodes to expand: their outputs' index, and their number among all candidates, seen in this order.
        parent = jnp.zeros((batch, k), jnp.int32)
        chosen = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
        out, mask = out[:, None], jnp.zeros((batch, k, 0), bool)
        levels, seen = [(tokens, scores, jnp.full((batch, k), -1, jnp.int32))], k
        beam_tokens, beam_scores = tokens, scores
        for depth in range(2, self.max_depth + 1):
            itself = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
            mask = jnp.concatenate([jnp.take_along_axis(mask, parent[..., None], 1), itself], -1)
            out, cache = model.run(
                params,
                context.target_params,
                jnp.take_along_axis(out, parent[..., None], 1),
                beam_tokens,
                cache,
                positions=jnp.broadcast_to(last_pair + depth - 1, (batch, k)),
                mask=mask,
            )
            tokens, scores = children_of(out, beam_scores)
            levels.append((tokens, scores, jnp.repeat(chosen, k, 1)))
            if depth < self.max_depth:
                beam_scores, best = jax.lax.top_k(scores, k)
                beam_tokens, parent, chosen = jnp.take_along_axis(tokens, best, 1), best // k, seen + best
            seen += k * k
        tokens, parents = keep_best(*(jnp.concatenate(part, 1) for part in zip(*levels, strict=True)), self.num_nodes)
        proposal = Proposal(tokens, None, valid, self.topology, FIXED, parents)
        return proposal, self.put_back(state, cache), context.target_cache


def keep_best(
    tokens: Int[Array, "B C"], scores: Float[Array, "B C"], parents: Int[Array, "B C"], num_nodes: int
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """(tokens, parents) of the best candidates, in the order of falling scores, as a Proposal numbers them.

    Args:
        tokens, scores: of all candidates. A child's score is at most its parent's.
        parents: each candidate's parent among them, which comes before it; -1 for the root.
        num_nodes: how many are kept.
    """
    _, kept = jax.lax.top_k(scores, num_nodes)  # of equal scores the first comes first: parents before children
    wanted = jnp.take_along_axis(parents, kept, 1)
    is_parent = wanted[..., None] == kept[:, None]  # [B, N, N]; none for children of the root
    numbers = jnp.arange(1, num_nodes + 1, dtype=jnp.int32)
    return jnp.take_along_axis(tokens, kept, 1), jnp.sum(jnp.where(is_parent, numbers, 0), -1)
