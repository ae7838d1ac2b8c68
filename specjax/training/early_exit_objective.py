"""Training for early exits: an exit behind a frozen target, or a target whose early layers can speak for it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from specjax.drafters.early_exit import EarlyExit
from specjax.models.config import TransformerConfig
from specjax.models.ends import head, normalise
from specjax.models.transformer import Transformer
from specjax.training import flops, losses
from specjax.training.objectives import check_comparison, compare_laws, shifted


@dataclasses.dataclass(frozen=True)
class ExitDistillation:
    """Brings the law of a trained exit to the target's at the same position, on whatever texts the batches hold.

    Trained are the exit's parameters alone (`EarlyExit.init_params`); `frozen` is the target's, which run without
    dropout and without gradient.

    Attributes:
        drafter: with `trained_exit`; its draft length plays no part.
        divergence: a name in `losses.DIVERGENCES`.
        beta: of jensen_shannon.
        target_temperature, drafter_temperature: of the two laws that are compared; the metrics are of the same laws.

    Metrics: divergence, overlap Σ min(p, q), agreement (share of positions with the same argmax), cross_entropy (nats
    per token of the batch's own text under the exit's law), positions.

    Raises:
        ValueError: a drafter without a trained exit, an unknown divergence, a value outside its range.
    """

    drafter: EarlyExit
    divergence: str = "forward_kl"
    beta: float = 0.5
    target_temperature: float = 1.0
    drafter_temperature: float = 1.0

    def __post_init__(self):
        if not self.drafter.trained_exit:
            raise ValueError("the drafter's exit is the target's own, with nothing to train; set trained_exit=True")
        check_comparison(self)

    def loss(self, params, batch, key, frozen=None):
        inputs, labels, mask = shifted(batch)
        frozen = jax.lax.stop_gradient(frozen)
        target_logits, _, hidden = Transformer(self.drafter.target).apply(
            {"params": frozen}, inputs, feature_layers=(self.drafter.exit_layer,)
        )
        log_p = losses.log_law(target_logits, self.target_temperature)
        log_q = losses.log_law(self.drafter.logits(params, frozen, hidden), self.drafter_temperature)
        return compare_laws(self, log_p, log_q, labels, mask)

    def flops(self, context):
        c = self.drafter.target
        # A frozen head is run forward and its input's gradient backward; whatever is trained, its own gradient too.
        exit_head = (3 if self.drafter.own_head else 2) * 2 * c.d_model * c.vocab_size
        adapter = 0 if self.drafter.own_head else 3 * 2 * c.d_model**2
        return flops.forward_flops(c, context) + exit_head + adapter


@dataclasses.dataclass(frozen=True)
class LayerSkip:
    """Next-token training with layer dropout and a loss at every exit (LayerSkip, arXiv 2404.16710, section 4.1).

    Whole layers are left out of single rows, later ones more often: layer l of L, counted from 0, with the rate
    D(l) · max_drop, D(l) = 2^(l / (L − 1)) − 1 (the paper's p_max, without its warm-up over the steps). Nothing is
    rescaled, and inference runs every layer. All exits share the final norm and the head. With i layers below it, an
    exit weighs exit_scale · i (i + 1) / 2, the end of the model L + exit_scale · L (L − 1) / 2, and the weights are
    divided by their sum. (The paper counts from 0, which gives the first exit no weight at all.)

    Attributes:
        config: the model; it decodes itself afterwards with `EarlyExit(config, exit_layer, ...)`.
        exit_layer: the exit that the metrics are about; one of `exit_layers`.
        exit_layers: exits that are trained, each from 1 to L − 1 (None: all of them).
        max_drop: drop rate of the last layer, in [0, 1).
        exit_scale: how much the exits weigh against the end of the model, >= 0 (the paper's e_scale).
        rotation: R; each step trains every R-th exit only, from a start drawn from the step's key, and the end of the
            model. The paper lets the start rotate from step to step, which comes to the same on average.

    Metrics: cross_entropy (nats per token, at the end of the model), exit_cross_entropy (at `exit_layer`), overlap
    Σ min(p, q) of their two laws, positions. In training they are measured with the step's layers left out; without a
    key all layers run and all exits count.

    Raises:
        ValueError: exits, a rate, a scale or a rotation outside their ranges.
    """

    config: TransformerConfig
    exit_layer: int
    exit_layers: tuple[int, ...] | None = None
    max_drop: float = 0.1
    exit_scale: float = 0.2
    rotation: int = 1

    def __post_init__(self):
        if self.exit_layers is not None:
            object.__setattr__(self, "exit_layers", tuple(self.exit_layers))
        layers, exits = self.config.num_layers, self.exits
        if list(exits) != sorted(set(exits)) or not all(1 <= i < layers for i in exits):
            raise ValueError(f"exit_layers must rise within 1 to {layers - 1}, below the last layer; got {exits}")
        if self.exit_layer not in exits:
            raise ValueError(f"exit_layer must be one of the trained exits {exits}; got {self.exit_layer}")
        if not 0 <= self.max_drop < 1:
            raise ValueError(f"max_drop must be in [0, 1); got {self.max_drop}")
        if not 0 <= self.exit_scale < math.inf:
            raise ValueError(f"exit_scale must be a finite number >= 0; got {self.exit_scale}")
        if not 1 <= self.rotation <= len(exits):
            raise ValueError(f"rotation must be 1 to {len(exits)}, the number of exits; got {self.rotation}")

    @property
    def exits(self) -> tuple[int, ...]:
        """The trained exits, in order."""
        return tuple(range(1, self.config.num_layers)) if self.exit_layers is None else self.exit_layers

    @property
    def drop_rates(self) -> np.ndarray:
        """[L] probability that a row passes each layer by."""
        layers = self.config.num_layers
        return self.max_drop * (2 ** (np.arange(layers) / max(layers - 1, 1)) - 1)

    def weights(self, chosen: Bool[Array, "E"]) -> tuple[Float[Array, "E"], Float[Array, ""]]:
        """Weights, summing to one, of the exits (0 for those not chosen) and of the end of the model."""
        exits, layers = np.array(self.exits), self.config.num_layers
        early = jnp.where(chosen, self.exit_scale * exits * (exits + 1) / 2, 0.0)
        last = layers + self.exit_scale * layers * (layers - 1) / 2
        total = jnp.sum(early) + last
        return early / total, last / total

    def layers_kept(self, key: Key[Array, ""], rows: int) -> Bool[Array, "B L"]:
        """Which layers each row runs."""
        rates = jnp.asarray(self.drop_rates)
        return jax.random.bernoulli(key, 1 - rates, (rows, rates.size))

    def loss(self, params, batch, key, frozen=None):
        c, exits = self.config, self.exits
        inputs, labels, mask = shifted(batch)
        options, rotation, start = {}, 1, jnp.int32(0)
        if key is not None:
            dropout_key, layer_key, start_key = jax.random.split(key, 3)
            rotation, start = self.rotation, jax.random.randint(start_key, (), 0, self.rotation)
            options = {"train": c.dropout > 0, "rngs": {"dropout": dropout_key} if c.dropout > 0 else None}
            if self.max_drop > 0:
                options["layer_keep"] = self.layers_kept(layer_key, inputs.shape[0])
        logits, _, hidden = Transformer(c).apply({"params": params}, inputs, feature_layers=exits, **options)
        hidden = jnp.stack(jnp.split(hidden, len(exits), -1))

        def law(hidden):
            return losses.log_law(head(c, params, normalise(c, params, hidden)))

        def mean_cross_entropy(log_q):
            return losses.masked_mean(losses.cross_entropy(log_q, labels), mask)

        early, last = self.weights(jnp.arange(len(exits)) % rotation == start)
        log_p = losses.log_law(logits)
        cross_entropy = mean_cross_entropy(log_p)
        loss = last * cross_entropy
        for j in range(math.ceil(len(exits) / rotation)):
            at = start + j * rotation  # past the last exit: of no weight
            weight = early.at[at].get(mode="fill", fill_value=0)
            loss += weight * mean_cross_entropy(law(hidden.at[at].get(mode="clip")))
        log_q, log_p = jax.lax.stop_gradient((law(hidden[exits.index(self.exit_layer)]), log_p))
        return loss, {
            "cross_entropy": cross_entropy,
            "exit_cross_entropy": mean_cross_entropy(log_q),
            "overlap": losses.masked_mean(losses.overlap(log_p, log_q), mask),
            "positions": jnp.sum(mask),
        }

    def flops(self, context):
        heads = math.ceil(len(self.exits) / self.rotation)
        return flops.training_flops(self.config, context) + 3 * heads * 2 * self.config.d_model * self.config.vocab_size
