"""What rules on a chain share: the run of accepted nodes, and the target's law behind it.

Node i of a chain hangs on node i - 1, so an accepted path is always 1, 2, ..., n and the next token follows node n.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT, Proposal

# A node of a chain has no siblings, so it does not matter how siblings would relate.
ANY_SIBLINGS = frozenset({IID, WITHOUT_REPLACEMENT, FIXED})


def chain_path(proposal: Proposal) -> Int[Array, "B N"]:
    """Node numbers 1..N for every row.

    Raises:
        ValueError: the proposal is a tree.
    """
    if not proposal.topology.is_chain:
        raise ValueError(f"this rule verifies chains only; got a tree with parents {proposal.topology.parents}")
    return jnp.broadcast_to(jnp.arange(1, proposal.topology.num_nodes + 1), proposal.tokens.shape)


def leading_run(flags: Bool[Array, "B N"]) -> Int[Array, "B"]:
    """How many flags are set before the first one that is not: 1, 0, 1, 1 counts one."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), -1), -1)


def target_law(p: Float[Array, "B M V"], num_accepted: Int[Array, "B"]) -> Float[Array, "B V"]:
    """The target's law of what follows the last accepted node."""
    if p.shape[1] == 1:
        return p[:, 0]
    return jnp.take_along_axis(p, num_accepted[:, None, None], 1)[:, 0]
