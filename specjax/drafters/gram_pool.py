"""A pool of n-grams per row in a static buffer: the latest ones, each once, looked up by their first token."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.sampling import top_tokens


@struct.dataclass
class GramPool:
    """A ring per row: the next n-gram takes the slot `end % P`, the oldest one's.

    Attributes:
        grams: [B, P, n] tokens; a slot that holds nothing has -1 first.
        end: [B] n-grams added so far.
    """

    grams: Int[Array, "B P n"]
    end: Int[Array, "B"]

    @classmethod
    def empty(cls, batch: int, size: int, n: int) -> "GramPool":
        return cls(jnp.full((batch, size, n), -1, jnp.int32), jnp.zeros(batch, jnp.int32))

    def add(self, new: Int[Array, "B M n"], wanted: Bool[Array, "B M"]) -> "GramPool":
        """The pool with the wanted ones of M <= P n-grams, the last one being the latest.

        An n-gram that is there already moves to its new place, so that the pool holds everything once. A row that adds
        nothing stays as it is.
        """
        batch, size, _ = self.grams.shape
        number = new.shape[1]
        same = jnp.all(new[:, :, None] == new[:, None], -1) & wanted[:, None]
        repeated = jnp.any(same & (jnp.arange(number) > jnp.arange(number)[:, None]), -1)
        wanted &= ~repeated
        held = jnp.all(self.grams[:, :, None] == new[:, None], -1) & wanted[:, None]
        grams = jnp.where(jnp.any(held, -1)[..., None], -1, self.grams)
        rank = jnp.cumsum(wanted, -1, dtype=jnp.int32)
        slot = jnp.where(wanted, (self.end[:, None] + rank - 1) % size, size)
        grams = grams.at[jnp.arange(batch)[:, None], slot].set(new.astype(grams.dtype), mode="drop")
        return GramPool(grams, self.end + rank[:, -1])

    def find(self, first: Int[Array, "B"], number: int) -> tuple[Int[Array, "B G n"], Bool[Array, "B G"]]:
        """(n-grams, found): those that begin with a row's token, the latest first; G is `number`, at most P.

        What is not found is zeros.
        """
        size = self.grams.shape[1]
        age = (self.end[:, None] - 1 - jnp.arange(size)) % size  # 0 for the slot that was written last
        fits = self.grams[..., 0] == first[:, None]
        slot = top_tokens(jnp.where(fits, size - age, 0).astype(jnp.float32), number)
        found = jnp.take_along_axis(fits, slot, 1)
        return jnp.where(found[..., None], jnp.take_along_axis(self.grams, slot[..., None], 1), 0), found
