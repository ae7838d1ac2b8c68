"""Which text of a row may be shown while it is still being written."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from specjax.data.incremental import IncrementalText
from specjax.data.pretrained_tokenizer import PretrainedTokenizer
from specjax.decoding import Origin

Segment = tuple[str, Origin]  # text, and the origin of the token that completed it


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """Text that has just become visible: whole characters, and never the beginning of a stop string."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return joined(self.segments)


class VisibleText:
    """What may be shown of one row: no half character, no stop token, nothing that may still become a stop string.

        stop string "END", tokens "a", "b E", "N", "C"     shown with each: "a", "b ", "", "ENC"

    Args:
        tokenizer: of the tokens.
        stop_ids: ids that are not shown.
        stop_strings: any of which may end the row.
        continues: whether the tokens continue a text, see `PretrainedTokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: PretrainedTokenizer,
        stop_ids: Iterable[int],
        stop_strings: Sequence[str],
        continues: bool = True,
    ):
        self._characters = IncrementalText(tokenizer, continues)
        self._stop_ids, self._stops = set(stop_ids), tuple(stop_strings)
        self._held: list[Segment] = []
        self.seen = 0  # tokens taken in

    def push(self, ids: np.ndarray, origins: np.ndarray) -> list[Segment]:
        """What can be shown of a row that goes on behind these tokens."""
        self._take(ids, origins)
        shown, self._held = _split(self._held, _safe_length(joined(self._held), self._stops))
        return shown

    def finish(self, ids: np.ndarray, origins: np.ndarray, stop_string: str | None = None) -> list[Segment]:
        """The rest of a row that ends with these tokens, the last of which completed the stop string, if there is one.

        Earlier occurrences stay: `Penalties.min_new_tokens` lets them pass.
        """
        self._take(ids, origins)
        end = -1
        if stop_string:
            begin = sum(len(text) for text, _ in self._held[:-1])
            end = joined(self._held).find(stop_string, max(0, begin - len(stop_string) + 1))
        last = self._held[-1][1] if self._held else Origin.BONUS
        self._hold(self._characters.finish(), last)
        rest, self._held = self._held, []
        return rest if end < 0 else _split(rest, end)[0]

    def held(self) -> list[Segment]:
        """What is known but not shown yet."""
        return list(self._held)

    def _take(self, ids, origins):
        for token, origin in zip(ids.tolist(), origins.tolist(), strict=True):
            if token not in self._stop_ids:
                self._hold(self._characters.push([token]), Origin(origin))
            self.seen += 1

    def _hold(self, text: str, origin: Origin):
        if text:
            self._held.append((text, origin))


def joined(segments: Iterable[Segment]) -> str:
    """The text of segments."""
    return "".join(text for text, _ in segments)


def _safe_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the text without the longest end of it that begins a stop string."""
    longest = max(map(len, stops), default=1) - 1
    return next((i for i in range(max(0, len(text) - longest), len(text)) if _begins(text[i:], stops)), len(text))


def _begins(text: str, stops: tuple[str, ...]) -> bool:
    return any(len(text) < len(stop) and stop.startswith(text) for stop in stops)


def _split(segments: list[Segment], at: int) -> tuple[list[Segment], list[Segment]]:
    """Segments of the first `at` characters, and of the rest."""
    before, after, begin = [], [], 0
    for text, origin in segments:
        cut = min(max(at - begin, 0), len(text))
        before += [(text[:cut], origin)] if cut else []
        after += [(text[cut:], origin)] if cut < len(text) else []
        begin += len(text)
    return before, after
