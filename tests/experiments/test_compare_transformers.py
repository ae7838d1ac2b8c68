"""The comparison with transformers: agreement, order of measuring, ratios and checks; small runs with a stand-in and
with the library itself, where it is installed."""

import collections
import importlib.util
import subprocess
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import compare_transformers as compare_config
from experiments import compare_transformers, compared_weights, loading_cost, transformers_checks
from experiments import interleaved_texts as texts
from experiments.agreement import compare_logits, gap_between, perplexity
from experiments.equal_texts import first_difference
from specjax.pretrained import load
from specjax.report.metrics import block_efficiency, summary
from specjax.report.stages import Stages
from specjax.weights import load_weights
from tests.experiments.tiny_pretrained import write_folder
from tests.weights import test_gguf_file


def test_logits_are_compared_position_by_position():
    rng = np.random.default_rng(0)
    ours = rng.normal(size=(10, 7))
    theirs = ours.copy()
    theirs[3, 2] += 0.25
    best = theirs[8].argmax()
    theirs[8, (best + 1) % 7] = theirs[8, best] + 0.125  # another best token, 0.125 above our choice
    found = compare_logits(np.split(ours, [4]), np.split(theirs, [4]))
    assert found["positions"] == 10 and found["max_difference"] == pytest.approx(np.abs(ours - theirs).max())
    assert found["argmax_differs"] == (ours.argmax(-1) != theirs.argmax(-1)).sum() >= 1
    assert found["widest_gap"] >= 0.125
    same = compare_logits([ours], [ours])
    assert (same["max_difference"], same["argmax_differs"], same["widest_gap"]) == (0, 0, 0)
    with pytest.raises(ValueError):
        compare_logits([ours], [ours, ours])


def test_perplexity_of_chunks():
    rng = np.random.default_rng(1)
    logits, tokens = 3 * rng.normal(size=(9, 5)), rng.integers(0, 5, 9).tolist()
    log_p = np.asarray(jax.nn.log_softmax(logits))
    expected = np.exp(-np.mean([log_p[i, tokens[i + 1]] for i in range(8)]))
    for sizes in ([9], [4, 5], [3, 3, 3], [8, 1]):
        chunks = np.split(logits, np.cumsum(sizes)[:-1])
        assert perplexity(chunks, tokens) == pytest.approx(expected, rel=1e-6)
    assert perplexity([np.zeros((6, 5))], tokens[:6]) == pytest.approx(5)


def test_where_two_texts_part():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert gap_between(np.array([0.5, -1.0, 2.0]), 1, 2) == 3


def test_all_take_turns():
    names = ["a", "b", "c"]
    plan = list(texts.interleaving(names, 2, 5))
    assert len(plan) == 6 * 2 * 3 and [turn for turn, _, _ in plan] == sorted(turn for turn, _, _ in plan)
    for turn in range(6):
        for prompt in range(2):
            assert sorted(name for t, p, name in plan if (t, p) == (turn, prompt)) == names
    first = collections.Counter(plan[i][2] for i in range(0, len(plan), 3))
    assert set(first.values()) == {4}  # each opens a third of the rounds


def test_the_warm_up_is_not_timed_and_the_last_text_is_kept():
    calls = collections.Counter()

    def writer(name):
        def write(ids):
            calls[name, tuple(ids)] += 1
            number = calls[name, tuple(ids)]
            return {"tokens": [number], "seconds": 10.0 * number, "timed_tokens": 1, "prefill_seconds": 1.0 * number}

        return write

    answers = texts.time_texts({"a": writer("a"), "b": writer("b")}, [[1], [2]], repeats=3, settle_seconds=0)
    assert set(calls.values()) == {4}
    for name in ("a", "b"):
        for answer in answers[name]:
            assert answer["seconds"] == [20, 30, 40] and answer["prefill_seconds"] == [2, 3, 4]
            assert answer["tokens"] == [4]


def record(library, dtype, drafter, seconds, tokens=40, calls=40, counts=None):
    one = {"tokens": [1] * tokens, "timed_tokens": tokens, "seconds": seconds, "prefill_seconds": [0.1],
           "target_calls": calls}  # fmt: skip
    answers = [one | ({"counts": counts} if counts else {})] * 2
    return {"library": library, "dtype": dtype, "drafter": drafter, "draft_length": 0, "answers": answers}


