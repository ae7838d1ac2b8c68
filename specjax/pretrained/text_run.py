"""A batch of prompts on its way through the decoding loop, seen as text."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from specjax.decoding import Counts, Run
from specjax.pretrained.arguments import as_integer
from specjax.pretrained.visible_text import Segment, TextPiece, VisibleText, joined


@dataclasses.dataclass(frozen=True, eq=False)
class TextGeneration:
    """One continued prompt, on the host.

    Attributes:
        text: what was generated; it ends before a stop string, and stop tokens are not in it.
        segments: the same text in pieces, each with the Origin of its token.
        tokens, origins, logprobs: [T] ids that were emitted, a stop token too, with each one's Origin and the target's
            log-probability (temperature 1, no filters).
        finish: "stop", "length", or "running" for a text that was left before its end.
        stop_string: the stop string that ended it, if one did; as text, or as the special token that it names.
        prompt_tokens: tokens of the prompt.
        reused_tokens: how many of them the target did not read again, because an earlier turn had.
        counts: Counts of this text alone, arrays of one row.
        prefill_seconds: of the prompts of the whole batch, with compilation where there was one.
        decode_seconds: of the decoding of the whole batch, without compilation.
    """

    text: str
    segments: tuple[Segment, ...]
    tokens: np.ndarray
    origins: np.ndarray
    logprobs: np.ndarray
    finish: str
    stop_string: str | None
    prompt_tokens: int
    reused_tokens: int
    counts: Counts
    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """This text's tokens per second of decoding; those of a batch add up. None before the first token."""
        return len(self.tokens) / self.decode_seconds if len(self.tokens) else None

    @property
    def block_efficiency(self) -> float | None:
        """τ: tokens per target call; None before the first."""
        rounds = int(self.counts.rounds[0])
        return int(self.counts.emitted[0]) / rounds if rounds else None


class TextRun:
    """A batch of prompts in progress.

    Args:
        run: prefilled.
        texts: a fresh one per row, for the tokenizer, stop ids and stop strings that the run was started with.
        stop_tokens: those of the stop ids that were asked for as stop strings, with these.
    """

    def __init__(self, run: Run, texts: Sequence[VisibleText], stop_tokens: Mapping[int, str] | None = None):
        run.advance(0)  # compiles the loop, so that no figure of speed holds that
        run.decode_seconds = 0.0
        self.decoder = run.decoder
        self._run: Run | None = run
        self._so_far = run.result()
        self._texts, self._stop_tokens = list(texts), dict(stop_tokens or {})
        self._segments: list[list[Segment]] = [[] for _ in self._texts]

    @property
    def running(self) -> bool:
        """Whether there is more to come."""
        return self._run is not None and "running" in self._so_far.finish

    @property
    def prefill_seconds(self) -> float:
        return self._so_far.prefill_seconds

    @property
    def decode_seconds(self) -> float:
        return self._so_far.decode_seconds

    def advance(self, rounds: int | None = None) -> list[TextPiece]:
        """Run some rounds, or all; returns what they made visible, per row."""
        if self._run is None:
            raise ValueError("this text was closed; start another")
        if self.running:
            self._run.advance() if rounds is None else self._run.advance(rounds)
            self._so_far = self._run.result()
        pieces = []
        for row, text in enumerate(self._texts):
            tokens, origins = (getattr(self._so_far, name)[row][text.seen :] for name in ("tokens", "origins"))
            segments = []
            if len(tokens) and self._so_far.finish[row] == "running":
                segments = text.push(tokens, origins)
            elif len(tokens):
                segments = text.finish(tokens, origins, self._so_far.stop_string[row])
            self._segments[row] += segments
            pieces.append(TextPiece(tuple(segments)))
        return pieces

    def results(self) -> list[TextGeneration]:
        """What there is of every text, also while it runs and after it was interrupted."""
        return [self._result(row) for row in range(len(self._texts))]

    def close(self) -> Run | None:
        """End it here, so that the device's memory can be reused. The results stay.

        Returns:
            the decoding run, for `previous` of the next one; None if it was closed before.
        """
        run, self._run = self._run, None
        return run

    def _result(self, row: int) -> TextGeneration:
        so_far, segments = self._so_far, (*self._segments[row], *self._texts[row].held())
        fields = [field.name for field in dataclasses.fields(Counts)]
        tokens, stop_string = so_far.tokens[row], so_far.stop_string[row]
        if stop_string is None and so_far.finish[row] == "stop":
            stop_string = self._stop_tokens.get(int(tokens[-1]))
        return TextGeneration(
            text=joined(segments),
            segments=segments,
            tokens=tokens,
            origins=so_far.origins[row],
            logprobs=so_far.logprobs[row],
            finish=so_far.finish[row],
            stop_string=stop_string,
            prompt_tokens=int(so_far.prompt_lengths[row]),
            reused_tokens=int(so_far.reused[row]),
            counts=Counts(**{name: getattr(so_far.counts, name)[row : row + 1] for name in fields}),
            prefill_seconds=so_far.prefill_seconds,
            decode_seconds=so_far.decode_seconds,
        )


class TextStream(Iterator[TextPiece]):
    """The text of one prompt as it comes: iterate over its pieces, and ask for `result` at any time.

    An exception in the middle, Ctrl-C for one, loses nothing but the round that it struck.
    """

    def __init__(self, run: TextRun, rounds_per_piece: int = 1):
        if as_integer("rounds_per_piece", rounds_per_piece) < 1:
            raise ValueError(f"rounds_per_piece must be at least 1; got {rounds_per_piece}")
        self.decoder, self._run, self._rounds = run.decoder, run, rounds_per_piece

    def __next__(self) -> TextPiece:
        while self._run.running:
            (piece,) = self._run.advance(self._rounds)
            if piece.segments:
                return piece
        raise StopIteration

    def result(self) -> TextGeneration:
        """The text so far; `finish` says "running" when it was left before its end."""
        return self._run.results()[0]

    def close(self) -> Run | None:
        """`TextRun.close`: the iterator ends, the result stays."""
        return self._run.close()


def text_seeds(seed: int | Sequence[int], count: int, first: int = 0) -> list[int]:
    """A seed for each of `count` texts: those given, or hashes of one integer and the text's number from `first` on.

    Raises:
        ValueError: no integers, or not one per text.
    """
    try:
        seeds = np.asarray(seed)
    except ValueError:  # lists of different lengths
        seeds = np.array(None)
    if not np.issubdtype(seeds.dtype, np.integer) or seeds.shape not in ((), (count,)) or (seeds < 0).any():
        raise ValueError(f"seed must be an integer >= 0, or {count} of them, one per text; got {seed!r}")
    if seeds.ndim:
        return seeds.tolist()
    hashes = (np.random.SeedSequence([int(seeds), first + i]).generate_state(1, np.uint64)[0] for i in range(count))
    return [int(value >> np.uint64(1)) for value in hashes]
