"""A model and data small enough to train for a few steps in any test of the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.data.pipeline import PipelineConfig, training_batches
from specjax.training import losses
from specjax.training.checkpoints import Checkpoints
from specjax.training.fit import Schedule, fit
from specjax.training.state import OptimizerConfig

VOCAB = 7


@dataclasses.dataclass(frozen=True)
class Bigram:
    """Next token from this token; the noise makes the loss depend on the step's key."""

    noise: float = 0.1

    def loss(self, params, batch, key, frozen=None):
        tokens = jnp.asarray(batch["tokens"])
        rows = jnp.take(params["table"], tokens[:, :-1], axis=0) + params["bias"]
        rows = rows + self.noise * jax.random.normal(key, rows.shape, rows.dtype)
        mask = jnp.asarray(batch["mask"])[:, 1:] if "mask" in batch else jnp.ones(tokens[:, 1:].shape, bool)
        loss = losses.masked_mean(losses.cross_entropy(losses.log_law(rows), tokens[:, 1:]), mask)
        return loss, {"cross_entropy": loss, "positions": jnp.sum(mask)}

    def flops(self, context):
        return 6 * VOCAB * VOCAB


OPTIMIZER = OptimizerConfig(learning_rate=0.1, total_steps=12, warmup_steps=3, ema_decay=0.9)


def initial_params(seed=0):
    return {"table": jax.random.normal(jax.random.key(seed), (VOCAB, VOCAB)), "bias": jnp.zeros((VOCAB,))}


def corpus(seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, 500).astype(np.int32)


def batches(seed=0):
    return training_batches(corpus(seed), PipelineConfig(window=8, batch_size=4))


def checkpoints(directory, **options):
    return Checkpoints(directory, **{"pipeline": "abc", **options})


def train(directory=None, steps=12, optimizer=OPTIMIZER, **options):
    """Fits the bigram model; with a directory, saves there every 2 steps and goes on from what is there."""
    saved = None if directory is None else checkpoints(directory)
    try:
        schedule = Schedule(steps, log_every=1, save_every=2)
        return fit(
            **{
                "objective": Bigram(),
                "params": initial_params(),
                "batches": batches(),
                "optimizer": optimizer,
                "schedule": schedule,
                "checkpoints": saved,
                **options,
            }
        )
    finally:
        if saved is not None:
            saved.close()
