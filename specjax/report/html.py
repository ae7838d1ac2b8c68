"""One generation as an HTML file that needs nothing else: text by origin, rounds as bars, p and q at the pointer."""

import codecs
import html
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

from specjax.data.pretrained_tokenizer import PretrainedTokenizer
from specjax.decoding import Origin
from specjax.report.html_style import SCRIPT, STYLE
from specjax.report.metrics import ratio
from specjax.report.trace import ACCEPTED, BEHIND, REJECTED, DraftedNode, EmittedToken, Trace, TracedRound

TokenText = Callable[[int], str | bytes]

_ORIGINS = {
    Origin.PROMPT: ("prompt", "prompt"),
    Origin.DRAFTED: ("drafted", "drafted and accepted"),
    Origin.CORRECTION: ("correction", "correction"),
    Origin.BONUS: ("bonus", "bonus"),
}
_FATES = {
    ACCEPTED: ("accepted", "accepted"),
    REJECTED: ("rejected", "rejected"),
    BEHIND: ("behind", "behind a rejection"),
}
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_BAR, _UNIT = 14, 9  # width of a round and height of a token, in the bars


def write_html(path: str | os.PathLike, trace: Trace, token_text: TokenText, *, title: str = "Generation") -> None:
    """Writes the report of one generation: a single file that loads nothing from anywhere.

    Args:
        path: of the file.
        trace: from `specjax.report.trace.record_trace`.
        token_text: the text of one id. Bytes are best, as a token may end inside a character: it is then shown with
            the token that completes it.
        title: heading.

    Raises:
        ValueError: the file cannot be written.
    """
    text = html_report(trace, token_text, title=title)
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; give another file") from None


def spelling(tokenizer: PretrainedTokenizer) -> TokenText:
    """`token_text` of a pretrained model's tokenizer: special tokens by name, ids past the vocabulary as nothing."""
    table = dict(enumerate(tokenizer.token_bytes)) | tokenizer.special_texts
    return lambda token: table.get(token, b"")


def html_report(trace: Trace, token_text: TokenText, *, title: str = "Generation") -> str:
    """What `write_html` writes. All text is escaped, the title included."""
    title = html.escape(title)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>{title}</h1>",
        _figures(trace),
        "<h2>Text</h2>",
        _legend(trace),
        f'<pre class="text">{"".join(_text(trace, token_text))}</pre>',
        "<h2>Rounds</h2>",
        _fate_legend(),
        _bars(trace),
        _note(trace),
        f'<ol class="rounds">{"".join(_round(i, one, token_text) for i, one in enumerate(trace.rounds))}</ol>',
        f'</main><div id="tip" role="tooltip" hidden></div><script>{SCRIPT}</script></body></html>',
    ]
    return "\n".join(parts) + "\n"


def _figures(trace: Trace) -> str:
    """The figures of the call, as a row of cards."""
    drafted = sum(len(one.drafted) for one in trace.rounds)
    accepted = sum(len(one.accepted) for one in trace.rounds)
    efficiency = ratio(len(trace.emitted), len(trace.rounds))
    cards = [
        ("tokens", f"{len(trace.emitted)}"),
        ("target calls", f"{len(trace.rounds)}"),
        ("tokens per target call τ", "–" if efficiency is None else f"{efficiency:.2f}"),
        ("drafted", f"{drafted}"),
        ("accepted", f"{accepted}"),
        ("drafter", trace.drafter),
        ("verifier", trace.verifier),
        ("temperature", f"{trace.temperature:g}"),
        ("ended by", trace.finish),
    ]
    cells = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in cards)
    return f'<dl class="figures">{cells}</dl>'


def _legend(trace: Trace) -> str:
    counts = {Origin.PROMPT: len(trace.prompt)}
    for token in trace.emitted:
        counts[token.origin] = counts.get(token.origin, 0) + 1
    parts = [
        f'<span class="{name}">{words}</span> {counts.get(origin, 0)}' for origin, (name, words) in _ORIGINS.items()
    ]
    return f'<p class="legend">{"<i></i>".join(parts)}</p>'


def _fate_legend() -> str:
    parts = [f'<span class="chip {name}">{words}</span>' for name, words in _FATES.values()]
    return f'<p class="legend">{"<i></i>".join(parts)}</p>'


def _note(trace: Trace) -> str:
    chains = all(node.parent == node.node - 1 for one in trace.rounds for node in one.drafted)
    lines = [
        "p and q are the laws of the target and of the drafter, as they were judged. What lies behind a rejection was "
        "never tried, or not kept."
    ]
    if trace.temperature == 0:
        lines.append("At temperature 0 the target's law is one-hot, so p is 1 or 0.")
    if trace.verifier != "token" or not chains:
        lines.append(f"The rule here, {trace.verifier}, need not accept with probability min(1, p/q).")
    if not chains:
        lines.append("Drafts are trees: the accepted path comes first in the bars, the other nodes follow it.")
    return f'<p class="note">{html.escape(" ".join(lines))}</p>'


