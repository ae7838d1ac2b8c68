"""What every EAGLE drafter has between rounds: the pairs with true features, and the cache entries made of them.

A pair is (feature at i, token at i + 1). With `length` committed tokens the last complete pair is (f, pending token),
number length - 2; a prompt of one token has none, and nothing is proposed for it in round one.

    pair number     0 ... n-1  | n ... length-2 | length-1 ...
                    in cache   | kept for later | drafted: their features are the drafter's own
    propose                      one forward of fixed width, then the drafting, behind it
    commit          what was kept counts as in the cache; this round's tokens and true features are kept for later

Drafted entries are never kept: the next round's forward writes the pairs again, with the features that the target gave
(EAGLE, arXiv 2401.15077, section 4.1). So accepted tokens need no compaction and no position is skipped.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.eagle_layer import EagleConfig


@struct.dataclass
class Pairs:
    """State of the EAGLE drafters.

    Attributes:
        cache: of the drafter's layer; `length` pairs with true features.
        features: [B, D + 1, F] target features of the pairs behind those, padded.
        tokens: [B, D + 1] their tokens.
        count: [B] how many they are.
    """

    cache: KVCache
    features: Float[Array, "B D1 F"]
    tokens: Int[Array, "B D1"]
    count: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class EagleDrafter:
    """What all three share; each adds `draft_length`, `topology`, `siblings` and `propose`."""

    model: EagleConfig

    @property
    def target(self) -> TransformerConfig:
        return self.model.target

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.model.feature_layers

    @property
    def context_length(self) -> int:
        return self.model.target.context_length

    @property
    def vocab_size(self) -> int:
        return self.model.target.vocab_size

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.topology.num_nodes + 1,)

    def init_params(self, key, target_params=None, draft_to_target=None) -> dict:
        return self.model.init_params(key, target_params, draft_to_target)

    def check_params(self, params) -> None:
        self.model.check_params(params)

    def init(self, params, context) -> Pairs:
        """All pairs of the prompt are run; the last one is kept for the first `propose`, which needs its output."""
        batch = context.tokens.shape[0]
        room = context.buffer_length + self.draft_length + self.drafted_slots
        cache = self.model.init_cache(batch, room)
        features = self.model.start(params, context.target_params, context.features)
        # The last column pairs a feature with the first token. It lies behind every row's pairs, like the padding.
        followers = jnp.roll(context.tokens, -1, 1)
        _, cache = self.model.run(params, context.target_params, features, followers, cache)
        last = jnp.maximum(context.length - 2, 0)[:, None]
        widen = lambda x: jnp.pad(x, ((0, 0), (0, self.draft_length)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
        return Pairs(
            cache=cache.rollback(last[:, 0]),
            features=widen(jnp.take_along_axis(context.features, last[..., None], 1)),
            tokens=widen(jnp.take_along_axis(followers, last, 1)),
            count=jnp.minimum(context.length - 1, 1),
        )

    @property
    def drafted_slots(self) -> int:
        """Cache slots that one round's drafting uses behind the pairs with true features."""
        return self.topology.num_nodes

    def catch_up(
        self, params, state: Pairs, target_params: Any
    ) -> tuple[Float[Array, "B D"], KVCache, Bool[Array, "B N"]]:
        """Run the pairs that are kept: (output behind the last one, cache up to it, which nodes may be proposed)."""
        features = self.model.start(params, target_params, state.features)
        out, cache = self.model.run(params, target_params, features, state.tokens, state.cache)
        last = jnp.maximum(state.count - 1, 0)[:, None, None]
        some = (state.count > 0)[:, None]
        valid = jnp.broadcast_to(some, (some.shape[0], self.topology.num_nodes))
        return jnp.take_along_axis(out, last, 1)[:, 0], cache.rollback(state.cache.length + state.count), valid

    def put_back(self, state: Pairs, cache: KVCache) -> Pairs:
        """The state after drafting: what was drafted is forgotten, what was kept is still kept until the commit."""
        return state.replace(cache=cache.rollback(state.cache.length))

    def commit(self, params, state: Pairs, committed) -> Pairs:
        new = committed.count > 0
        pick = lambda after, before: jnp.where(new.reshape(-1, *(1,) * (after.ndim - 1)), after, before)  # noqa: E731
        length = state.cache.length
        kept, fresh = ((x.features, x.tokens.astype(jnp.int32), x.count.astype(jnp.int32)) for x in (state, committed))
        features, tokens, count = jax.tree.map(pick, fresh, kept)
        return Pairs(state.cache.rollback(jnp.where(new, length + state.count, length)), features, tokens, count)
