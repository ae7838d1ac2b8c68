"""A smaller language model of its own that drafts a static tree, a level per forward (SpecInfer, arXiv 2305.09781)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.drafters.arguments import check_target_vocab_size
from specjax.drafters.independent import read, read_last_two, read_prompt
from specjax.drafters.tree_draws import check_siblings, check_static_tree, draw_level, tree_proposal
from specjax.models import KVCache, TransformerConfig
from specjax.models.transformer import check_params
from specjax.protocol import WITHOUT_REPLACEMENT
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class IndependentTree:
    """Drafts the nodes of a tree level by level; each level's forward sees, by a mask, only its own ancestors.

        cache slots     ... a [b] r  1  2  3  4  ...      r is pending; node n of the tree lies n slots behind it
        after commit    ... a  b  r  2  4                 the accepted path 2, 4 brought together

    The deepest level is never run, so after a whole accepted path one position is missing; as in `Independent` the
    first forward of a round therefore runs the two last committed tokens.

    Attributes:
        model: the drafter's architecture.
        topology: a tree whose nodes are numbered by depth, as `Topology.from_shape` and `from_paths` do.
        siblings: how the children of a node come about.
        target_vocab_size: as for `Independent`.

    Raises:
        ValueError: a topology without nodes, with passengers or numbered otherwise; an unknown kind of siblings.
    """

    model: TransformerConfig
    topology: Topology
    siblings: str = WITHOUT_REPLACEMENT
    target_vocab_size: int | None = dataclasses.field(default=None, kw_only=True)

    feature_layers = ()
    target = None

    def __post_init__(self):
        check_static_tree(self.topology)
        check_siblings(self.siblings)
        check_target_vocab_size(self.target_vocab_size)

    @property
    def draft_length(self) -> int:
        return self.topology.max_depth

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.topology.num_nodes + 1,)

    @property
    def context_length(self) -> int:
        return self.model.context_length

    @property
    def vocab_size(self) -> int:
        return self.target_vocab_size or self.model.vocab_size

    def check_params(self, params) -> None:
        check_params(self.model, params, "drafter")

    def init(self, params, context) -> KVCache:
        return read_prompt(self, params, context, self.topology.num_nodes)

    def propose(self, params, state: KVCache, context, noise):
        topology = self.topology
        logits, cache = read_last_two(self, params, context, state)
        logits = logits[:, None]
        levels = []
        for depth in range(1, topology.max_depth + 1):
            children = draw_level(
                logits, topology, depth, sampling=context.sampling, siblings=self.siblings, noise=noise
            )
            levels.append(children)
            if depth < topology.max_depth:
                nodes = topology.level(depth)
                logits, cache = read(
                    self,
                    params,
                    children.tokens,
                    cache,
                    positions=jnp.broadcast_to(context.length[:, None] - 1 + depth, children.tokens.shape),
                    mask=jnp.asarray(topology.ancestors[nodes, 1 : nodes[-1] + 1]),
                )
        return tree_proposal(levels, topology, self.siblings), cache, context.target_cache

    def commit(self, params, state: KVCache, committed) -> KVCache:
        root = state.length - 1 - int(np.sum(self.topology.depths[1:] < self.topology.max_depth))
        return state.compact(root, committed.nodes[:, 1:])
