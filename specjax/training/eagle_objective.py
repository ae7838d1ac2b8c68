"""What EAGLE drafters are trained with: the target's features and laws, one or several drafting steps ahead.

    position                0     1     2     3    ...
    pair i                  (f_i, t_{i+1}) at position i
    its output stands for   f_{i+1}, and is judged by the target's law at position i + 1, the law of t_{i+2}

`unroll` repeats, for every position at once, what decoding does from there on: the chain that starts at pair i goes on
with its own outputs in place of features. With three pairs and two steps, rows attending to columns:

    step 1      a b c            step 2      a b c | a' b' c'
    pair 0   a  x .  .           chain 0  a' x . . | x  .  .       true pairs up to the chain's start,
    pair 1   b  x x  .           chain 1  b' x x . | .  x  .       then the chain's own
    pair 2   c  x x  x           chain 2  c' x x x | .  .  x

A chain counts when every token that its steps predict counts, so that all steps are measured on the same prefixes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.models.eagle_layer import VOCABULARY, EagleConfig
from specjax.models.transformer import Transformer
from specjax.training import flops, losses
from specjax.training.objectives import read_batch


@dataclasses.dataclass(frozen=True)
class Eagle1Distillation:
    """Smooth L1 between predicted and true features, plus a divergence of the laws (arXiv 2401.15077, section 4.2).

    Attributes:
        drafter: the network, version 1.
        divergence: a name in `losses.DIVERGENCES`, target's law first. Forward KL has the gradient of the paper's cross
            entropy.
        law_weight: of the divergence; the paper's is 0.1.
        feature_noise: true features are disturbed by uniform noise up to this size, as in the paper.

    Metrics: regression, divergence, overlap_1, positions.

    Raises:
        ValueError: another version, an unknown divergence, a value outside its range.
    """

    drafter: EagleConfig
    divergence: str = "forward_kl"
    law_weight: float = 0.1
    feature_noise: float = 0.1

    def __post_init__(self):
        _check(self.drafter, 1, self.divergence)
        for name in ("law_weight", "feature_noise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0; got {getattr(self, name)}")

    def loss(self, params, batch, key, frozen=None):
        """`frozen`: the target's parameters."""
        texts = _Texts.read(self.drafter, params, batch, frozen, steps=1)
        features = texts.features
        if self.feature_noise:
            features = features + jax.random.uniform(
                key, features.shape, features.dtype, -self.feature_noise, self.feature_noise
            )
        (out,) = unroll(self.drafter, params, texts.frozen, features, texts.tokens, 1)
        log_p, log_q, overlap = texts.laws(self.drafter, params, out, 1)
        wide = log_q.dtype
        error = jnp.mean(_smooth_l1(out.astype(wide) - texts.true_features(1).astype(wide)), -1)
        regression = losses.masked_mean(error, texts.mask)
        divergence = losses.masked_mean(losses.DIVERGENCES[self.divergence](log_p, log_q), texts.mask)
        return regression + self.law_weight * divergence, {
            "regression": regression,
            "divergence": divergence,
            "overlap_1": overlap,
            "positions": jnp.sum(texts.mask),
        }

    def flops(self, context):
        return _flops(self.drafter, context, 1)


@dataclasses.dataclass(frozen=True)
class Eagle3Distillation:
    """The divergence of laws alone, over S unrolled steps: training-time test (arXiv 2503.01840, section 3.2).

    With a reduced vocabulary the target's law is restricted to it and renormalised, as only that can be followed; the
    overlaps are with the whole law.

    Attributes:
        drafter: the network, version 3.
        steps: S >= 1.
        decay: step s weighs decay^(s - 1); the authors' code takes 0.8.
        divergence: a name in `losses.DIVERGENCES`, target's law first.

    Metrics: divergence (weighted mean over the steps), overlap_1 .. overlap_S, positions.

    Raises:
        ValueError: another version, an unknown divergence, a value outside its range.
    """

    drafter: EagleConfig
    steps: int = 3
    decay: float = 0.8
    divergence: str = "forward_kl"

    def __post_init__(self):
        _check(self.drafter, 3, self.divergence)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; got {self.steps}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1]; got {self.decay}")

    def loss(self, params, batch, key, frozen=None):
        """`frozen`: the target's parameters, joined with the fixed part of the drafter's (`split_params`)."""
        texts = _Texts.read(self.drafter, params, batch, frozen, self.steps)
        outs = unroll(self.drafter, params, texts.frozen, texts.features, texts.tokens, self.steps)
        total, weights, metrics = 0.0, 0.0, {}
        for step, out in enumerate(outs, start=1):
            log_p, log_q, metrics[f"overlap_{step}"] = texts.laws(self.drafter, params, out, step)
            weight = self.decay ** (step - 1)
            distance = losses.DIVERGENCES[self.divergence](log_p, log_q)
            total, weights = total + weight * losses.masked_mean(distance, texts.mask), weights + weight
        return total / weights, {"divergence": total / weights, "positions": jnp.sum(texts.mask), **metrics}

    def flops(self, context):
        return _flops(self.drafter, context, self.steps)


def overlap_by_depth(drafter: EagleConfig, params, batch, frozen, steps: int) -> dict[str, Array]:
    """Teacher-forced Σ min(p, q) at draft depths 1 to `steps` of either version: overlap_1 .., and positions.

    Arguments are those of the objectives' `loss`; the drafted tokens are those of the text.
    """
    texts = _Texts.read(drafter, params, batch, frozen, steps)
    outs = unroll(drafter, params, texts.frozen, texts.features, texts.tokens, steps)
    overlaps = {f"overlap_{s}": texts.laws(drafter, params, out, s)[2] for s, out in enumerate(outs, start=1)}
    return {**overlaps, "positions": jnp.sum(texts.mask)}


