"""The key-value cache: static buffers, one length per row, rollback by length, and one place that writes.

    slots of a row     0 ... length-1 | length ... length+T-1 | ...
    before a step      committed      | anything              |
    after apply        committed      | keys of the T tokens  |      length += T
    after rollback     committed  accepted | anything              length = what was kept

After a tree the accepted slots are scattered among the T; `compact` brings them together first.

Rejected entries are not erased: they lie past `length`, are never attended to, and the next step overwrites them.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.models.config import TransformerConfig


@struct.dataclass
class KVCache:
    """Keys and values of every layer.

    Attributes:
        keys, values: one array per layer, [B, K, S, H]: with the slots next to the head width both attention products
            are plain batched matrix products, and XLA copies no cache-sized array. One array per layer, because a
            slice of a stacked array is copied in every step.
        length: [B] slots in use.
    """

    keys: tuple[Float[Array, "B K S H"], ...]
    values: tuple[Float[Array, "B K S H"], ...]
    length: Int[Array, "B"]

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[2]

    def rollback(self, length: Int[Array, "B"]) -> "KVCache":
        """Forget all slots from `length` on. Nothing is copied."""
        return self.replace(length=length)

    def compact(self, base: Int[Array, "B"], kept: Int[Array, "B D"]) -> "KVCache":
        """Move the slots `base + kept[:, j]` of each row to `base + 1 + j`: the accepted path of a tree into place.

        Node numbers count from the root, whose slot is `base`. `length` is not changed.
        """

        def move(buffer):
            slots = jnp.minimum(base[:, None] + kept, buffer.shape[2] - 1)
            return write(buffer, jnp.take_along_axis(buffer, slots[:, None, :, None], 2), base + 1)

        return self.replace(keys=tuple(map(move, self.keys)), values=tuple(map(move, self.values)))


def init_cache(config: TransformerConfig, batch: int, num_slots: int) -> KVCache:
    """An empty cache for `num_slots` tokens per row (one more slot is allocated, see `write`)."""
    shape = (batch, config.num_kv_heads, num_slots + 1, config.head_dim)
    zeros = lambda: tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))  # noqa: E731
    return KVCache(keys=zeros(), values=zeros(), length=jnp.zeros(batch, jnp.int32))


def write(
    buffer: Float[Array, "B K S H"], new: Float[Array, "B K T H"], start: Int[Array, "B"]
) -> Float[Array, "B K S H"]:
    """Write T slots of every row, each from its own start; every change of a cache's contents goes through here.

    A single slot is written twice, to itself and to the free slot behind it: XLA on CPU turns an update of width one
    into three copies of the whole buffer.
    """
    if new.shape[2] == 1:
        new = jnp.concatenate([new, new], 2)
    update = lambda b, n, s: jax.lax.dynamic_update_slice_in_dim(b, n, s, axis=1)  # noqa: E731
    return jax.vmap(update)(buffer, new.astype(buffer.dtype), start)
