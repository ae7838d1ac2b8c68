"""The table of all families and the replay of recorded rounds, small: everything runs, is reported, and is reused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import replay as replay_config
from configs import variants as variants_config
from experiments import replay, variants
from experiments.acceptance import along_corpus
from experiments.families import FAMILIES
from experiments.trained_pair import prepare_text, train_drafter, train_target
from experiments.training_stage import Text
from specjax.data.pipeline import TokenizedText
from specjax.data.tokenizer import ByteTokenizer
from specjax.decoding.checks import check_pair
from specjax.models import LanguageModel, TransformerConfig
from specjax.report.results import ROW_KEYS
from specjax.report.stages import Stages
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS
from tests.experiments.test_distillation import tiny as tiny_quickstart


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 8)
    return folder


@pytest.fixture(scope="module")
def lent(text, tmp_path_factory):
    """The trained part of a tiny main job, which both experiments borrow."""
    workdir = tmp_path_factory.mktemp("lent")
    config = tiny_quickstart(text)
    config.target.num_layers = 3
    config.drafters = ("distilled",)
    stages = Stages(workdir)
    text = prepare_text(config, stages)
    target, _ = train_target(config, stages, text)
    train_drafter(config, stages, text, target, "distilled")
    return config, workdir


def tiny_variants(lent):
    main, workdir = lent
    config = variants_config.get_config()
    config.reuse = str(workdir)
    for name in ("corpus", "tokenizer", "target", "target_training", "drafter_training"):
        config[name] = main[name]
    config.families = ("block",)
    config.family_settings.block.update(draft_length=2, feature_layers=(1, 3))
    config.quality.update(prefixes=8, prefix_length=12, depths=2, texts=2, text_length=12)
    config.decoding.update(prompt_length=8, new_tokens=8, timed_prompts=2, batches=(1, 2), turns=2)
    return config


@pytest.mark.slow
def test_the_table_of_families(lent, tmp_path, capsys):
    config = tiny_variants(lent)
    report = variants.run(config, tmp_path)
    assert "target: finished in" in capsys.readouterr().out  # the lent target was not trained again
    assert json.loads((tmp_path / "report.json").read_text()) == report
    rows = report["results"]["rows"]
    assert all(row.keys() >= set(ROW_KEYS) for row in rows)
    assert {row["drafter"] for row in rows} == {"none", "block"}
    assert {row["batch"] for row in rows} == {1, 2} and all(row["lossless"] for row in rows)
    for row in rows:
        if row["drafter"] != "none":
            assert (row["predicted_speedup"] is None) == (row["batch"] > 1)
            assert row["drafter_bytes"] >= 4 * row["drafter_parameters"]
    exact = report["results"]["checks"][0]
    assert "target-only text" in exact["name"] and exact["passed"], exact
    assert {row["drafter"] for row in report["results"]["quality"]} == set(config.families)
    trained = [row["model"] for row in report["results"]["training"]]
    assert trained == ["target", "block"]
    variants.run(config, tmp_path)
    out = capsys.readouterr().out
    assert all(f"{stage}: finished earlier, reused" in out for stage in ("drafter_block", "decoding_block"))


def test_an_unknown_family_is_named(tmp_path):
    config = variants_config.get_config()
    config.families = ("medusa", "medussa")
    with pytest.raises(ValueError, match=r"some of independent, .*; got medussa"):
        variants.run(config, tmp_path)


@pytest.fixture(scope="module")
def small():
    """A target of the shape that the config's settings are written for, and text to index and to measure on."""
    config = TransformerConfig(64, 16, 3, 2, d_ff=32, context_length=256)
    rng = np.random.default_rng(0)
    part = TokenizedText(rng.integers(1, 64, 2000).astype(np.int32), 4000)
    return LanguageModel.init(config, jax.random.key(0)), Text(ByteTokenizer(), part, part)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_config_can_be_built_and_decoded_in_all_its_forms(small, name):
    config = variants_config.get_config()
    assert set(config.families) == set(FAMILIES) == set(config.family_settings)
    target, text = small
    family = FAMILIES[name](config.family_settings[name], target, text)
    params = family.initial(jax.random.key(1))
    one = variants.Trained(family, params, family.forms(params), {})
    settings = variants.settings_of(name, one, (1, 8))
    assert {setting.batch for setting in settings} == {1, 8}
    assert {setting.temperature for setting in settings} == {0.0, 1.0}
    for setting in settings:  # each passes the loop's own checks
        law = Sampling.of(setting.temperature)
        check_pair(target, setting.drafter, setting.params, VERIFIERS[setting.verifier](), law, law)
    if family.objective is not None:
        tokens = jnp.asarray(text.train.tokens[:128].reshape(2, 64))
        shapes = jax.eval_shape(family.objective.loss, params, {"tokens": tokens}, jax.random.key(2), target.params)
        assert shapes[0].shape == () and "positions" in shapes[1]


