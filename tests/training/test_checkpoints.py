import dataclasses
import json
import math
import shutil

import chex
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.checkpoints import Checkpoints
from specjax.training.state import OptimizerConfig, create
from tests.training import bigram

OPTIMIZER = OptimizerConfig(ema_decay=0.9)


def state_at(step, params=None, optimizer=OPTIMIZER):
    return create(optimizer, params or bigram.initial_params(step), jax.random.key(step)).replace(step=jnp.int32(step))


def plain(state):
    return jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of steps 2 and 4, and the iterator of the latter."""
    folder = tmp_path / "checkpoints"
    manager, iterator = bigram.checkpoints(folder), bigram.batches()
    manager.describe(optimizer=OPTIMIZER)
    for step in (2, 4):
        next(iterator)
        manager.save(state_at(step), iterator)
    manager.close()
    return folder


@pytest.fixture
def reopen(saved):
    opened = []

    def open_again(optimizer=OPTIMIZER, **options):
        manager = bigram.checkpoints(saved, **options)
        manager.describe(optimizer=optimizer)
        opened.append(manager)
        return manager

    yield open_again
    for manager in opened:
        manager.close()


def test_round_trip_is_bitwise_and_moves_the_iterator(reopen):
    reference, iterator = bigram.batches(), bigram.batches()
    for _ in range(2):
        next(reference)
    restored = reopen().restore(state_at(0), iterator)
    chex.assert_trees_all_equal(plain(restored), plain(state_at(4)))
    assert jax.random.key_impl(restored.key) == jax.random.key_impl(state_at(4).key)
    for _ in range(3):
        np.testing.assert_array_equal(next(iterator)["tokens"], next(reference)["tokens"])


def test_an_older_step_can_be_restored_and_a_missing_one_is_named(reopen):
    chex.assert_trees_all_equal(plain(reopen().restore(state_at(0), step=2)), plain(state_at(2)))
    with pytest.raises(ValueError, match="no checkpoint of step 3 in"):
        reopen().restore(state_at(0), step=3)


def test_no_checkpoint_is_named(tmp_path):
    manager = Checkpoints(tmp_path)
    assert manager.latest_step() is None and manager.best_step() is None and manager.best_value() is None
    with pytest.raises(ValueError, match="no checkpoint in"):
        manager.restore(state_at(0))
    manager.close()


@pytest.mark.parametrize("largest, best", [(True, 3), (False, 5)])
def test_keeps_the_latest_ones_and_the_best(largest, best, tmp_path):
    values = {1: 1.0, 2: 2.0, 3: 5.0, 4: None, 5: 0.5, 6: 1.5, 7: math.nan, 8: None}
    manager = bigram.checkpoints(tmp_path, best="tau", largest=largest, keep=2)
    for step, value in values.items():
        manager.save(state_at(step), metrics={} if value is None else {"tau": value})
    folders = sorted(int(path.name) for path in tmp_path.iterdir())
    assert folders == [best, 7, 8]
    assert manager.best_step() == best and manager.best_value() == values[best]
    manager.close()
    again = bigram.checkpoints(tmp_path, best="tau", largest=largest)
    assert again.best_step() == best and again.latest_step() == 8
    better = {"tau": 9.0 if largest else 0.1}
    assert again.improves(better)
    assert not any(again.improves(m) for m in ({"tau": values[best]}, {"tau": math.nan}, {"other": 100.0}, {}))
    again.close()


def test_nothing_is_best_without_a_metric_to_go_by(tmp_path):
    manager = bigram.checkpoints(tmp_path)
    assert not manager.improves({"tau": 1.0})
    manager.close()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pipeline": "abd"}, "pipeline was 'abc' when it was saved and is 'abd' now"),
        ({"optimizer": dataclasses.replace(OPTIMIZER, b2=0.99)}, "optimizer.b2 was 0.95 .* is 0.99 now"),
    ],
)
def test_another_run_is_refused_naming_what_differs(change, message, reopen):
    with pytest.raises(ValueError, match=message) as error:
        reopen(**change).restore(state_at(0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: {**p, "extra": jnp.ones(2)}, "array .*extra is missing from it"),
        (lambda p: {"table": p["table"]}, "array .*bias is in it but not in this run"),
        (lambda p: {**p, "bias": jnp.zeros((8,))}, r"shape of .*bias was \[7\] .* is \[8\] now"),
        (lambda p: {**p, "bias": p["bias"].astype(jnp.bfloat16)}, "dtype of .*bias was float32 .* is bfloat16 now"),
    ],
)
def test_other_arrays_are_refused_naming_the_first(change, message, reopen):
    with pytest.raises(ValueError, match=message) as error:
        reopen().restore(state_at(0, change(bigram.initial_params())))
    assert "\n" not in str(error.value)


# Orbax abandons its other reads when one fails; their futures complain about it later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_flipped_bit_is_noticed(saved, reopen):
    """Flips one bit in the middle of each file of the checkpoint, one file at a time."""
    files = [path for path in (saved / "4").rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) >= 5
    needed = [path for path in files if path.name != "_CHECKPOINT_METADATA"]  # times of writing, read by nobody
    noticed = []
    for path in needed:
        content = path.read_bytes()
        for place in {len(content) // 3, len(content) // 2, len(content) - 2}:
            flipped = bytearray(content)
            flipped[place] ^= 1
            path.write_bytes(flipped)
            try:
                restored = reopen().restore(state_at(0), iterator := bigram.batches())
            except ValueError as error:
                assert "\n" not in str(error) and str(saved / "4") in str(error)
                noticed.append(path)
            else:  # a bit that nobody reads may change, but then what came back must be what was saved
                chex.assert_trees_all_equal(plain(restored), plain(state_at(4)))
                assert iterator.get_state() == _position(2)
        path.write_bytes(content)
    assert any(path.parent.name == "d" or "d" in path.parts for path in noticed)
    assert {"data", "manifest", "state"} <= {path.relative_to(saved / "4").parts[0] for path in noticed}
    chex.assert_trees_all_equal(plain(reopen().restore(state_at(0))), plain(state_at(4)))


def _position(steps):
    iterator = bigram.batches()
    for _ in range(steps):
        next(iterator)
    return iterator.get_state()


def test_arrays_swapped_behind_the_manifest_are_noticed(saved, reopen):
    """Storage that decodes without an error is still not believed: here the other checkpoint's arrays."""
    shutil.rmtree(saved / "4" / "state")
    shutil.copytree(saved / "2" / "state", saved / "4" / "state")
    with pytest.raises(ValueError, match="is damaged: array .* is not what was written; delete that folder"):
        reopen().restore(state_at(0))


