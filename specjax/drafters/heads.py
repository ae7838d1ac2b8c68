"""What Medusa and Hydra share: K heads on the target's last hidden state, one per depth of the proposal.

    position          s        s+1       s+2       s+3
    token             a         r         x1        x2        r is pending: its own forward has not been run
    feature           f                                       f emitted r
    target's head     f ──────► r
    head 1            f, r ───────────►  x1                   Hydra's heads also see the path r, x1, ...;
    head 2            f, r, x1 ──────────────────►  x2        Medusa's see f alone

Head k at the feature of position s predicts token s + k + 1, which the target's law at position s + k judges.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.tree_draws import check_siblings, check_static_tree
from specjax.models import TransformerConfig, ends
from specjax.models.param_check import check_params_against
from specjax.models.prediction_heads import PredictionHead
from specjax.protocol import WITHOUT_REPLACEMENT, Proposal
from specjax.topology import Topology


@struct.dataclass
class HeadState:
    """Between rounds.

    Attributes:
        feature: [B, D] the target's last hidden state, before the final norm, at the position that emitted the pending
            token.
        known: [B] False as long as there is none: after a prompt of one token.
    """

    feature: Float[Array, "B D"]
    known: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True)
class PredictionHeads:
    """Fields, parameters and state of both families.

    Attributes:
        target: config of the target, whose final norm, output head and (Hydra) embedding are used.
        topology: a chain, or a static tree whose nodes are numbered by depth.
        siblings: how the children of a node come about.
        num_heads: K (None: as many as the topology is deep). Heads that were trained beyond the depth stay unused.
        num_blocks, hidden_width, own_output: of each head, see `PredictionHead`.

    Raises:
        ValueError: a topology without nodes or deeper than there are heads, or a value outside its range.
    """

    target: TransformerConfig
    topology: Topology = Topology.chain(4)
    siblings: str = WITHOUT_REPLACEMENT
    num_heads: int | None = None
    num_blocks: int = 1
    hidden_width: int | None = None
    own_output: bool = False

    sequential: ClassVar[bool]
    context_length: ClassVar[None] = None

    def __post_init__(self):
        check_static_tree(self.topology)
        check_siblings(self.siblings)
        if self.num_heads is None:
            object.__setattr__(self, "num_heads", self.draft_length)
        if self.num_heads < self.draft_length:
            raise ValueError(
                f"a topology {self.draft_length} deep needs as many heads; got num_heads {self.num_heads}: train more "
                "heads, or use a shallower topology"
            )
        for name in ("num_blocks", "hidden_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")

    @property
    def draft_length(self) -> int:
        return self.topology.max_depth

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.topology.num_nodes + 1,)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (self.target.num_layers,)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def init_params(self, key, target_params=None):
        """Parameters {"head_1": ..., "head_K": ...} of untrained heads, which all give the target's next-token law.

        Output matrices of the heads' own are copies of the target's, or random when `target_params` is None.
        """
        c, params = self.target, {}
        feature = jnp.zeros((1, c.d_model), c.dtype)
        for depth in range(1, self.num_heads + 1):
            path = jnp.zeros((1, depth, c.d_model), c.dtype) if self.sequential else None
            head = self._head().init(jax.random.fold_in(key, depth), feature, path)["params"]
            if self.own_output and target_params is not None:
                head["output"] = jax.tree.map(jnp.array, ends.untied_head(c, target_params))
            params[f"head_{depth}"] = head
        return params

    def check_params(self, params) -> None:
        check_params_against(expected_params(self), params, "the drafter", f"; it has {self.num_heads} heads")

    def representation(
        self, params, target_params, depth: int, normalised: Float[Array, "*B D"], path: Int[Array, "*B k"] | None
    ):
        """What `output` turns into the logits of head `depth`, from features behind the target's final norm.

        `path`: the `depth` tokens that follow the feature's position, the pending one first; Medusa does not read it.
        """
        embedded = ends.embed(self.target, target_params, path) if self.sequential else None
        return self._head().apply({"params": params[f"head_{depth}"]}, normalised, embedded)

    def output(self, target_params, representation) -> Float[Array, "*B V"]:
        return representation if self.own_output else ends.head(self.target, target_params, representation)

    def teacher_forced(
        self, params, target_params, features: Float[Array, "B T D"], tokens: Int[Array, "B T"]
    ) -> list[Float[Array, "B S V"]]:
        """Logits of all K heads along given texts, at the S = T − K positions where every head can be judged.

        Entry k − 1, position s belongs to the target's law at position s + k.

        Args:
            features: the target's, of layer `feature_layers`.
            tokens: what the target read at the same positions.
        """
        count = tokens.shape[1] - self.num_heads
        if count < 1:
            raise ValueError(
                f"{self.num_heads} heads need texts longer than {self.num_heads} tokens; got {tokens.shape[1]}"
            )
        normalised = ends.normalise(self.target, target_params, features[:, :count])
        logits = []
        for depth in range(1, self.num_heads + 1):
            path = jnp.stack([tokens[:, ahead : ahead + count] for ahead in range(1, depth + 1)], -1)
            representation = self.representation(params, target_params, depth, normalised, path)
            logits.append(self.output(target_params, representation))
        return logits

    def init(self, params, context) -> HeadState:
        at = jnp.maximum(context.length - 2, 0)
        return HeadState(feature=_take(context.features, at), known=context.length >= 2)

    def commit(self, params, state: HeadState, committed) -> HeadState:
        new, live = _take(committed.features, jnp.maximum(committed.count - 1, 0)), committed.count > 0
        return HeadState(feature=jnp.where(live[:, None], new, state.feature), known=state.known | live)

    def _head(self) -> PredictionHead:
        return PredictionHead(self.target, self.num_blocks, self.hidden_width, self.own_output)


def only_known(proposal: Proposal, state: HeadState) -> Proposal:
    """Nothing where no feature is known yet."""
    return proposal.replace(valid=proposal.valid & state.known[:, None])


def counted_positions(mask: Bool[Array, "B T"], num_heads: int) -> Bool[Array, "B S"]:
    """Positions s, S = T − 1 − K of them, whose tokens s + 2 to s + K + 1 are all set in a mask over the tokens."""
    positions = mask.shape[1] - 1 - num_heads
    ahead = [mask[:, depth + 1 : depth + 1 + positions] for depth in range(1, num_heads + 1)]
    return jnp.all(jnp.stack(ahead), 0)


@functools.lru_cache(maxsize=64)
def expected_params(drafter: PredictionHeads):
    """Shapes and dtypes of the parameters."""
    return jax.eval_shape(drafter.init_params, jax.random.key(0))


def _take(features: Float[Array, "B T D"], at: Int[Array, "B"]) -> Float[Array, "B D"]:
    return jnp.take_along_axis(features, at[:, None, None], 1)[:, 0]
