"""The HTML report of a generation: nothing from outside, nothing unescaped, and the numbers of the trace."""

import html.parser
import re
import shutil
import subprocess
import types

import pytest

from specjax.decoding import Origin
from specjax.report.html import html_report, spelling, write_html
from specjax.report.trace import ACCEPTED, BEHIND, REJECTED, DraftedNode, EmittedToken, Trace, TracedRound

EVIL = '<script>alert("x")</script>'
WORDS = {0: "def", 1: " f", 2: "(x):\n", 3: EVIL, 4: "' onmouseover='alert(1)", 5: "&amp;", 6: "\x1b[2J", 7: " return"}


def node(token, number, parent, p, q, fate, depth=None):
    return DraftedNode(token, number, parent, number if depth is None else depth, p, q, fate)


def a_trace():
    first = TracedRound(
        (node(1, 1, 0, 0.5, 0.25, ACCEPTED), node(4, 2, 1, 0.125, 0.5, REJECTED), node(5, 3, 2, 0.25, 0.5, BEHIND)),
        (EmittedToken(1, Origin.DRAFTED, -0.7), EmittedToken(3, Origin.CORRECTION, -2.0)),
    )
    second = TracedRound(
        (node(2, 1, 0, 0.9, 0.9, ACCEPTED), node(6, 2, 0, 0.0, 0.1, BEHIND, depth=1), node(7, 3, 1, 0.3, 0.2, ACCEPTED,
                                                                                          depth=2)),
        (EmittedToken(2, Origin.DRAFTED, -0.1), EmittedToken(7, Origin.DRAFTED, -1.0),
         EmittedToken(5, Origin.BONUS, -3.25)),
    )  # fmt: skip
    return Trace((0, 3), (first, second), "length", "IndependentTree", "multi_round", 0.7)


class Page(html.parser.HTMLParser):
    """Elements with their attributes and text, as a browser would see them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.found.append(element)
        if tag not in ("meta", "rect"):
            self.open.append(element)

    def handle_endtag(self, tag):
        if self.open and self.open[-1]["tag"] == tag:
            self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def of(self, tag, **attributes):
        return [e for e in self.found if e["tag"] == tag and all(e.get(k) == v for k, v in attributes.items())]


def test_tokens_cannot_become_markup():
    page = Page(html_report(a_trace(), WORDS.__getitem__, title=EVIL))
    (pre,) = page.of("pre")
    assert pre["text"] == "def" + EVIL + " f" + EVIL + "(x):\n return&amp;"
    assert len(page.of("script")) == 1 and "alert" not in page.of("script")[0]["text"]
    allowed = {"tag", "text", "class", "data-round", "data-tip", "tabindex", "id", "x", "y", "width", "height", "role",
               "viewbox", "aria-label", "lang", "charset", "name", "content", "hidden"}  # fmt: skip
    assert {key for element in page.found for key in element} <= allowed
    assert page.of("h1")[0]["text"] == EVIL and page.of("title")[0]["text"] == EVIL
    assert "\x1b" not in html_report(a_trace(), WORDS.__getitem__)


def test_nothing_is_loaded_from_outside():
    text = html_report(a_trace(), WORDS.__getitem__)
    assert not re.search(r"https?:|//[a-z]|\bsrc\s*=|\bhref\s*=|url\(|@import|fetch\(|XMLHttp|<link|<iframe|<img", text)


def test_numbers_are_those_of_the_trace():
    page = Page(html_report(a_trace(), WORDS.__getitem__))
    figures = dict(zip([e["text"] for e in page.of("dt")], [e["text"] for e in page.of("dd")], strict=True))
    assert figures["tokens"] == "5" and figures["target calls"] == "2" and figures["tokens per target call τ"] == "2.50"
    assert (figures["drafted"], figures["accepted"], figures["temperature"]) == ("6", "3", "0.7")
    classes = [e["class"] for e in page.of("pre")[0:1] and page.of("span") if "class" in e and "chip" not in e["class"]]
    assert classes.count("prompt") == 2 + 1 and classes.count("drafted") == 3 + 1  # in the text, and in the legend
    assert classes.count("correction") == 1 + 1 and classes.count("bonus") == 1 + 1
    tips = [e["data-tip"] for e in page.of("span") if "chip" in e.get("class", "") and "data-tip" in e]
    rejected = next(tip for tip in tips if "rejected" in tip)
    assert "p = 0.125\nq = 0.5\nmin(1, p/q) = 0.25" in rejected and "(id 4)" in rejected
    assert any("p = 0.5\nq = 0.25\nmin(1, p/q) = 1" in tip for tip in tips)
    assert any("min(1, p/q) = 0" in tip and "child of the root" in tip for tip in tips)  # p = 0 is never accepted
    drafted = next(e for e in page.of("span", **{"class": "drafted"}) if "data-tip" in e)
    assert "round 1" in drafted["data-tip"] and "q = 0.25" in drafted["data-tip"]
    groups = page.of("g")
    assert [g["data-tip"] for g in groups] == [
        "round 1\ndrafted 3\naccepted 1\nemitted 2", "round 2\ndrafted 3\naccepted 2\nemitted 3",
    ]  # fmt: skip
    rects = [e["class"] for e in page.of("rect")]
    assert (rects.count("accepted"), rects.count("rejected"), rects.count("behind")) == (3, 1, 2)


def test_a_tree_shows_its_path_first():
    page = Page(html_report(a_trace(), WORDS.__getitem__))
    second = page.of("li")[1]["text"]
    assert second == "2" + "2/3" + "(x):⏎" + "␣return" + "\\x1b[2J" + "→" + "&amp;"


def test_a_character_of_several_tokens_is_shown_with_its_last():
    pieces = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"\xff"}
    emitted = tuple(EmittedToken(i, Origin.BONUS, -1.0) for i in (1, 2, 3))
    trace = Trace((0,), tuple(TracedRound((), (token,)) for token in emitted), "length", "Empty", "coupled", 1.0)
    page = Page(html_report(trace, pieces.__getitem__))
    spans = [e["text"] for e in page.of("span", **{"class": "bonus"}) if "data-tip" in e]
    assert spans == ["", "é", "\ufffd"]
    assert "\\xc3" in html_report(trace, pieces.__getitem__) and not page.of("svg")  # nothing drafted: no bars


def test_special_tokens_have_names_and_cut_characters_end_before_them():
    tokenizer = types.SimpleNamespace(token_bytes=(b"a", b"\xc3", b""), special_texts={2: "<|end|>"})
    text = {i: spelling.__wrapped__(tokenizer)(i) for i in range(4)}  # without the check of its argument's type
    assert text == {0: b"a", 1: b"\xc3", 2: "<|end|>", 3: b""}
    emitted = tuple(EmittedToken(i, Origin.BONUS, -1.0) for i in (1, 2, 3))
    page = Page(html_report(Trace((0,), (TracedRound((), emitted),), "stop", "Empty", "token", 1.0), text.__getitem__))
    assert page.of("pre")[0]["text"] == "a\ufffd<|end|>"


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="cannot write .*; give another file"):
        write_html(tmp_path / "missing" / "a.html", a_trace(), WORDS.__getitem__)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a chromium")
def test_a_browser_runs_its_script_to_the_end(tmp_path):
    write_html(tmp_path / "a.html", a_trace(), WORDS.__getitem__)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(tmp_path / "a.html")]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert 'data-ready="yes"' in dom
