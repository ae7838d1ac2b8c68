"""Stop strings that are written like a special token are that token too."""

import pytest

from specjax.drafters import NGram
from specjax.penalties import Penalties
from tests.pretrained.tiny_model import SPECIAL

TEXTS = ["the cat", "d", [{"role": "user", "content": "a"}], "für", "x y", "z"]
USER, ASSISTANT = SPECIAL.index("<|user|>"), SPECIAL.index("<|assistant|>")


@pytest.fixture(scope="module")
def options(model):
    """Such that few tokens but special ones are left, and a text does not depend on what is drafted."""
    letters = {int(model.tokenizer.encode(letter)[0]) for letter in "abcdef"}
    kept = {USER, ASSISTANT, *letters}
    banned = Penalties.of(banned_ids=[i for i in range(model.model.config.vocab_size) if i not in kept])
    return dict(max_new_tokens=24, penalties=banned, verifier="coupled", seed=3)


@pytest.fixture(scope="module")
def whole(model, options):
    return model.generate(TEXTS, **options)


def reference(model, tokens, stop):
    """(tokens, text, stop string) of a text that is stopped by special tokens or by text, whichever is first."""
    text = ""
    for number, token in enumerate(tokens, start=1):
        written = model.tokenizer.special_texts.get(token)
        if written in stop:
            return tokens[:number], text, written
        text += model.tokenizer.decode([token])
        ended = [string for string in stop if text.endswith(string)]
        if ended:
            longest = max(ended, key=len)
            return tokens[:number], text.removesuffix(longest), longest
    return tokens, text, None


@pytest.mark.parametrize("drafter", [None, NGram(3)], ids=["plain", "drafted"])
@pytest.mark.parametrize(
    "stop", ["<|user|>", ("<|user|>",), ("<|user|>", "<|assistant|>"), ("ab", "<|user|>"), ["<|assistant|>", "c", "ba"]]
)
def test_the_token_ends_the_text_and_is_not_in_it(model, options, whole, stop, drafter):
    ended = set()
    for text, result in zip(whole, model.generate(TEXTS, stop=stop, drafter=drafter, **options), strict=True):
        strings = (stop,) if isinstance(stop, str) else stop
        tokens, shown, string = reference(model, text.tokens.tolist(), strings)
        assert (result.tokens.tolist(), result.text, result.stop_string) == (tokens, shown, string)
        assert result.finish == ("length" if string is None else "stop")
        ended.add(string)
    assert "<|user|>" in ended or "<|assistant|>" in ended


@pytest.mark.parametrize("stop", ["<|user|>a", "a<|user|>", "<|user", ("<|user|>\n", "user|>")])
def test_what_holds_more_or_less_than_a_special_token_is_text(model, options, whole, stop):
    results = model.generate(TEXTS, stop=stop, **options)
    assert [one.tokens.tolist() for one in results] == [one.tokens.tolist() for one in whole]


def test_a_stream_and_a_chat_end_alike(model, options):
    seeded = {name: value for name, value in options.items() if name != "seed"}
    stream = model.stream("the cat", stop=("<|user|>", "<|assistant|>"), drafter=NGram(3), **options)
    pieces = "".join(piece.text for piece in stream)
    (expected,) = model.generate(["the cat"], stop=("<|user|>", "<|assistant|>"), **options)
    assert pieces == stream.result().text == expected.text
    assert stream.result().stop_string == expected.stop_string in ("<|user|>", "<|assistant|>")
    chat = model.chat(stop=["<|user|>", "<|assistant|>"], seed=5, **seeded)
    first, second = chat.reply("a"), chat.reply("b")
    assert first.finish == second.finish == "stop" and {first.stop_string, second.stop_string} <= set(SPECIAL)
    assert chat.messages[1]["content"] == first.text


def test_it_ends_a_text_that_spells_it_too(model):
    made = model.decoding_options(stop="<|user|>")
    assert made["stop_ids"] == (*model.stop_ids, USER) and made["stop_strings"].strings == ("<|user|>",)
    assert model.decoding_options(stop=("<|end|>", "a"))["stop_ids"] == model.stop_ids
    assert model.decoding_options()["stop_ids"] == model.stop_ids


def test_it_waits_for_min_new_tokens(model, options):
    banned = [i for i in options["penalties"].banned_ids.tolist() if i >= 0]
    penalties = Penalties.of(banned_ids=banned, min_new_tokens=10)
    for result in model.generate(TEXTS, stop="<|user|>", **options | dict(penalties=penalties)):
        assert len(result.tokens) >= 10 and USER not in result.tokens[:9].tolist()
