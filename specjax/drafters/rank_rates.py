"""How often the target's token is the r-th choice of a head: the rates that `optimal_tree` wants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.heads import PredictionHeads, counted_positions
from specjax.models.transformer import apply
from specjax.sampling import Sampling, top_tokens


def measure_rank_rates(
    drafter: PredictionHeads,
    params,
    target_params,
    tokens: Int[Array, "B T"] | np.ndarray,
    *,
    num_ranks: int,
    sampling: Sampling | None = None,
    mask: Bool[Array, "B T"] | np.ndarray | None = None,
) -> np.ndarray:
    """[K, R] rates: mean of p(token of rank r of head k), teacher-forced on held-out texts.

    That is the acceptance of `fixed` siblings, which are the head's tokens in order. Averaged over all positions, so
    what is taken as given is that the path before is the text's own, not that the drafter proposed it.

    Args:
        tokens: [B, T] texts, T > K; best sampled from the target itself.
        num_ranks: R.
        sampling: how the target's logits become p (default: temperature 0, where p is one-hot).
        mask: [B, T] which tokens are text; a position counts when all K tokens that are predicted from it do.

    Raises:
        ValueError: no position to count, or more ranks than tokens in the vocabulary.
    """
    tokens = jnp.asarray(tokens)
    if not 1 <= num_ranks <= drafter.target.vocab_size:
        raise ValueError(f"num_ranks must be 1 to {drafter.target.vocab_size}, the vocabulary; got {num_ranks}")
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)
    sampling = Sampling.of(temperature=0.0) if sampling is None else sampling
    sums, count = jax.device_get(_sums(drafter, num_ranks, params, target_params, tokens, mask, sampling))
    if count == 0:
        raise ValueError(f"no position of {tokens.shape} tokens has {drafter.num_heads + 1} unmasked ones behind it")
    return np.asarray(sums, float) / count


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(
    drafter: PredictionHeads, num_ranks: int, params, target_params, tokens, mask, sampling: Sampling
) -> tuple[Float[Array, "K R"], Int[Array, ""]]:
    inputs = tokens[:, :-1]
    logits, _, features = apply(drafter.target, target_params, inputs, feature_layers=drafter.feature_layers)
    p = sampling.law(logits)
    heads = drafter.teacher_forced(params, target_params, features, inputs)
    positions = heads[0].shape[1]
    counted = counted_positions(mask, drafter.num_heads)
    sums = []
    for depth, head in enumerate(heads, start=1):
        ranked = top_tokens(head.astype(p.dtype), num_ranks)
        chosen = jnp.take_along_axis(p[:, depth : depth + positions], ranked, -1)
        sums.append(jnp.sum(jnp.where(counted[..., None], chosen, 0), (0, 1)))
    return jnp.stack(sums), jnp.sum(counted)