@pytest.mark.slow
def test_a_reduced_vocabulary_is_trained_and_saved_with_its_ids(small, tmp_path):
    config = variants_config.get_config()
    config.family_settings.eagle3.draft_vocab = 8
    config.drafter_training.update(
        steps=2, batch_size=2, window=24, log_every=1, eval_every=2, save_every=2, eval_prompts=2, eval_new_tokens=4
    )
    config.drafter_training.optimizer.warmup_steps = 1
    config.decoding.prompt_length = 8
    target, text = small
    stages = Stages(tmp_path)
    stages.run("target", {}, lambda folder: {})
    trained = variants.train_family(config, stages, text, target, "eagle3")
    assert trained.params["draft_to_target"].shape == (8,)


@pytest.mark.parametrize("name", ["independent", "medusa", "eagle", "eagle3", "block", "ngram"])
def test_overlap_along_a_text(small, name):
    """Untrained drafters: every depth has a number in (0, 1), the same one at all depths for a language model."""
    config = variants_config.get_config()
    config.quality.update(texts=2, text_length=24, depths=3)
    target, text = small
    family = FAMILIES[name](config.family_settings[name], target, text)
    values = list(along_corpus(config, text, target, family, family.initial(jax.random.key(1))).values())
    assert len(values) == 3
    if name == "ngram":
        assert values == [None] * 3
    else:
        assert all(0 < value < 1 for value in values) and (len(set(values)) == 1) == (name == "independent")


def test_what_the_papers_lead_one_to_expect():
    config = variants_config.get_config()
    row = lambda drafter, first, along: {  # noqa: E731
        "drafter": drafter, "overlap_1": first, **{f"along_text_{d}": v for d, v in enumerate(along, start=1)}
    }  # fmt: skip
    quality = [row("medusa", 0.5, [0.5, 0.4, 0.3, 0.2]), row("eagle", 0.8, [0.8, 0.7, 0.3, 0.1]),
               row("eagle3", 0.7, [0.7, 0.7, 0.6, 0.6]), row("ngram", 0.1, [None] * 4)]  # fmt: skip
    measured = (("none", 1, 1.0), ("eagle", 1, 1.2), ("eagle, tree", 1, 1.3), ("medusa", 8, 2.0))
    rows = [{"family": name.split(",")[0], "drafter": name, "batch": batch, "speedup": speedup}
            for name, batch, speedup in measured]  # fmt: skip
    found = {check["name"]: check for check in variants.expectations(config, rows, quality)}
    assert found["families faster than target-only at batch 1"]["value"] == 1
    passed = [found[f"along text {d}: eagle above medusa"]["passed"] for d in (2, 3, 4)]
    assert passed == [True, True, False]  # 0 is not below the limit of 0
    assert found["along the text, eagle3's overlap falls less from depth 1 to 4 than eagle's"]["passed"]
    assert len(variants.expectations(config, [], quality)) == len(found) - 1


@pytest.mark.slow
def test_rounds_are_recorded_once_and_scored(lent, tmp_path, capsys):
    config = replay_config.get_config()
    config.update(models=str(lent[1]), prompts=3, prompt_length=8, new_tokens=12, draft_length=3, tree_shape=(3, 1))
    config.draft_lengths, config.children = (1, 3), (1, 3)
    report = replay.run(config, tmp_path)
    chains, trees = report["results"]["chains"], report["results"]["trees"]
    assert len(chains) == 3 * 2 and len(trees) == 3 * 2
    by = {(row["verifier"], row["draft_length"]): row["expected_tokens"] for row in chains}
    assert by["block", 1] == pytest.approx(by["token", 1], abs=1e-5)  # one token: the same rule
    assert 1 <= by["token", 1] <= by["token", 3] <= 4 and 1 <= by["block", 3] <= 4
    one = {row["verifier"]: row["expected_tokens"] for row in trees if row["children"] == 1}
    assert one["multi_round"] == pytest.approx(one["k_sequential"], abs=1e-5)  # one child: the token rule
    assert all(check["passed"] for check in report["results"]["checks"])
    replay.run(config, tmp_path)
    assert "chains: finished earlier, reused" in capsys.readouterr().out
    config.models = "nowhere"
    with pytest.raises(ValueError, match="holds no finished stage 'text'; train first"):
        replay.run(config, tmp_path / "other")
