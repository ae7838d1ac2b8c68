"""The benchmark by category: sums before ratios, what is kept and resumed, and a whole small run."""

import json

import pytest

from configs import spec_bench as spec_bench_config
from experiments import spec_bench
from experiments.pretrained_setting import Setting, identity
from specjax.drafters import Empty, NGram
from specjax.report.results import ROW_KEYS
from tests.experiments.tiny_pretrained import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


def small(folder, questions):
    config = spec_bench_config.get_config()
    config.model, config.questions = str(folder), str(questions)
    config.drafters, config.repeats, config.max_new_tokens, config.prompts_per_stage = ("ngram",), 3, 12, 2
    config.drafter_settings.ngram.draft_length = 3
    return config


def write_questions(path, broken=False):
    lines = [
        {"question_id": 1, "category": "writing", "turns": ["Say a.", "Say b."]},
        {"question_id": 2, "category": "coding", "turns": ["def f(x):"]},
        {"question_id": 3, "category": "coding", "turns": ["x" * 600]},
        {"question_id": 4, "category": "writing", "prompt": "Say c."},
        {"question_id": 5, "category": "writing", "prompt": "Say d."},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text + ('{"category": "writing", "turns": []}\n' if broken else ""))
    return path


def answer(tokens, seconds, rounds, attempts=(), acceptances=()):
    counts = {"rounds": rounds, "drafted": sum(attempts), "accepted": sum(acceptances), "emitted": tokens,
              "attempts": list(attempts), "acceptances": list(acceptances),
              "overlap_sum": [0.0] * len(attempts)}  # fmt: skip
    return {"emitted_tokens": tokens, "seconds": seconds, "prefill_seconds": [0.1], "counts": counts}


def question(category, *turns):
    return {"prompt": "q", "category": category, "turns": list(turns), "parted": [], "left_out": []}


def test_figures_are_ratios_of_sums_over_prompts():
    """A short prompt that drafts badly and a long one that drafts well: their speed-ups are 0.5 and 2."""
    short = {"none": answer(10, [1.0], 10), "ngram": answer(10, [2.0], 10, [10, 0], [0, 0])}
    long = {"none": answer(100, [9.0, 10.0, 30.0], 100), "ngram": answer(100, [5.0, 4.0, 9.0], 25, [25, 25], [25, 25])}
    config = spec_bench_config.get_config()
    settings = {"none": Setting(Empty(), None, "greedy"), "ngram": Setting(NGram(2), None, "greedy")}
    questions = [question("a", short), question("a", long), question("b", short, long)]
    rows = {(row["category"], row["drafter"]): row for row in spec_bench.all_rows(config, settings, questions)}
    assert list(rows) == [(c, d) for c in ("a", "b", "overall") for d in ("none", "ngram")]
    one = rows["a", "ngram"]
    assert one.keys() >= set(ROW_KEYS) and one["draft_length"] == 2 and one["lossless"]
    assert one["tokens_per_second"] == pytest.approx(110 / 7) and one["speedup"] == pytest.approx(11 / 7)
    assert one["block_efficiency"] == pytest.approx(110 / 35) and one["acceptance_rate"] == pytest.approx(50 / 60)
    assert one["speedup_low"] == pytest.approx(0.5) and one["speedup_high"] == pytest.approx(2)
    assert rows["b", "ngram"]["prompts"] == 1 and rows["b", "ngram"]["answers"] == 2
    assert rows["b", "ngram"]["speedup_low"] is None  # one prompt: no interval
    assert rows["overall", "ngram"]["speedup"] == pytest.approx(11 / 7)
    assert all(rows[c, "none"]["speedup"] == 1 for c in ("a", "b", "overall"))


def test_checks_notice_what_is_missing_or_slow_or_different():
    config = spec_bench_config.get_config()
    row = {"category": "overall", "drafter": "ngram", "speedup": 1.2, "speedup_low": 0.9}
    parted = question("a", {}) | {"parted": [{"gap": 0.5, "position": 3}]}
    passed = [check["passed"] for check in spec_bench.checks(config, [row], [parted, question("a")], 2)]
    assert passed == [False, False, False]
    row["speedup_low"], parted["parted"][0]["gap"] = 1.1, 0.001
    assert all(check["passed"] for check in spec_bench.checks(config, [row], [parted], 1))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("model", "", "config.model is empty"), ("turns", "second", "'first' or 'all'"), ("repeats", 0, "at least 1"),
     ("drafters", ("eagle",), "some of eagle_suffix, independent, ngram"), ("drafters", ("saved",), "saved.path=PATH")],
)  # fmt: skip
def test_what_a_config_can_get_wrong(tmp_path, field, value, message):
    config = small("model", "questions")
    config[field] = value
    with pytest.raises(ValueError, match=message):
        spec_bench.run(config, tmp_path)


def test_a_model_is_identified_by_its_files(tmp_path):
    write_questions(tmp_path / "a.json")
    before = identity(tmp_path)
    assert before == identity(tmp_path) and before[0] == identity(tmp_path / "a.json")[0]
    write_questions(tmp_path / "a.json", broken=True)
    assert identity(tmp_path) != before


@pytest.mark.slow
def test_a_run_is_resumed_where_it_was_stopped(folder, tmp_path, capsys, monkeypatch):
    config = small(folder, write_questions(tmp_path / "q.jsonl"))
    config.turns, config.longest_prompt = "all", 480
    whole, calls = spec_bench.measure_prompt, []

    def stop_at_the_third(*arguments):
        calls.append(arguments[3].name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(spec_bench, "measure_prompt", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        spec_bench.run(config, tmp_path / "run")
    report = spec_bench.run(config, tmp_path / "run")["results"]
    assert "prompts_000: finished earlier, reused" in capsys.readouterr().out
    assert len(calls) == 3 + 2  # the two of the first batch are not measured again
    assert [record["prompt"] for record in report["left_out"]] == ["q.jsonl:3"]
    rows = {(row["category"], row["drafter"]): row for row in report["rows"]}
    assert rows["writing", "ngram"]["prompts"] == 2 and rows["writing", "ngram"]["answers"] == 3
    assert rows["coding", "ngram"]["prompts"] == 1
    for category in ("writing", "coding", "overall"):
        plain, drafted = rows[category, "none"], rows[category, "ngram"]
        assert plain["block_efficiency"] == 1 <= drafted["block_efficiency"]
        assert plain["emitted_tokens"] == drafted["emitted_tokens"] == plain["target_calls"]
        assert drafted["speedup"] == pytest.approx(drafted["tokens_per_second"] / plain["tokens_per_second"])
    checks = {check["name"].split(" (")[0]: check["passed"] for check in report["checks"]}
    assert not checks["prompts measured"] and checks["greedy texts equal the target-only text"]
    assert (tmp_path / "run" / "plots" / "speedup_ngram.png").exists()
