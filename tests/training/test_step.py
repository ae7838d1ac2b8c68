import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.training.state import OptimizerConfig, create
from specjax.training.step import PREPARE, gradient, step_key, train_step
from tests.training import bigram


def batch(rows=8, ragged=True):
    rng = np.random.default_rng(0)
    mask = rng.random((rows, 9)) < (0.4 if ragged else 2)
    mask[1] = not ragged  # a whole row without targets
    return {"tokens": rng.integers(0, bigram.VOCAB, (rows, 9)).astype(np.int32), "mask": mask}


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_microbatches_give_the_gradient_of_the_whole_batch(accumulation):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), bigram.initial_params())
        compute = jax.jit(functools.partial(gradient, bigram.Bigram(noise=0.0)), static_argnames="accumulation")
        whole = compute(params, batch(), jax.random.key(0), None)
        parts = compute(params, batch(), jax.random.key(0), None, accumulation=accumulation)
        assert float(whole[0][1]["positions"]) == batch()["mask"][:, 1:].sum()
        chex.assert_trees_all_close(parts, whole, rtol=1e-12)
        chex.assert_trees_all_equal_dtypes(parts[1], params)


def test_microbatches_without_any_position_give_zeros():
    empty = {**batch(), "mask": np.zeros((8, 9), bool)}
    (loss, _), gradients = gradient(bigram.Bigram(), bigram.initial_params(), empty, jax.random.key(0), None, 4)
    assert loss == 0
    assert all(not np.any(g) for g in jax.tree.leaves(gradients))


def test_microbatches_have_their_own_noise():
    params, same = bigram.initial_params(), {"tokens": np.tile(batch()["tokens"][:1], (2, 1))}
    once = gradient(bigram.Bigram(), params, same, jax.random.key(0), None, 2)[0][0]
    keys = jax.random.split(jax.random.key(0), 2)
    losses = [bigram.Bigram().loss(params, {"tokens": same["tokens"][:1]}, key)[0] for key in keys]
    assert losses[0] != losses[1]
    assert once == pytest.approx(np.mean(losses), rel=1e-6)


def test_rows_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="8 rows.*3 microbatches"):
        gradient(bigram.Bigram(), bigram.initial_params(), batch(), jax.random.key(0), None, 3)


def test_step_reuses_the_buffers_of_its_state_and_reports_the_norm_before_clipping():
    optimizer = OptimizerConfig(clip_norm=1e-3, ema_decay=0.9)
    params = bigram.initial_params()
    state = create(optimizer, params, jax.random.key(0))
    _, gradients = gradient(bigram.Bigram(), params, batch(), step_key(state, 0), None)
    old = state.params["table"]
    new, metrics = train_step(state, batch(), None, objective=bigram.Bigram(), optimizer=optimizer)
    assert old.is_deleted() and not params["table"].is_deleted()
    assert metrics["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-5)
    assert metrics["gradient_norm"] > 10 * optimizer.clip_norm
    assert int(new.step) == 1


def test_keys_differ_by_step_and_role():
    state = create(OptimizerConfig(), bigram.initial_params(), jax.random.key(0))
    keys = [
        tuple(np.asarray(jax.random.key_data(step_key(state.replace(step=jnp.int32(step)), role))))
        for step in range(4)
        for role in (0, PREPARE)
    ]
    assert len(set(keys)) == 8
