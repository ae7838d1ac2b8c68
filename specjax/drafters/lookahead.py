"""Lookahead decoding: n-grams read off a Jacobi iteration that runs beside the verify, in the same forward."""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.drafters.gram_pool import GramPool
from specjax.protocol import FIXED, Proposal
from specjax.topology import DynamicTopology, Topology


@struct.dataclass
class LookaheadState:
    """What is carried from round to round.

    Attributes:
        window: [B, n - 1, W] tokens; level j of column i is a guess for position length + i + j.
        pool: the n-grams to draw candidates from.
        tail: [B, n - 1] the last tokens of the text, -1 before its beginning.
    """

    window: Int[Array, "B J W"]
    pool: GramPool
    tail: Int[Array, "B J"]


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Guesses W columns of n - 1 tokens ahead and keeps what the target makes of them as n-grams.

    The tree of one round, n = 4, W = 3, G = 2 (r is pending):

        r ─┬─ g1 ── g2 ── g3         G candidates: n-grams of the pool that begin with r, the latest first
           ├─ h1 ── h2 ── h3         (where h1 is g1, h2 hangs on g1: what begins alike is one path)
           └─ a1 ── a2 ── a3         W (n - 1) passengers, the window: level 0 is a chain, and every column
              │     │     │          hangs on its token there
              b2    b3    b4         level 1
              │     │     │
              c3    c4    c5         level 2; the target's most probable tokens behind it are d4, d5, d6

    Each column gives the pool an n-gram (a1 b2 c3 d4), and the next window has the levels b, c, d. When k tokens were
    emitted its columns move on by k - 1 too, so that every guess stays at its position; the columns that fall off come
    back at the end as the guesses that are missing there. The window starts with tokens of the prompt, spread over it.

    The pool holds the `pool_size` latest n-grams of a row, each once. The paper keeps a few per first token instead
    and begins its window at the pending token; both differ in what is proposed only, never in the text. Candidates are
    chosen, not drawn, so q is one-hot. No parameters.

    Attributes:
        window: W >= 1, columns.
        ngram: n >= 2; the draft length is n - 1.
        candidates: G >= 1, n-grams verified per round.
        pool_size: at least W + n, what a round can add.
        from_text: also pool the n-grams of the prompt and of the emitted text.

    Raises:
        ValueError: a number outside its range.

    Reference:
        Fu et al., Break the Sequential Dependency of LLM Inference Using Lookahead Decoding, 2024 (arXiv 2402.02057).
    """

    window: int
    ngram: int
    candidates: int
    pool_size: int = 512
    from_text: bool = True

    siblings = FIXED
    feature_layers = ()
    context_length = None
    vocab_size = None
    target = None

    def __post_init__(self):
        for name, least in (("window", 1), ("ngram", 2), ("candidates", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        least = max(self.window + self.ngram, self.candidates)
        if self.pool_size < least:
            raise ValueError(f"pool_size must be at least {least} (window + ngram, candidates); got {self.pool_size}")

    @property
    def draft_length(self) -> int:
        return self.ngram - 1

    @property
    def topology(self) -> DynamicTopology:
        layout = self.layout
        return DynamicTopology(layout.num_nodes, layout.max_depth, layout.passengers)

    @property
    def layout(self) -> Topology:
        """Candidates level by level, then the window level by level, where no two candidates begin alike."""
        columns, levels = self.window, self.ngram - 1
        parents = list(Topology.from_shape((self.candidates,) + (1,) * (levels - 1)).parents)
        begin = len(parents) + 1
        parents += [0, *range(begin, begin + columns - 1)]
        parents += range(begin, begin + columns * (levels - 1))
        return Topology(tuple(parents), passengers=columns * levels)

    @property
    def widths(self) -> tuple[int, ...]:
        """One: the window runs in every round."""
        return (self.topology.num_nodes + 1,)

    def check_params(self, params) -> None:
        if params is not None:
            raise ValueError("the lookahead drafter takes no parameters; give drafter_params=None")

    def init(self, params, context) -> LookaheadState:
        batch, levels = context.tokens.shape[0], self.ngram - 1
        length = context.length[:, None]
        # An odd multiplier near 2^16 / golden ratio scatters the prompt's tokens over the window.
        spread = jnp.arange(1, levels * self.window + 1) * 40503 % length
        window = jnp.take_along_axis(context.tokens, spread, 1).reshape(batch, levels, self.window)
        at = length - levels + jnp.arange(levels)
        tail = jnp.where(at >= 0, jnp.take_along_axis(context.tokens, jnp.maximum(at, 0), 1), -1)
        pool = GramPool.empty(batch, self.pool_size, self.ngram)
        if self.from_text:
            begin = length - self.ngram - jnp.arange(min(self.pool_size, context.tokens.shape[1]))[::-1]
            at = jnp.maximum(begin[..., None] + jnp.arange(self.ngram), 0)
            grams = jnp.take_along_axis(context.tokens, at.reshape(batch, -1), 1).reshape(at.shape)
            pool = pool.add(grams, begin >= 0)
        return LookaheadState(window, pool, tail)

    def propose(self, params, state: LookaheadState, context, noise):
        grams, found = state.pool.find(context.pending, self.candidates)
        batch, count = found.shape
        candidates, window = grams[..., 1:], state.window.reshape(batch, -1)
        leader = first_alike(candidates, found)
        # Level j of a candidate hangs on level j - 1 of the first that begins like it.
        parents = 1 + count * jnp.arange(self.ngram - 2)[:, None] + leader[..., :-1].swapaxes(1, 2)
        parents = jnp.concatenate([jnp.zeros((batch, count), parents.dtype), parents.reshape(batch, -1)], 1)
        below = jnp.broadcast_to(jnp.asarray(self.layout.parents[parents.shape[1] :], parents.dtype), window.shape)
        valid = found[..., None] & (leader == jnp.arange(count)[:, None])
        by_level = lambda x: x.swapaxes(1, 2).reshape(batch, -1)  # noqa: E731
        proposal = Proposal(
            tokens=jnp.concatenate([by_level(candidates), window], 1),
            law=None,
            valid=jnp.concatenate([by_level(valid), jnp.zeros(window.shape, bool)], 1),
            topology=self.topology,
            siblings=FIXED,
            parents=jnp.concatenate([parents, below], 1).astype(jnp.int32),
        )
        return proposal, state, context.target_cache

    def commit(self, params, state: LookaheadState, committed) -> LookaheadState:
        """The next window, and the round's n-grams in the pool; a finished row stays as it is."""
        count, live = committed.count, committed.count > 0
        outputs = committed.passengers[:, None, -self.window :]
        columns = jnp.concatenate([state.window, outputs], 1)  # [B, n, W]: an n-gram per column
        grams = columns.swapaxes(1, 2)
        wanted = jnp.broadcast_to(live[:, None], grams.shape[:2])

        text = jnp.concatenate([state.tail, committed.tokens], 1)  # n - 1 old tokens and up to n new ones
        levels = jnp.arange(self.ngram - 1)
        tail = jnp.take_along_axis(text, count[:, None] + levels, 1)
        if self.from_text:
            ends = jnp.arange(self.ngram)
            emitted = text[:, ends[:, None] + jnp.arange(self.ngram)]
            grams = jnp.concatenate([grams, emitted], 1)
            new = (ends < count[:, None]) & (emitted[..., 0] >= 0)
            wanted = jnp.concatenate([wanted, new], 1)

        # Level j of the next window is level j + 1 of this one, and column i is column i + k - 1.
        shift = (jnp.arange(self.window) + jnp.maximum(count - 1, 0)[:, None]) % self.window
        window = jnp.take_along_axis(columns[:, 1:], shift[:, None], 2)
        window = jnp.where(live[:, None, None], window, state.window)
        return LookaheadState(window, state.pool.add(grams, wanted), tail)


def first_alike(candidates: Int[Array, "B G J"], found: Bool[Array, "B G"]) -> Int[Array, "B G J"]:
    """For each candidate and level, the first candidate with the same tokens up to that level: itself, or an earlier
    one. Only those that were found are compared."""
    equal = jnp.cumprod(candidates[:, :, None] == candidates[:, None], -1, dtype=jnp.int32) > 0
    equal &= (found[:, :, None] & found[:, None])[..., None]
    alike = equal | jnp.eye(found.shape[1], dtype=bool)[..., None]
    return jnp.argmax(alike, 2).astype(jnp.int32)
