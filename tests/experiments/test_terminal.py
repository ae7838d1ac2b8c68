"""The terminal: what it shows, and what is kept when somebody presses Ctrl-C or stops reading."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import generate_text, terminal
from experiments.terminal import Terminal
from specjax.decoding import Origin
from specjax.pretrained import TextRun, TextStream
from tests.experiments.tiny_generation import from_the_api, tiny, user
from tests.pretrained.tiny_model import write_model

ROOT = Path(__file__).resolve().parents[2]


def kept_texts(workdir):
    return list(map(json.loads, (workdir / "texts.jsonl").read_text().splitlines()))


@pytest.fixture
def long_answer(tmp_path):
    """A program in the midst of an answer of 10,000 tokens: (process, the first byte shown)."""
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
        try:
            yield process, os.read(process.stdout.fileno(), 1)
        finally:
            process.kill()  # where a test failed before its end


def test_ctrl_c_ends_an_answer_and_not_the_chat(tmp_path, long_answer):
    """The chat then takes the next line, and the end of input ends it."""
    process, begun = long_answer
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/help\n")
    process.stdin.close()
    shown, remarks = begun + process.stdout.read(), process.stderr.read().decode()
    assert process.wait(timeout=60) == 0, remarks
    assert "interrupted" in remarks and "/reset forgets" in remarks
    (text,) = kept_texts(tmp_path / "run")
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


def test_ctrl_c_in_a_file_keeps_what_was_done(folder, tmp_path, capsys, interrupted_stream):
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


def test_an_interrupted_answer_is_part_of_the_conversation(folder, tmp_path, monkeypatch, interrupted_stream, model):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\nwhy\n")))
    report = generate_text.run(tiny(folder), tmp_path)
    first, second = kept_texts(tmp_path)
    assert first["finish"] == second["finish"] == "interrupted"
    conversation = [user("the cat"), {"role": "assistant", "content": first["text"]}, user("why")]
    assert report["results"]["texts"][1]["prompt_tokens"] == len(model.prompt_ids(conversation))


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_ctrl_c_in_a_batch_keeps_its_texts(folder, model, tmp_path, capsys, monkeypatch, presses):
    """The second press interrupts at once, the third while the texts are shown."""
    advance, show, calls = TextRun.advance, Terminal.show, []

    def pressed(run, *rounds):
        pieces = advance(run, *rounds)
        calls.append(pieces)
        for _ in range(min(presses, 2) if len(calls) == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return pieces

    def pressed_again(shown, segments):
        show(shown, segments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(terminal, "ROUNDS_BETWEEN_LOOKS", 2)
    monkeypatch.setattr(TextRun, "advance", pressed)
    if presses == 3:
        monkeypatch.setattr(Terminal, "show", pressed_again)
    (tmp_path / "prompts.txt").write_text("the cat\nthe dog\nthe mat\n")
    with pytest.raises(KeyboardInterrupt):
        generate_text.run(tiny(folder, file=str(tmp_path / "prompts.txt"), batch_size=2), tmp_path)
    assert len(calls) == 2
    monkeypatch.setattr(TextRun, "advance", advance)
    texts, whole = kept_texts(tmp_path), from_the_api(model, [[user("the cat")], [user("the dog")]])
    assert [text["prompt"] for text in texts] == [[user("the cat")], [user("the dog")]]
    for text, result in zip(texts, whole, strict=True):
        assert text["text"] and text["finish"] == "interrupted"
        assert result.text.startswith(text["text"]) and len(text["text"]) < len(result.text)
    shown = "".join(text["text"] + "\n" for text in texts[: 1 if presses == 3 else 2])
    assert capsys.readouterr().out == shown
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [text["finish"] for text in results["texts"]] == ["interrupted"] * 2


@pytest.fixture
def closed_pipe(monkeypatch):
    """Closes the reading end of standard output, and of standard error too if asked to."""
    files = []

    def close(*names):
        for name in names:
            read, write = os.pipe()
            os.close(read)
            files.append(os.fdopen(write, "w"))
            monkeypatch.setattr(sys, name, files[-1])

    yield close
    for file in files:
        file.close()  # as Python does when a program ends: nothing is left that would fail


@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr")])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_closed_output_ends_a_file_and_keeps_what_was_done(folder, tmp_path, closed_pipe, batch_size, streams):
    (tmp_path / "prompts.txt").write_text("the cat\nthe dog\nthe mat\n")
    closed_pipe(*streams)
    config = tiny(folder, file=str(tmp_path / "prompts.txt"), batch_size=batch_size)
    report = generate_text.run(config, tmp_path)
    texts = kept_texts(tmp_path)
    assert len(texts) == len(report["results"]["texts"]) == batch_size and texts[0]["text"]
    assert texts[0]["finish"] == ("interrupted" if batch_size == 1 else "length")


def test_a_closed_output_ends_a_chat(folder, tmp_path, closed_pipe, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\nwhy\n")))
    closed_pipe("stdout")
    generate_text.run(tiny(folder), tmp_path)
    (text,) = kept_texts(tmp_path)
    assert text["prompt"] == "the cat" and text["text"]


def test_a_closed_standard_error_ends_nothing(folder, model, tmp_path, closed_pipe, capsys):
    closed_pipe("stderr")
    generate_text.run(tiny(folder, prompt="the cat"), tmp_path)
    assert capsys.readouterr().out == from_the_api(model, [[user("the cat")]])[0].text + "\n"


def test_a_program_whose_reader_leaves_ends_quietly_with_its_report(tmp_path, long_answer):
    process, begun = long_answer
    process.stdout.close()
    remarks = process.stderr.read().decode()
    assert process.wait(timeout=60) == 0, remarks
    assert "nobody reads the output" in remarks
    assert "Traceback" not in remarks and "BrokenPipe" not in remarks and "ignored" not in remarks
    (text,) = kept_texts(tmp_path / "run")
    assert text["finish"] == "interrupted" and text["text"].encode().startswith(begun)
    (row,) = json.loads((tmp_path / "run" / "report.json").read_text())["results"]["rows"]
    assert 0 < row["emitted_tokens"] < 10000


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