def test_an_edited_position_or_manifest_is_noticed(saved, reopen):
    path = next((saved / "4" / "data").glob("*.json"))
    good = path.read_text()
    path.write_text(good.replace("2", "3"))
    assert path.read_text() != good
    with pytest.raises(ValueError, match="position in the data"):
        reopen().restore(state_at(0), bigram.batches())
    path.write_text(good)
    path = next(p for p in (saved / "4" / "manifest").iterdir() if "pipeline" in p.read_text())
    manifest = json.loads(path.read_text())
    manifest["about"]["pipeline"] = "abd"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="its manifest is not what was written"):
        reopen(pipeline="abd").restore(state_at(0))


@pytest.mark.parametrize("part", ["state", "manifest", "data"])
def test_a_missing_part_is_one_clear_line(part, saved, reopen):
    shutil.rmtree(saved / "4" / part)
    with pytest.raises(ValueError, match="is damaged: it cannot be read") as error:
        reopen().restore(state_at(0), bigram.batches())
    assert "\n" not in str(error.value)


def test_after_deleting_a_damaged_checkpoint_the_one_before_is_used(saved, reopen):
    shutil.rmtree(saved / "4")
    assert reopen().latest_step() == 2


def test_records_come_back_as_they_were(tmp_path):
    records = {"history": [{"step": 1, "loss": 0.1 + 0.2}], "evaluations": [{"step": 1, "tau": -math.inf}]}
    manager = bigram.checkpoints(tmp_path)
    manager.save(state_at(1), records=records)
    manager.save(state_at(2))
    manager.close()
    again = bigram.checkpoints(tmp_path)
    assert again.records(1) == records and again.records(2) == {}
    again.close()


def test_saving_a_step_again_changes_nothing(saved, reopen):
    manager = reopen()
    manager.save(state_at(4, bigram.initial_params(99)), bigram.batches())
    chex.assert_trees_all_equal(plain(manager.restore(state_at(0))), plain(state_at(4)))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write checkpoints to .*file"):
        Checkpoints(tmp_path / "file" / "inside")


def test_iterator_state_really_is_the_step_count():
    assert isinstance(bigram.batches(), grain.DatasetIterator)
    assert _position(2) != _position(3)
