"""The training loop: what it computes, measures and refuses."""


import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.fit import NonFiniteLoss, Schedule
from specjax.training.step import train_step
from tests.training import bigram
from tests.training.watched_fit import Recorder, assert_same_run


@pytest.fixture(scope="module")
def uninterrupted():
    return bigram.train()


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
