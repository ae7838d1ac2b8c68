"""Text from the command line: prompts, files and chats, and what is wrong with a config."""

import html
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specjax
from experiments import generate_text
from specjax.drafters import NGram
from specjax.report.results import ROW_KEYS
from specjax.sampling import Sampling
from tests.experiments.tiny_generation import from_the_api, tiny, user
from tests.pretrained.tiny_model import CONTEXT, write_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def typed(monkeypatch):
    """Sets what comes from standard input, which is no terminal."""

    def lines(*text):
        data = b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in text)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return lines


def launch(*arguments, text=None):
    command = [sys.executable, "launch.py", "--config", "configs/generate.py", *arguments]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, encoding="utf-8", timeout=240)


def test_one_prompt_from_the_command_line(folder, model, tmp_path):
    (expected,) = from_the_api(model, [[user("the cat")]])
    arguments = (f"--config.model={folder}", "--config.max_new_tokens=12", "--config.drafter.draft_length=3")
    done = launch(*arguments, "--config.prompt=the cat", "--workdir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.text + "\n"
    assert f"{len(expected.tokens)} tokens, " in done.stderr and "tokens/s, τ " in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    (row,) = report["results"]["rows"]
    assert set(ROW_KEYS) <= set(row)
    assert (row["drafter"], row["verifier"], row["lossless"], row["draft_length"]) == ("ngram", "greedy", True, 3)
    assert row["emitted_tokens"] == len(expected.tokens) and row["target_calls"] == expected.counts.rounds[0]
    assert row["block_efficiency"] == pytest.approx(expected.block_efficiency) and row["tokens_per_second"] > 0
    assert report["experiment"] == "generate_text" and report["results"]["first_text_seconds"] > 0
    assert "## Rows" in (tmp_path / "report.md").read_text()
    (text,) = map(json.loads, (tmp_path / "texts.jsonl").read_text().splitlines())
    assert text == {"prompt": [user("the cat")], "text": expected.text, "finish": expected.finish}


def test_a_chat_through_a_pipe_from_the_command_line(folder, model, tmp_path):
    chat = model.chat("Be brief.", max_new_tokens=12, sampling=Sampling.of(0), drafter=NGram(3))
    replies = [chat.reply("the cat"), chat.reply("für 日本")]
    chat.reset()
    replies.append(chat.reply("why"))
    arguments = (f"--config.model={folder}", "--config.max_new_tokens=12", "--config.system=Be brief.")
    lines = "the cat\n\nfür 日本\n/reset\n/help\nwhy\n/quit\nnever read\n"
    done = launch(*arguments, "--config.drafter.draft_length=3", "--workdir", str(tmp_path), text=lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(reply.text + "\n" for reply in replies)
    assert done.stderr.count("tokens/s, τ") == 4  # three answers, and all together
    assert "the conversation is forgotten" in done.stderr and "/quit" in done.stderr and " known) in " in done.stderr
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [text["emitted_tokens"] for text in results["texts"]] == [len(reply.tokens) for reply in replies]
    assert results["rows"][0]["emitted_tokens"] == sum(len(reply.tokens) for reply in replies)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_file_of_prompts(folder, model, tmp_path, capsys, batch_size):
    lines = [
        {"prompt": "the cat"},
        {"messages": [user("für 日本"), {"role": "assistant", "content": "x"}, user("why")]},
    ]
    lines.append({"turns": ["one", "two"]})
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    report = generate_text.run(tiny(folder, file=str(tmp_path / "p.jsonl"), batch_size=batch_size), tmp_path)
    prompts = [[user("the cat")], lines[1]["messages"], [user("one")]]
    expected = from_the_api(model, prompts)
    out, err = capsys.readouterr()
    assert out == "".join(result.text + "\n" for result in expected)
    assert "p.jsonl:5" in err and "1 follow-up questions are not asked" in err
    assert report["results"]["rows"][0]["batch"] == batch_size
    assert len(report["results"]["texts"]) == 3


def test_plain_lines_are_continued_raw_on_request(folder, model, tmp_path, capsys):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfthe cat\r\n\r\nf\xc3\xbcr\r\n")
    generate_text.run(tiny(folder, file=str(tmp_path / "p.txt"), raw=True), tmp_path)
    assert capsys.readouterr().out == "".join(r.text + "\n" for r in from_the_api(model, ["the cat", "für"]))


def test_a_raw_chat_continues_each_line_by_itself(folder, model, tmp_path, typed, capsys):
    typed("the cat", b"f\xff\n", "für", " a " * 300, "/nonsense is a text too")
    generate_text.run(tiny(folder, raw=True), tmp_path)
    texts = from_the_api(model, ["the cat", "für", "/nonsense is a text too"])
    out, err = capsys.readouterr()
    assert out == "".join(result.text + "\n" for result in texts)
    assert "not UTF-8 (byte 1)" in err and f"tiny-llama's context is {CONTEXT}" in err


def test_stop_strings_penalties_and_sampling_come_from_the_config(folder, model, tmp_path, capsys):
    (whole,) = from_the_api(model, ["the cat"])
    stop = whole.text[3:5]
    config = tiny(folder, prompt="the cat", raw=True, stop=(stop,))
    generate_text.run(config, tmp_path)
    assert capsys.readouterr().out == whole.text[: whole.text.find(stop)] + "\n"
    config = tiny(folder, prompt="the cat", raw=True, seed=3)
    config.sampling.update(temperature=1.5, top_k=20)
    config.penalties.banned_ids = (int(whole.tokens[0]),)
    report = generate_text.run(config, tmp_path)
    assert report["results"]["rows"][0]["verifier"] == "token"
    sampled = Sampling.of(1.5, top_k=20)
    penalties = specjax.penalties.Penalties.of(banned_ids=[int(whole.tokens[0])])
    (expected,) = from_the_api(model, ["the cat"], sampling=sampled, seed=3, penalties=penalties)
    assert capsys.readouterr().out == expected.text + "\n"


def test_a_page_shows_the_same_generation(folder, model, tmp_path, capsys):
    config = tiny(folder, prompt="the cat", raw=True, html=str(tmp_path / "page.html"))
    generate_text.run(config, tmp_path)
    (result,) = from_the_api(model, ["the cat"])
    shown = html.unescape(re.sub(r"<[^>]*>", "", (tmp_path / "page.html").read_text()))
    assert result.text.strip() in shown and f"page: {config.html}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["none", "suffix", "independent"])
def test_drafters_by_name(folder, model, tmp_path, capsys, kind):
    config = tiny(folder, prompt="the cat", raw=True)
    config.drafter.update(kind=kind, path=str(folder) if kind == "independent" else "")
    report = generate_text.run(config, tmp_path)
    assert capsys.readouterr().out == from_the_api(model, ["the cat"])[0].text + "\n"
    (row,) = report["results"]["rows"]
    assert (row["drafter"], row["draft_length"]) == (kind, 0 if kind == "none" else 3)


def bad(**changes):
    return changes


@pytest.mark.parametrize(
    "changes, message",
    [
        (bad(model=""), "there is no model: --config.model=PATH"),
        (bad(model="no/such/model/here"), "no/such/model/here"),
        (bad(mode="talk", prompt=""), "mode must be one of prompt, file, chat; got 'talk'"),
        (bad(mode="file"), "give one of them"),
        (bad(file="x.txt"), "give one of them"),
        (bad(prompt="", file="no.txt"), "there is no file no.txt"),
        (bad(raw=True, system="x"), "needs the chat template"),
        (bad(raw=True, prompt="", mode="prompt"), "the prompt is empty"),
        (bad(prompt="", html="x.html"), "html x.html is a page of one prompt; in mode chat leave it out"),
        (bad(dtype="flaot32"), "dtype must be float32, bfloat16 or float16; got 'flaot32'"),
        (bad(verifier="tokn"), "verifier must be one of token"),
        (bad(prompt="a" * 400), f"tokens and tiny-llama's context is {CONTEXT}"),
        (bad(max_new_tokens=255), "lower max_new_tokens to"),
        (bad(batch_size=0), "batch_size of at least 1"),
        (bad(drafter={"kind": "ngrm"}), "drafter.kind must be one of none, ngram"),
        (bad(on_broken="maybe"), "on_broken must be 'stop' or 'skip'; got 'maybe'"),
        (bad(drafter={"kind": "saved"}), "needs a folder: --config.drafter.path"),
        (bad(drafter={"kind": "eagle_suffix"}), "needs a folder: --config.drafter.path"),
        (bad(drafter={"kind": "saved", "path": "nowhere"}), "there is no folder nowhere"),
        (bad(drafter={"draft_length": 0}), "draft_length must be at least 1; got 0"),
        (bad(sampling={"temperature": -1.0}), "temperature must be a finite number >= 0"),
        (bad(sampling={"top_k": 0}), "top_k must be an integer >= 1"),
        (bad(penalties={"repetition": 0.0}), "repetition must be"),
        (bad(stop=("",)), "stop string"),
    ],
)
def test_what_is_wrong_with_a_config_is_said_in_one_line(folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        generate_text.run(tiny(folder, **({"prompt": "the cat"} | changes)), tmp_path)
    assert "\n" not in str(error.value)


def test_a_model_without_a_template_says_how_to_go_on(tmp_path):
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ValueError, match="has no chat template; --config.raw"):
        generate_text.run(tiny(tmp_path, prompt="a"), tmp_path / "run")
