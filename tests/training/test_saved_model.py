import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import RotaryScaling, TransformerConfig
from specjax.models.transformer import LanguageModel
from specjax.training.saved_model import load_model, save_model

CONFIG = TransformerConfig(
    vocab_size=11, d_model=8, num_layers=1, num_heads=2, d_ff=16, rotary_scaling=RotaryScaling(8.0, 1.0, 4.0, 64)
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_keeps_config_dtypes_and_every_bit(dtype, tmp_path):
    model = LanguageModel.init(dataclasses.replace(CONFIG, param_dtype=dtype, dtype=dtype), jax.random.key(0))
    save_model(tmp_path / "model", model)
    loaded = load_model(tmp_path / "model")
    assert loaded.config == model.config
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, loaded.params), jax.tree.map(np.asarray, model.params))
    chex.assert_trees_all_equal_dtypes(loaded.params, model.params)
    loaded.check("drafter")
    tokens = jnp.arange(5)[None]
    np.testing.assert_array_equal(loaded(tokens)[0], model(tokens)[0])


def test_saving_again_replaces_the_model_and_leaves_nothing_else(tmp_path):
    for seed in (0, 1):
        model = LanguageModel.init(CONFIG, jax.random.key(seed))
        save_model(tmp_path / "model", model)
    chex.assert_trees_all_equal(load_model(tmp_path / "model").params, model.params)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Orbax abandons its other reads when one fails; their futures complain about it later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_model_and_damage_are_named(tmp_path):
    with pytest.raises(ValueError, match="no saved model in .*nowhere"):
        load_model(tmp_path / "nowhere")
    model = LanguageModel.init(CONFIG, jax.random.key(0))
    save_model(tmp_path / "model", model)
    noticed = set()
    for path in [p for p in (tmp_path / "model").rglob("*") if p.is_file() and p.stat().st_size]:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        path.write_bytes(flipped)
        try:
            loaded = load_model(tmp_path / "model")
        except ValueError as error:
            assert "is damaged" in str(error) and "\n" not in str(error)
            noticed.add(path.relative_to(tmp_path / "model").parts[0])
        else:  # bytes that nobody reads
            chex.assert_trees_all_equal(jax.tree.map(np.asarray, loaded.params), jax.tree.map(np.asarray, model.params))
        path.write_bytes(content)
    assert noticed >= {"state", "manifest"}


def test_another_folder_is_not_called_damaged(tmp_path):
    """Such as that of the stage which the model lies in: nobody should be told to delete it."""
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="there is no saved model in .*, which holds checkpoints; give the folder"):
        load_model(tmp_path)
