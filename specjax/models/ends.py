"""The two ends of a transformer on their own: token embedding, and final norm with the head.

Drafters that borrow the target's ends (Medusa, EAGLE, block drafters) read them here from the target's parameters.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.config import TransformerConfig
from specjax.models.layers import make_dense, make_norm, scale_embeddings
from specjax.models.linear import attend_to_table


def embed(config: TransformerConfig, params, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """The model's embedding of tokens, without positions."""
    module = nn.Embed(config.vocab_size, config.d_model, dtype=config.dtype, param_dtype=config.param_dtype)
    return scale_embeddings(config, module.apply({"params": params["embedding"]}, tokens))


def normalise(config: TransformerConfig, params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The model's final norm, if it has one, of what a block gives."""
    if not config.final_norm:
        return hidden
    return make_norm(config, None).apply({"params": params["final_norm"]}, hidden)


def untied_head(config: TransformerConfig, params) -> dict:
    """Parameters of an untied head, as `tied_head=False` asks for, that gives the same logits as the model's own."""
    if not config.tied_head:
        return dict(params["head"])
    table = params["embedding"]["embedding"]
    bias = {"bias": jnp.zeros(config.vocab_size, table.dtype)} if config.head_bias else {}  # a tied head has none
    return {"kernel": table.T, **bias}


def head(config: TransformerConfig, params, normalised: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """The model's logits from the output of its final norm."""
    if config.tied_head:
        table = jnp.asarray(params["embedding"]["embedding"], config.dtype)
        return attend_to_table(normalised.astype(config.dtype), table)
    return make_dense(config, config.vocab_size, config.head_bias, None).apply({"params": params["head"]}, normalised)
