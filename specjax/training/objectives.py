"""What is minimised: pure `loss(params, batch, key, frozen) -> (loss, metrics)`, one frozen dataclass per objective.

A batch is a dict with

    tokens  [B, T + 1]  the model reads the first T and predicts the last T
    mask    [B, T + 1]  optional: which tokens count as targets; it sits on the token itself, so it shifts with it

`frozen` is whatever is read but not trained (a target's parameters); it is an argument, not a closure, so that it is
not baked into the compiled step. Metrics are means over the counted positions, with their number under "positions",
so that microbatches can be averaged exactly.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer
from specjax.sampling import first_max
from specjax.training import flops, losses

Batch = dict[str, Array | np.ndarray]
Metrics = dict[str, Array]


@runtime_checkable
class Objective(Protocol):
    """What `fit` minimises: a frozen, hashable dataclass."""

    def loss(self, params: Any, batch: Batch, key: Key[Array, ""], frozen: Any = None) -> tuple[Array, Metrics]:
        """Mean loss over the counted positions, and metrics: their means, and "positions", how many there are."""

    def flops(self, context: int) -> int:
        """Model FLOPs per trained token, for texts of `context` tokens."""


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross entropy of the next token.

    Metrics: cross_entropy (nats per token), accuracy (of the argmax), positions.
    """

    config: TransformerConfig

    def loss(self, params, batch, key, frozen=None):
        inputs, labels, mask = shifted(batch)
        log_q = losses.log_law(_forward(self.config, params, inputs, key))
        loss = losses.masked_mean(losses.cross_entropy(log_q, labels), mask)
        hits = first_max(jax.lax.stop_gradient(log_q)) == labels
        return loss, {
            "cross_entropy": loss,
            "accuracy": losses.masked_mean(hits, mask),
            "positions": jnp.sum(mask),
        }

    def flops(self, context):
        return flops.training_flops(self.config, context)


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Brings the drafter's law to the target's, on whatever texts the batches hold.

    The target runs inside the same step, without dropout and without gradient; `frozen` is its parameters.

    Attributes:
        drafter, target: the two models; same vocabulary.
        divergence: a name in `losses.DIVERGENCES`.
        beta: of jensen_shannon.
        target_temperature, drafter_temperature: of the two laws that are compared; the metrics are of the same laws.

    Metrics: divergence, overlap Σ min(p, q), agreement (share of positions with the same argmax), cross_entropy (nats
    per token of the batch's own text under the drafter's law), positions.

    Raises:
        ValueError: an unknown divergence, vocabularies that differ, a value outside its range.
    """

    drafter: TransformerConfig
    target: TransformerConfig
    divergence: str = "forward_kl"
    beta: float = 0.5
    target_temperature: float = 1.0
    drafter_temperature: float = 1.0

    def __post_init__(self):
        if self.drafter.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"the drafter's vocabulary of {self.drafter.vocab_size} must be the target's {self.target.vocab_size}"
            )
        check_comparison(self)

    def loss(self, params, batch, key, frozen=None):
        inputs, labels, mask = shifted(batch)
        target_logits = _forward(self.target, jax.lax.stop_gradient(frozen), inputs)
        log_p = losses.log_law(target_logits, self.target_temperature)
        log_q = losses.log_law(_forward(self.drafter, params, inputs, key), self.drafter_temperature)
        return compare_laws(self, log_p, log_q, labels, mask)

    def flops(self, context):
        return flops.training_flops(self.drafter, context) + flops.forward_flops(self.target, context)


def check_comparison(objective) -> None:
    """Raises ValueError for an unknown divergence, or a β or a temperature outside its range."""
    if objective.divergence not in losses.DIVERGENCES:
        raise ValueError(f"divergence must be one of {', '.join(losses.DIVERGENCES)}; got {objective.divergence!r}")
    if not 0 < objective.beta < 1:
        raise ValueError(f"beta must be strictly between 0 and 1; got {objective.beta}")
    for name in ("target_temperature", "drafter_temperature"):
        if not 0 < getattr(objective, name) < float("inf"):
            raise ValueError(f"{name} must be a positive number; got {getattr(objective, name)}")


def compare_laws(
    objective, log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], labels: Int[Array, "B T"], mask
) -> tuple[Array, Metrics]:
    """The objective's divergence, averaged over the counted positions, and the metrics of `Distillation`."""
    options = {"beta": objective.beta} if objective.divergence == "jensen_shannon" else {}
    loss = losses.masked_mean(losses.DIVERGENCES[objective.divergence](log_p, log_q, **options), mask)
    fixed = jax.lax.stop_gradient(log_q)
    return loss, {
        "divergence": loss,
        "overlap": losses.masked_mean(losses.overlap(log_p, fixed), mask),
        "agreement": losses.masked_mean(first_max(log_p) == first_max(fixed), mask),
        "cross_entropy": losses.masked_mean(losses.cross_entropy(fixed, labels), mask),
        "positions": jnp.sum(mask),
    }


def read_batch(batch: Batch, least: int, why: str = "") -> tuple[Int[Array, "B T1"], Bool[Array, "B T1"]]:
    """(tokens, mask) of a batch, the mask all set where none is given.

    Raises:
        ValueError: rows of fewer than `least` tokens (`why` ends the message), or a mask of another shape.
    """
    tokens, mask = jnp.asarray(batch["tokens"]), batch.get("mask")
    if tokens.ndim != 2 or tokens.shape[1] < least:
        raise ValueError(f"a batch's tokens must be [rows, at least {least}]{why}; got shape {tokens.shape}")
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f"a batch's mask must have the shape of its tokens {tokens.shape}; got {mask.shape}")
    return tokens, jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)


def shifted(batch: Batch) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Bool[Array, "B T"]]:
    """(inputs, labels, mask of the labels)."""
    tokens, mask = read_batch(batch, 2)
    return tokens[:, :-1], tokens[:, 1:], mask[:, 1:]


def _forward(config, params, tokens, key=None):
    """Logits; with dropout when a key is given and the config asks for it."""
    train = key is not None and config.dropout > 0
    rngs = {"dropout": key} if train else None
    return Transformer(config).apply({"params": params}, tokens, train=train, rngs=rngs)[0]
