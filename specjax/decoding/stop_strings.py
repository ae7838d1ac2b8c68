"""Stop strings inside the compiled loop: an automaton over bytes, lifted to tokens.

The automaton of Aho and Corasick (1975) reads a text byte by byte; its state is the longest end of the text that begins
some string. A token moves it by several bytes at once, and those moves are tabulated for every state and token, so that
a round looks up one entry per token. Strings "ab" and "bc":

    state        text so far ends in       after token "a"   after token "bc"
    0            nothing of interest       1                 4, having completed "bc"
    1            a                         1                 4, having completed "ab"
    3            b                         1                 4, having completed "bc"

Which string ended a text is decided by bytes: the one whose end comes first, the longest of those that end together.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int, Integer

TABLE_BYTES = 256 * 2**20  # the most that both tables may take
FEWEST_STATES = 64  # states are padded to powers of two from here on, so that other strings find the same program


@struct.dataclass
class StopTables:
    """The automaton on the device.

    Attributes:
        next_state: [S, V] state after a token.
        completed: [S, V] the first string that is completed inside it, counted from 1; 0 for none.
    """

    next_state: Integer[Array, "S V"]
    completed: Integer[Array, "S V"]

    def step(self, state: Int[Array, "*B"], tokens: Int[Array, "*B"]) -> tuple[Int[Array, "*B"], Int[Array, "*B"]]:
        """(state after each token, string completed in it). Ids outside the vocabulary read as the nearest inside."""
        tokens = jnp.clip(tokens, 0, self.next_state.shape[1] - 1)
        return self.next_state[state, tokens].astype(jnp.int32), self.completed[state, tokens].astype(jnp.int32)

    def along(
        self, state: Int[Array, "B"], tokens: Int[Array, "B T"]
    ) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
        """`step` for every token of a text in turn."""

        def read(state, token):
            state, completed = self.step(state, token)
            return state, (state, completed)

        return jax.tree.map(lambda x: x.T, jax.lax.scan(read, state, tokens.T)[1])

    def at_nodes(
        self, state: Int[Array, "B"], tokens: Int[Array, "B N"], parents: Int[Array, "#B N"] | np.ndarray, depth: int
    ) -> Int[Array, "B N"]:
        """The string completed in each node of a tree, read from its root's state down to `depth`.

        Every turn reads all nodes behind what their parents are known to be, so after d turns depth d is right.
        """
        parents = jnp.broadcast_to(jnp.asarray(parents), tokens.shape)

        def turn(_, carry):
            states, _ = carry
            return self.step(jnp.take_along_axis(jnp.concatenate([state[:, None], states], 1), parents, 1), tokens)

        nothing = jnp.zeros(tokens.shape, jnp.int32)
        return jax.lax.fori_loop(0, depth, turn, (nothing, nothing))[1]


@struct.dataclass
class StopProgress:
    """What a row carries between rounds.

    Attributes:
        state: [B] of the automaton, after the committed new text. The prompt is not read.
        string: [B] the string that ended the row, counted from 1; 0 for none.
    """

    state: Int[Array, "B"]
    string: Int[Array, "B"]

    @classmethod
    def start(cls, batch: int) -> "StopProgress":
        return cls(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))


class StopStrings:
    """Strings any of which ends a row, with the token in which it is completed.

    Args:
        strings: one string or several (at most 255), matched as UTF-8 bytes.
        token_bytes: what each token of the vocabulary stands for, in the order of ids; b"" for tokens without text,
            across which a string may reach.

    Raises:
        ValueError: no strings, an empty or a wrong one, or more than the tables may hold.

    Attributes:
        strings: as given.
    """

    def __init__(self, strings: str | Sequence[str], token_bytes: Sequence[bytes]):
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        encoded = [_encoded(string) for string in self.strings]
        if not 1 <= len(encoded) <= 255:
            raise ValueError(f"stop strings must be 1 to 255 of them; got {len(encoded)}")
        if not all(isinstance(token, bytes) for token in token_bytes):
            raise ValueError("token_bytes must hold the bytes of every token, such as PretrainedTokenizer.token_bytes")
        self.vocab_size = len(token_bytes)
        self._with_text = max((i for i, text in enumerate(token_bytes, start=1) if text), default=0)
        children, ends = _trie(encoded)
        states = max(FEWEST_STATES, 1 << (len(children) - 1).bit_length())
        size = states * self.vocab_size * 3
        if size > TABLE_BYTES or states > 2**15:
            raise ValueError(
                f"stop strings of {sum(map(len, encoded))} bytes in all need tables of {size >> 20} MiB for a "
                f"vocabulary of {self.vocab_size}; the limit is {TABLE_BYTES >> 20} MiB: give fewer or shorter strings"
            )
        goto, output = _automaton(children, ends)
        self._next_state = np.zeros((states, self.vocab_size), np.int16)
        self._completed = np.zeros((states, self.vocab_size), np.uint8)
        self._next_state[: len(goto)], self._completed[: len(goto)] = _lift(goto, output, token_bytes)
        self._tables = {}

    def tables(self, vocab_size: int) -> StopTables:
        """The tables for a model's vocabulary; ids behind those of the tokenizer stand for nothing.

        Raises:
            ValueError: tokens with text that the model does not have. One without text, such as a special token that
                was added to the tokenizer alone, does no harm.
        """
        if vocab_size < self._with_text:
            raise ValueError(
                f"stop_strings were made for a vocabulary of {self._with_text} tokens and the target's has "
                f"{vocab_size}; give them the target's own tokenizer, token_bytes[:{vocab_size}] of it"
            )
        if vocab_size not in self._tables:
            next_state, completed = self._next_state[:, :vocab_size], self._completed[:, :vocab_size]
            behind = np.broadcast_to(
                np.arange(len(next_state), dtype=np.int16)[:, None],
                (len(next_state), vocab_size - next_state.shape[1]),
            )
            self._tables[vocab_size] = StopTables(
                jnp.asarray(np.concatenate([next_state, behind], 1)),
                jnp.asarray(np.pad(completed, ((0, 0), (0, behind.shape[1])))),
            )
        return self._tables[vocab_size]


def _encoded(string) -> bytes:
    if not isinstance(string, str) or not string:
        raise ValueError(f"a stop string must be a string of at least one character; got {string!r}")
    try:
        return string.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the stop string {string!r} has no UTF-8 form; give one without surrogates") from None


def _trie(strings: Sequence[bytes]) -> tuple[list[dict[int, int]], list[int]]:
    """Per state, the states one byte further and the string that ends there, counted from 1 (0: none)."""
    children, ends = [{}], [0]
    for number, string in enumerate(strings, start=1):
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                ends.append(0)
            state = children[state][byte]
        ends[state] = ends[state] or number
    return children, ends


def _automaton(children: list[dict[int, int]], ends: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(state after each byte [S, 256], longest string that ends in each state [S])."""
    goto, output = np.zeros((len(children), 256), np.int32), np.array(ends)
    queue = [(0, None)]
    for state, shorter in queue:  # breadth first; `shorter` is the state of the longest proper end
        if shorter is not None:
            goto[state] = goto[shorter]
            output[state] = output[state] or output[shorter]
        for byte, child in children[state].items():
            queue.append((child, 0 if shorter is None else goto[shorter, byte]))
            goto[state, byte] = child
    return goto, output


