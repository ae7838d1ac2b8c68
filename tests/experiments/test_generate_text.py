"""Text in the terminal: prompts, files and chats end as they should, also when somebody presses Ctrl-C."""

import html
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import specjax
from configs import generate as generate_config
from experiments import generate_text
from experiments.terminal import Terminal
from specjax.decoding import Origin
from specjax.drafters import NGram
from specjax.pretrained import TextStream
from specjax.report.results import ROW_KEYS
from specjax.sampling import Sampling
from tests.pretrained.tiny_model import CONTEXT, write_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return specjax.load(folder)


def tiny(folder, **changes):
    config = generate_config.get_config()
    config.model, config.max_new_tokens = str(folder), 12
    config.drafter.draft_length = 3
    config.update(changes)
    return config


def from_the_api(model, prompts, **options):
    return model.generate(
        prompts, **({"max_new_tokens": 12, "sampling": Sampling.of(0), "drafter": NGram(3)} | options)
    )


def user(text):
    return {"role": "user", "content": text}


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


def test_ctrl_c_ends_an_answer_and_not_the_chat(tmp_path):
    """A long answer is under way when the signal comes; the chat then takes the next line, and end of input ends it."""
    write_model(tmp_path / "model", context_length=16384)
    arguments = (
        f"--config.model={tmp_path / 'model'}", "--config.max_new_tokens=10000", "--config.penalties.banned_ids=(0,)",
        "--config.drafter.kind=none", "--workdir", str(tmp_path / "run"),
    )  # fmt: skip
    command = [sys.executable, "launch.py", "--config", "configs/generate.py", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdin.write(b"the cat\n")
        process.stdin.flush()
        begun = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/help\n")
        process.stdin.close()
        shown, remarks = begun + process.stdout.read(), process.stderr.read().decode()
        assert process.wait(timeout=60) == 0, remarks
    assert "interrupted" in remarks and "/reset forgets" in remarks
    (text,) = map(json.loads, (tmp_path / "run" / "texts.jsonl").read_text().splitlines())
    assert text["finish"] == "interrupted" and text["text"] + "\n" == shown.decode()
    (row,) = json.loads((tmp_path / "run" / "report.json").read_text())["results"]["rows"]
    assert 0 < row["emitted_tokens"] < 10000


@pytest.fixture
def interrupted_stream(monkeypatch):
    """Every stream is interrupted before its third piece."""
    original, count = TextStream.__next__, [0]

    def next_piece(stream):
        count[0] += 1
        if count[0] % 3 == 0:
            raise KeyboardInterrupt
        return original(stream)

    monkeypatch.setattr(TextStream, "__next__", next_piece)


def test_ctrl_c_leaves_the_partial_text_of_a_prompt_and_its_report(folder, model, tmp_path, capsys, interrupted_stream):
    with pytest.raises(KeyboardInterrupt):
        generate_text.run(tiny(folder, prompt="the cat"), tmp_path)
    shown = capsys.readouterr().out.removesuffix("\n")
    (whole,) = from_the_api(model, [[user("the cat")]])
    assert shown and whole.text.startswith(shown) and len(shown) < len(whole.text)
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert results["texts"][0]["finish"] == "interrupted" and results["rows"][0]["emitted_tokens"] > 0


def test_ctrl_c_in_a_file_keeps_what_was_done(folder, tmp_path, capsys, monkeypatch, interrupted_stream):
    (tmp_path / "prompts.txt").write_text("the cat\nthe dog\n")
    with pytest.raises(KeyboardInterrupt):
        generate_text.run(tiny(folder, file=str(tmp_path / "prompts.txt")), tmp_path)
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 1


def test_ctrl_c_at_the_prompt_ends_the_chat(folder, tmp_path, capsys, monkeypatch):
    def ask(terminal):
        raise KeyboardInterrupt

    monkeypatch.setattr(Terminal, "ask", ask)
    report = generate_text.run(tiny(folder), tmp_path)
    assert report["results"]["rows"] == [] and (tmp_path / "report.md").exists()


def test_an_interrupted_answer_is_part_of_the_conversation(folder, tmp_path, typed, capsys, interrupted_stream, model):
    typed("the cat", "why")
    report = generate_text.run(tiny(folder), tmp_path)
    first, second = map(json.loads, (tmp_path / "texts.jsonl").read_text().splitlines())
    assert first["finish"] == second["finish"] == "interrupted"
    conversation = [user("the cat"), {"role": "assistant", "content": first["text"]}, user("why")]
    assert report["results"]["texts"][1]["prompt_tokens"] == len(model.prompt_ids(conversation))


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


def test_a_model_without_a_template_says_how_to_go_on(tmp_path):
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ValueError, match="has no chat template; --config.raw"):
        generate_text.run(tiny(tmp_path, prompt="a"), tmp_path / "run")


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("colour", [False, True])
def test_colours_and_no_control_characters_on_a_terminal(monkeypatch, colour):
    monkeypatch.setattr(sys, "stdout", FakeTerminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(colour)
    terminal.show([("a\x1b[2J", Origin.DRAFTED), ("b", Origin.BONUS)])
    shown = sys.stdout.getvalue()
    assert "\x1b[2J" not in shown and "a\\x1b[2J" in shown
    assert ("\x1b[36m" in shown and "\x1b[35;1mb" in shown) == colour


def test_the_text_in_a_file_is_exact(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    Terminal(True).show([("a\x1b\r", Origin.DRAFTED)])
    assert sys.stdout.getvalue() == "a\x1b\r"
