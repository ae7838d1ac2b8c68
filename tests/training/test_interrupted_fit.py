"""A training run that was stopped, killed or crashed equals one that was not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from specjax.training.fit import Schedule
from tests.training import bigram
from tests.training.watched_fit import Counter, assert_same_run, same_batch, score


@pytest.fixture(scope="module")
def uninterrupted():
    return bigram.train()


@pytest.mark.parametrize("stop", [2, 5, 11])
def test_resume_equals_no_interruption_bit_for_bit(stop, tmp_path, uninterrupted):
    first = bigram.train(tmp_path, steps=stop)
    assert first.resumed_at == 0
    second = bigram.train(tmp_path)
    assert second.resumed_at == stop
    assert_same_run(second, uninterrupted)
    again = bigram.train(tmp_path)
    assert again.resumed_at == 12
    progress = Counter()
    bigram.train(tmp_path, progress=progress)
    assert progress.count == 12
    assert_same_run(again, uninterrupted)


def test_a_crash_loses_at_most_one_interval(tmp_path, uninterrupted):
    saved, calls = bigram.checkpoints(tmp_path), []

    def prepare(params, key, batch):
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("the disk is on fire")
        return batch

    with pytest.raises(RuntimeError, match="fire"):
        bigram.train(checkpoints=saved, prepare=prepare)
    saved.close()
    resumed = bigram.train(tmp_path, prepare=prepare)
    assert resumed.resumed_at == 6
    assert_same_run(resumed, uninterrupted)


@pytest.mark.parametrize("prepare", [None, lambda params, key, batch: batch], ids=["none", "a function"])
def test_another_way_to_prepare_batches_is_refused(prepare, tmp_path):
    bigram.train(tmp_path, steps=2, prepare=same_batch)
    with pytest.raises(ValueError, match="prepare was 'same_batch' when it was saved and is .* now"):
        bigram.train(tmp_path, prepare=prepare)
    assert bigram.train(tmp_path, prepare=same_batch).resumed_at == 2


@pytest.mark.parametrize("number, error", [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signals_save_and_exit_and_the_handlers_come_back(number, error, tmp_path, uninterrupted):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]

    # The metrics of step 4 are fetched while step 5 runs.
    progress = Counter(4, lambda: os.kill(os.getpid(), number))
    schedule = Schedule(12, log_every=1, save_every=100)
    with pytest.raises(error) as caught:
        bigram.train(tmp_path, schedule=schedule, progress=progress)
    if error is SystemExit:
        assert caught.value.code == 128 + signal.SIGTERM
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    resumed = bigram.train(tmp_path, schedule=schedule)
    assert resumed.resumed_at == 5
    assert_same_run(resumed, uninterrupted)


@pytest.mark.parametrize("arrives", [3, 5, 6, 7, 11, 12])
@pytest.mark.parametrize("number, error", [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_costs_no_evaluation(number, error, arrives, tmp_path):
    """Also on the last step, after which there is nothing to resume; the evaluations are at steps 4, 8 and 12."""
    schedule = Schedule(12, log_every=5, eval_every=4, save_every=100)
    whole = bigram.train(schedule=schedule, evaluators=[score])
    assert [record["step"] for record in whole.evaluations] == [4, 8, 12]
    progress = Counter(arrives, lambda: os.kill(os.getpid(), number))
    options = {"schedule": schedule, "evaluators": [score]}
    runs = []
    for stop in (progress, None):
        saved = bigram.checkpoints(tmp_path, best="held_out/score")
        try:
            runs.append(bigram.train(checkpoints=saved, progress=stop, **options))
        except error:
            runs.append(None)
        best_step = saved.best_step()
        saved.close()
    assert runs[0] is None and runs[1].resumed_at >= arrives
    assert_same_run(runs[1], whole)
    assert runs[1].evaluations == whole.evaluations
    assert best_step == max(whole.evaluations, key=lambda record: record["held_out/score"])["step"]


@pytest.mark.parametrize("killed", ["before the last save", "after the last save"])
def test_a_kill_around_the_last_save_costs_no_record(killed, tmp_path):
    """As SIGKILL would: nothing that the loop does after that moment happens."""
    options = {"schedule": Schedule(12, log_every=5, eval_every=4, save_every=6), "evaluators": [score]}
    whole = bigram.train(**options)
    saved = bigram.checkpoints(tmp_path)
    save = saved.save

    def killed_save(state, *arguments):
        if killed == "after the last save" or int(state.step) < 12:
            save(state, *arguments)
        if int(state.step) == 12:
            raise RuntimeError("killed")

    saved.save = killed_save
    with pytest.raises(RuntimeError, match="killed"):
        bigram.train(checkpoints=saved, **options)
    saved.close()
    for _ in range(2):  # the second finds nothing left to do
        resumed = bigram.train(tmp_path, **options)
        assert_same_run(resumed, whole)
        assert resumed.evaluations == whole.evaluations
    assert resumed.resumed_at == 12


def run_child(code, directory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_kill_in_the_middle_of_a_save_loses_one_interval(tmp_path, uninterrupted):
    code = """
import os, signal, sys
from grain._src.python.checkpoint.handler import CheckpointHandler
from tests.training import bigram

save, calls = CheckpointHandler.save, []

def killed_halfway(self, *args, **kwargs):
    save(self, *args, **kwargs)
    calls.append(1)
    if len(calls) == 3:  # the save of step 6: some of its files are written, it is not committed
        os.kill(os.getpid(), signal.SIGKILL)

CheckpointHandler.save = killed_halfway
bigram.train(sys.argv[1])
"""
    child = run_child(code, tmp_path)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, errors
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("6")] != ["6"]
    assert any("tmp" in path.name for path in tmp_path.iterdir())
    resumed = bigram.train(tmp_path)
    assert resumed.resumed_at == 4
    assert_same_run(resumed, uninterrupted)
    assert not any("tmp" in path.name for path in tmp_path.iterdir())


@pytest.mark.slow
def test_sigterm_from_outside_ends_the_process_cleanly(tmp_path, uninterrupted):
    code = """
import sys, time
from specjax.events import Progress
from specjax.training.fit import Schedule
from tests.training import bigram

class Slow(Progress):
    def update(self, units=1, **figures):
        super().update(units, **figures)
        print("step", self.count, flush=True)
        time.sleep(0.2)

bigram.train(sys.argv[1], progress=Slow(None, "", enabled=False), schedule=Schedule(1000, log_every=1))
"""
    child = run_child(code, tmp_path)
    while "step 3" not in child.stdout.readline():
        assert child.poll() is None, child.stderr.read()
    time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors and "orbax" not in errors.lower()
    saved = bigram.checkpoints(tmp_path)
    assert saved.latest_step() >= 3
    saved.close()
