"""Drafters from folders: saved ones, and second models, which must mean the same by every token."""

import json

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import specjax
from experiments.generation_settings import make_drafter
from specjax.drafters import BlockDrafter, Eagle, EagleSuffix, Empty, Independent, Medusa, NGram
from specjax.models.eagle_layer import EagleConfig
from specjax.pretrained import independent_drafter, saved_drafter
from specjax.pretrained.drafters import with_params
from specjax.sampling import Sampling
from specjax.topology import Topology
from specjax.training.saved_drafter import save_drafter
from specjax.weights.speculators import save_speculator
from tests.pretrained.tiny_model import write_model, write_tokenizer

GREEDY = Sampling.of(0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_model(folder, seed=1, num_layers=1)
    return folder


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "eagle"
    eagle = EagleConfig(model.model.config, 1, d_ff=32)
    save_drafter(folder, Eagle(eagle, 3), eagle.init_params(jax.random.key(2), model.model.params))
    return folder


def test_a_second_model_drafts_the_targets_text(model, small):
    drafter = independent_drafter(small, model, draft_length=2)
    assert isinstance(drafter[0], Independent) and drafter[0].draft_length == 2
    options = dict(max_new_tokens=16, sampling=GREEDY)
    plain, drafted = (model.generate(["the cat"], drafter=d, **options)[0] for d in (None, drafter))
    assert plain.tokens.tolist() == drafted.tokens.tolist()
    assert drafted.counts.drafted[0] > 0 == plain.counts.drafted[0]


@pytest.mark.parametrize("paddings", [(0, 5), (7, 0)], ids=["target", "drafter"])
def test_a_second_model_whose_vocabulary_is_padded_otherwise(tmp_path, paddings):
    """As Qwen2.5's small models draft for its large ones."""
    write_model(tmp_path / "small", seed=1, num_layers=1, padding=paddings[0])
    write_model(tmp_path / "large", padding=paddings[1])
    target = specjax.load(tmp_path / "large")
    pair = independent_drafter(tmp_path / "small", target, draft_length=2)
    assert pair[0].vocab_size == target.model.config.vocab_size != pair[0].model.vocab_size
    options = dict(max_new_tokens=16, sampling=GREEDY)
    plain, drafted = (target.generate(["the cat"], drafter=d, **options)[0] for d in (None, pair))
    assert plain.tokens.tolist() == drafted.tokens.tolist() and drafted.counts.drafted[0] > 0
    sampled = target.generate(["the cat"], drafter=pair, max_new_tokens=16)[0]
    assert np.isfinite(sampled.logprobs).all() and sampled.counts.drafted[0] > 0


def test_a_saved_drafter_is_read_from_its_folder(model, saved):
    plain, drafted = (
        model.generate(["the cat"], max_new_tokens=12, sampling=GREEDY, drafter=drafter)[0] for drafter in (None, saved)
    )
    assert plain.tokens.tolist() == drafted.tokens.tolist() and drafted.counts.drafted[0] > 0
    assert saved_drafter(saved, model.model)[0].draft_length == 3
    assert saved_drafter(saved, model.model, draft_length=5)[0].draft_length == 5


def test_a_saved_chain_that_also_copies(model, saved):
    """As generate, spec_bench and compare_transformers build it."""
    settings = ConfigDict(dict(kind="eagle_suffix", path=str(saved), draft_length=2, max_match=3))
    drafter, params = make_drafter(settings, model)
    assert isinstance(drafter, EagleSuffix) and (drafter.steps, drafter.draft_length) == (2, 10)
    text = "the cat sat on the mat and ate the rat; the cat sat"
    plain, copied = (
        model.generate([text], max_new_tokens=24, sampling=GREEDY, drafter=one)[0] for one in (None, (drafter, params))
    )
    assert plain.tokens.tolist() == copied.tokens.tolist()
    assert copied.counts.drafted[0] > 2 * copied.counts.rounds[0]  # more than the network drafts alone


def test_a_served_head_whose_file_holds_the_targets_table_is_read(model, tmp_path):
    """As another program writes it: the table is compared with the target's own."""
    block = BlockDrafter(model.model.config, 1, (1,), 2, qk_norm=True)
    params = block.init_params(jax.random.key(3))
    save_speculator(tmp_path, block, params, "a/target", target_params=model.model.params, mask_token_id=0)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["specjax"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, drafted = (
        model.generate(["the cat"], max_new_tokens=8, sampling=GREEDY, drafter=one)[0] for one in (None, tmp_path)
    )
    assert plain.tokens.tolist() == drafted.tokens.tolist() and drafted.counts.drafted[0] > 0
    other = model.model.replace(params=jax.tree.map(lambda x: x + 1, model.model.params))
    with pytest.raises(ValueError, match="embed_tokens.weight"):
        saved_drafter(tmp_path, other)


def test_heads_cannot_draft_deeper_than_they_are(model, tmp_path):
    medusa = Medusa(model.model.config, Topology.chain(2), num_heads=2)
    save_drafter(tmp_path / "medusa", medusa, medusa.init_params(jax.random.key(0), model.model.params))
    assert saved_drafter(tmp_path / "medusa", model.model, draft_length=2)[0] == medusa
    with pytest.raises(ValueError, match="always drafts 2 deep"):
        saved_drafter(tmp_path / "medusa", model.model, draft_length=3)


def test_what_generate_takes_for_a_drafter(model):
    assert with_params(None, model.model) == (Empty(), None)
    assert with_params(NGram(3), model.model) == (NGram(3), None)
    pair = (NGram(3), None)
    assert with_params(pair, model.model) is pair


@pytest.mark.parametrize("change", ["fewer merges", "one more special token", "other bytes"])
def test_a_drafter_with_another_tokenizer_is_refused(model, tmp_path, change):
    write_model(tmp_path, seed=1, num_layers=1)
    if change == "fewer merges":
        write_model(tmp_path, merges=39)
    elif change == "one more special token":
        write_model(tmp_path, merges=39, bos=True)  # as many tokens, shifted by one
    else:
        tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="cannot draft for tiny-llama: it has another tokenizer") as error:
        independent_drafter(tmp_path, model, 2)
    assert "\n" not in str(error.value)


def test_the_same_tokenizer_in_other_words_is_accepted(model, small):
    """A fingerprint is of a file; what counts is what each id stands for."""
    path = small / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    about = json.loads((small / "tokenizer_config.json").read_text())
    (small / "tokenizer_config.json").write_text(json.dumps(about | {"model_max_length": 77}))
    independent_drafter(small, model, 2)


def test_a_drafter_of_another_size_of_vocabulary_is_refused_before_compiling(model, small):
    drafter, params = independent_drafter(small, model, 2)
    other = Independent(specjax.models.TransformerConfig(17, 8, 1, 2), 2)
    with pytest.raises(ValueError, match="17 tokens"):
        model.generate(["the"], max_new_tokens=4, drafter=(other, params))
    assert np.isfinite(model.generate(["the"], max_new_tokens=4, drafter=(drafter, params))[0].logprobs).all()


def test_a_folder_may_be_given_with_a_tilde(model, saved, monkeypatch):
    monkeypatch.setenv("HOME", str(saved.parent))
    assert saved_drafter("~/eagle", model.model)[0] == with_params("~/eagle", model.model)[0]
    assert saved_drafter(saved, model.model)[0] == saved_drafter("~/eagle", model.model)[0]
    with pytest.raises(ValueError, match="~nosuchuser/x begins with a user that this machine does not have"):
        with_params("~nosuchuser/x", model.model)


def test_what_is_no_drafter_is_named(model, tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*nothing"):
        saved_drafter(tmp_path / "nothing", model.model)
    with pytest.raises(ValueError) as error:
        saved_drafter(tmp_path, model.model)
    assert "\n" not in str(error.value)


def test_tokenizers_of_the_fixture_differ_as_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert write_tokenizer(tmp_path / "a", bos=True, merges=39) == write_tokenizer(tmp_path / "b")
