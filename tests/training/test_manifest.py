import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.models.config import RotaryScaling, TransformerConfig
from specjax.training import manifest as manifests

TREE = {"layer": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3, jnp.bfloat16)}, "step": jnp.int32(3)}


def test_flatten_names_leaves_by_path_and_unflatten_puts_them_back():
    flat = manifests.flatten(TREE)
    assert sorted(flat) == ["layer.bias", "layer.kernel", "step"]
    chex.assert_trees_all_equal(manifests.unflatten(TREE, dict(reversed(flat.items()))), TREE)


def test_description_of_a_config_is_json_and_tells_configs_apart():
    config = TransformerConfig(
        vocab_size=7, d_model=8, num_layers=1, num_heads=2, rotary_scaling=RotaryScaling(8, 1, 4, 64)
    )
    described = manifests.describe({"config": config, "list": (1, 2.5, None, True), "dtype": jnp.bfloat16})
    assert json.loads(json.dumps(described)) == described
    assert described["config"]["dtype"] == "float32" and described["dtype"] == "bfloat16"
    assert described["config"]["rotary_scaling"]["factor"] == 8
    assert manifests.describe(config) != manifests.describe(dataclasses.replace(config, qk_norm=True))


def test_what_cannot_be_described_is_named():
    with pytest.raises(ValueError, match="cannot be written into a checkpoint's manifest"):
        manifests.describe({"f": print})


@given(bit=st.integers(0, 6 * 32 - 1))
def test_any_flipped_bit_changes_the_checksum(bit):
    kernel = np.asarray(TREE["layer"]["kernel"]).copy()
    manifest = manifests.build({}, {"kernel": kernel})
    manifests.check_arrays(manifest, {"kernel": kernel}, "checkpoint 1")
    kernel.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="checkpoint 1 is damaged: array kernel"):
        manifests.check_arrays(manifest, {"kernel": kernel}, "checkpoint 1")


@pytest.mark.parametrize(
    "change", [lambda x: x.astype(np.int32).view(np.float32), lambda x: x.reshape(3, 2), lambda x: -x]
)
def test_same_bytes_of_another_shape_or_dtype_do_not_pass(change):
    zero = np.zeros((2, 3), np.float32)
    manifest = manifests.build({}, {"x": np.ones((2, 3), np.float32)})
    with pytest.raises(ValueError):
        manifests.check_arrays(manifest, {"x": change(np.ones((2, 3), np.float32))}, "here")
    manifest = manifests.build({}, {"x": zero})
    with pytest.raises(ValueError):
        manifests.check_arrays(manifest, {"x": zero.view(np.int32)}, "here")


def test_checksum_covers_names_and_bytes():
    same = jax.tree.map(lambda x: x + 0, TREE)
    assert manifests.checksum(TREE) == manifests.checksum(same)
    assert manifests.checksum({"a": TREE["step"]}) != manifests.checksum({"b": TREE["step"]})
    assert manifests.checksum(TREE) != manifests.checksum({**TREE, "step": jnp.int32(4)})


def test_nested_differences_are_named_by_their_path():
    manifest = manifests.build({"a": {"b": [1, 2]}, "c": 1}, {})
    manifests.check_about(manifest, {"a": {"b": (1, 2)}, "c": 1}, "here")
    for about, message in (
        ({"a": {"b": [1, 3]}, "c": 1}, r"a.b was \[1, 2\] when it was saved and is \[1, 3\] now"),
        ({"a": {"b": [1, 2]}}, "c was 1 .* is None now"),
        ({"a": None, "c": 1}, "a was .* is None now"),
    ):
        with pytest.raises(ValueError, match=message):
            manifests.check_about(manifest, about, "here")
