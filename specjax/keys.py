"""The two streams of randomness, and where each of their keys comes from.

Every row of a batch owns one key, so that its text depends on nothing but its own prompt: not on its neighbours, the
batch size, the padding or on who has finished. From the row's key two streams branch off, told apart by a tag:

    round stream      fold_in(key, ROUND) -> committed length at the start of the round -> depth -> role -> sibling
    position stream   fold_in(key, POSITION) -> absolute position of the token

(A coin belongs to a node, whose number takes the place of the depth; a chain's draws have no sibling number.) A round
emits at least one token, so the committed length never repeats and no round key is used twice. That freshness
is not a nicety: the block rule and dynamic trees let discarded draws influence what was kept, so redrawing the same
noise in a later round biases the law, and no test of a single round can see it. The position stream may be revisited
in any number of rounds, because there the emitted token is a function of the noise alone.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Key

ROUND, POSITION = 0, 1


class Stream(enum.Enum):
    """Which of the two streams a verifier lives on; static."""

    ROUND = ROUND
    POSITION = POSITION


class Role(enum.IntEnum):
    """What a key of the round stream is for."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2  # the one correction or bonus of the round


@struct.dataclass
class Source:
    """One draw's worth of randomness per row: a uniform (round stream) or a key for Gumbel noise (position stream)."""

    uniform: Float[Array, "*batch"] | None = None
    key: Key[Array, "*batch"] | None = None


@struct.dataclass
class Noise:
    """All randomness of one round.

    Attributes:
        row_keys: one key per row.
        length: committed length of each row at the start of the round.
        stream: the stream that the verifier asked for.
    """

    row_keys: Key[Array, "B"]
    length: Int[Array, "B"]
    stream: Stream = struct.field(pytree_node=False)

    def draft(self, max_depth: int) -> Source:
        """Sources for the draws at depths 1..max_depth, stacked: fields are [max_depth, B]."""
        depths = jnp.arange(1, max_depth + 1)
        if self.stream is Stream.ROUND:
            return Source(uniform=jax.vmap(lambda d: self._round_uniform(d, Role.DRAFT))(depths))
        return Source(key=jax.vmap(self._position_key)(self.length + depths[:, None] - 1))

    def draft_children(self, depth: int, num_parents: int, num_children: int, replace: bool = True) -> Source:
        """Sources for the children at one depth of M parents, fields [B, M, k].

        Round stream: independent uniforms, the first of them that of `draft`. Position stream: what decides is the
        position's one noise vector, the same under every parent; with replacement only the first child takes it and
        the others take noise of their own, without replacement all take it (the Gumbel top-k).
        """
        shape = (self.length.shape[0], num_parents, num_children)
        if self.stream is Stream.ROUND:
            number = jnp.arange(num_parents * num_children)
            uniform = jax.vmap(lambda n: self._round_uniform(depth, Role.DRAFT, n), out_axes=1)(number)
            return Source(uniform=uniform.reshape(shape))
        keys = self._position_key(self.length + depth - 1)
        ranks = jnp.arange(num_children if replace else 1)
        own = jax.vmap(lambda key: jax.vmap(lambda j: jax.random.fold_in(key, j))(ranks))(keys)
        children = jnp.where(ranks == 0, keys[:, None], own)
        return Source(key=jnp.broadcast_to(children[:, None], shape))

    def accept(self, num_nodes: int) -> Float[Array, "B N"]:
        """One fresh uniform in [0, 1) per node (round stream)."""
        nodes = jnp.arange(1, num_nodes + 1)
        return jax.vmap(lambda n: self._round_uniform(n, Role.ACCEPT), out_axes=1)(nodes)

    def next_token(self) -> Float[Array, "B"]:
        """The uniform in [0, 1) that draws the round's correction or bonus (round stream)."""
        return self._round_uniform(jnp.zeros((), jnp.int32), Role.NEXT)

    def gumbel(self, depths: Int[Array, "M"], vocab_size: int) -> Float[Array, "B M V"]:
        """Gumbel noise for the token that follows a node of each given depth, the root being 0 (position stream)."""
        keys = jax.vmap(self._position_key, out_axes=1)(self.length + depths[:, None])
        return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,))))(keys)

    def _round_uniform(self, depth, role, number=0):
        def one(key, length):
            key = jax.random.fold_in(jax.random.fold_in(key, ROUND), length)
            key = jax.random.fold_in(jax.random.fold_in(key, depth), role)
            return jax.random.uniform(jnp.where(number == 0, key, jax.random.fold_in(key, number)))

        return jax.vmap(one)(self.row_keys, self.length)

    def _position_key(self, positions):
        return jax.vmap(lambda key, i: jax.random.fold_in(jax.random.fold_in(key, POSITION), i))(
            self.row_keys, positions
        )


def row_keys(seed, batch: int) -> Key[Array, "B"]:
    """Keys of the rows of a batch.

    Args:
        seed: one integer (row i gets a key folded from the seed and i), or `batch` integers, one per row: a row with
            a seed of its own produces the same text in any batch and in any slot.
        batch: number of rows B.
    """
    seeds = np.asarray(seed)
    if not np.issubdtype(seeds.dtype, np.integer) or seeds.shape not in ((), (batch,)) or (seeds >= 2**63).any():
        raise ValueError(f"seed must be an integer below 2**63 or {batch} of them, one per row; got {seed!r}")
    if seeds.ndim == 0:
        base = _key(int(seeds))
        return jax.vmap(lambda i: jax.random.fold_in(base, i))(jnp.arange(batch))
    return jnp.stack([_key(int(s)) for s in seeds])


def _key(seed: int) -> Key[Array, ""]:
    """Of all 64 bits: without 64-bit types `jax.random.key` takes the lower 32 alone."""
    low, high = seed % 2**32, seed // 2**32 % 2**32
    key = jax.random.key(np.uint32(low))
    return jax.random.fold_in(key, np.uint32(high)) if high else key
