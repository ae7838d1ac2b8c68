"""Following the target's own tokens: what a rule does that knows which token the target emits behind every node."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.protocol import Proposal, Verdict
from specjax.verifiers.chain import chain_path, leading_run
from specjax.verifiers.tree_walk import deepest, path_to, whole_paths


def follow(target_tokens: Int[Array, "B M"], proposal: Proposal) -> Verdict:
    """Accepts the longest path of the target's own tokens; the next token is the target's behind it.

    Args:
        target_tokens: the token the target emits behind the root and each node (M = N + 1); anything behind an invalid
            node.
        proposal: a chain or a tree; equal siblings give equal texts, the first of the longest paths is taken.
    """
    if proposal.topology.is_chain:
        path = chain_path(proposal)
        num_accepted = leading_run(proposal.valid & (proposal.tokens == target_tokens[:, :-1]))
        return Verdict(num_accepted, path, jnp.take_along_axis(target_tokens, num_accepted[:, None], 1)[:, 0])
    parents = jnp.broadcast_to(proposal.node_parents, proposal.tokens.shape)
    matches = proposal.valid & (proposal.tokens == jnp.take_along_axis(target_tokens, parents, 1))
    node = deepest(whole_paths(matches, proposal), proposal)
    return Verdict(*path_to(node, proposal), jnp.take_along_axis(target_tokens, node[:, None], 1)[:, 0])
