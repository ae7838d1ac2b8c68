"""The pair in small: every section is there, the checks pass, and a second run trains nothing again."""

import json

import jax
import numpy as np
import pytest

from configs import minigpt as config_file
from experiments import minigpt
from experiments.cyclic_texts import cyclic_texts, epochs_of_batches
from specjax.models import LanguageModel
from specjax.report.results import ROW_KEYS


def small():
    config = config_file.get_config()
    for role in ("drafter", "target"):
        config[role].update(d_model=16, num_layers=1)
    config.update(epochs=2, num_sequences=40, num_seeds=6, max_new_tokens=7)
    config.update(comparison_draft_length=2, sweep_draft_lengths=(2,), scenario_draft_length=2)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("minigpt")
    return workdir, minigpt.run(small().lock(), workdir)


def test_report(finished):
    workdir, report = finished
    assert json.loads((workdir / "report.json").read_text()) == report
    results = report["results"]
    # 4.5 standard errors for each of 7 acceptance rates: false alarm 5e-5, and the seed is fixed.
    assert [check for check in results["checks"] if not check["passed"]] == []
    assert all(set(ROW_KEYS) <= row.keys() for row in results["rows"])
    assert {row["section"] for row in results["rows"]} == {"comparison", "sweep", "scenarios"}
    assert [row["draft_length"] for row in results["rows"] if row["section"] == "sweep"] == [0, 2]
    for row in results["rows"]:
        assert row["emitted_tokens"] == 6 * 7 and row["speedup"] > 0
        assert row["block_efficiency"] == pytest.approx(1 / (1 - row["calls_saved"]))
        assert (row["predicted_speedup"] is None) == (row["draft_length"] == 0) == (row["acceptance_rate"] is None)
    for name in ("training_loss", "speedup", "expected_tokens", "survival"):
        assert (workdir / "plots" / f"{name}.png").exists()
    for role in ("drafter", "target"):
        assert list((workdir / "stages" / role / "events").iterdir())


def test_each_first_run_is_one_of_the_counted_texts(finished):
    for record in finished[1]["results"]["first_runs"]:
        assert record["emitted_tokens"] == 7
        assert record["target_calls"] + record["accepted_tokens"] == 7


def test_second_run_reuses_every_stage(finished, capsys, monkeypatch):
    workdir, first = finished
    monkeypatch.setattr(minigpt, "fit", None)
    second = minigpt.run(small(), workdir)
    assert all(stage["reused"] for stage in second["results"]["stages"])
    assert capsys.readouterr().out.count("finished earlier, reused") == len(second["results"]["stages"]) == 7
    assert second["results"]["rows"] == first["results"]["rows"]


@pytest.mark.parametrize("role, parameters", [("drafter", 26_772), ("target", 202_644)])
def test_parameters_of_the_pair(role, parameters):
    model_config = minigpt.architecture(config_file.get_config(), role)
    model = jax.eval_shape(lambda key: LanguageModel.init(model_config, key), jax.random.key(0))
    assert sum(np.prod(x.shape) for x in jax.tree.leaves(model)) == minigpt.parameters(model_config) == parameters


def test_texts_and_batches_are_as_described():
    texts = cyclic_texts(500, 12, 8)
    assert texts.shape == (500, 12) and texts[6].tolist() == [7, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    batches = list(epochs_of_batches(texts, 32, epochs=2))
    assert len(batches) == 2 * 16 and {b["tokens"].shape for b in batches} == {(32, 12)}
    kept = np.concatenate([b["tokens"][b["mask"].all(1)] for b in batches])
    np.testing.assert_array_equal(kept, np.concatenate([texts, texts]))
    assert sum(b["mask"].sum() for b in batches) == 2 * texts.size


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("max_new_tokens", 63, "context_length 64"),
        ("epochs", 0, "epochs"),
        ("easy_prompt", (1, 20), "token id 20"),
        ("easy_prompt", (), "empty"),
        ("sweep_draft_lengths", (), "draft lengths"),
        ("sweep_draft_lengths", (2, 0), "draft lengths"),
        ("pattern_length", 20, "vocab_size 20"),
        ("sequence_length", 1, "sequence_length"),
        ("temperature", -1.0, "temperature"),
    ],
)
def test_wrong_settings_end_in_one_line_before_training(tmp_path, field, value, message):
    config = config_file.get_config()
    config[field] = value
    with pytest.raises(ValueError, match=message):
        minigpt.run(config, tmp_path)
    assert not (tmp_path / "stages").exists()
