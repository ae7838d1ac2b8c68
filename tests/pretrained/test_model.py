"""Text in, text out: batches, streams, stops, limits and every argument that can be wrong."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import specjax
from specjax.decoding import generate
from specjax.decoding.run import decode
from specjax.drafters import NGram
from specjax.penalties import Penalties
from specjax.pretrained import Pretrained
from specjax.sampling import Sampling
from specjax.weights.checksums import sha256_of
from tests.pretrained.tiny_model import CONTEXT, write_model

TEXTS = ["the cat sat on the mat", "d", [{"role": "user", "content": "für 日本語"}], "def add(a, b):\n    return"]
GREEDY = Sampling.of(0)


@pytest.fixture(scope="module")
def double(folder):
    with jax.enable_x64(True):
        return specjax.load(folder, "float64")


@pytest.fixture
def wide(double):
    """The same model in float64, in which a row does not depend on its batch even by rounding."""
    with jax.enable_x64(True):
        yield double


@pytest.fixture(scope="module")
def texts(double):
    """The results of one batch, sampled and drafted."""
    with jax.enable_x64(True):
        return double.generate(TEXTS, max_new_tokens=30, drafter=NGram(3), seed=[5, 6, 7, 8])


def test_load_is_an_attribute_of_the_package():
    assert specjax.load is specjax.pretrained.load
    with pytest.raises(AttributeError, match="no_such_thing"):
        getattr(specjax, "no_such_thing")  # noqa: B009 (the name is the point)


def test_a_text_of_a_batch_is_that_of_its_own_run(wide, texts):
    for number, (text, result) in enumerate(zip(TEXTS, texts, strict=True)):
        (alone,) = wide.generate([text], max_new_tokens=30, drafter=NGram(3), seed=[5 + number])
        np.testing.assert_array_equal(alone.tokens, result.tokens)
        assert (alone.text, alone.segments, alone.finish) == (result.text, result.segments, result.finish)
        assert alone.counts.rounds == result.counts.rounds


def test_batch_size_and_seed_decide_together_with_nothing_else(wide):
    options = dict(max_new_tokens=12, drafter=NGram(3))
    whole, split = (wide.generate(TEXTS, batch_size=size, **options) for size in (4, 3))
    other = wide.generate(TEXTS, seed=1, **options)
    assert [r.tokens.tolist() for r in whole] == [r.tokens.tolist() for r in split]
    assert [r.tokens.tolist() for r in whole] != [r.tokens.tolist() for r in other]
    twice = wide.generate([TEXTS[0]] * 2, **options)
    assert twice[0].tokens.tolist() != twice[1].tokens.tolist()  # noise of its own for every text


def test_a_result_says_what_was_emitted(wide, texts):
    for prompt, result in zip(TEXTS, texts, strict=True):
        assert len(result.tokens) == len(result.origins) == len(result.logprobs) == result.counts.emitted[0]
        kept = [i for i in result.tokens.tolist() if i not in wide.stop_ids]
        assert result.text == wide.tokenizer.decode(kept)
        assert "".join(text for text, _ in result.segments) == result.text
        assert result.finish == ("stop" if result.tokens[-1] in wide.stop_ids else "length")
        assert result.prompt_tokens == len(wide.prompt_ids(prompt))
        assert result.block_efficiency == len(result.tokens) / result.counts.rounds[0] >= 1
        assert result.tokens_per_second == len(result.tokens) / result.decode_seconds
        assert result.seconds == result.prefill_seconds + result.decode_seconds


def test_the_text_is_that_of_the_decoding_loop(wide):
    ids = wide.prompt_ids("the cat")
    (text,) = wide.generate(["the cat"], max_new_tokens=20, sampling=GREEDY)
    options = dict(max_new_tokens=20, sampling=GREEDY, verifier="greedy", stop_ids=wide.stop_ids, buffer_length=64)
    plain = generate(wide.model, [ids], **options)
    np.testing.assert_array_equal(text.tokens, plain.tokens[0])


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_pieces_of_a_stream_make_the_text(wide, rounds):
    options = dict(max_new_tokens=40, drafter=NGram(3), seed=3, stop=("e t", "🙂"))
    (whole,) = wide.generate([TEXTS[0]], **options)
    stream = wide.stream(TEXTS[0], rounds_per_piece=rounds, **options)
    pieces = list(stream)
    assert len(pieces) > 1 and all(piece.text for piece in pieces)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.result().text
    assert stream.result().finish == whole.finish


def test_a_stream_that_is_left_keeps_its_text_and_can_be_gone_on_with(wide):
    stream = wide.stream(TEXTS[0], max_new_tokens=40, seed=3, drafter=NGram(3))
    shown = next(stream).text + next(stream).text
    with pytest.raises(KeyboardInterrupt):
        for piece in stream:
            shown += piece.text
            raise KeyboardInterrupt
    so_far = stream.result()
    assert so_far.finish == "running" and so_far.text == shown and 0 < len(so_far.tokens) < 40
    rest = "".join(piece.text for piece in stream)
    assert shown + rest == wide.generate([TEXTS[0]], max_new_tokens=40, seed=3, drafter=NGram(3))[0].text


def test_an_interrupt_inside_a_round_loses_that_round_alone(wide, monkeypatch):
    stream = wide.stream(TEXTS[0], max_new_tokens=20, seed=3, drafter=NGram(3))
    shown = next(stream).text

    def interrupted(rounds):
        raise KeyboardInterrupt

    run = stream._run._run
    monkeypatch.setattr(run, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert stream.result().text == shown
    monkeypatch.undo()
    rest = "".join(piece.text for piece in stream)
    assert shown + rest == wide.generate([TEXTS[0]], max_new_tokens=20, seed=3, drafter=NGram(3))[0].text


def test_a_closed_stream_ends_and_keeps_its_result(wide):
    stream = wide.stream("the", max_new_tokens=20, drafter=NGram(3))
    next(stream)
    result = stream.result()
    assert stream.close() is not None and stream.close() is None
    assert list(stream) == [] and stream.result().text == result.text


def test_a_stop_string_ends_the_text_before_itself(wide):
    options = dict(max_new_tokens=40, sampling=GREEDY, drafter=NGram(3))
    (whole,) = wide.generate(["the cat"], **options)
    stop = whole.text[6:9]
    assert whole.text.find(stop) > 0
    (ended,) = wide.generate(["the cat"], stop=stop, **options)
    assert ended.text == whole.text[: whole.text.find(stop)]
    assert (ended.finish, ended.stop_string) == ("stop", stop)
    assert len(ended.tokens) < len(whole.tokens)


def test_a_stop_token_is_emitted_and_not_shown(wide):
    options = dict(max_new_tokens=20, sampling=GREEDY, drafter=NGram(3))
    (whole,) = wide.generate(["the cat"], **options)
    stop = int(whole.tokens[3])
    stopping = dataclasses.replace(wide, stop_ids=(stop,))
    (ended,) = stopping.generate(["the cat"], **options)
    first = whole.tokens.tolist().index(stop)
    assert ended.tokens.tolist() == whole.tokens[: first + 1].tolist() and ended.finish == "stop"
    assert ended.stop_string is None and ended.text == wide.tokenizer.decode(whole.tokens[:first])


def test_penalties_reach_the_law(wide):
    options = dict(max_new_tokens=10, sampling=GREEDY, drafter=NGram(3))
    (plain,) = wide.generate(["the cat"], **options)
    banned = Penalties.of(banned_ids=[int(plain.tokens[0])])
    (other,) = wide.generate(["the cat"], penalties=banned, **options)
    assert plain.tokens[0] not in other.tokens


def test_prompts_of_one_bucket_share_their_programs(model):
    words = ["the cat sat on the mat and " * n for n in (1, 2, 3)]
    options = dict(max_new_tokens=9, drafter=NGram(3), batch_size=1, sampling=GREEDY)
    model.generate(words[:1], **options)
    traces = decode._cache_size()
    model.generate(words, stop=(), **options)
    list(model.stream(words[1], max_new_tokens=7, drafter=NGram(3), sampling=GREEDY))
    assert decode._cache_size() == traces


def test_special_tokens_are_read_in_the_template_and_not_in_texts(model):
    assert 0 not in model.prompt_ids("<|end|>")
    typed = model.prompt_ids([{"role": "user", "content": "<|end|>"}])
    assert typed.count(0) == 1 and typed[-2:] == [0, 2]
    ids = model.prompt_ids([{"role": "user", "content": "a"}])
    assert ids == [1, *model.tokenizer.encode("a").tolist(), 0, 2]


def test_a_beginning_of_text_is_added_where_the_tokenizer_says_so(tmp_path, model):
    write_model(tmp_path, bos=True)
    beginning = specjax.load(tmp_path)
    assert beginning.prompt_ids("a")[0] == 4 and beginning.prompt_ids("") == [4]
    assert 4 not in beginning.prompt_ids([{"role": "user", "content": "a"}])
    assert model.prompt_ids("a") == model.tokenizer.encode("a").tolist()


def test_stop_ids_come_from_the_other_configs_too(tmp_path):
    write_model(tmp_path)
    assert specjax.load(tmp_path).stop_ids == (0,)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"eos_token_id": 3}))
    assert specjax.load(tmp_path).stop_ids == (0, 3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 0, 99999]}')
    assert specjax.load(tmp_path).stop_ids == (0, 1, 3)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json"):
        specjax.load(tmp_path)


@pytest.mark.parametrize(
    "texts, options, message",
    [
        ([""], {}, "the prompt is empty.*beginning-of-text"),
        ("the", {}, "takes a list"),
        ([{"role": "user", "content": "a"}], {}, "takes a list"),
        ([], {}, "needs a text"),
        ([[]], {}, "a list of at least one message"),
        ([[{"role": "user"}]], {}, "message 0 must be a dict with a text for 'content'"),
        (["the"], dict(batch_size=0), "batch_size of at least 1"),
        (["the"], dict(batch_size=1.5), "batch_size must be an integer; got 1.5"),
        (["the"], dict(batch_size=None), "batch_size must be an integer; got None"),
        (["the"], dict(max_new_tokens=1.5), "max_new_tokens must be an integer; got 1.5"),
        (["the"], dict(max_new_tokens=np.float32(2)), "max_new_tokens must be an integer; got .*2.0"),
        (["the"], dict(max_new_tokens=True), "max_new_tokens must be an integer; got True"),
        (["the"], dict(max_new_tokens=np.bool_(True)), "max_new_tokens must be an integer; got .*True"),
        (["the"], dict(max_new_tokens="8"), "max_new_tokens must be an integer; got '8'"),
        (["the"], dict(max_new_tokens=[8]), r"max_new_tokens must be an integer; got \[8\]"),
        (["the"], dict(max_new_tokens=0), "max_new_tokens must be at least 1; got 0"),
        (
            ["the", "a " * 300],
            dict(max_new_tokens=4),
            f"prompt 1 takes \\d+ tokens and tiny-llama's context is {CONTEXT}.*{CONTEXT - 1}",
        ),
        (["a " * 100], {}, f"the prompt takes .* tokens; with max_new_tokens 256.*{CONTEXT}: lower max_new_tokens to "),
        (["the"], dict(seed=-1), "seed must be an integer >= 0"),
        (["the"], dict(seed=[1, 2]), "1 of them, one per text"),
        (["the"], dict(seed=[[1], [2, 3]]), "seed must be an integer >= 0"),
        (["the"], dict(seed=True), "seed must be an integer >= 0"),
        (["the"], dict(sampling=0.5, max_new_tokens=4), "sampling must be made by Sampling.of"),
        (["the"], dict(penalties=1.2, max_new_tokens=4), "penalties must be made by Penalties.of"),
        (["the"], dict(drafter=7), "drafter must be None, a drafter"),
        (["the"], dict(drafter="no/such/folder"), "there is no folder no/such/folder"),
        (["the"], dict(verifier="tokn", max_new_tokens=4), "unknown verifier 'tokn'"),
        (["the"], dict(stop=("",), max_new_tokens=4), "stop string"),
        (
            ["the"],
            dict(stop=None, max_new_tokens=4),
            r"stop must be a string or a list of strings, \(\) for none; got None",
        ),
        (["the"], dict(stop=3, max_new_tokens=4), "stop must be a string or a list of strings.*; got 3"),
        (["the"], dict(stop=[3], max_new_tokens=4), "a stop string must be a string of at least one character; got 3"),
        (["the"], dict(stop=[["a"]], max_new_tokens=4), r"a stop string must be a string of .*; got \['a'\]"),
        (
            ["the"],
            dict(stop=b"ab", max_new_tokens=4),
            "a stop string must be a string of at least one character; got 97",
        ),
        (["\ud800"], {}, "surrogate"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_in_one_line(model, unchecked, texts, options, message):
    with pytest.raises(ValueError, match=message) as error:
        model.generate(texts, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens="8"), "max_new_tokens must be an integer; got '8'"),
        (dict(max_new_tokens=2.0), "max_new_tokens must be an integer; got 2.0"),
        (dict(rounds_per_piece=1.5), "rounds_per_piece must be an integer; got 1.5"),
        (dict(stop=None), "stop must be a string or a list of strings"),
        (dict(seed="1"), "seed must be an integer >= 0"),
    ],
)
def test_a_stream_says_it_at_once_and_a_chat_too(model, unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        model.stream("the", **dict(max_new_tokens=4) | options)
    if options.keys() <= {"max_new_tokens", "stop"}:
        with pytest.raises(ValueError, match=message):
            model.chat(**options)


def test_integers_of_other_libraries_are_integers(model, unchecked):
    (plain,) = model.generate(["the"], max_new_tokens=4, sampling=GREEDY)
    options = dict(max_new_tokens=np.int32(4), batch_size=np.uint8(2), sampling=GREEDY)
    assert model.generate(["the"], **options)[0].text == plain.text


def test_a_template_that_cannot_be_parsed_does_not_hinder_texts(tmp_path, model):
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    loaded = specjax.load(tmp_path)
    options = dict(max_new_tokens=8, sampling=GREEDY)
    assert loaded.generate(["the cat"], **options)[0].text == model.generate(["the cat"], **options)[0].text
    message = "chat_template.jinja: the chat template cannot be parsed .* give a text to continue"
    for ask in (lambda: loaded.generate([TEXTS[2]], **options), lambda: loaded.chat(**options).reply("a")):
        with pytest.raises(ValueError, match=message) as error:
            ask()
        assert "\n" not in str(error.value)


def test_messages_need_a_chat_template(model):
    plain = dataclasses.replace(model, chat_template=None)
    with pytest.raises(ValueError, match="tiny-llama has no chat template"):
        plain.generate([[{"role": "user", "content": "a"}]])
    with pytest.raises(ValueError, match="no chat template, so it cannot chat"):
        plain.chat()


def test_the_tokenizer_must_fit_the_model(model):
    config = dataclasses.replace(model.model.config, vocab_size=100)
    with pytest.raises(ValueError, match="tokens and the model 100"):
        Pretrained(model.model.replace(config=config), model.tokenizer)


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path):
    write_model(tmp_path)
    digest = sha256_of(tmp_path / "model.safetensors")
    assert specjax.load(tmp_path, sha256={"model.safetensors": digest}).model.num_params > 0
    with pytest.raises(ValueError, match=f"model.safetensors must have sha256 {digest[::-1]}; got {digest}"):
        specjax.load(tmp_path, sha256={"model.safetensors": digest[::-1]})