def _lift(goto: np.ndarray, output: np.ndarray, token_bytes: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """([S, V] states after each token, [S, V] strings first completed in it).

    All tokens are read at once, byte by byte. What has been read of a token is a map from states to (state, string);
    different beginnings have few different maps, so these are numbered, and only new ones are worked out.
    """
    lengths = np.array([len(token) for token in token_bytes], int)
    begins = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join(token_bytes), np.uint8)
    states = len(goto)
    maps = [(np.arange(states), np.zeros(states, int))]
    number_of = {b"".join(part.tobytes() for part in maps[0]): 0}
    after = {}  # (map, byte) as one number -> map
    read = np.zeros(len(lengths), int)
    for at in range(lengths.max(initial=0)):
        active = np.flatnonzero(lengths > at)
        pairs, which = np.unique(read[active] * 256 + text[begins[active] + at], return_inverse=True)
        for pair in pairs.tolist():
            if pair in after:
                continue
            moved, completed = maps[pair // 256]
            moved = goto[moved, pair % 256].astype(int)
            completed = np.where(completed > 0, completed, output[moved])
            after[pair] = number_of.setdefault(moved.tobytes() + completed.tobytes(), len(maps))
            if after[pair] == len(maps):
                maps.append((moved, completed))
        read[active] = np.array([after[pair] for pair in pairs.tolist()])[which.reshape(-1)]
    moved, completed = (np.stack(part, 1) for part in zip(*maps, strict=True))
    return moved.astype(np.int16)[:, read], completed.astype(np.uint8)[:, read]
