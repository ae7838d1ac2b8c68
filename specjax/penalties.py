"""Penalties: what the target's logits become, given what was written before, ahead of `Sampling.law`.

They are part of the target's law, so each node of a proposal has its own, made from the committed text and the drafted
path above it (the node itself included). Drafters know nothing of them: their q is whatever they drew from.

    committed     the cat sat          counted in a History, which grows at commit
    drafted       on ── the ── mat     the law behind "mat" counts: the 2, cat 1, sat 1, on 1, mat 1
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class History:
    """What the committed text holds; a field is None when no penalty reads it.

    Attributes:
        seen: [B, V] whether a token occurs in the prompt or the new text.
        counts: [B, V] how often it occurs in the new text.
    """

    seen: Bool[Array, "B V"] | None
    counts: Int[Array, "B V"] | None

    def add(self, tokens: Int[Array, "B T"], count: Int[Array, "B"]) -> "History":
        """The history after the first `count` of each row's tokens were emitted."""
        at = _rows(tokens), _kept(tokens, count)
        return History(
            None if self.seen is None else self.seen.at[at].set(True, mode="drop"),
            None if self.counts is None else self.counts.at[at].add(1, mode="drop"),
        )


@struct.dataclass
class Penalties:
    """Penalties on tokens that occurred, and tokens that must not come. Build it with `Penalties.of`.

    The numbers are arrays, one for all rows or one per row, so that changing them does not retrace; which are on (not
    None) is static. They apply in this order: repetition, frequency, presence, then what is banned.

    Attributes:
        repetition: a token of the prompt or the new text has its logit divided by this if positive, multiplied if
            negative; 1 changes nothing (Keskar et al., CTRL, arXiv 1909.05858, section 4.1, over prompt and new text as
            in Hugging Face transformers).
        presence: subtracted once from the logit of a token of the new text (as in the OpenAI API; the prompt does not
            count); 0 changes nothing.
        frequency: subtracted once per occurrence in the new text (likewise).
        min_new_tokens: stop ids have probability 0 until so many tokens were emitted, and a stop string that is
            completed by an earlier one does not end the row.
        banned_ids: [K] or [B, K] tokens of probability 0, padded with -1.
    """

    repetition: Float[Array, "*B"] | None = None
    presence: Float[Array, "*B"] | None = None
    frequency: Float[Array, "*B"] | None = None
    min_new_tokens: Int[Array, "*B"] | None = None
    banned_ids: Int[Array, "*B K"] | None = None

    @classmethod
    def of(cls, repetition=None, presence=None, frequency=None, min_new_tokens=None, banned_ids=()) -> "Penalties":
        """Checked construction from Python numbers or one number per row; `banned_ids` is a list, or one per row.

        Raises:
            ValueError: a value outside its range; the message names it.
        """
        number = "a finite number or one per row"
        return cls(
            repetition=_checked("repetition", repetition, lambda r: r > 0, "finite and > 0, or one such per row"),
            presence=_checked("presence", presence, lambda x: x == x, number),
            frequency=_checked("frequency", frequency, lambda x: x == x, number),
            min_new_tokens=_checked(
                "min_new_tokens",
                min_new_tokens,
                lambda n: (n >= 0) & (n < 2**31) & (n == n // 1),
                "an integer >= 0 or one per row",
                jnp.int32,
            ),
            banned_ids=_padded_ids(banned_ids),
        )

    @property
    def on(self) -> bool:
        """Whether there is any penalty at all; static."""
        return any(value is not None for value in vars(self).values())

    def per_row(self, batch: int) -> "Penalties":
        """The same with one value per row, so that scalars and arrays share a trace.

        Raises:
            ValueError: a value comes once per row, but not for this many rows.
        """
        values = {}
        for name, value in vars(self).items():
            shape = (batch, value.shape[-1]) if name == "banned_ids" and value is not None else (batch,)
            if value is not None and value.ndim == len(shape) and value.shape != shape:
                raise ValueError(f"{name} has {value.shape[0]} values for a batch of {batch}; give one, or one per row")
            values[name] = None if value is None else jnp.broadcast_to(value, shape)
        return self.replace(**values)

    def start(self, prompts: Int[Array, "B P"], lengths: Int[Array, "B"], vocab_size: int) -> History | None:
        """The history after the prompts; None when no penalty counts tokens."""
        counting = self.presence is not None or self.frequency is not None
        if self.repetition is None and not counting:
            return None
        shape = prompts.shape[0], vocab_size
        seen = None
        if self.repetition is not None:
            seen = jnp.zeros(shape, bool).at[_rows(prompts), _kept(prompts, lengths)].set(True, mode="drop")
        return History(seen, jnp.zeros(shape, jnp.int32) if counting else None)

    def apply(
        self,
        logits: Float[Array, "B M V"],
        history: History | None,
        tokens: Int[Array, "B N"],
        ancestors: Bool[Array, "#B M M"] | np.ndarray,
        emitted: Int[Array, "B"],
        stop_ids: Int[Array, "S"],
    ) -> Float[Array, "B M V"]:
        """Penalised logits behind the root and the N nodes (M = N + 1), at least float32.

        Args:
            logits: of the target.
            history: of the committed text, the root's token included.
            tokens: of the nodes.
            ancestors: the nodes' `Topology.ancestors`, with one row for all or one each.
            emitted: new tokens committed so far.
            stop_ids: padded with -1.
        """
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        ancestors = jnp.asarray(ancestors)
        if history is not None:
            logits = self._over_paths(logits, history, tokens, ancestors[:, :, 1:])
        vocab, banned = logits.shape[-1], None
        if self.banned_ids is not None:
            banned = _members(self.banned_ids, vocab)[:, None]
        if self.min_new_tokens is not None:
            # Behind a node of depth d comes new token number emitted + d + 1.
            depths = jnp.sum(ancestors, -1, dtype=jnp.int32) - 1
            early = (emitted[:, None] + depths < self.min_new_tokens[:, None])[..., None]
            early &= _members(stop_ids[None], vocab)[:, None]
            banned = early if banned is None else banned | early
        return logits if banned is None else jnp.where(banned, -jnp.inf, logits)

    def _over_paths(self, logits, history, tokens, on_path):
        """Penalties of the committed text at every token, then, at each node, of the tokens on its path once more.

        A path changes at most N of a node's V logits, so these are computed apart, from the raw logits and whole
        counts, and put in place; nothing larger than the logits is made.
        """
        batch, nodes, vocab = logits.shape
        ids = jnp.clip(tokens, 0, vocab - 1)  # an invalid node may hold any id
        equal = ids[:, :, None] == ids[:, None]
        repeats = jnp.sum(on_path[:, :, None] & equal[:, None], -1, dtype=jnp.int32)  # [B, M, N]

        def look_up(per_token):
            return None if per_token is None else jnp.take_along_axis(per_token, ids, 1)[:, None]

        seen, counts = look_up(history.seen), look_up(history.counts)
        own = jnp.take_along_axis(logits, jnp.broadcast_to(ids[:, None], repeats.shape), 2)
        own = self._penalise(
            own, None if seen is None else seen | (repeats > 0), None if counts is None else counts + repeats
        )
        widen = lambda per_token: None if per_token is None else per_token[:, None]  # noqa: E731
        logits = self._penalise(logits, widen(history.seen), widen(history.counts))
        at = jnp.where(on_path, ids[:, None], vocab)
        rows, behind = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[:, None]
        return logits.at[rows, behind, at].set(own, mode="drop")

    def _penalise(self, logits, seen, counts):
        spread = lambda value: value.astype(logits.dtype)[:, None, None]  # noqa: E731
        if self.repetition is not None:
            by = spread(self.repetition)
            logits = jnp.where(seen, jnp.where(logits > 0, logits / by, logits * by), logits)
        if self.frequency is not None:
            logits = logits - spread(self.frequency) * counts
        if self.presence is not None:
            logits = logits - spread(self.presence) * (counts > 0)
        return logits


def _rows(tokens):
    return jnp.arange(tokens.shape[0])[:, None]


def _kept(tokens, count):
    """The first `count` ids of each row; an index that is out of bounds anywhere for the others."""
    return jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, jnp.iinfo(jnp.int32).max)


