"""Text generation from a file: a line that is broken, or that the model cannot take, stops the run or is left out."""

import json

import pytest

from experiments import generate_text
from specjax.drafters import NGram
from specjax.pretrained.fitting import check_fits, why_too_long
from tests.experiments.tiny_generation import REFUSING, from_the_api, tiny, use_template, user, write_lines
from tests.pretrained.tiny_model import CONTEXT, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    write_model(folder)
    use_template(folder, REFUSING)
    return folder


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("p.txt", b"the cat\nf\xffr\n", ("p.txt, line 2: not UTF-8 (byte 1)",)),
        ("p.txt", b"\n \n", ("every line of it is blank",)),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "f\xffr"}\n', ("p.jsonl, line 2: not UTF-8",)),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', ("p.jsonl, line 2: not JSON", "skip")),
    ],
)
def test_a_broken_file_of_prompts_names_its_line(folder, tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        generate_text.run(tiny(folder, file=str(tmp_path / name)), tmp_path)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_broken_lines_are_skipped_on_request(folder, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\nbroken\n')
    report = generate_text.run(tiny(folder, file=str(tmp_path / "p.jsonl"), on_broken="skip"), tmp_path)
    assert len(report["results"]["texts"]) == 1
    assert "skipped" in capsys.readouterr().err


GOOD = {"messages": [user("the cat")]}
UNUSABLE = {
    "a refused beginning": (
        {"messages": [{"role": "assistant", "content": "Hello."}, user("a")]},
        "the chat template failed (TemplateError: begin with the user)",
    ),
    "a refused word": ({"prompt": "a forbidden word"}, "the chat template failed (TemplateError: no!)"),
    "a long prompt": ({"prompt": "a" * 400}, f"tokens and tiny-llama's context is {CONTEXT}; shorten it to"),
    "no room for the answer": ({"prompt": "a" * (CONTEXT - 8)}, "lower max_new_tokens to"),
}


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_prompt_that_the_model_cannot_take_is_named_by_its_line(folder, model, tmp_path, capsys, name, batch_size):
    record, reason = UNUSABLE[name]
    path = write_lines(tmp_path / "p.jsonl", GOOD, record, GOOD)
    config = tiny(folder, file=str(path), batch_size=batch_size)
    with pytest.raises(ValueError) as error:
        generate_text.run(config, tmp_path)
    assert str(error.value).startswith("p.jsonl:2: ") and reason in str(error.value)
    assert str(error.value).endswith("on_broken='skip'") and "\n" not in str(error.value)
    config.on_broken = "skip"
    report = generate_text.run(config, tmp_path)
    out, err = capsys.readouterr()
    (expected,) = from_the_api(model, [[user("the cat")]])
    assert out == 2 * (expected.text + "\n") and "skipped: p.jsonl:2: " in err
    (left_out,) = report["results"]["left_out"]
    assert left_out["reason"].startswith("p.jsonl:2: ") and reason in left_out["reason"]
    assert len(report["results"]["texts"]) == 2


def test_a_file_without_any_usable_prompt_is_named(folder, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "forbidden"}, {"prompt": "a" * 400})
    with pytest.raises(ValueError, match="tiny-llama can take none of the 2 prompts; the first: p.jsonl:1: the chat"):
        generate_text.run(tiny(folder, file=str(path), on_broken="skip"), tmp_path)


def test_lines_of_plain_text_are_left_out_too(folder, tmp_path, capsys):
    path = tmp_path / "p.txt"
    path.write_bytes(b"the cat\n\nf\xffr\n" + b"a" * 400 + b"\nforbidden\nthe dog\n")
    report = generate_text.run(tiny(folder, file=str(path), on_broken="skip", batch_size=2), tmp_path)
    reasons = [record["reason"] for record in report["results"]["left_out"]]
    assert "p.txt, line 3: not UTF-8 (byte 1)" in reasons[0]
    assert [reason.split(": ")[0] for reason in reasons[1:]] == ["p.txt:4", "p.txt:5"]
    assert [text["prompt"][0]["content"] for text in map(json.loads, open(tmp_path / "texts.jsonl"))] == [
        "the cat", "the dog",
    ]  # fmt: skip
    path.write_bytes(b"\n\xff\n")
    with pytest.raises(ValueError, match="holds no prompts: 1 lines are broken, the first: .*line 2: not UTF-8"):
        generate_text.run(tiny(folder, file=str(path), on_broken="skip"), tmp_path)


def test_a_conversation_in_a_raw_file_is_named_by_its_line(folder, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", GOOD, {"messages": [user("a"), user("b")]})
    with pytest.raises(ValueError, match="^p.jsonl:2: 2 messages cannot be continued as plain text"):
        generate_text.run(tiny(folder, file=str(path), raw=True), tmp_path)
    report = generate_text.run(tiny(folder, file=str(path), raw=True, on_broken="skip"), tmp_path)
    assert len(report["results"]["texts"]) == 1


def test_what_fits_is_the_same_for_one_prompt_and_for_many(model):
    config, drafter = model.model.config, NGram(3)
    for length, limit, fits in ((CONTEXT - 1, 1, True), (CONTEXT, 1, False), (CONTEXT - 1, 2, False), (1, 12, True)):
        reason = why_too_long("m", [0] * length, limit, config, drafter)
        assert (reason is None) == fits
        if fits:
            check_fits("m", [[0], [0] * length], limit, config, drafter)
        else:
            with pytest.raises(ValueError) as error:
                check_fits("m", [[0], [0] * length], limit, config, drafter)
            assert str(error.value) == reason.replace("the prompt", "prompt 1", 1)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1; got 0"):
        check_fits("m", [[0]], 0, config, drafter)
