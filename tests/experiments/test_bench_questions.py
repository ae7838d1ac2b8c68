"""Which prompts a benchmark asks, and that all of them are known to be usable before anything is timed."""

import dataclasses

import pytest

import specjax
from configs import spec_bench as spec_bench_config
from experiments import spec_bench
from experiments.bench_questions import choose_questions, read_questions
from experiments.pretrained_setting import BASELINE, Setting
from tests.experiments.tiny_generation import REFUSING, use_template, write_lines
from tests.experiments.tiny_pretrained import write_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("model"))
    use_template(folder, REFUSING)
    return specjax.load(folder)


def small(questions):
    config = spec_bench_config.get_config()
    config.model, config.questions, config.drafters = "model", str(questions), ("ngram",)
    return config


def write_questions(path, *more):
    lines = [
        {"category": "writing", "turns": ["Say a.", "Say b."]},
        {"category": "coding", "turns": ["def f(x):"]},
        {"category": "coding", "turns": ["x" * 600]},
        {"category": "writing", "prompt": "Say c."},
        {"category": "writing", "prompt": "Say d."},
    ]
    return write_lines(path, *lines, *more)


def test_the_first_prompts_of_every_category_are_chosen(target, tmp_path):
    config = small(write_questions(tmp_path / "q.jsonl", {"category": "writing", "turns": []}))
    with pytest.raises(ValueError, match="line 6: 'turns' must be a list"):
        read_questions(config)
    config.on_broken = "skip"
    asked, left_out = read_questions(config)
    assert "line 6" in left_out[0]["reason"]
    chosen, refused = choose_questions(config, target, asked)
    assert [(p.kind, p.name.split(":")[-1]) for p in chosen] == [
        ("writing", "1"), ("coding", "2"), ("coding", "3"), ("writing", "4"),
    ]  # fmt: skip
    assert refused == []
    config.categories, config.prompts_per_category = ("writing",), 0
    assert len(choose_questions(config, target, read_questions(config)[0])[0]) == 3
    config.categories = ("cooking",)
    with pytest.raises(ValueError, match="has no category 'cooking'; it has writing, coding"):
        read_questions(config)


FORBIDDEN = {"category": "coding", "turns": ["forbidden"]}


def test_a_refused_prompt_stops_or_the_next_one_takes_its_place(target, tmp_path):
    path = write_lines(tmp_path / "q.jsonl", FORBIDDEN, *({"category": "coding", "prompt": f"p{i}"} for i in range(3)))
    config = small(path)
    asked, _ = read_questions(config)
    message = r"^q.jsonl:1: the chat template failed \(TemplateError: no!\); .* on_broken='skip'$"
    with pytest.raises(ValueError, match=message):
        choose_questions(config, target, asked)
    config.on_broken = "skip"
    chosen, (refused,) = choose_questions(config, target, asked)
    assert [prompt.name for prompt in chosen] == ["q.jsonl:2", "q.jsonl:3"]
    assert (refused["prompt"], refused["category"]) == ("q.jsonl:1", "coding")
    assert refused["reason"].startswith("q.jsonl:1: the chat template failed")
    with pytest.raises(ValueError, match="refuses all 1 prompts; the first: q.jsonl:1: the chat template failed"):
        choose_questions(config, target, asked[:1])
    config.on_broken = "stop"  # what is not asked is not looked at
    assert len(choose_questions(config, target, [*asked[1:], asked[0]])[0]) == 2


def test_a_follow_up_is_tried_where_it_is_asked(target, tmp_path):
    config = small(write_lines(tmp_path / "q.jsonl", {"turns": ["a", "b", "forbidden"]}))
    asked, _ = read_questions(config)
    assert len(choose_questions(config, target, asked)[0]) == 1
    config.turns = "all"
    with pytest.raises(ValueError, match="q.jsonl:1: the chat template failed"):
        choose_questions(config, target, asked)


def test_nothing_is_timed_before_all_prompts_are_known_to_be_usable(target, tmp_path, monkeypatch):
    config = small(write_questions(tmp_path / "q.jsonl", FORBIDDEN))
    config.prompts_per_category = 0
    monkeypatch.setattr(spec_bench, "load", lambda *_: target)
    for name in ("measure_peak_flops", "generate"):
        monkeypatch.setattr(spec_bench, name, lambda *_, **__: pytest.fail("something was timed"))
    with pytest.raises(ValueError, match="q.jsonl:6: the chat template failed"):
        spec_bench.run(config, tmp_path / "run")


def test_a_follow_up_that_is_refused_for_the_answer_before_it_is_left_out(target, tmp_path, monkeypatch):
    """Only the answer shows it: by then the first turn has been measured, and it is kept."""
    config = small(write_lines(tmp_path / "q.jsonl", {"category": "c", "turns": ["a", "b"]}))
    config.turns, config.drafters, config.repeats, config.max_new_tokens = "all", (), 1, 4
    (prompt,), _ = choose_questions(config, target, read_questions(config)[0])
    decoded = dataclasses.replace(target)
    monkeypatch.setattr(type(target.tokenizer), "decode", lambda *_, **__: "forbidden")
    settings = {BASELINE: Setting.of(None, target, 0.0)}
    record = spec_bench.measure_prompt(config, decoded, settings, prompt, set())
    assert len(record["turns"]) == 1
    (left_out,) = record["left_out"]
    assert left_out["reason"] == "turn 2: the chat template failed (TemplateError: no!)"
