"""Events are read back by TensorBoard's own reader; progress leaves one line and never breaks a table."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from specjax.events import EventWriter, Progress


def read(logdir) -> EventAccumulator:
    return EventAccumulator(str(logdir), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0}).Reload()


def curve(events: EventAccumulator, tag: str):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def text(events: EventAccumulator, tag: str) -> str:
    return events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()


def test_scalars_are_read_back(tmp_path):
    with EventWriter(tmp_path) as writer:
        for step in range(100):
            writer.scalars({"loss/train": 0.5 * step, "acceptance/alpha": jnp.float32(0.25)}, step * 1024)
        writer.scalars({"loss/train": np.int64(7)}, 200_000)
    events = read(tmp_path)
    assert curve(events, "loss/train") == [(step * 1024, 0.5 * step) for step in range(100)] + [(200_000, 7)]
    assert [value for _, value in curve(events, "acceptance/alpha")] == [0.25] * 100


def test_undefined_values_have_no_point(tmp_path):
    with EventWriter(tmp_path) as writer:
        for step, value in enumerate([1.0, float("nan"), None, float("inf"), -np.inf, jnp.nan, 2.0]):
            writer.scalars({"loss/train": value}, step)
    assert curve(read(tmp_path), "loss/train") == [(0, 1.0), (6, 2.0)]


def test_a_resumed_run_replaces_what_it_writes_again(tmp_path):
    with EventWriter(tmp_path) as writer:
        for step in range(10):
            writer.scalars({"loss/train": float(step)}, step)
    with EventWriter(tmp_path, resume_step=6) as writer:
        for step in range(6, 12):
            writer.scalars({"loss/train": 100.0 + step}, step)
    assert curve(read(tmp_path), "loss/train") == [(i, float(i) if i < 6 else 100.0 + i) for i in range(12)]


def test_text_and_config_are_read_back(tmp_path):
    with EventWriter(tmp_path) as writer:
        writer.text("samples/target", "def f(): *ünïcode*", 3)
        writer.table("config/all", {"seed": 1, "model": {"width": 8, "mlp": "a|b", "empty": {}}, "note": "x\ny"})
    events = read(tmp_path)
    assert text(events, "samples/target") == "def f(): *ünïcode*"
    lines = text(events, "config/all").split("\n")
    assert lines[:2] == ["| name | value |", "|---|---|"]
    cells = [("seed", "1"), ("model.width", "8"), ("model.mlp", "a\\|b"), ("model.empty", "{}"), ("note", "x<br>y")]
    assert lines[2:] == [f"| {name} | {value} |" for name, value in cells]


def test_without_a_folder_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with EventWriter(None) as writer:
        writer.scalars({"loss/train": 1.0}, 0)
        writer.text("samples/a", "b")
        writer.table("config/all", {"a": 1})
        writer.flush()
    assert not os.listdir(tmp_path)


def test_events_survive_an_exception_and_a_second_close(tmp_path):
    with pytest.raises(RuntimeError), EventWriter(tmp_path) as writer:
        writer.scalars({"loss/train": 1.0}, 0)
        raise RuntimeError
    writer.close()
    writer.scalars({"loss/train": 2.0}, 1)
    assert curve(read(tmp_path), "loss/train") == [(0, 1.0)]


@pytest.mark.parametrize("logdir", [None, "events"])
@pytest.mark.parametrize("tag", ["loss", "/loss", "loss/", "loss/tr ain", ""])
def test_a_tag_without_a_group_is_refused(tmp_path, logdir, tag):
    with EventWriter(logdir and tmp_path / logdir) as writer, pytest.raises(ValueError, match="group/name"):
        writer.scalars({tag: 1.0}, 0)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write events") as error:
        EventWriter(tmp_path / "file" / "events")
    assert "\n" not in str(error.value)


def test_progress_in_a_log_is_one_line_when_short(capsys):
    with Progress(3, "train") as progress:
        for step in range(3):
            progress.update(loss=1.5 - step, rate="fast")
        progress.write("| table |")
    progress.close()
    out, err = capsys.readouterr()
    assert out == "| table |\n"
    assert err.startswith("train: 3 / 3 steps, ") and err.endswith("loss -0.5, rate fast\n") and err.count("\n") == 1


def test_progress_in_a_log_writes_a_line_per_interval(capsys):
    with Progress(None, "decode", unit="token", interval=0) as progress:
        for _ in range(4):
            progress.update(1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("decode: 1,000 tokens, ") and lines[3].startswith("decode: 4,000 tokens, ")
    assert len(lines) == 5


def test_progress_can_be_off(capsys):
    with Progress(3, "train", enabled=False) as progress:
        progress.update(3)
    assert capsys.readouterr() == ("", "") and progress.count == 3


def test_progress_on_a_terminal_leaves_tables_whole():
    """A real pseudo-terminal: a bar is drawn, and what the screen shows in the end are whole lines without it."""
    code = (
        "import time\n"
        "from specjax.events import Progress\n"
        "with Progress(10, 'train') as progress:\n"
        "    for i in range(10):\n"
        "        time.sleep(0.03)\n"
        "        progress.update(loss=0.5)\n"
        "        if i == 5: progress.write('| inside |')\n"
        "print('| after |')\n"
    )
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", code], stdin=end, stdout=end, stderr=end)
    os.close(end)
    output = b""
    try:
        while data := os.read(terminal, 4096):
            output += data
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait() == 0
    os.close(terminal)
    output = output.decode()
    assert re.search(r"train: +\d+%\|█[^|]*\| \d+/10 \[", output)
    shown = [line.split("\r")[-1].rstrip() for line in output.replace("\r\n", "\n").split("\n")]
    shown = [line for line in shown if line]
    assert shown[0] == "| inside |" and shown[1].startswith("train: 10 / 10 steps") and shown[2] == "| after |"
    assert len(shown) == 3