def some_records(ngram=0.5):
    counts = {"rounds": 10, "drafted": 60, "accepted": 30, "emitted": 40, "attempts": [10, 10], "acceptances": [10, 5],
              "overlap_sum": [0.0, 0.0]}  # fmt: skip
    plain = {"rounds": 40, "drafted": 0, "accepted": 0, "emitted": 40, "attempts": [], "acceptances": [],
             "overlap_sum": []}  # fmt: skip
    records = [
        record("transformers", "float32", "none", [4.0, 8.0, 4.0]),
        record("transformers", "bfloat16", "none", [3.0, 6.0, 3.0]),
        record("transformers", "bfloat16", "prompt lookup 10", [2.5, 5.0, 2.5], calls=20),
        record("specjax", "float32", "none", [1.5, 3.0, 1.5], counts=plain),
        record("specjax", "bfloat16", "none", [2.0, 4.0, 2.0], counts=plain),
        record("specjax", "bfloat16", "ngram", [ngram, 2 * ngram, ngram], counts=counts),
        record("specjax", "float32", "saved", [1.0, 2.0, 1.0], counts=counts),
    ]
    return {f"{one['library']} {one['dtype']} {one['drafter']}": one for one in records}


def test_ratios_are_taken_within_a_turn():
    """The machine was at half speed in the second turn: no ratio notices."""
    records = some_records()
    one, other = records["specjax float32 none"], records["transformers float32 none"]
    assert texts.rates(one).tolist() == [80 / 3, 80 / 6, 80 / 3]
    assert texts.over(one, other) == pytest.approx(4 / 1.5)
    assert texts.fastest(list(records.values())) is records["specjax bfloat16 ngram"] and texts.fastest([]) is None


def test_counts_of_both_libraries():
    records = some_records()
    theirs = texts.count_table(records["transformers bfloat16 prompt lookup 10"])
    assert block_efficiency(theirs) == 2 and summary(theirs)["acceptance_rate"] is None
    assert summary(texts.count_table(records["specjax float32 saved"]))["acceptance_rate"] == pytest.approx(15 / 20)


def test_rows_compare_with_the_fastest_plain_setting_of_both():
    config = compare_config.get_config()
    rows = {f"{row['library']} {row['dtype']} {row['drafter']}": row
            for row in compare_transformers.all_rows(config, some_records())}  # fmt: skip
    ngram = rows["specjax bfloat16 ngram"]
    assert ngram["speedup"] == pytest.approx(3) and ngram["over_plain"] == pytest.approx(4)
    assert rows["specjax float32 none"]["speedup"] == 1
    assert rows["transformers bfloat16 prompt lookup 10"]["over_plain"] == pytest.approx(1.2)
    assert ngram["baseline_tokens_per_second"] == rows["specjax float32 none"]["tokens_per_second"]
    assert ngram["speedup_low"] == pytest.approx(3)
    assert compare_transformers.figures(list(rows.values()))["tokens_per_second"].axes


def test_speed_checks_name_both_settings_and_the_aim():
    config = compare_config.get_config()
    found = {check["name"].split(":")[0]: check for check in transformers_checks.speed_checks(config, some_records())}
    value = lambda name: found[name]["value"]  # noqa: E731
    assert value("plain float32") == pytest.approx(4 / 1.5) and "(aim 2.5, reached)" in found["plain float32"]["limit"]
    assert value("plain fastest") == pytest.approx(2)
    assert value("speculative same dtype") == pytest.approx(4)  # bfloat16: 2 / 0.5
    assert value("speculative fastest plain") == pytest.approx(3)
    name = found["speculative fastest plain"]["name"]
    assert name == "speculative fastest plain: specjax bfloat16 ngram over specjax float32 none"
    assert value("speculative over transformers") == pytest.approx(5)
    assert value("τ of specjax float32 saved") == 4 and all(check["passed"] for check in found.values())
    slow = {check["name"].split(":")[0]: check
            for check in transformers_checks.speed_checks(config, some_records(ngram=3.0))}  # fmt: skip
    assert value("speculative same dtype") != slow["speculative same dtype"]["value"] == pytest.approx(1.5)
    assert "saved" in slow["speculative fastest plain"]["name"]
    assert "(aim 2.5, not reached)" in slow["speculative same dtype"]["limit"]
    assert not slow["speculative over transformers"]["passed"] or slow["speculative over transformers"]["value"] >= 2


