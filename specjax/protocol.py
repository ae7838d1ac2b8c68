"""What drafter, verifier and loop hand to each other, and nothing else.

One round, for a chain of N = 3 nodes behind the pending token r (already committed, its forward not yet run):

    node          0    1    2    3
    token         r    x1   x2   x3      the target's forward sees these N + 1 tokens
    its logits    p0   p1   p2   p3      p[:, i] is the target's law of what follows node i
    drafted from       q1   q2   q3      proposal.law[:, i - 1] is the law that node i was drawn from

Node i > 0 is therefore judged by p at its parent. Node numbers count the root as 0; arrays over the N proposed nodes
(`tokens`, `law`, `valid`) leave the root out.
"""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.keys import Noise, Stream
from specjax.sampling import Sampling
from specjax.topology import AnyTopology, ancestors_of

# How the children of one node came about. A verifier lists the kinds it is lossless for.
IID, WITHOUT_REPLACEMENT, FIXED = "iid", "without_replacement", "fixed"


@struct.dataclass
class Proposal:
    """Drafted tokens with the laws they were really drawn from.

    Attributes:
        tokens: [B, N] drafted ids.
        law: [B, N, V] the law each node was drawn from; None when the tokens were chosen, not drawn (q is one-hot).
        valid: [B, N] nodes that may be accepted. An invalid node has no valid descendant; its token and law may be
            anything, but for a passenger's token, which the target reads.
        topology: static shape.
        siblings: static; how the children of a node relate: drawn independently from one law (`iid`), each from the law
            that is left after removing its earlier siblings, renormalised (`without_replacement`), or chosen and to be
            tried in order (`fixed`; law None).
        parents: [B, N] parent of each node, where the topology is dynamic; a parent comes before its children.
        hidden: [B, N + 1, D] outputs of the target's first `first_layer` layers at the root and every node, if the
            drafter ran them (on the target's cache); the target's forward goes on from there.
        first_layer: static; the layer at which the target's forward begins, 0 for the embedding.
    """

    tokens: Int[Array, "B N"]
    law: Float[Array, "B N V"] | None
    valid: Bool[Array, "B N"]
    topology: AnyTopology = struct.field(pytree_node=False)
    siblings: str = struct.field(pytree_node=False, default=IID)
    parents: Int[Array, "B N"] | None = None
    hidden: Float[Array, "B M D"] | None = None
    first_layer: int = struct.field(pytree_node=False, default=0)

    @property
    def node_parents(self) -> Int[Array, "#B N"] | np.ndarray:
        """[1 or B, N] parents; numpy, with one row for all, where the topology is static."""
        if self.topology.is_static:
            return np.asarray(self.topology.parents, np.int32)[None]
        return self.parents

    @property
    def node_ancestors(self) -> Bool[Array, "#B M M"] | np.ndarray:
        """[1 or B, N + 1, N + 1] `Topology.ancestors`, likewise."""
        if self.topology.is_static:
            return self.topology.ancestors[None]
        return ancestors_of(self.parents, self.topology.num_nodes)

    @property
    def node_depths(self) -> Int[Array, "#B M"] | np.ndarray:
        """[1 or B, N + 1] depths, likewise."""
        if self.topology.is_static:
            return self.topology.depths[None]
        return jnp.sum(self.node_ancestors, -1, dtype=jnp.int32) - 1


@struct.dataclass
class Verdict:
    """What the verifier decided for each row.

    Attributes:
        num_accepted: [B] length of the accepted path, 0..max depth.
        path: [B, max depth] node numbers along the accepted path (1..N); entries past `num_accepted` are arbitrary.
        next_token: [B] the correction or bonus that follows the path.
    """

    num_accepted: Int[Array, "B"]
    path: Int[Array, "B D"]
    next_token: Int[Array, "B"]