def _text(trace: Trace, token_text: TokenText) -> Iterator[str]:
    """The prompt and the text, one span per token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ids = [*trace.prompt, *(token.token for token in trace.emitted)]
    pieces = []
    for i, token in enumerate(ids):
        raw, last = token_text(token), i == len(ids) - 1
        pieces.append(decoder.decode(raw, last) if isinstance(raw, bytes) else decoder.decode(b"", True) + raw)
    for piece in pieces[: len(trace.prompt)]:
        yield f'<span class="prompt">{_escaped(piece)}</span>'
    at = len(trace.prompt)
    for number, one in enumerate(trace.rounds):
        path = dict(enumerate(one.accepted))
        for step, token in enumerate(one.emitted):
            name, words = _ORIGINS[token.origin]
            node = path.get(step) if token.origin == Origin.DRAFTED else None
            tip = _tip(token_text, token.token, [f"{words}, round {number + 1}"], node, token)
            yield f'<span class="{name}" data-round="{number}" data-tip="{tip}">{_escaped(pieces[at])}</span>'
            at += 1


def _round(number: int, one: TracedRound, token_text: TokenText) -> str:
    """One line: the drafts, then what the target added."""
    chain = all(node.parent == node.node - 1 for node in one.drafted)
    nodes = one.drafted if chain else (*one.accepted, *(node for node in one.drafted if node.fate != ACCEPTED))
    chips = [_drafted_chip(node, chain, token_text) for node in nodes]
    for token in one.emitted[-1:]:
        if token.origin != Origin.DRAFTED:
            name, words = _ORIGINS[token.origin]
            tip = _tip(token_text, token.token, [f"{words} of the target"], None, token)
            chips.append("<b>→</b>" + _chip(name, tip, token_text, token.token))
    count = f"{len(one.accepted)}/{len(one.drafted)}"
    head = f'<span class="number">{number + 1}</span><span class="count">{count}</span>'
    return f'<li id="round-{number}" data-round="{number}">{head}<span class="chips">{"".join(chips)}</span></li>'


def _drafted_chip(node: DraftedNode, chain: bool, token_text: TokenText) -> str:
    name, words = _FATES[node.fate]
    place = f"depth {node.depth}" if chain else f"node {node.node}, child of {node.parent or 'the root'}"
    return _chip(name, _tip(token_text, node.token, [f"{words} · {place}"], node, None), token_text, node.token)


def _chip(name: str, tip: str, token_text: TokenText, token: int) -> str:
    text = html.escape(_printed(token_text, token))
    return f'<span class="chip {name}" tabindex="0" data-tip="{tip}">{text}</span>'


def _bars(trace: Trace) -> str:
    """One column per round: a filled cell for each accepted draft, an open one for each other."""
    tallest = max((len(one.drafted) for one in trace.rounds), default=0)
    if not tallest:
        return ""
    unit = _UNIT if tallest <= 16 else max(2, 144 // tallest)
    height, width = tallest * unit + 18, len(trace.rounds) * _BAR + 2
    columns = []
    for number, one in enumerate(trace.rounds):
        cells, x = [], number * _BAR + 2
        fates = sorted((node.fate for node in one.drafted), key=(ACCEPTED, REJECTED, BEHIND).index)
        for place, fate in enumerate(fates):
            y = (tallest - place - 1) * unit
            cells.append(
                f'<rect class="{_FATES[fate][0]}" x="{x}" y="{y + 1}" width="{_BAR - 3}" height="{max(unit - 2, 1)}"/>'
            )
        tip = html.escape(_bar_tip(number, one))
        label = f'<text x="{x + (_BAR - 3) / 2}" y="{height - 5}">{number + 1}</text>' if not (number + 1) % 10 else ""
        hit = f'<rect class="hit" x="{x - 1}" y="0" width="{_BAR - 1}" height="{height - 16}"/>'
        columns.append(f'<g data-round="{number}" data-tip="{tip}">{hit}{"".join(cells)}{label}</g>')
    return (
        f'<div class="bars"><svg role="img" aria-label="drafted and accepted tokens of every round" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(columns)}</svg></div>'
    )


def _bar_tip(number: int, one: TracedRound) -> str:
    return f"round {number + 1}\ndrafted {len(one.drafted)}\naccepted {len(one.accepted)}\nemitted {len(one.emitted)}"


def _tip(
    token_text: TokenText, token: int, lines: Sequence[str], node: DraftedNode | None, emitted: EmittedToken | None
) -> str:
    """What the pointer shows, escaped for an attribute: the token, then its numbers."""
    rows = [f"{_printed(token_text, token)}  (id {token})", *lines]
    if node is not None:
        rows += [f"p = {node.p:.4g}", f"q = {node.q:.4g}", f"min(1, p/q) = {node.acceptance:.4g}"]
    if emitted is not None:
        rows.append(f"log-probability {emitted.logprob:.3f}")
    return html.escape("\n".join(rows))


def _printed(token_text: TokenText, token: int) -> str:
    """One token alone, with white space and stray bytes made visible."""
    raw = token_text(token)
    text = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else raw
    return text.translate(_VISIBLE).translate(_CONTROL) or "∅"


def _escaped(piece: str) -> str:
    return html.escape(piece.translate(_CONTROL))
