"""Training of prediction heads (Medusa, Hydra), on a frozen target or together with it.

Head k at position s is compared with the target's law at position s + k, the law of token s + k + 1. A position counts
when the labels of all K heads are inside the text and unmasked, so every head is measured on the same prefixes:

    tokens    0  1  2  3  4  5 | padding        K = 2: position s is judged by tokens s + 2 and s + 3,
    counted   s  s  s                           so the last one that counts is 2
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters.heads import PredictionHeads, counted_positions, expected_params
from specjax.models.transformer import Transformer
from specjax.training import flops, losses
from specjax.training.objectives import read_batch

CROSS_ENTROPY = "cross_entropy"


@dataclasses.dataclass(frozen=True)
class HeadDistillation:
    """Medusa-1 (section 2.2.1): the heads learn, the target does not. `frozen` is its parameters.

    The loss is Σ_k decay^k of the mean divergence of head k. The target's forward runs inside the step.

    Attributes:
        drafter: whose heads are trained; the parameters are the drafter's own.
        divergence: from the target's law, a name in `losses.DIVERGENCES`; or "cross_entropy" with the batch's tokens,
            as published.
        decay: weight of head k is decay^k; later heads are less certain.

    Metrics: loss, overlap_k (Σ min(p, q_k) at temperature 1, per head), positions.

    Raises:
        ValueError: an unknown divergence, or a decay that is not positive.
    """

    drafter: PredictionHeads
    divergence: str = "forward_kl"
    decay: float = 0.8

    def __post_init__(self):
        _check(self.divergence, self.decay)

    def loss(self, params, batch, key, frozen=None):
        frozen = jax.lax.stop_gradient(frozen)
        tokens, mask = _tokens_and_mask(batch, self.drafter.num_heads)
        logits, features = _forward(self.drafter, frozen, tokens[:, :-1])
        total, metrics = _heads_loss(self, self.drafter, params, frozen, logits, features, tokens, mask)
        loss = total / jnp.maximum(metrics["positions"], 1)
        return loss, {"loss": loss, **metrics}

    def flops(self, context):
        return flops.forward_flops(self.drafter.target, context) + _heads_flops(self.drafter, output_backward=1)


@dataclasses.dataclass(frozen=True)
class JointHeads:
    """Medusa-2 (section 2.2.2): target and heads together, so that the last hidden state serves both.

    Parameters {"target": ..., "heads": ...}; loss = cross entropy of the target's next token + λ Σ_k decay^k of the
    heads' divergence. The target's law that the heads are compared with counts as given (no gradient), while the
    features, the output head and the embeddings that the heads use do get their gradient. Start from heads that were
    trained on the frozen target. Decoding is then lossless with respect to the new target, not to the old one.

    Attributes:
        drafter, divergence, decay: as in `HeadDistillation`.
        heads_weight: λ.

    Metrics: loss, cross_entropy (of the target), overlap_k, positions (labels of the target). The heads' sum is divided
    by the same number, so that microbatches add up exactly.

    Raises:
        ValueError: an unknown divergence, or a weight that is not positive.
    """

    drafter: PredictionHeads
    divergence: str = "forward_kl"
    decay: float = 0.8
    heads_weight: float = 0.2

    def __post_init__(self):
        _check(self.divergence, self.decay)
        if not 0 < self.heads_weight < float("inf"):
            raise ValueError(f"heads_weight must be a positive number; got {self.heads_weight}")

    def loss(self, params, batch, key, frozen=None):
        target, heads = params["target"], params["heads"]
        tokens, mask = _tokens_and_mask(batch, self.drafter.num_heads)
        logits, features = _forward(self.drafter, target, tokens[:, :-1], key)
        total, metrics = _heads_loss(self, self.drafter, heads, target, logits, features, tokens, mask)
        labels = mask[:, 1:]
        cross_entropy = losses.masked_mean(losses.cross_entropy(losses.log_law(logits), tokens[:, 1:]), labels)
        positions = jnp.sum(labels)
        loss = cross_entropy + self.heads_weight * total / jnp.maximum(positions, 1)
        return loss, {**metrics, "loss": loss, "cross_entropy": cross_entropy, "positions": positions}

    def flops(self, context):
        return flops.training_flops(self.drafter.target, context) + _heads_flops(self.drafter, output_backward=2)


def _check(divergence, decay):
    known = (*losses.DIVERGENCES, CROSS_ENTROPY)
    if divergence not in known:
        raise ValueError(f"divergence must be one of {', '.join(known)}; got {divergence!r}")
    if not 0 < decay < float("inf"):
        raise ValueError(f"decay must be a positive number; got {decay}")


def _tokens_and_mask(batch, num_heads):
    return read_batch(batch, num_heads + 2, f" for {num_heads} heads")


def _forward(drafter, params, inputs, key=None):
    """Logits and features of the target; with dropout when a key is given and its config asks for it."""
    train = key is not None and drafter.target.dropout > 0
    logits, _, features = Transformer(drafter.target).apply(
        {"params": params},
        inputs,
        feature_layers=drafter.feature_layers,
        train=train,
        rngs={"dropout": key} if train else None,
    )
    return logits, features


def _heads_loss(objective, drafter, params, target_params, logits, features, tokens, mask):
    """(Σ_k decay^k Σ_s divergence of head k at position s, metrics)."""
    log_p = jax.lax.stop_gradient(losses.log_law(logits))
    heads = drafter.teacher_forced(params, target_params, features, tokens[:, :-1])
    counted = counted_positions(mask, drafter.num_heads)
    total, metrics = jnp.zeros((), log_p.dtype), {"positions": jnp.sum(counted)}
    for depth, head in enumerate(heads, start=1):
        log_q = losses.log_law(head)
        judge = log_p[:, depth : depth + counted.shape[1]]
        if objective.divergence == CROSS_ENTROPY:
            distance = losses.cross_entropy(log_q, tokens[:, depth + 1 : depth + 1 + counted.shape[1]])
        else:
            distance = losses.DIVERGENCES[objective.divergence](judge, log_q)
        total += objective.decay**depth * jnp.sum(jnp.where(counted, distance, 0))
        overlap = losses.overlap(judge, jax.lax.stop_gradient(log_q))
        metrics[f"overlap_{depth}"] = losses.masked_mean(overlap, counted)
    return total, metrics


def _heads_flops(drafter, output_backward):
    """Two per weight of every matrix and pass; a shared output head is passed backward once when it is not trained."""
    matrices = sum(x.size for x in jax.tree.leaves(expected_params(drafter)) if x.ndim == 2)
    shared = 0 if drafter.own_output else drafter.num_heads * drafter.target.d_model * drafter.target.vocab_size
    return 6 * matrices + 2 * (1 + output_backward) * shared
