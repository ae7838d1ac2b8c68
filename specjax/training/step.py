"""One training step: gradient, accumulated over microbatches if asked for, and the optimizer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.training.objectives import Batch, Metrics, Objective
from specjax.training.state import OptimizerConfig, TrainState, apply_gradients

# What the key of a step is for.
LOSS, PREPARE = 0, 1


def step_key(state: TrainState, role: int) -> jax.Array:
    """The key of the step that comes next, for one role; a function of the run's key and the step alone."""
    return jax.random.fold_in(jax.random.fold_in(state.key, state.step), role)


@functools.partial(jax.jit, static_argnames=("objective", "optimizer"), donate_argnames="state")
def train_step(
    state: TrainState, batch: Batch, frozen: Any, *, objective: Objective, optimizer: OptimizerConfig
) -> tuple[TrainState, Metrics]:
    """(next state, metrics); the old state's buffers are reused.

    Metrics are the objective's, with "loss" and "gradient_norm" (before clipping).

    Raises:
        ValueError: rows that do not divide into `optimizer.accumulation` microbatches.
    """
    (loss, metrics), gradients = gradient(
        objective, state.params, batch, step_key(state, LOSS), frozen, optimizer.accumulation
    )
    norm = optax.tree.norm(gradients)
    return apply_gradients(optimizer, state, gradients, norm), {**metrics, "loss": loss, "gradient_norm": norm}


def gradient(objective: Objective, params: Any, batch: Batch, key: jax.Array, frozen: Any, accumulation: int = 1):
    """((loss, metrics), gradient) of the batch's mean loss, computed `accumulation` microbatches at a time.

    Microbatches are weighted by the positions they count, so a ragged mask gives the big batch's gradient too.
    """
    value_and_grad = jax.value_and_grad(objective.loss, has_aux=True)
    if accumulation == 1:
        return value_and_grad(params, batch, key, frozen)
    rows = batch["tokens"].shape[0]
    if rows % accumulation:
        raise ValueError(f"a batch of {rows} rows does not divide into {accumulation} microbatches; change one of them")
    parts = jax.tree.map(lambda x: x.reshape(accumulation, rows // accumulation, *x.shape[1:]), batch)

    def one(part, part_key):
        result = value_and_grad(params, part, part_key, frozen)
        weight = result[0][1]["positions"].astype(jnp.float32)
        wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)) * weight  # noqa: E731
        return weight, jax.tree.map(wide, result)

    def add(total, part_and_key):
        return jax.tree.map(jnp.add, total, one(*part_and_key)), None

    xs = (parts, jax.random.split(key, accumulation))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *jax.tree.map(lambda x: x[0], xs)))
    (weight, summed), _ = jax.lax.scan(add, zero, xs)
    (loss, metrics), gradients = jax.tree.map(lambda x: x / jnp.maximum(weight, 1), summed)
    gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)
    return (loss, {**metrics, "positions": weight}), gradients