def test_agreement_and_loading_checks_can_fail():
    config = compare_config.get_config()
    logits = {"positions": 1000, "max_difference": 5e-4, "argmax_differs": 1, "widest_gap": 2e-4}
    perplexities = [{"text": "code", "tokens": 2048, "specjax": 5.001, "transformers": 5.0, "difference": 2e-4}]
    greedy = {"prompts": 20, "new_tokens": 128, "parted": [{"prompt": 3, "position": 7, "gap": 1e-4}]}
    agreement = {"logits": logits, "perplexity": perplexities, "greedy": greedy}
    loading = {"first_token": [{"first_token_seconds": s} for s in (9.0, 40.0, 9.5)],
               "memory": [{"format": "gguf", "peak_over_weights": 1.2}]}  # fmt: skip
    assert all(check["passed"] for check in transformers_checks.agreement_checks(config, agreement))
    loaded = transformers_checks.loading_checks(config, loading)
    assert all(check["passed"] for check in loaded) and "not reached" in loaded[0]["limit"]
    logits.update(max_difference=2e-3, widest_gap=2e-3)
    perplexities[0]["difference"], greedy["parted"][0]["gap"] = 2e-3, None
    loading["memory"][0]["peak_over_weights"], loading["first_token"][0]["first_token_seconds"] = 1.4, 50.0
    assert not any(check["passed"] for check in transformers_checks.agreement_checks(config, agreement))
    assert not any(check["passed"] for check in transformers_checks.loading_checks(config, loading))
    parted = [{"dtype": "bfloat16", "gap": 0.4}, {"dtype": "float32", "gap": 0.4}]
    assert [check["passed"] for check in transformers_checks.text_checks(config, parted)] == [False, True]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


def test_texts_to_read_and_logits_in_chunks(folder):
    target = load(folder, "float32")
    for kind in ("code", "prose"):
        ids = compared_weights.passage(kind, target, 70)
        assert len(ids) == 70 and target.tokenizer.decode(ids).isprintable() is False
    chunks = list(compared_weights.chunked_logits(target.model, ids, chunk=32))
    assert [len(chunk) for chunk in chunks] == [32, 32, 6]
    whole = target.model(jnp.asarray([ids]))[0][0]
    np.testing.assert_allclose(np.concatenate(chunks), whole, atol=1e-4)


@pytest.mark.parametrize("at_hand", [True, False], ids=["the target", "a draft model"])
def test_a_gguf_file_is_written_as_a_folder_that_both_read(tmp_path, at_hand):
    model = test_gguf_file.random_model(test_gguf_file.CONFIGS["qwen2"])
    path = test_gguf_file.write(tmp_path / "small.gguf", model, "qwen2")
    folder = compared_weights.weights_folder("w", str(path), Stages(tmp_path), (lambda: model) if at_hand else None)
    assert folder == tmp_path / "stages" / "w" / "huggingface"
    chex.assert_trees_all_equal(load_weights(folder, "float32").params, model.params)
    assert compared_weights.weights_folder("w", str(folder), Stages(tmp_path)) == folder


class StandIn:
    """Does what `transformers_side.TransformersModel` does, by plain forwards of the same weights."""

    def __init__(self, path, dtype, threads):
        self.model = load_weights(path, dtype)

    def logits(self, ids, chunk=256):
        yield np.asarray(self.model(jnp.asarray([list(ids)]))[0][0].astype(jnp.float32))

    def greedy(self, ids, max_new_tokens, stop_ids=(), *, prompt_lookup=None, assistant=None):
        text = np.zeros((1, len(ids) + max_new_tokens), np.int32)
        text[0, : len(ids)] = ids
        end = len(ids)
        while end < text.shape[1]:
            text[0, end] = int(_forward(self.model, jnp.asarray(text))[0, end - 1].argmax())
            end += 1
            if text[0, end - 1] in stop_ids:
                break
        tokens = text[0, len(ids) : end].tolist()
        return {"tokens": tokens, "seconds": 1.0, "timed_tokens": len(tokens) - 1, "prefill_seconds": 0.1,
                "target_calls": len(tokens)}  # fmt: skip


_forward = jax.jit(lambda model, text: model(text)[0])


