"""What may be shown while a text is written: whole characters, nothing of a stop string, and all of it in the end."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.decoding import Origin
from specjax.pretrained import VisibleText


def show(tokenizer, ids, cuts, stops=(), stop_ids=(), stop_string=None):
    """(pieces shown before the end, the rest), the tokens coming in parts that end at `cuts`."""
    visible = VisibleText(tokenizer, stop_ids, stops)
    parts = np.split(np.asarray(ids), cuts)
    pieces = [visible.push(part, np.full(len(part), Origin.DRAFTED)) for part in parts[:-1]]
    rest = visible.finish(parts[-1], np.full(len(parts[-1]), Origin.DRAFTED), stop_string)
    return ["".join(text for text, _ in piece) for piece in pieces], "".join(text for text, _ in rest)


TEXTS = st.text(alphabet="abß日🙂 \n", max_size=12)


@given(text=TEXTS, seed=st.integers(0, 99), stops=st.lists(st.text("ab日", min_size=1, max_size=3), max_size=2))
def test_the_pieces_of_a_row_that_is_not_stopped_are_its_text(model, text, seed, stops):
    ids = model.tokenizer.encode(text)
    cuts = sorted(random.Random(seed).choices(range(len(ids) + 1), k=3))
    pieces, rest = show(model.tokenizer, ids, cuts, stops)
    assert "".join(pieces) + rest == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(before=st.text("abx🙂", max_size=8), behind=st.text("abx", max_size=3), seed=st.integers(0, 99))
def test_nothing_of_a_stop_string_is_shown_and_all_before_it_is(model, before, behind, seed):
    stop = "ab🙂x"
    whole = before + stop
    text = whole[: whole.find(stop) + len(stop)]
    ids = model.tokenizer.encode(text)
    cuts = sorted(random.Random(seed).choices(range(len(ids)), k=3))
    pieces, rest = show(model.tokenizer, ids, cuts, (stop, "never"), stop_string=stop)
    assert "".join(pieces) + rest == text.removesuffix(stop)


def test_only_the_last_token_can_have_completed_the_stop_string(model):
    """An earlier occurrence was let pass, by a minimum of new tokens."""
    ids = [int(model.tokenizer.encode(letter)[0]) for letter in "xyzxy"]
    pieces, rest = show(model.tokenizer, ids, [2, 3], ("xy",), stop_string="xy")
    assert "".join(pieces) + rest == "xyz"
    assert pieces == ["xy", "z"]  # a row that goes on was not stopped by what it has


def test_text_behind_the_stop_string_in_its_token_is_dropped(model):
    token = int(model.tokenizer.encode("the")[0])
    assert model.tokenizer.token_bytes[token] == b"the"
    assert show(model.tokenizer, [token], [], ("h",), stop_string="h") == ([], "t")


def test_stop_ids_are_not_shown(model):
    word = model.tokenizer.encode("a").tolist()
    assert show(model.tokenizer, [*word, *word, 0], [1], stop_ids=(0,)) == (["a"], "a")
    assert show(model.tokenizer, [*word, *word], [1], stop_ids=word) == ([""], "")


def test_every_character_has_the_origin_of_the_token_that_completed_it(model):
    ids = model.tokenizer.encode("a🙂")
    assert len(ids) > 2  # a, and parts of the other
    origins = np.array([Origin.BONUS] + [Origin.DRAFTED] * (len(ids) - 2) + [Origin.CORRECTION])
    visible = VisibleText(model.tokenizer, (), ())
    assert visible.push(ids[:-1], origins[:-1]) == [("a", Origin.BONUS)]
    assert visible.finish(ids[-1:], origins[-1:]) == [("🙂", Origin.CORRECTION)]


def test_half_a_character_at_the_end_becomes_a_replacement_once(model):
    ids = model.tokenizer.encode("a🙂")[:-1]
    pieces, rest = show(model.tokenizer, ids, [len(ids)])
    assert pieces == ["a"] and rest == model.tokenizer.decode(ids).removeprefix("a") != ""


@pytest.mark.parametrize("stops", [("aaab",), ("aab", "aaab")])
def test_what_may_become_a_stop_string_is_held_back_no_longer_than_needed(model, stops):
    letter = {c: int(model.tokenizer.encode(c)[0]) for c in "abc"}
    visible = VisibleText(model.tokenizer, (), stops)
    shown = []
    for c in "aaaaca":
        shown.append("".join(text for text, _ in visible.push(np.array([letter[c]]), np.array([Origin.BONUS]))))
    assert shown == ["", "", "", "a", "aaac", ""]
    assert [text for text, _ in visible.held()] == ["a"]
