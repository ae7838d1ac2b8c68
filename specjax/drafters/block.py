"""A block drafter: one pass proposes all γ tokens from the target's features (DFlash, arXiv 2602.06036)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.arguments import check_draft_length
from specjax.models import KVCache, TransformerConfig, init_cache
from specjax.models.block_layers import BlockTransformer
from specjax.models.cache import write
from specjax.models.ends import embed, head
from specjax.models.param_check import check_params_against
from specjax.protocol import IID, Proposal
from specjax.sampling import draw, first_max
from specjax.topology import Topology


@dataclasses.dataclass(frozen=True)
class BlockDrafter:
    """Drafts a chain of γ tokens in one pass over the pending token and γ masks.

    Each token is drawn from its mask's own law, independently of the others; so that law is the q of its node, and the
    drafts are lossless under every rule for sampled chains. What the pass attends to, besides the block, are entries
    made from the target's features, one per position before the pending token, which are computed once and cached:

        position          0 .. a-1   a   a+1 .. a+γ        a = length - 1
        cache             entries
        block                        r    m  ..  m    ->   laws of the tokens at a+1 .. a+γ
        after a round     entries    entries of the root and the accepted path

    A prompt of one token has no entries yet, and its first block sees only itself: a draft like any other, if a poor
    one.

    Attributes:
        target: the target's architecture; the drafter has its width, heads, embedding and head.
        num_layers: layers of the drafter.
        feature_layers: layers of the target whose outputs it reads, low to high; the paper spreads five of them evenly.
        draft_length: γ >= 1; the paper's block of 16 is γ = 15.
        qk_norm: norms on the queries and keys of its layers, as the paper's have (None: as the target).

    Raises:
        ValueError: a number outside its range, or feature layers that repeat or that the target does not have.
    """

    target: TransformerConfig
    num_layers: int
    feature_layers: tuple[int, ...]
    draft_length: int
    qk_norm: bool | None = None

    siblings = IID
    context_length = None

    def __post_init__(self):
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        layers = self.feature_layers
        if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(self.target.num_layers + 1)):
            raise ValueError(
                f"feature_layers must be different layers from 0 (the embedding) to {self.target.num_layers}, at least "
                f"one; got {layers}"
            )
        check_draft_length(self.draft_length)
        _ = self.config  # a wrong num_layers, or heads that cannot be rotated

    @property
    def config(self) -> TransformerConfig:
        """Of the drafter's layers: pre-norm and rotary, whatever the target's are."""
        qk_norm = self.target.qk_norm if self.qk_norm is None else self.qk_norm
        return self.target.for_drafting_layers(self.num_layers, final_norm=True, remat=False, qk_norm=qk_norm)

    @property
    def module(self) -> BlockTransformer:
        return BlockTransformer(self.config)

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.draft_length)

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.draft_length + 1,)

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def init_params(self, key) -> dict:
        """Fresh parameters."""
        return jax.jit(self._init)(key)

    def check_params(self, params) -> None:
        remedy = "; see BlockDrafter.init_params"
        check_params_against(_expected_params(self), params, "the block drafter", remedy)

    def init(self, params, context) -> KVCache:
        batch = context.tokens.shape[0]
        cache = init_cache(self.config, batch, context.buffer_length + self.draft_length)
        return self._extend(params, cache, context.features).rollback(context.length - 1)

    def propose(self, params, state: KVCache, context, noise):
        logits = self.decode_logits(params, context.target_params, state, context.pending)
        sources = noise.draft(self.draft_length)
        if context.sampling.greedy:
            tokens, law = first_max(logits), None
        else:
            law = context.sampling.law(logits)
            tokens = jax.vmap(draw, in_axes=(1, 0), out_axes=1)(law, sources)
        return Proposal(tokens, law, jnp.ones(tokens.shape, bool), self.topology), state, context.target_cache

    def commit(self, params, state: KVCache, committed) -> KVCache:
        return self._extend(params, state, committed.features).rollback(state.length + committed.count)

    def decode_logits(self, params, target_params, cache: KVCache, pending: Int[Array, "B"]) -> Float[Array, "B G V"]:
        """Logits of the γ tokens behind the pending one, whose position is the cache's length."""

        def run(module, pending):
            context = tuple(zip(cache.keys, cache.values, strict=True))
            return module.denoise(module.blocks(pending, self.draft_length), context, cache.length[:, None])

        hidden = self.module.apply({"params": params}, embed(self.target, target_params, pending)[:, None], method=run)
        return head(self.target, target_params, hidden[:, 0, 1:])

    def logits(
        self,
        params,
        target_params,
        features: Float[Array, "B S F"],
        tokens: Int[Array, "B S"],
        anchors: Int[Array, "B A"],
    ) -> Float[Array, "B A G V"]:
        """Logits of the γ tokens behind each anchor, from the features before it; whole texts, without a cache."""
        pending = embed(self.target, target_params, jnp.take_along_axis(tokens, anchors, 1))
        hidden = self.module.apply({"params": params}, features, pending, anchors, self.draft_length)
        return head(self.target, target_params, hidden)

    def _extend(self, params, cache: KVCache, features: Float[Array, "B T F"]) -> KVCache:
        """Entries of T positions written behind the cache's length; the length is for the caller to set."""
        positions = cache.length[:, None] + jnp.arange(features.shape[1])
        entries = self.module.apply({"params": params}, features, positions, method="inject")
        return cache.replace(
            keys=tuple(write(old, k, cache.length) for old, (k, _) in zip(cache.keys, entries, strict=True)),
            values=tuple(write(old, v, cache.length) for old, (_, v) in zip(cache.values, entries, strict=True)),
        )

    def _init(self, key):
        features = jnp.zeros((1, 1, len(self.feature_layers) * self.target.d_model), self.target.dtype)
        pending = jnp.zeros((1, 1, self.target.d_model), self.target.dtype)
        return self.module.init(key, features, pending, jnp.ones((1, 1), jnp.int32), self.draft_length)["params"]


@functools.lru_cache(maxsize=64)
def _expected_params(drafter: BlockDrafter):
    return jax.eval_shape(drafter._init, jax.random.key(0))