def small(folder):
    config = compare_config.get_config()
    config.model, config.drafters, config.dtypes = str(folder), ("ngram",), ("float32",)
    config.threads, config.repeats, config.settle_seconds, config.load_repeats = 1, 2, 0.0, 1
    config.greedy_prompts, config.timed_prompts, config.max_new_tokens, config.greedy_new_tokens = 2, 2, 8, 8
    config.logit_positions, config.perplexity_tokens, config.prompt_chars = 40, 64, 200
    return config


@pytest.mark.slow
def test_a_whole_run_with_a_stand_in(folder, tmp_path, monkeypatch, capsys):
    stand_in = types.SimpleNamespace(VERSIONS={"torch": "0", "transformers": "0"}, TransformersModel=StandIn)
    for module in (compared_weights, compare_transformers):
        monkeypatch.setattr(module, "other_library", lambda: stand_in)
    monkeypatch.setattr(compare_transformers, "limit_cores", lambda threads: None)
    config = small(folder)
    report = compare_transformers.run(config, tmp_path)
    results = report["results"]
    assert results["logits"]["positions"] == 40 and results["logits"]["max_difference"] < 1e-3
    assert [one["text"] for one in results["perplexity"]] == ["code", "prose"]
    assert all(one["difference"] < 1e-5 for one in results["perplexity"])
    assert {(row["library"], row["drafter"]) for row in results["rows"]} == {
        ("transformers", "none"), ("transformers", "prompt lookup 10"), ("specjax", "none"), ("specjax", "ngram"),
    }  # fmt: skip
    texts_agree = [check for check in results["checks"] if "texts" in check["name"]]
    assert len(texts_agree) == 2 and all(check["passed"] for check in texts_agree)
    assert results["memory"][0]["weights_bytes"] > 0 and results["first_token"][0]["first_token_seconds"] > 0
    assert report["environment"]["torch"] == "0" and (tmp_path / "plots" / "tokens_per_second.png").exists()
    compare_transformers.run(config, tmp_path)
    out = capsys.readouterr().out
    assert all(f"{stage}: finished earlier, reused" in out for stage in ("logits", "greedy", "loading", "timing"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs requirements-compare.txt")
def test_the_library_itself_reads_the_same_weights(folder):
    from experiments.transformers_side import TransformersModel

    theirs, stand_in = TransformersModel(folder, "float32", 1), StandIn(folder, "float32", 1)
    ids = list(range(40, 70))
    found = compare_logits(stand_in.logits(ids), [np.concatenate(list(theirs.logits(ids, chunk=7)))])
    assert found["max_difference"] < 1e-4
    expected = stand_in.greedy(ids, 12)["tokens"]
    for options in ({}, {"prompt_lookup": 3}, {"assistant": theirs}):
        text = theirs.greedy(ids, 12, **options)
        assert text["tokens"] == expected and 0 < text["target_calls"] <= 12
        assert text["timed_tokens"] < 12 and text["seconds"] > 0 and text["prefill_seconds"] > 0
    assert theirs.greedy(ids, 12, [expected[2]])["tokens"] == expected[: expected.index(expected[2]) + 1]


def test_without_the_library_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    monkeypatch.delitem(__import__("sys").modules, "experiments.transformers_side", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ValueError, match="requirements-compare.txt"):
        compared_weights.other_library()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("model", "", "there is no model"), ("dtypes", ("bfloat16",), "dtypes must be float32"),
     ("repeats", 0, "repeats must be at least 1"), ("drafters", ("saved",), "saved.path=PATH")],
)  # fmt: skip
def test_what_a_config_can_get_wrong(tmp_path, field, value, message):
    config = small("model")
    config[field] = value
    with pytest.raises(ValueError, match=message):
        compare_transformers.run(config, tmp_path)


def test_the_peak_is_that_of_the_process_and_not_of_the_one_that_started_it():
    large = np.ones(2**27)  # a gigabyte here, which a child that only asks for its own peak has not
    script = "from experiments.loading_cost import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", script], cwd=loading_cost.ROOT, capture_output=True, text=True)
    assert 0 < int(done.stdout) < large.nbytes / 2 < loading_cost.peak_bytes()


def test_a_failed_process_is_reported(tmp_path):
    with pytest.raises(RuntimeError, match="first_token of .*nothing failed in a fresh process"):
        loading_cost.in_fresh_process("first_token", tmp_path / "nothing", "float32", tmp_path)
