"""The whole way from prompts to a measured drafter, with a tiny target that reads bytes."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import smollm2 as smollm2_config
from experiments import answer_stage, pretrained_distillation
from experiments.answer_stage import TokenPrompt, write_answers
from experiments.families import FAMILIES
from experiments.training_stage import Text
from specjax.data.answers import AnswerSource
from specjax.data.pipeline import TokenizedText
from specjax.data.tokenizer import ByteTokenizer
from specjax.models import LanguageModel, TransformerConfig
from specjax.report.results import ROW_KEYS

STOP = 256


@pytest.fixture(scope="module")
def target():
    model = LanguageModel.init(TransformerConfig(257, 16, 3, 2, d_ff=32, context_length=96), jax.random.key(0))
    tokenizer = ByteTokenizer()
    return types.SimpleNamespace(
        model=model, tokenizer=tokenizer, chat_template=None, stop_ids=(STOP,), name="tiny",
        prompt_ids=lambda text: tokenizer.encode(text).tolist(),
    )  # fmt: skip


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}?"}) + "\n" for i in range(60)))
    return path


def tiny(path):
    config = smollm2_config.get_config()
    config.model = "tiny"
    config.prompts.update(sources=("files",), path=str(path), held_out=0.3, count=10, held_out_count=6, max_tokens=16)
    config.answers.update(batch=2, max_new_tokens=12, per_shard=4, held_out_count=3)
    config.training.update(
        steps=4, window=15, context=4, log_every=2, eval_every=2, save_every=2, eval_prompts=2, eval_new_tokens=6
    )
    config.training.optimizer.warmup_steps = 1
    config.family_settings.eagle3.update(feature_layers=(1, 2, 3), d_ff=32, draft_vocab=100, steps_ahead=2)
    config.family_settings.block.update(feature_layers=(1, 3), num_layers=1, anchors=3, draft_length=2)
    config.decoding.update(prompts=4, timed_prompts=2, new_tokens=6, draft_lengths=(1, 2), turns=1, depths=2)
    config.decoding.trees = False
    return config


@pytest.mark.slow
def test_prompts_become_a_measured_drafter_and_another_family_reuses_the_answers(
    target, prompt_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pretrained_distillation.pretrained, "load", lambda path, dtype: target)
    config = tiny(prompt_file)
    report = pretrained_distillation.run(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    results = report["results"]
    assert [row["draft_length"] for row in results["rows"]] == [0, 1, 2, 5]
    assert all(row.keys() >= set(ROW_KEYS) and row["lossless"] for row in results["rows"])
    assert results["checks"][0]["passed"], results["checks"][0]
    assert [row["answers"] for row in results["answers"]] == [10, 3]
    assert results["training"][0]["steps"] == 4
    assert {row["temperature"] for row in results["survey"]} == {0.0, 1.0}
    (along,) = results["quality"]
    assert all(0 < along[f"along_text_{depth}"] < 1 for depth in (1, 2)) and "along_text_3" not in along
    capsys.readouterr()
    again = pretrained_distillation.run(config, tmp_path / "run")
    assert capsys.readouterr().out.count("finished earlier, reused") == 5
    assert again["results"]["rows"] == results["rows"]

    config.family, config.training.corpus_fraction = "block", 0.5
    config.training.corpus_characters = 1000
    other = pretrained_distillation.run(config, tmp_path / "run")
    out = capsys.readouterr().out
    assert "answers: finished earlier, reused" in out and "drafter_eagle3" not in out
    assert [row["draft_length"] for row in other["results"]["rows"]] == [0, 2]  # a block has its length

    (tmp_path / "run" / "stages" / "answers" / "train" / "answers-00001.arrayrecord").write_bytes(b"other")
    with pytest.raises(ValueError, match="answers-00001.arrayrecord was changed since it was written"):
        pretrained_distillation.run(config, tmp_path / "run")


@pytest.fixture(scope="module")
def prompts():
    return [TokenPrompt(f"p{i}", "", [65 + i, 66, 67][: 1 + i % 3]) for i in range(10)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_killed_answers_stage_goes_on_to_the_same_shards(target, prompts, tmp_path, monkeypatch, drafter):
    settings = tiny("").answers
    settings.drafter = drafter
    whole = write_answers(tmp_path / "whole", target, prompts, settings, 0, "x", 16)
    calls, real = [], answer_stage.generate

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(answer_stage, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        write_answers(tmp_path / "killed", target, prompts, settings, 0, "x", 16)
    assert len(AnswerSource(tmp_path / "killed")) == 4
    record = write_answers(tmp_path / "killed", target, prompts, settings, 0, "x", 16)
    assert len(calls) == 4 + 3  # batches of the two shards that were missing
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert {k: record[k] for k in ("answers", "answer_tokens")} == {k: whole[k] for k in ("answers", "answer_tokens")}


def test_answers_are_the_targets_own_with_the_mask_on_what_it_wrote(target, prompts, tmp_path):
    settings = tiny("").answers
    write_answers(tmp_path, target, prompts, settings, 0, "x", 16)
    source = AnswerSource(tmp_path)
    assert [a.prompt for a in source] == [p.name for p in prompts]
    assert {a.temperature for a in source} == {0.0, 0.7}
    for answer, prompt in zip(source, prompts, strict=True):
        n = len(prompt.ids)
        assert answer.tokens[:n].tolist() == prompt.ids and answer.mask.tolist() == [False] * n + [True] * (
            len(answer.tokens) - n
        )
        assert 1 <= len(answer.tokens) - n <= 12 and STOP not in answer.tokens[n:-1]
        if answer.temperature == 0:
            best = np.argmax(np.asarray(target.model(jnp.asarray(answer.tokens[None]))[0][0]), -1)
            assert (best[n - 1 : -1] == answer.tokens[n:]).all()


def test_speculative_answers_at_temperature_0_are_the_plain_ones(target, prompts, tmp_path):
    settings = tiny("").answers
    settings.temperatures = (0.0,)
    texts = {}
    for settings.drafter in ("none", "ngram"):
        write_answers(tmp_path / settings.drafter, target, prompts, settings, 0, "x", 16)
        texts[settings.drafter] = [a.tokens.tolist() for a in AnswerSource(tmp_path / settings.drafter)]
    assert texts["none"] == texts["ngram"]


@pytest.mark.parametrize("size", ["", "gpu"])
def test_every_family_of_the_config_can_be_built_with_its_draft_lengths(size):
    config = smollm2_config.get_config(size)
    small = TransformerConfig(600, 16, 30, 2, d_ff=32, context_length=64, tied_head=True)
    target = LanguageModel.init(small, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(1, 600, 2000).astype(np.int32)
    text = Text(ByteTokenizer(), TokenizedText(tokens, 0), TokenizedText(tokens, 0))
    config.family_settings.eagle3.draft_vocab = 300
    for name, settings in config.family_settings.items():
        family = FAMILIES[name](settings, target, text)
        lengths = {pretrained_distillation.with_draft_length(family.chain, length) for length in (1, 2, 9)}
        found = {chain.draft_length for chain in lengths if chain is not None}
        assert found == {"block": set(), "medusa": {1, 2}, "hydra": {1, 2}}.get(name, {1, 2, 9}), name


def test_the_reduced_vocabulary_is_the_most_frequent_tokens_and_is_not_trained(target):
    settings = tiny("").family_settings.eagle3
    settings.draft_vocab = 4
    text = TokenizedText(np.array([7, 9, 9, 7, 3, 256, 3, 11, 256, 7], np.int32), 0)
    family = FAMILIES["eagle3"](settings, target.model, Text(target.tokenizer, text, text))
    assert family.fixed["draft_to_target"].tolist() == [3, 7, 9, 256]
    trained = family.initial(jax.random.key(0))
    assert "draft_to_target" not in trained
    pretrained_distillation.with_draft_length(family.chain, 2).check_params(family.whole(trained))


def test_corpus_windows_take_the_place_of_a_batch():
    windows = pretrained_distillation.CorpusWindows(np.arange(100, dtype=np.int32))
    batch = windows(None, jax.random.key(0), {"tokens": np.zeros((3, 10), np.int32)})
    assert batch["mask"].all() and batch["mask"].shape == batch["tokens"].shape == (3, 10)
    assert (np.diff(batch["tokens"]) == 1).all() and len(set(batch["tokens"][:, 0])) > 1
    other = dataclasses.replace(windows, tokens=windows.tokens + 1)
    assert windows.description() != other.description()


def changed(**changes):
    config = tiny("nowhere.jsonl")
    for name, value in changes.items():
        *rest, last = name.split("__")
        part = config
        for field in rest:
            part = part[field]
        part[last] = value
    return config


@pytest.mark.parametrize(
    "config, message",
    [
        (changed(model=""), "model is empty; give the path"),
        (changed(model="./no/such.gguf"), "no model at ./no/such.gguf"),
        (changed(family="lookahead"), "family must be one of .*; got 'lookahead'"),
        (changed(answers__drafter="eagle"), "answers.drafter must be none or ngram"),
        (changed(answers__batch=3), "answers.batch 3 must be a multiple"),
        (changed(training__context=99), "training.context must be 1 to training.window 15"),
        (changed(training__corpus_fraction=1.0), "corpus_fraction must be in"),
        (changed(prompts__held_out_count=5), "prompts.held_out_count 5 must be at least 6"),
        (changed(decoding__repeats=4), "decoding.repeats must be at least 5"),
        (changed(answers__max_new_tokens=90), "prompts.max_tokens 16 . 90 new tokens.* context of 96"),
        (changed(), "no file or folder 'nowhere.jsonl'"),
        (changed(prompts__path=""), "reads prompts.path, and that is empty"),
        (changed(prompts__sources=("web",)), "prompts.sources must be some of standard_library, files; got web"),
    ],
)
def test_mistakes_are_named_before_anything_is_computed(config, message, target, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained_distillation.pretrained, "load", lambda path, dtype: target)
    with pytest.raises(ValueError, match=message):
        pretrained_distillation.run(config, tmp_path)


def test_too_few_prompts_are_named(target, prompt_file, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained_distillation.pretrained, "load", lambda path, dtype: target)
    config = tiny(prompt_file)
    config.prompts.max_tokens = 11  # "question 10?" is longer
    with pytest.raises(ValueError, match="10 train prompts of at most 11 tokens are asked for, and there are"):
        pretrained_distillation.run(config, tmp_path)


def test_the_config_knows_two_sizes():
    with pytest.raises(ValueError, match="smollm2.py takes no argument, or gpu; got|or gpu: smollm2.py:gpu; got 'big'"):
        smollm2_config.get_config("big")
