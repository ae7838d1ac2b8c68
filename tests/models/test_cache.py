"""The one function that writes, and rollback by length."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specjax.models import TransformerConfig, init_cache
from specjax.models.cache import write

WRITE = jax.jit(write)


@given(st.lists(st.integers(0, 8), min_size=3, max_size=3), st.sampled_from([1, 2, 4]))
def test_a_write_changes_its_slots_and_no_committed_one(starts, width):
    rng = np.random.default_rng(0)
    buffer, new = rng.normal(size=(3, 2, 13, 4)).astype("f"), rng.normal(size=(3, 2, width, 4)).astype("f")
    found = np.asarray(WRITE(buffer, new, jnp.asarray(starts, jnp.int32)))
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(found[row, :, start : start + width], new[row])
        np.testing.assert_array_equal(found[row, :, :start], buffer[row, :, :start])
        # Width one also writes the free slot behind it; anything further is as it was.
        behind = start + max(width, 2)
        np.testing.assert_array_equal(found[row, :, behind:], buffer[row, :, behind:])


def test_the_last_slot_can_be_written_alone():
    config = TransformerConfig(vocab_size=5, d_model=8, num_layers=3, num_heads=4, num_kv_heads=2, dtype="bfloat16")
    cache = init_cache(config, 2, 6)
    assert [k.shape for k in cache.keys] == [v.shape for v in cache.values] == [(2, 2, 7, 2)] * 3
    assert cache.num_slots == 7 and cache.keys[0].dtype == jnp.bfloat16
    new = jnp.arange(1, 9.0).reshape(2, 2, 1, 2)
    found = write(cache.keys[0], new, jnp.array([5, 0]))
    np.testing.assert_array_equal(found[0, :, 5], new[0, :, 0])
    assert not found[0, :, :5].any()


def test_rollback_changes_the_length_alone():
    cache = init_cache(TransformerConfig(vocab_size=5, d_model=8, num_layers=1, num_heads=2), 2, 6)
    back = cache.rollback(jnp.array([3, 1]))
    assert back.keys is cache.keys and back.values is cache.values and back.length.tolist() == [3, 1]


@given(st.data())
def test_compaction_brings_a_path_together_and_leaves_what_was_committed(data):
    """Kept nodes rise along a path, so no slot is read after it was overwritten."""
    rng = np.random.default_rng(1)
    cache = init_cache(TransformerConfig(vocab_size=5, d_model=8, num_layers=2, num_heads=2), 2, 14)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype("f")), cache.replace(length=None))
    base = [data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))]
    rises = st.lists(st.integers(1, 8), min_size=3, max_size=3, unique=True).map(sorted)
    kept = [data.draw(rises), data.draw(rises)]
    cache = cache.replace(length=jnp.array([9, 9]))
    found = cache.compact(jnp.array(base), jnp.array(kept))
    for before, after in zip(cache.keys + cache.values, found.keys + found.values, strict=True):
        for row in range(2):
            np.testing.assert_array_equal(after[row, :, : base[row] + 1], before[row, :, : base[row] + 1])
            for place, node in enumerate(kept[row]):
                np.testing.assert_array_equal(after[row, :, base[row] + 1 + place], before[row, :, base[row] + node])
    assert found.length.tolist() == [9, 9]
