import os
import signal
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.events import EventWriter, Progress
from specjax.training.fit import NonFiniteLoss, Schedule
from specjax.training.step import train_step
from tests.training import bigram


class Recorder(EventWriter):
    """A writer that remembers."""

    def __init__(self):
        super().__init__(None)
        self.numbers, self.texts = {}, []

    def scalars(self, values, step):
        super().scalars(values, step)  # checks the tags
        for tag, value in values.items():
            self.numbers.setdefault(tag, []).append((step, value))

    def text(self, tag, text, step=0):
        super().text(tag, text, step)
        self.texts.append((step, tag, text))


class Counter(Progress):
    """A silent bar that runs an action when a step's metrics arrive."""

    def __init__(self, at=None, action=None):
        super().__init__(None, "", enabled=False)
        self.at, self.action = at, action

    def update(self, units=1, **figures):
        super().update(units, **figures)
        if self.count == self.at:
            self.action()


def same_batch(params, key, batch):
    return batch


def score(params):
    yield "held_out/score", float(jnp.sum(params["table"]))


@pytest.fixture(scope="module")
def uninterrupted():
    return bigram.train()


def assert_same_run(resumed, whole):
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, resumed.state.replace(key=jax.random.key_data(resumed.state.key))),
        jax.tree.map(np.asarray, whole.state.replace(key=jax.random.key_data(whole.state.key))),
    )
    assert resumed.history == whole.history


def test_training_lowers_the_loss_and_leaves_the_initial_parameters_alone():
    params = bigram.initial_params()
    before = jax.tree.map(np.array, params)
    result = bigram.train(params=params, optimizer=bigram.OptimizerConfig(learning_rate=0.1, total_steps=60), steps=60)
    losses = [record["loss"] for record in result.history]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, params), before)
    assert int(result.state.step) == 60 and [record["step"] for record in result.history] == list(range(1, 61))
    assert result.tokens_per_second > 0 and result.flop_utilisation > 0


def test_two_runs_are_equal_and_another_seed_is_not(uninterrupted):
    assert_same_run(bigram.train(), uninterrupted)
    assert bigram.train(schedule=Schedule(12, log_every=1, seed=1)).history != uninterrupted.history


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


def test_one_trace_for_the_whole_run():
    train_step.clear_cache()
    bigram.train()
    assert train_step._cache_size() == 1


def test_non_finite_loss_stops_and_names_the_step(tmp_path):
    calls = []

    def poison(params, key, batch):
        calls.append(1)
        return batch if len(calls) == 6 else {**batch, "mask": np.ones(batch["tokens"].shape, bool)}

    class Diverging(bigram.Bigram):
        def loss(self, params, batch, key, frozen=None):
            loss, metrics = super().loss(params, batch, key)
            return (loss if "mask" in batch else loss * jnp.nan), metrics

    with pytest.raises(NonFiniteLoss, match="step 6: loss nan.*checkpoint of step 4 is kept.*learning rate") as error:
        bigram.train(tmp_path, objective=Diverging(), prepare=poison)
    assert error.value.step == 6
    saved = bigram.checkpoints(tmp_path)
    assert saved.latest_step() == 4
    saved.close()


def test_non_finite_gradient_stops_too():
    class Kink(bigram.Bigram):
        def loss(self, params, batch, key, frozen=None):
            loss, metrics = super().loss(params, batch, key)
            return loss + jnp.sqrt(0 * jnp.sum(params["table"])), metrics

    with pytest.raises(NonFiniteLoss, match="step 1: loss .*gradient norm nan.*no checkpoint"):
        bigram.train(objective=Kink())


def test_a_batch_without_positions_changes_nothing_but_the_step():
    empty = lambda params, key, batch: {**batch, "mask": np.zeros(batch["tokens"].shape, bool)}  # noqa: E731
    optimizer = bigram.OptimizerConfig(learning_rate=0.1, weight_decay=0.0, total_steps=3)
    result = bigram.train(steps=3, prepare=empty, optimizer=optimizer)
    assert [record["loss"] for record in result.history] == [0, 0, 0]
    assert [record["gradient_norm"] for record in result.history] == [0, 0, 0]
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, result.state.params), jax.tree.map(np.asarray, bigram.initial_params())
    )


def test_evaluators_see_the_average_and_decide_what_is_best(tmp_path):
    seen = []
    scores = iter([1.0, 3.0, 2.0, float("nan"), 2.5, 2.9])

    def score(params):
        seen.append(jax.tree.map(np.asarray, params))
        yield "held_out/block_efficiency", next(scores)
        yield "samples/text", "once upon"

    writer = Recorder()
    saved = bigram.checkpoints(tmp_path, best="held_out/block_efficiency")
    schedule = Schedule(12, log_every=3, eval_every=2, save_every=6)
    result = bigram.train(checkpoints=saved, schedule=schedule, evaluators=[score], writer=writer)
    assert saved.best_step() == 4 and saved.best_value() == 3.0 and saved.latest_step() == 12
    best = saved.restore(result.state, step=4)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, best.ema), seen[1])
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, result.state.ema), seen[-1])
    assert saved.metrics(4) == {"held_out/block_efficiency": 3.0}
    saved.close()
    assert [step for step, _ in writer.numbers["train/loss"]] == [3, 6, 9, 12]
    assert [step for step, _ in writer.numbers["held_out/block_efficiency"]] == [2, 4, 6, 8, 10, 12]
    assert writer.texts[0] == (2, "samples/text", "once upon")
    for tag in ("train/perplexity", "optimizer/learning_rate", "optimizer/gradient_norm", "speed/peak_flops"):
        assert len(writer.numbers[tag]) == 4
    assert all(value > 0 for _, value in writer.numbers["speed/tokens_per_second"])
    assert [record["step"] for record in result.evaluations] == [2, 4, 6, 8, 10, 12]


def test_evaluation_does_not_disturb_training(uninterrupted):
    noisy = lambda params: [("x", float(jnp.sum(params["table"])))]  # noqa: E731
    result = bigram.train(evaluators=[noisy], schedule=Schedule(12, log_every=1, eval_every=1))
    assert_same_run(result, uninterrupted)


def test_prepare_gets_fresh_parameters_and_one_key_per_step(uninterrupted):
    seen = []

    def prepare(params, key, batch):
        seen.append((np.asarray(params["table"]), tuple(np.asarray(jax.random.key_data(key)))))
        return batch

    assert_same_run(bigram.train(prepare=prepare), uninterrupted)
    assert len({key for _, key in seen}) == 12
    np.testing.assert_array_equal(seen[0][0], bigram.initial_params()["table"])
    assert all(np.any(a[0] != b[0]) for a, b in zip(seen, seen[1:], strict=False))


def test_data_that_end_too_soon_are_named():
    with pytest.raises(ValueError, match="ended after 2 of 12 steps"):
        bigram.train(batches=[{"tokens": np.zeros((2, 4), np.int32)}] * 2)


def test_data_without_a_position_cannot_be_checkpointed(tmp_path):
    with pytest.raises(ValueError, match="list_iterator cannot be resumed.*grain"):
        bigram.train(tmp_path, batches=[{"tokens": np.zeros((2, 4), np.int32)}])


@pytest.mark.parametrize("bad", [{"steps": 0}, {"steps": 3, "log_every": 0}, {"steps": 3, "save_every": -1}])
def test_bad_schedules_are_named(bad):
    with pytest.raises(ValueError, match="at least 1"):
        Schedule(**bad)


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
