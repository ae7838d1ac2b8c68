"""Tokenizers with tokens added behind the model's vocabulary, as Gemma 3 and many a Llama are published."""

import dataclasses
import json

import pytest
from tokenizers import AddedToken, Tokenizer

import specjax
from specjax.data.pretrained_tokenizer import load_pretrained_tokenizer
from specjax.decoding import StopStrings, generate
from specjax.drafters import NGram
from specjax.pretrained import Pretrained, independent_drafter
from specjax.report.html import spelling
from specjax.sampling import Sampling
from tests.pretrained.tiny_model import TEMPLATE, write_model

GREEDY = dict(max_new_tokens=12, sampling=Sampling.of(0))
USER = [{"role": "user", "content": "the cat"}]


def add_tokens(folder, **special):
    """Adds tokens to a folder's tokenizer alone."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, is_special in special.items():
        token = AddedToken(f"<{name}>", special=is_special, normalized=False)
        backend.add_special_tokens([token]) if is_special else backend.add_tokens([token])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def change(file, **settings):
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | settings))


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """The tiny model, whose tokenizer has <image> (special) and <pad> (not) without a row in its tables."""
    folder = tmp_path_factory.mktemp("larger") / "larger"
    write_model(folder)
    return specjax.load(add_tokens(folder, image=True, pad=False))


def test_texts_and_answers_are_those_of_the_model_with_its_own_tokenizer(larger, model):
    assert larger.tokenizer.vocab_size == larger.model.config.vocab_size + 2
    for drafter in (None, NGram(3)):
        for stop in ((), ("e t", "<image>", "<pad>")):
            options = GREEDY | dict(drafter=drafter, stop=stop)
            texts = [one.generate(["the cat", USER], **options) for one in (larger, model)]
            for mine, other in zip(*texts, strict=True):
                assert (mine.text, mine.finish, mine.stop_string) == (other.text, other.finish, other.stop_string)
    assert (
        "".join(piece.text for piece in larger.stream("the cat", **GREEDY))
        == larger.generate(["the cat"], **GREEDY)[0].text
    )
    chats = [one.chat(stop="e t", **GREEDY) for one in (larger, model)]
    for text in ("the cat", "why"):
        assert len({chat.reply(text).text for chat in chats}) == 1


def test_a_prompt_that_holds_such_a_token_is_refused(larger):
    first = larger.model.config.vocab_size
    template = larger.chat_template
    writes_one = type(template)("<image>" + TEMPLATE, template.bos_token, template.eos_token)
    cases = [
        (larger, "a <pad> b", f"the prompt holds '<pad>', token {first + 1}, which larger has no weights for"),
        (larger, [{"role": "user", "content": "<pad>"}], "the prompt holds '<pad>'"),
        (dataclasses.replace(larger, chat_template=writes_one), USER, f"the prompt holds '<image>', token {first},"),
    ]
    for one, prompt, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            one.generate([prompt], **GREEDY)
        assert "\n" not in str(error.value) and f"its last token is {first - 1}" in str(error.value)
    with pytest.raises(ValueError, match="<pad>"):
        larger.chat(**GREEDY).reply("<pad>")


def test_a_special_one_that_somebody_typed_is_text(larger):
    for prompt in ("a <image> b", [{"role": "user", "content": "<image>"}]):
        ids = larger.prompt_ids(prompt)
        assert max(ids) < larger.model.config.vocab_size and "<image>" in larger.tokenizer.decode(ids)


def test_it_ends_no_text(tmp_path):
    write_model(tmp_path)
    add_tokens(tmp_path, image=True, pad=False)
    first = load_pretrained_tokenizer(tmp_path).vocab_size - 2
    change(tmp_path / "tokenizer_config.json", eos_token="<pad>")
    change(tmp_path / "generation_config.json", eos_token_id=[first, 0])
    model = specjax.load(tmp_path)
    assert model.stop_ids == (0,) and model.tokenizer.eos_ids == (first + 1, first, 0)
    assert Pretrained(model.model, model.tokenizer, stop_ids=(first, 2, first + 1)).stop_ids == (2,)
    assert len(model.generate(["the"], stop="<image>", **GREEDY)[0].tokens)


def test_an_ordinary_token_without_weights_is_refused(larger):
    vocab = larger.model.config.vocab_size - 1
    smaller = larger.model.replace(config=dataclasses.replace(larger.model.config, vocab_size=vocab))
    message = (
        f"the tokenizer has {vocab + 3} tokens and the model {vocab}, so that token {vocab}, b'.*', has no weights"
    )
    with pytest.raises(ValueError, match=message):
        Pretrained(smaller, larger.tokenizer)


def test_stop_strings_of_the_decoding_loop_take_the_tokenizers_table(larger):
    prompt, rows = larger.prompt_ids("the cat"), larger.model.config.vocab_size
    table = larger.tokenizer.token_bytes
    options = dict(max_new_tokens=12, sampling=Sampling.of(0), buffer_length=64)
    whole = generate(larger.model, [prompt], **options)
    string = larger.tokenizer.decode(whole.tokens[0])[3:5]
    for part in (table[: rows + 1], table[:rows]):
        ended = generate(larger.model, [prompt], stop_strings=StopStrings(string, part), **options)
        assert ended.stop_string == [string] and len(ended.tokens[0]) < 12
    with pytest.raises(ValueError, match=rf"{rows + 2} tokens and the target's has {rows}; .* token_bytes\[:{rows}\]"):
        generate(larger.model, [prompt], stop_strings=StopStrings(string, table), **options)
    assert spelling(larger.tokenizer)(rows) == "<image>"


@pytest.mark.parametrize(
    "whose, paddings", [("drafter", (0, 0)), ("target", (0, 5)), ("both", (0, 5)), ("both", (5, 0))]
)
def test_a_drafter_of_the_family_has_the_same_tokenizer(tmp_path, whose, paddings):
    """Also where one of the two has weights for what the other has none for."""
    for name, padding, chosen in zip(("small", "large"), paddings, ("drafter", "target"), strict=True):
        write_model(tmp_path / name, seed=padding, num_layers=1, padding=padding)
        if whose in (chosen, "both"):
            add_tokens(tmp_path / name, image=True, pad=False)
    target = specjax.load(tmp_path / "large")
    drafter = independent_drafter(tmp_path / "small", target, draft_length=2)
    texts = [target.generate(["the cat"], drafter=one, **GREEDY)[0] for one in (None, drafter)]
    assert texts[0].tokens.tolist() == texts[1].tokens.tolist() and texts[1].counts.drafted[0] > 0


def test_other_tokens_with_weights_in_both_are_another_tokenizer(tmp_path):
    write_model(tmp_path / "small", num_layers=1, padding=2)
    write_model(tmp_path / "large", num_layers=1, padding=2)
    add_tokens(tmp_path / "small", image=True, pad=False)
    for added, meaning in (({}, "missing"), (dict(video=True), "'<video>'")):
        target = specjax.load(add_tokens(tmp_path / "large", **added))
        with pytest.raises(ValueError, match=rf"tokenizer \(token \d+ is '<image>' there and {meaning} here\)"):
            independent_drafter(tmp_path / "small", target, draft_length=2)