def unroll(
    model: EagleConfig,
    params,
    target_params,
    features: Float[Array, "B n D"],
    tokens: Int[Array, "B m"],
    steps: int,
) -> list[Float[Array, "B n D"]]:
    """The outputs of every step of the n chains; chain i's step s is the pair at position i + s - 1.

    Args:
        model, params, target_params: drafter and target.
        features: true ones, as `EagleConfig.start` makes them.
        tokens: the text, n + steps tokens or more: step s of chain i takes token i + s.
        steps: S.
    """
    batch, n, _ = features.shape
    cache = model.init_cache(batch, 0)
    mask, outs = jnp.zeros((n, 0), bool), []
    grow = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, n), (0, 0)))  # noqa: E731
    for step in range(steps):
        cache = cache.replace(keys=(grow(cache.keys[0]),), values=(grow(cache.values[0]),))
        mask = jnp.concatenate([mask, jnp.tri(n, dtype=bool) if step == 0 else jnp.eye(n, dtype=bool)], 1)
        positions = jnp.broadcast_to(jnp.arange(n) + step, (batch, n))
        followers = tokens[:, step + 1 : step + 1 + n]
        features, cache = model.run(params, target_params, features, followers, cache, positions=positions, mask=mask)
        outs.append(features)
    return outs


@dataclasses.dataclass(frozen=True)
class _Texts:
    """A batch as the target sees it. Chain i of n = T - S starts at position i.

    Attributes:
        tokens: [B, T + 1].
        log_p: [B, T, W] the target's law, over the draft vocabulary and renormalised there.
        whole: [B, T, W] the same tokens in the target's whole law; log_p itself where nothing is left out.
        start: [B, T, D] features as pairs take them.
        mask: [B, n] chains that count.
        frozen: the target's parameters, without gradient.
        fixed: the drafter's untrained parameters.
    """

    tokens: Int[Array, "B T1"]
    log_p: Float[Array, "B T W"]
    whole: Float[Array, "B T W"]
    start: Float[Array, "B T D"]
    mask: Bool[Array, "B n"]
    frozen: Any
    fixed: dict

    @classmethod
    def read(cls, model: EagleConfig, params, batch, frozen, steps: int) -> "_Texts":
        tokens, mask = read_batch(batch, steps + 2, f" for {steps} steps")
        fixed = {name: x for source in (frozen, params) for name, x in source.items() if name == VOCABULARY}
        if model.draft_vocab is not None and VOCABULARY not in fixed:
            raise ValueError(
                f"a reduced vocabulary needs its ids: give frozen={{**target_params, {VOCABULARY!r}: ids}}"
            )
        frozen = jax.lax.stop_gradient({name: x for name, x in frozen.items() if name != VOCABULARY})
        logits, _, features = Transformer(model.target).apply(
            {"params": frozen}, tokens[:, :-1], feature_layers=model.feature_layers
        )
        # Once for all steps: over a real vocabulary the laws are the largest arrays there are.
        log_p = whole = losses.log_law(logits)
        if model.draft_vocab is not None:
            wide = logits.astype(log_p.dtype)
            kept = wide[..., fixed[VOCABULARY]]
            log_p, whole = losses.log_law(kept), kept - jax.nn.logsumexp(wide, -1, keepdims=True)
        chains = tokens.shape[1] - 1 - steps
        counted = [mask[:, 1 + step : 1 + step + chains] for step in range(1, steps + 1)]
        start, mask = model.start(params, frozen, features), jnp.all(jnp.stack(counted), 0)
        return cls(tokens, log_p, whole, start, mask, frozen, fixed)

    @property
    def features(self) -> Float[Array, "B n D"]:
        """What the chains start from."""
        return self.start[:, : self.mask.shape[1]]

    def true_features(self, step: int) -> Float[Array, "B n D"]:
        """What the outputs of a step stand for."""
        return self.start[:, step : step + self.mask.shape[1]]

    def laws(self, model: EagleConfig, params, out: Float[Array, "B n D"], step: int):
        """(log p, log q over the draft vocabulary, mean overlap with all of p) behind a step's pairs."""
        log_q = losses.log_law(model.draft_logits(params, self.frozen, out))
        log_p, whole = (law[:, step : step + self.mask.shape[1]] for law in (self.log_p, self.whole))
        # Over the draft vocabulary alone: elsewhere q is 0, and so is the minimum.
        return log_p, log_q, losses.masked_mean(losses.overlap(whole, jax.lax.stop_gradient(log_q)), self.mask)


def _smooth_l1(difference):
    size = jnp.abs(difference)
    return jnp.where(size < 1, difference**2 / 2, size - 0.5)


def _check(model, version, divergence):
    if model.version != version:
        raise ValueError(f"this objective trains version {version} of EAGLE; the drafter is version {model.version}")
    if divergence not in losses.DIVERGENCES:
        raise ValueError(f"divergence must be one of {', '.join(losses.DIVERGENCES)}; got {divergence!r}")


def _flops(model, context, steps):
    """Training of the layer and its head in every step, and of what joins features to it, plus the target's forward."""
    c, d = model.layer, model.target.d_model
    doubled = 2 * d * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim  # the attention's second input
    per_step = flops.forward_flops(c, context) + (doubled if model.version == 3 else 4 * d * d)
    fusion = 2 * len(model.feature_layers) * d * d if model.version == 3 else 0
    return 3 * (steps * per_step + fusion) + flops.forward_flops(model.target, context)
