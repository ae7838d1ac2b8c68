"""Hydra: heads that also see the tokens drafted before them (Ankner et al. 2024, arXiv 2402.05109)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from specjax.drafters.heads import HeadState, PredictionHeads, only_known
from specjax.drafters.tree_draws import draw_level, tree_proposal
from specjax.models import ends


@dataclasses.dataclass(frozen=True)
class Hydra(PredictionHeads):
    """Level by level: head d reads the feature and the embeddings of the d tokens on the path to the node it extends.

    Fields: see `PredictionHeads`.
    """

    sequential: ClassVar[bool] = True

    def propose(self, params, state: HeadState, context, noise):
        topology = self.topology
        normalised = ends.normalise(self.target, context.target_params, state.feature)[:, None]
        path = context.pending[:, None, None]  # [B, nodes, depth]
        levels = []
        for depth in range(1, topology.max_depth + 1):
            feature = jnp.broadcast_to(normalised, (*path.shape[:2], normalised.shape[-1]))
            representation = self.representation(params, context.target_params, depth, feature, path)
            children = draw_level(
                self.output(context.target_params, representation),
                topology,
                depth,
                sampling=context.sampling,
                siblings=self.siblings,
                noise=noise,
            )
            levels.append(children)
            parents = np.asarray(topology.parents)[topology.level(depth) - 1]
            row = np.searchsorted(topology.level(depth - 1), parents)
            path = jnp.concatenate([path[:, row], children.tokens[..., None]], -1)
        proposal = tree_proposal(levels, topology, self.siblings)
        return only_known(proposal, state), state, context.target_cache
