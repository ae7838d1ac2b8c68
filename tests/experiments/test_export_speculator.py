"""From a drafter's folder to the layout that vLLM serves, through the config that README names."""

import json

import jax
import pytest

from configs import export_speculator as export_config
from experiments import export_speculator
from specjax.drafters import BlockDrafter, Eagle, NGram
from specjax.models.eagle_layer import EagleConfig
from specjax.pretrained import load
from specjax.sampling import Sampling
from specjax.training.saved_drafter import save_drafter
from tests.experiments.tiny_pretrained import write_folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("target"), num_layers=3)


def drafters(target):
    return {
        "eagle3": Eagle(EagleConfig(target, 3, (1, 2, 3), feature_scale=(2.0, 3.0, 0.5)), 2),
        "block": BlockDrafter(target, 1, (1, 3), 2, qk_norm=True),
    }


def config_for(target_folder, drafter, **fields):
    config = export_config.get_config()
    fields = dict(model=str(target_folder), drafter=str(drafter), target_name="some/target") | fields
    with config.unlocked():
        config.update(fields)
    return config


@pytest.mark.parametrize("name", ["eagle3", "block"])
def test_what_is_exported_drafts_the_same(target_folder, tmp_path, name):
    target = load(target_folder)
    drafter = drafters(target.model.config)[name]
    params = (
        drafter.init_params(jax.random.key(1))
        if name == "block"
        else drafter.model.init_params(jax.random.key(1), target.model.params)
    )
    save_drafter(tmp_path / "drafter", drafter, params)
    config = config_for(target_folder, tmp_path / "drafter", mask_token_id=3 if name == "block" else None)
    report = export_speculator.run(config, tmp_path)
    assert [check["passed"] for check in report["results"]["checks"]] == [True, True]
    assert json.loads((tmp_path / "report.json").read_text())["results"]["family"] == type(drafter).__name__
    options = dict(max_new_tokens=12, sampling=Sampling.of(0))
    ours, theirs = (
        target.generate(["def f(x):"], drafter=one, **options)[0]
        for one in (tmp_path / "drafter", tmp_path / "speculator")
    )
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.counts.drafted[0] == theirs.counts.drafted[0] > 0


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(model=""), "model is empty; give --config.model=PATH"),
        (dict(target_name=""), "target_name is empty; give --config.target_name=HuggingFaceTB/SmolLM2-135M-Instruct"),
        (dict(drafter="nowhere"), "nowhere"),
        (dict(drafter="ngram"), "NGram has no speculators layout"),
    ],
)
def test_what_can_be_wrong_is_one_line(target_folder, tmp_path, monkeypatch, fields, message):
    monkeypatch.chdir(tmp_path)
    save_drafter(tmp_path / "ngram", NGram(3), None)
    with pytest.raises(ValueError, match=message) as error:
        export_speculator.run(config_for(target_folder, **{"drafter": "ngram"} | fields), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run" / "speculator").exists()
