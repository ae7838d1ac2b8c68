"""The main job and the benchmark, small: everything runs, is reported, and is reused."""

import json

import pytest

from configs import benchmark as benchmark_config
from configs import longer, quickstart
from experiments import benchmark, distillation
from specjax.report.results import ROW_KEYS


def tiny(folder):
    config = quickstart.get_config()
    config.corpus.kind, config.corpus.path = "files", str(folder)
    config.tokenizer.vocab_size = 270
    for model in (config.target, config.drafter):
        model.num_layers, model.d_model, model.num_heads, model.num_kv_heads, model.d_ff = 1, 16, 2, 1, 32
        model.context_length = 64
    for training in (config.target_training, config.drafter_training):
        training.steps, training.window, training.batch_size, training.eval_every, training.save_every = 6, 24, 2, 3, 3
        training.optimizer.warmup_steps = 2
    config.drafter_training.eval_prompts, config.drafter_training.eval_new_tokens = 2, 8
    config.distillation.target_samples = config.distillation.drafter_samples = 0.4
    config.distillation.prompt_length, config.distillation.target_texts = 4, 3
    decoding = config.decoding
    decoding.prompt_length, decoding.new_tokens, decoding.common_draft_length = 8, 16, 2
    decoding.draft_lengths, decoding.widths = (2,), (1, 3)
    decoding.survey_prompts = decoding.timed_prompts = 2
    decoding.survey_new_tokens = 12
    decoding.coupled_prompts = 3
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    text = tmp_path_factory.mktemp("text")
    for i in range(40):
        (text / f"{i}.txt").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 8)
    workdir = tmp_path_factory.mktemp("run")
    config = tiny(text)
    return config, workdir, distillation.run(config, workdir)


@pytest.mark.slow
def test_the_report_holds_what_it_promises(finished):
    config, workdir, report = finished
    assert json.loads((workdir / "report.json").read_text()) == report
    rows = report["results"]["rows"]
    assert all(row.keys() >= set(ROW_KEYS) for row in rows)
    assert {(r["drafter"], r["temperature"]) for r in rows} == {
        (name, t) for name in ("none", "corpus", "distilled") for t in (0.0, 1.0)
    }
    for row in rows:
        assert row["block_efficiency"] == row["emitted_tokens"] / row["target_calls"]
        assert (row["acceptance_rate"] is None) == (row["drafter"] == "none")
    exact = [check for check in report["results"]["checks"] if "target-only text" in check["name"]]
    assert len(exact) == 3 and all(check["passed"] for check in exact)
    assert {path.name for path in (workdir / "plots").iterdir()} >= {"survival.png", "speedup.png", "loss.png"}
    assert list(workdir.glob("stages/*/events/events*"))


@pytest.mark.slow
def test_a_second_run_trains_nothing(finished, capsys):
    config, workdir, _ = finished
    distillation.run(config, workdir)
    out = capsys.readouterr().out
    for stage in ("text", "target", "drafter_corpus", "drafter_distilled"):
        assert f"{stage}: finished earlier, reused" in out


@pytest.mark.slow
def test_the_benchmark_measures_what_was_trained(finished, tmp_path):
    _, workdir, _ = finished
    config = benchmark_config.get_config()
    config.models = str(workdir)
    config.prompts, config.prompt_length, config.new_tokens = 2, 8, 16
    config.batches, config.widths, config.draft_lengths = (1, 2), (1, 3), (2,)
    config.repeats, config.loop_repeats, config.turns = 5, 5, 2
    config.tree_shape, config.cache_lengths = (2, 1), (8, 12)
    results = benchmark.run(config, tmp_path)["results"]
    assert [(r["temperature"], r["draft_length"]) for r in results["rows"]] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert {(r["batch"], r["width"]) for r in results["width_seconds"]} == {(1, 1), (1, 3), (2, 1), (2, 3)}
    assert all(r["ideal_round_ratio"] > 0 for r in results["rows"] if r["draft_length"])
    assert [(r["cache_length"], r["nodes"]) for r in results["tree_cost"]] == [(8, 4)] * 3 + [(12, 4)] * 3


def test_the_longer_config_differs_in_effort_alone():
    """Same models, text and measurements: steps, the share of sampled texts and what is expected of them."""
    ours, theirs = (dict(flat(config.get_config().to_dict())) for config in (longer, quickstart))
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    effort = ("steps", "eval_every", "save_every")
    allowed = {f"{model}_training.{name}" for model in ("target", "drafter") for name in effort}
    allowed |= {"distillation.target_texts", *(name for name in ours if name.startswith("expected."))}
    assert changed <= allowed
    assert ours["target_training.steps"] > theirs["target_training.steps"]


def flat(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("drafter_training.steps", 0, "drafter_training.steps must be at least 1; got 0"),
        ("target_training.batch_size", 0, "target_training.batch_size must be at least 1; got 0"),
        ("target_training.eval_every", 0, "target_training.eval_every must be at least 1, or None; got 0"),
        ("target_training.window", 100_000, "training window 100000 must be below"),
        ("target_training.optimizer.learning_rate", -1.0, "target_training.optimizer: learning_rate must be > 0"),
        ("drafter_training.optimizer.schedule", "foo", "drafter_training.optimizer: schedule must be one of .* 'foo'"),
        ("distillation.divergence", "foo", "distillation: .*'foo'"),
        ("distillation.target_samples", 1.5, "together at most 1; got 1.5 and 0.0"),
        ("distillation.target_texts", 0, "distillation.target_texts must be at least 1; got 0"),
        ("distillation.prompt_length", 129, "must be from 1 to the drafter's training window 128; got 129"),
        ("target_training.compute_dtype", "int8", "target_training.compute_dtype must be one of .*; got 'int8'"),
        ("drafters", ("copus",), "drafters must be some of corpus, distilled; got 'copus'"),
        ("decoding.prompt_length", 0, "decoding.prompt_length must be at least 1; got 0"),
        ("decoding.coupled_prompts", -1, "decoding.coupled_prompts must be at least 0; got -1"),
        ("decoding.timed_prompts", 0, "decoding.timed_prompts must be at least 1; got 0"),
        ("decoding.repeats", 0, "decoding.repeats must be at least 5; got 0"),
        ("decoding.new_tokens", 100_000, "exceed target.context_length 256"),
        ("target.d_model", 7, "d_model 7 must be a multiple of num_heads 8"),
        ("drafter.num_heads", 7, "must be a multiple of num_heads 7"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_read_or_trained(tmp_path, field, value, message):
    config = quickstart.get_config()
    config.update_from_flattened_dict({field: value})
    with pytest.raises(ValueError, match=message) as error:
        distillation.run(config, tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_benchmark_without_models_says_what_to_do(tmp_path):
    config = benchmark_config.get_config()
    config.models = str(tmp_path)
    with pytest.raises(ValueError, match="holds no finished stage 'text'; train first: python launch.py"):
        benchmark.run(config, tmp_path)
