"""The layers inside an EAGLE drafter, and where their attention begins; `eagle_layer` says what they are given."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.attention import Attention
from specjax.models.config import TransformerConfig
from specjax.models.layers import make_dense, make_norm
from specjax.models.transformer import MLP, Block


class Layer1(nn.Module):
    """EAGLE-1's: a linear map of feature and embedding side by side, and a decoder layer."""

    config: TransformerConfig
    input_norm: bool = True

    def setup(self):
        self.join = make_dense(self.config, self.config.d_model, False, None)
        self.block = Block(self.config, input_norm=self.input_norm)

    def __call__(
        self, features: Float[Array, "B T D"], embedded: Float[Array, "B T D"], cached, length, positions, mask
    ):
        joined = self.join(jnp.concatenate([features, embedded], -1))
        return self.block(joined, cached, length, positions, mask, False)

    everything = __call__


class Layer3(nn.Module):
    """EAGLE-3's: attention over embedding and feature side by side, each with a norm of its own; and the own head."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        self.fusion = make_dense(c, c.d_model, False, None)
        self.embedding_norm, self.feature_norm = make_norm(c, None), make_norm(c, None)
        self.attention, self.mlp_norm, self.mlp = Attention(c), make_norm(c, None), MLP(c)
        self.final_norm, self.head = make_norm(c, None), make_dense(c, c.vocab_size, c.head_bias, None)

    def fuse(self, features: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
        return self.fusion(features)

    def logits(self, out: Float[Array, "*B D"]) -> Float[Array, "*B W"]:
        return self.head(self.final_norm(out))

    def __call__(
        self, features: Float[Array, "B T D"], embedded: Float[Array, "B T D"], cached, length, positions, mask
    ):
        x = jnp.concatenate([self.embedding_norm(embedded), self.feature_norm(features)], -1)
        out, cached = self.attention(x, cached, length, positions, mask)
        x = features + out
        return x + self.mlp(self.mlp_norm(x)), cached

    def everything(self, features: Float[Array, "B T F"], embedded: Float[Array, "B T D"], *rest):
        """Touches every parameter, for the initialisation."""
        return self.logits(self(self.fuse(features), embedded, *rest)[0])


def own_position_first(attention: dict, layer: TransformerConfig) -> dict:
    """Query heads of the first key head ask for the embedding that their own key holds: their attention begins at home.

    Both kernels read [embedding, feature], each behind a norm, so |embedding|² is D; with entries of deviation s the
    expected score at home is s² D √head_dim, and s is chosen to make that 8, where a random pair of tokens has about 0.
    """
    width, groups = layer.head_dim, layer.num_heads // layer.num_kv_heads
    query, key = attention["query"]["kernel"], attention["key"]["kernel"]
    rows = key.shape[0] // 2
    shared = key[:rows, :width]
    wanted = (8 / (rows * width**0.5)) ** 0.5
    shared = shared * (wanted / jnp.maximum(jnp.std(shared), 1e-12)).astype(shared.dtype)
    home = jnp.concatenate([shared, jnp.zeros_like(shared)])
    return {
        **attention,
        "query": {**attention["query"], "kernel": query.at[:, : groups * width].set(jnp.tile(home, (1, groups)))},
        "key": {**attention["key"], "kernel": key.at[:, :width].set(home)},
    }