def _members(ids: Int[Array, "B K"], vocab: int) -> Bool[Array, "B V"]:
    """Which tokens are among the ids."""
    at = jnp.where(ids < 0, vocab, ids)
    return jnp.zeros((ids.shape[0], vocab), bool).at[_rows(at), at].set(True, mode="drop")


def _checked(name, value, ok, rule, dtype=jnp.float32):
    if value is None:
        return None
    try:
        array = np.asarray(value)
        fits = array.dtype.kind in "iuf" and array.ndim <= 1 and array.size > 0
        fits = fits and bool(np.all(np.isfinite(array)) and np.all(ok(array)))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"{name} must be {rule}; got {value!r}")
    return jnp.asarray(array, dtype)


def _padded_ids(banned_ids):
    """[K] or [B, K] ids, K a multiple of 8 so that their number seldom retraces; None for none."""
    try:
        items = list(banned_ids)
        nested = any(np.ndim(item) for item in items)
        rows = [np.asarray(list(row)) for row in items] if nested else [np.asarray(items)]
        fits = all(
            row.ndim == 1 and (not row.size or (row.dtype.kind in "iu" and 0 <= row.min() and row.max() < 2**31))
            for row in rows
        )
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"banned_ids must be a list of token ids >= 0, or one list per row; got {banned_ids!r}")
    width = -(-max(row.size for row in rows) // 8) * 8
    if not width:
        return None
    padded = [np.pad(row.astype(np.int32), (0, width - row.size), constant_values=-1) for row in rows]
    return jnp.asarray(np.stack(padded) if nested else padded[0])
