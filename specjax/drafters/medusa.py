"""Medusa: every head predicts its token from the last hidden state alone (Cai et al. 2024, arXiv 2401.10774)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.drafters.heads import HeadState, PredictionHeads, only_known
from specjax.drafters.tree_draws import draw_children, draw_level, tree_proposal
from specjax.models import ends
from specjax.protocol import FIXED


@dataclasses.dataclass(frozen=True)
class Medusa(PredictionHeads):
    """All laws of a round at once: every node of depth d has the law of head d, whatever its parent.

    Nodes of one depth under different parents are drawn independently of each other; `fixed` ones are the same under
    every parent, the head's tokens by rank. Fields: see `PredictionHeads`.
    """

    sequential: ClassVar[bool] = False

    def propose(self, params, state: HeadState, context, noise):
        normalised = ends.normalise(self.target, context.target_params, state.feature)
        depths = range(1, self.draft_length + 1)
        heads = [self.representation(params, context.target_params, depth, normalised, None) for depth in depths]
        logits = self.output(context.target_params, jnp.stack(heads, 1))
        levels = [self._level(logits[:, depth - 1, None], depth, context.sampling, noise) for depth in depths]
        proposal = tree_proposal(levels, self.topology, self.siblings)
        return only_known(proposal, state), state, context.target_cache

    def _level(self, logits, depth, sampling, noise):
        """The nodes of one depth, from its head's logits [B, 1, V]."""
        options = {"sampling": sampling, "siblings": self.siblings, "noise": noise}
        level, above = self.topology.level(depth), self.topology.level(depth - 1)
        if self.siblings == FIXED or sampling.greedy:
            rank = self.topology.ranks[level - 1]
            best = draw_children(logits, int(rank.max()) + 1, depth=depth, **options)
            return jax.tree.map(lambda x: x[:, 0, rank], best)
        logits = jnp.broadcast_to(logits, (logits.shape[0], len(above), logits.shape[-1]))
        return draw_level(logits, self.topology, depth, **options)
