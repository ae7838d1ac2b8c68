"""What a block drafter is trained on: whole blocks at random anchors of a text (DFlash, arXiv 2602.06036, section 4.2).

With T the tokens that the target reads, γ = 3 and one anchor at a:

    position       ... a-1   a    a+1  a+2
    block sees     ... h     x_a  m    m    m          h: features of the positions before the anchor
    its law of                    a+1  a+2  a+3        token
    compared with            p_a  p_a+1 p_a+2          the target's law of the token behind each position

The target's law at depth d knows the text's tokens up to a+d-1 and the drafter's does not, so their divergence cannot
vanish for d > 1. In expectation over texts of the target's own, the forward KL is least where the drafter gives the
target's law of the d-th token ahead, given the anchor's past.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.drafters.block import BlockDrafter
from specjax.models.transformer import apply
from specjax.training import flops, losses
from specjax.training.objectives import shifted


@dataclasses.dataclass(frozen=True)
class BlockDistillation:
    """Brings the laws of whole blocks to the target's, depth d counting exp(-(d - 1) / decay) (the paper's equation 4).

    The target runs inside the same step, without dropout and without gradient; `frozen` is its parameters. All blocks
    of a row go through one forward and share its context entries. Over the depths the weights have a mean of 1.

    Attributes:
        drafter: what is trained.
        divergence: a name in `losses.DIVERGENCES`.
        anchors: A, blocks per row; at most one for each position. Random with a key, evenly spaced without (key None),
            among those whose next token counts, as long as there are any.
        decay: in tokens, how fast the weight falls with the depth; the paper takes 7 for blocks of 16.

    Metrics: divergence (without the weights), overlap_1 to overlap_γ (Σ min(p, q) per depth), positions (how many
    anchor and depth pairs are counted).

    Raises:
        ValueError: an unknown divergence, anchors or decay outside their ranges.
    """

    drafter: BlockDrafter
    divergence: str = "forward_kl"
    anchors: int = 8
    decay: float = 4.0

    def __post_init__(self):
        if self.divergence not in losses.DIVERGENCES:
            raise ValueError(f"divergence must be one of {', '.join(losses.DIVERGENCES)}; got {self.divergence!r}")
        if self.anchors < 1:
            raise ValueError(f"anchors must be at least 1; got {self.anchors}")
        if not self.decay > 0:
            raise ValueError(f"decay must be a positive number of tokens; got {self.decay}")

    def loss(self, params, batch, key, frozen=None):
        inputs, _, mask = shifted(batch)
        frozen = jax.lax.stop_gradient(frozen)
        rows, length = inputs.shape
        target = self.drafter.target
        logits, _, features = apply(target, frozen, inputs, feature_layers=self.drafter.feature_layers)
        anchors = choose_anchors(mask, min(self.anchors, length), key)
        at = (anchors[..., None] + jnp.arange(self.drafter.draft_length)).reshape(rows, -1)  # [B, A * γ]
        inside = jnp.minimum(at, length - 1)
        counted = (at < length) & jnp.take_along_axis(mask, inside, 1)
        log_p = losses.log_law(jnp.take_along_axis(logits, inside[..., None], 1))
        log_q = losses.log_law(self.drafter.logits(params, frozen, features, inputs, anchors).reshape(log_p.shape))

        by_depth = lambda x: x.reshape(rows, -1, self.drafter.draft_length)  # noqa: E731
        counted = by_depth(counted)
        distance = by_depth(losses.DIVERGENCES[self.divergence](log_p, log_q))
        overlap = by_depth(losses.overlap(log_p, jax.lax.stop_gradient(log_q)))
        weights = jnp.exp(-jnp.arange(self.drafter.draft_length) / self.decay)
        weighted = distance * (weights / jnp.mean(weights)).astype(distance.dtype)
        metrics = {
            "divergence": losses.masked_mean(jax.lax.stop_gradient(distance), counted),
            "positions": jnp.sum(counted),
        }
        for d in range(self.drafter.draft_length):
            metrics[f"overlap_{d + 1}"] = losses.masked_mean(overlap[..., d], counted[..., d])
        return losses.masked_mean(weighted, counted), metrics

    def flops(self, context):
        """Of a row of `context` tokens, divided among them: the target's forward, context entries, A blocks, heads."""
        c, blocks = self.drafter.config, min(self.anchors, context)
        width, gamma = self.drafter.draft_length + 1, self.drafter.draft_length
        query, key_value = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
        mlp = c.d_model * c.d_ff * (3 if c.gated_mlp else 2)
        entry = len(self.drafter.feature_layers) * c.d_model**2 + c.num_layers * c.d_model * key_value
        token = c.num_layers * (c.d_model * (2 * query + key_value) + mlp)
        attention = c.num_layers * 4 * query * (context + width)
        row = 2 * context * entry + blocks * width * (2 * token + attention)
        row += 2 * blocks * gamma * c.d_model * c.vocab_size
        return 3 * row // context + flops.forward_flops(self.drafter.target, context)


def choose_anchors(mask: Bool[Array, "B T"], count: int, key=None) -> Int[Array, "B A"]:
    """`count` different positions per row, where the mask is set as far as there are as many.

    Random with a key. Without, evenly spaced among the set ones in order, or the first ones if there are too few.
    """
    rows, length = mask.shape
    if key is not None:
        score = jax.random.uniform(key, mask.shape) + mask
        return jax.lax.top_k(score, count)[1]
    ordered = jnp.argsort(~mask, axis=-1, stable=True)  # the set ones first
    available = jnp.sum(mask, -1, keepdims=True)
    steps = jnp.arange(count)
    return jnp.take_along_axis(ordered, jnp.where(available >= count, steps * available // count, steps), 1)
