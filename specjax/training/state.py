"""What a training step carries along, and how its optimizer is made from numbers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int, Key

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine", "wsd")


@struct.dataclass
class TrainState:
    """Everything that a resumed run needs, apart from its position in the data.

    Attributes:
        params: the trained parameters.
        opt_state: Optax's state.
        step: number of finished steps.
        key: the run's key; step t uses fold_in(key, t), so the key itself never changes.
        ema: exponential moving average of the parameters, or None.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    key: Key[Array, ""]
    ema: Any = None

    @property
    def eval_params(self):
        """The parameters to evaluate and to decode with: the moving average where there is one."""
        return self.params if self.ema is None else self.ema


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, clipping, schedule, accumulation, moving average.

    Attributes:
        optimizer: "adamw" (Loshchilov & Hutter 2019, arXiv 1711.05101), or "muon": Muon for the matrices inside the
            blocks and AdamW for all else (Jordan 2024; scaled as in Liu et al. 2025, arXiv 2502.16982, so that both
            share one learning rate).
        learning_rate: the peak.
        total_steps: where the schedule ends; later steps keep its last value.
        schedule: after the warm-up, "constant", "linear" or "cosine" down to `final_fraction`, or "wsd": constant,
            then linear over the last `decay_fraction` of the steps (warm-up, stable, decay; arXiv 2404.06395).
        warmup_steps: step k of the warm-up uses k / warmup_steps of the peak, the first step being k = 1.
        final_fraction: last learning rate as a share of the peak.
        decay_fraction: share of the steps in which "wsd" decays.
        b1, b2, eps: Adam's moments. b1 is Muon's momentum too.
        weight_decay: decoupled; only on arrays of two or more dimensions, so not on biases and norms (Muon: on its
            matrices).
        clip_norm: largest global norm of the gradient, or None.
        accumulation: microbatches per step; the gradient is that of the whole batch.
        ema_decay: decay of the moving average of the parameters, or None for none.

    Raises:
        ValueError: a value outside its range; the message names it.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    total_steps: int = 1000
    schedule: str = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.1
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    accumulation: int = 1
    ema_decay: float | None = None

    def __post_init__(self):
        for name, choices in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        limits = {
            "learning_rate": (self.learning_rate > 0, "> 0"),
            "total_steps": (self.total_steps >= 1, ">= 1"),
            "warmup_steps": (0 <= self.warmup_steps <= self.total_steps, f"in 0..total_steps {self.total_steps}"),
            "final_fraction": (0 <= self.final_fraction <= 1, "in [0, 1]"),
            "decay_fraction": (0 < self.decay_fraction <= 1, "in (0, 1]"),
            "b1": (0 <= self.b1 < 1, "in [0, 1)"),
            "b2": (0 <= self.b2 < 1, "in [0, 1)"),
            "eps": (self.eps > 0, "> 0"),
            "weight_decay": (self.weight_decay >= 0, ">= 0"),
            "clip_norm": (self.clip_norm is None or self.clip_norm > 0, "> 0 or None"),
            "accumulation": (self.accumulation >= 1, ">= 1"),
            "ema_decay": (self.ema_decay is None or 0 <= self.ema_decay < 1, "in [0, 1) or None"),
        }
        for name, (fits, rule) in limits.items():
            if not fits:
                raise ValueError(f"{name} must be {rule}; got {getattr(self, name)}")

    def learning_rates(self) -> optax.Schedule:
        """Learning rate as a function of the number of finished steps."""
        peak, last = self.learning_rate, self.learning_rate * self.final_fraction
        left = max(1, self.total_steps - self.warmup_steps)
        if self.schedule == "constant":
            after = optax.constant_schedule(peak)
        elif self.schedule == "linear":
            after = optax.linear_schedule(peak, last, left)
        elif self.schedule == "cosine":
            after = optax.cosine_decay_schedule(peak, left, self.final_fraction)
        else:
            decay = max(1, round(self.decay_fraction * self.total_steps))
            after = optax.linear_schedule(peak, last, decay, transition_begin=max(0, left - decay))
        if not self.warmup_steps:
            return after
        warmup = optax.linear_schedule(peak / self.warmup_steps, peak, max(1, self.warmup_steps - 1))
        return optax.join_schedules([warmup, after], [self.warmup_steps])

    def build(self) -> optax.GradientTransformation:
        """The optimizer. Clipping and accumulation belong to the step, which needs the norm anyway."""
        if self.optimizer == "adamw":
            return optax.adamw(
                self.learning_rates(), self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=_matrices
            )
        return optax.contrib.muon(
            self.learning_rates(),
            beta=self.b1,
            weight_decay=self.weight_decay,
            adam_b1=self.b1,
            adam_b2=self.b2,
            muon_weight_dimension_numbers=_hidden_matrices,
            consistent_rms=0.2,
        )


def create(config: OptimizerConfig, params: Any, key: Key[Array, ""]) -> TrainState:
    """The state before the first step. The parameters are copied: the step donates its buffers."""
    copy = lambda tree: jax.tree.map(lambda x: jnp.array(x, copy=True), tree)  # noqa: E731
    return TrainState(
        params=copy(params),
        opt_state=config.build().init(params),
        step=jnp.zeros((), jnp.int32),
        key=jax.random.clone(key),
        ema=None if config.ema_decay is None else copy(params),
    )


def apply_gradients(config: OptimizerConfig, state: TrainState, gradients: Any, norm: Array) -> TrainState:
    """One optimizer step with gradients of the given global norm: clip, update, move the average."""
    if config.clip_norm is not None:
        scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
    updates, opt_state = config.build().update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = state.ema
    if config.ema_decay is not None:
        # The plain average of the first steps would remember the initialisation; this weight forgets it at first.
        decay = jnp.minimum(config.ema_decay, (1 + state.step) / (10 + state.step))
        ema = jax.tree.map(lambda e, p: e + ((1 - decay) * (p - e)).astype(e.dtype), ema, params)
    return state.replace(params=params, opt_state=opt_state, step=state.step + 1, ema=ema)


def _matrices(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def _hidden_matrices(params):
    """Muon's dimension numbers for the kernels inside the blocks; None for embeddings, head, norms and biases."""

    def numbers(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        inside = leaf.ndim == 2 and not any(word in name for word in ("embed", "head", "position"))
        return optax.contrib.MuonDimensionNumbers() if inside else None

    return jax.tree_util.tree_map_with_path(numbers, params)