@struct.dataclass
class Context:
    """What a drafter may look at between rounds.

    Attributes:
        tokens: [B, L] committed tokens of each row, right-padded; the last committed one is pending.
        length: [B] number of committed tokens.
        sampling: the drafter's own Sampling.
        features: target features the drafter asked for by `feature_layers`, [B, L, F] at init and None if it asked for
            none; what commits later arrives in `Committed.features`.
        target_params: the target's parameters.
        target_cache: the target's cache; travels through `propose` and back.
        buffer_length: static; L, the longest text this call can reach. At init, `tokens` may be shorter.
        live: [B] rows that have not finished; nothing that is proposed for another counts. None at init.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, "B"]
    sampling: Sampling
    features: Any = None
    target_params: Any = None
    target_cache: Any = None
    buffer_length: int = struct.field(pytree_node=False, default=0)
    live: Bool[Array, "B"] | None = None

    @property
    def pending(self) -> Int[Array, "B"]:
        """The last committed token of each row."""
        return last_tokens(self.tokens, self.length)


def last_tokens(tokens: Int[Array, "B L"], length: Int[Array, "B"]) -> Int[Array, "B"]:
    """The token before each row's `length`: the pending one."""
    return jnp.take_along_axis(tokens, length[:, None] - 1, 1)[:, 0]


@struct.dataclass
class Committed:
    """What one round added.

    Attributes:
        tokens: [B, D + 1] the accepted path's tokens and the next token, padded.
        features: [B, D + 1, F] the target features of the root and the accepted path (those that emitted `tokens`).
        count: [B] how many of them were emitted; 0 for a finished row.
        nodes: [B, D + 1] numbers of the nodes behind which `tokens` were emitted: 0, then the accepted path.
        passengers: [B, P] the target's most probable token behind each passenger, or None without passengers.
    """

    tokens: Int[Array, "B D1"]
    features: Any
    count: Int[Array, "B"]
    nodes: Int[Array, "B D1"]
    passengers: Int[Array, "B P"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """Whatever proposes tokens: a frozen, hashable dataclass. Parameters and state are passed in and out.

    Attributes:
        draft_length: γ, the depth of one proposal; 0 proposes nothing.
        topology: shape of every proposal, with that depth.
        siblings: how the children of a node come about.
        feature_layers: target layers whose outputs the drafter wants (layer i's output is i; 0 is the embedding).
        context_length: longest text it can follow, or None when it has no limit.
        vocab_size: ids it may propose, or None when it has no vocabulary of its own.
        target: config of the only target it can draft for, because it uses that target's layers, features or head; None
            when any target will do.
        widths: static widths in which a verify may run, in tokens and rising; the last is N + 1. A round takes the
            first one that holds the last valid node of the live rows. More than one pays only for a drafter that often
            proposes less than N nodes; passengers run in every round, so with them there is one.
    """

    draft_length: int
    topology: AnyTopology
    siblings: str
    feature_layers: tuple[int, ...]
    context_length: int | None
    vocab_size: int | None
    target: Any
    widths: tuple[int, ...]

    def check_params(self, params) -> None:
        """Raises ValueError, before anything is compiled, when the parameters do not fit."""

    def init(self, params, context: Context) -> Any:
        """State after the prompt; `context.length - 1` positions may be processed, the last one is pending."""

    def propose(self, params, state, context: Context, noise: Noise) -> tuple[Proposal, Any, Any]:
        """(proposal, state, target cache). Draws come from `noise.draft`, one source per depth."""

    def commit(self, params, state, committed: Committed) -> Any:
        """State after the round: caches rolled back to what was accepted."""


@runtime_checkable
class Verifier(Protocol):
    """A rule that turns laws and a proposal into a verdict: a frozen, hashable dataclass without a model.

    Attributes:
        name: what tables and configs call it; a lossy rule's name starts with "lossy_".
        lossless: whether the output law is exactly the target's.
        stream: the stream of randomness the rule needs.
        siblings: sibling kinds the rule accepts.
        greedy_only: whether the rule needs one-hot target laws (temperature 0).
        trees: whether topologies other than chains are accepted.
    """

    name: str
    lossless: bool
    stream: Stream
    siblings: frozenset[str]
    greedy_only: bool
    trees: bool

    def verify(self, p: Float[Array, "B M V"], proposal: Proposal, noise: Noise) -> Verdict:
        """The verdict for target laws p of the root and the N nodes (M = N + 1)."""


def node_laws(p: Float[Array, "B M V"], proposal: Proposal) -> Float[Array, "B N V"]:
    """The target's law at each proposed node's parent: what that node's token is judged by."""
    topology = proposal.topology
    if topology.is_chain:
        return p[:, :-1]
    if topology.is_static:
        return p[:, np.asarray(topology.parents, np.int32)]
    return jnp.take_along_axis(p, proposal.parents[..., None], 1)


def token_probabilities(law: Float[Array, "B N V"], tokens: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """law[b, n, tokens[b, n]]."""
    return jnp.take_along_axis(law, tokens[..., None], -1)[..., 0]
