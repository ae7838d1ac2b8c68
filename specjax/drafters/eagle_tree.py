"""EAGLE drafting a static tree, a level per forward (arXiv 2401.15077, section 4.1)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.drafters.eagle_pairs import EagleDrafter, Pairs
from specjax.drafters.tree_draws import check_siblings, check_static_tree, draw_level, tree_proposal
from specjax.protocol import WITHOUT_REPLACEMENT
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class EagleTree(EagleDrafter):
    """Drafts the nodes of a tree level by level; a node's pair has the output of its parent as feature.

        cache slots    true pairs | 1  2 | 3  4  5  6 ...      node n of the tree lies n - 1 slots behind the last pair

    The deepest level is never run.

    Attributes:
        model: the drafter's network.
        topology: a tree whose nodes are numbered by depth, as `Topology.from_shape` and `from_paths` do.
        siblings: how the children of a node come about.

    Raises:
        ValueError: a topology without nodes, with passengers or numbered otherwise; an unknown kind of siblings; more
            children of one node than tokens that can be drafted.
    """

    topology: Topology
    siblings: str = WITHOUT_REPLACEMENT

    def __post_init__(self):
        check_static_tree(self.topology)
        check_siblings(self.siblings)
        children = int(self.topology.ranks.max()) + 1
        if children > self.model.num_draft_tokens:
            raise ValueError(
                f"{children} children of one node need as many tokens; the drafter knows {self.model.num_draft_tokens}"
            )

    @property
    def draft_length(self) -> int:
        return self.topology.max_depth

    def propose(self, params, state: Pairs, context, noise):
        topology, model = self.topology, self.model
        out, cache, valid = self.catch_up(params, state, context.target_params)
        out, last_pair = out[:, None], cache.length[:, None] - 1
        levels = []
        for depth in range(1, topology.max_depth + 1):
            children = draw_level(
                model.logits(params, context.target_params, out),
                topology,
                depth,
                sampling=context.sampling,
                siblings=self.siblings,
                noise=noise,
            )
            levels.append(children)
            if depth < topology.max_depth:
                nodes = topology.level(depth)
                parents = np.searchsorted(topology.level(depth - 1), np.asarray(topology.parents)[nodes - 1])
                out, cache = model.run(
                    params,
                    context.target_params,
                    out[:, parents],
                    children.tokens,
                    cache,
                    positions=jnp.broadcast_to(last_pair + depth, children.tokens.shape),
                    mask=jnp.asarray(topology.ancestors[nodes, 1 : nodes[-1] + 1]),
                )
        proposal = tree_proposal(levels, topology, self.siblings)
        return (
            proposal.replace(valid=proposal.valid & valid),
            self.put_back(state, cache),
            context.target_cache,
        )
