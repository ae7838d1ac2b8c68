"""A drafter comes back with its shape, its feature layers and its target; another target is refused."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import DRAFTERS, Medusa
from specjax.training.saved_drafter import load_drafter, save_drafter
from tests.drafters.families import FAMILIES, make_target


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_of_every_family(name, tmp_path):
    with jax.enable_x64(True):
        drafter, params = FAMILIES[name](make_target(11))
        save_drafter(tmp_path / "drafter", drafter, params)
        again, loaded = load_drafter(tmp_path / "drafter")
        assert again == drafter and hash(again) == hash(drafter) and type(again) in DRAFTERS.values()
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, loaded), jax.tree.map(np.asarray, params))


@pytest.mark.parametrize("name", ["ngram", "suffix", "suffix_with_corpus", "lookahead"])
def test_what_has_no_network_comes_back_without_float64_too(name, tmp_path):
    with jax.enable_x64(True):
        drafter, params = FAMILIES[name](make_target(11))
    save_drafter(tmp_path / "drafter", drafter, params)
    again, loaded = load_drafter(tmp_path / "drafter")
    assert again == drafter
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, loaded), jax.tree.map(np.asarray, params))


def test_another_target_is_refused(tmp_path):
    with jax.enable_x64(True):
        target = make_target(11)
        drafter, params = FAMILIES["medusa"](target)
        save_drafter(tmp_path / "drafter", drafter, params)
        assert load_drafter(tmp_path / "drafter", target.config)[0].feature_layers == drafter.feature_layers
        with pytest.raises(ValueError, match="features of another target \\(its num_layers, rotary_base differ\\)"):
            load_drafter(tmp_path / "drafter", dataclasses.replace(target.config, num_layers=2, rotary_base=5.0))


def test_what_cannot_be_saved(tmp_path):
    with jax.enable_x64(True):
        drafter, params = FAMILIES["medusa"](make_target(11))
        with pytest.raises(ValueError, match="lack"):
            save_drafter(tmp_path / "drafter", drafter, {})

        @dataclasses.dataclass(frozen=True)
        class Mine(Medusa):
            pass

        with pytest.raises(ValueError, match="Mine is not listed in specjax.drafters.DRAFTERS"):
            save_drafter(tmp_path / "drafter", Mine(drafter.target), jnp.zeros(3))
        assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("name", ["medusa", "eagle_reduced", "block", "early_exit"])
def test_a_target_in_another_dtype_gets_a_drafter_in_that_dtype(name, tmp_path):
    with jax.enable_x64(True):
        target = make_target(11)
        drafter, params = FAMILIES[name](target)
        save_drafter(tmp_path / "drafter", drafter, params)
        half = dataclasses.replace(target.config, dtype="bfloat16", param_dtype="bfloat16")
        cast, cast_params = load_drafter(tmp_path / "drafter", half)
        assert cast.target == half and cast.topology == drafter.topology
        cast.check_params(cast_params)
        for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(cast_params), strict=True):
            expected = jnp.asarray(before).astype(half.dtype) if jnp.issubdtype(before.dtype, jnp.floating) else before
            chex.assert_trees_all_equal(after, expected)
