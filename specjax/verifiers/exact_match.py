"""Following the target's own tokens: what a rule does that knows which token the target emits behind every node."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.protocol import Proposal, Verdict
from specjax.verifiers.chain import chain_path, leading_run


def follow(target_tokens: Int[Array, "B M"], proposal: Proposal) -> Verdict:
    """Accepts while the draft equals the target's token; the next token is the target's at the first difference.

    Args:
        target_tokens: the token the target emits behind the root and each node (M = N + 1); anything behind an invalid
            node.
        proposal: a chain.
    """
    path = chain_path(proposal)
    num_accepted = leading_run(proposal.valid & (proposal.tokens == target_tokens[:, :-1]))
    return Verdict(num_accepted, path, jnp.take_along_axis(target_tokens, num_accepted[:, None], 1)[:, 0])
