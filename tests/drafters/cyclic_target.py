"""A language in which x is followed by x + 1 (mod V), a target that speaks it, and heads that know it, all set by hand.

The target's block adds nothing, its embedding is one-hot and its output head a cyclic shift, so the last hidden state
of token x is e_x. The head that predicts the k-th token after the next shifts by k more. A head that is off by one
anywhere is therefore wrong everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import LanguageModel, TransformerConfig

VOCAB = 7
CONFIG = TransformerConfig(VOCAB, VOCAB, 1, 1, head_dim=8, d_ff=8, context_length=64, tied_head=False)


def shift(by):
    """[V, V] kernel that maps e_x to e_{x + by}."""
    return jnp.asarray(np.roll(np.eye(VOCAB, dtype=np.float32), by, 1))


def target(config=CONFIG) -> LanguageModel:
    params = jax.tree.map(lambda x: 0 * x, LanguageModel.init(config, jax.random.key(0)).params)
    params["embedding"]["embedding"] = jnp.eye(VOCAB)
    params["head"]["kernel"] = 4 * shift(1)
    params["final_norm"]["scale"] = jnp.ones(VOCAB)
    return LanguageModel(config, jax.tree.map(lambda x: x.astype(config.param_dtype), params))


def knowing_heads(drafter):
    """Parameters with which head k is certain of the k-th token after the next one."""
    params = drafter.init_params(jax.random.key(0))
    for depth in range(1, drafter.num_heads + 1):
        block = params[f"head_{depth}"]["block_0"]["update"]
        kernel = jnp.zeros_like(block["kernel"])
        block["kernel"] = kernel.at[:VOCAB].set(4 * shift(depth).astype(kernel.dtype))
    return params


def texts(rows=3, width=12, seed=0):
    starts = np.random.default_rng(seed).integers(0, VOCAB, (rows, 1))
    return ((starts + np.arange(width)) % VOCAB).astype(np.int32)
