"""A decoder-only transformer in Linen: one function for training, prefill, one-token and N-token steps."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.models.attention import Attention
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.layers import make_dense, make_norm, scale_embeddings
from specjax.models.linear import attend_to_table
from specjax.models.param_check import check_params_against
from specjax.models.positions import sinusoidal


class MLP(nn.Module):
    """The position-wise network."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        up = make_dense(c, c.d_ff, c.mlp_bias, "up")(x)
        activation = {"swiglu": nn.silu, "geglu": nn.gelu, "gelu": nn.gelu, "relu": nn.relu}[c.mlp]
        if c.gated_mlp:
            hidden = activation(make_dense(c, c.d_ff, c.mlp_bias, "gate")(x)) * up
        else:
            hidden = activation(up)
        return make_dense(c, c.d_model, c.mlp_bias, "down")(hidden)


class Block(nn.Module):
    """Attention and MLP, each with its norm before it (pre), before and after it (sandwich) or after the sum (post)."""

    config: TransformerConfig
    sliding: bool = False
    input_norm: bool = True

    @nn.compact
    def __call__(self, x, cached, length, positions, mask, train: bool):
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=not train)
        attention_norm = make_norm(c, "attention_norm") if self.input_norm else lambda x: x
        mlp_norm = make_norm(c, "mlp_norm")
        attention, mlp = Attention(c, self.sliding, name="attention"), MLP(c, name="mlp")
        if c.norm_position != "post":
            after = lambda name, out: make_norm(c, name)(out) if c.norm_position == "sandwich" else out  # noqa: E731
            out, cached = attention(attention_norm(x), cached, length, positions, mask)
            x = x + drop(after("attention_out_norm", out))
            return x + drop(after("mlp_out_norm", mlp(mlp_norm(x)))), cached
        out, cached = attention(x, cached, length, positions, mask)
        x = attention_norm(x + drop(out))
        return mlp_norm(x + drop(mlp(x))), cached


class Transformer(nn.Module):
    """Logits for the token after each given one."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
        mask: Bool[Array, "*b T M"] | None = None,
        feature_layers: tuple[int, ...] = (),
        logits_at: Int[Array, "B M"] | None = None,
        layers: tuple[int, int] | None = None,
        hidden: Float[Array, "B T D"] | None = None,
        layer_keep: Bool[Array, "B num_layers"] | None = None,
        train: bool = False,
    ) -> tuple[Any, KVCache | None, Any]:
        """Run the model.

        Args:
            tokens: [B, T] ids. With a cache they take the slots `cache.length + 0..T-1` of each row.
            cache: what came before; None for training on whole sequences.
            positions: [B, T] absolute positions (default: slots). The nodes of a tree share positions, not slots.
            mask: [T, M] or [B, T, M] booleans, M >= T: which of the last M slots, these T tokens' own being the last T,
                each of them may attend to (default: causal). All slots before those are visible.
            feature_layers: layers whose outputs are returned, i for the i-th block's, 0 for the embedding.
            logits_at: [B, M] indices into T at which logits are wanted (default: all); M = 0 skips the head.
            layers: (first, last) runs only the blocks first + 1 to last (default: all); the others' caches stay as they
                are. The head reads whatever the last of them gives.
            hidden: what block `first` gave for these tokens; needed when `first` is above 0, and `tokens` is not read.
            layer_keep: [B, num_layers] booleans, for layer dropout; where False, a row passes the block unchanged
                (default: no row passes any).
            train: whether dropout is on; needs a "dropout" rng when the rate is above 0.

        Returns:
            (logits [B, T or M, V], the cache with its length advanced by T or None, features [B, T, len * D] or None)
        """
        c = self.config
        first, last = (0, c.num_layers) if layers is None else layers
        if not 0 <= first <= last <= c.num_layers or (first > 0) != (hidden is not None):
            raise ValueError(
                f"layers {layers} must lie within 0 to {c.num_layers}, with `hidden` given if they begin above 0"
            )
        if cache is None and c.positions == "learned" and tokens.shape[1] > c.context_length:
            raise ValueError(
                f"{tokens.shape[1]} tokens exceed the {c.context_length} learned positions; shorten the sequence, or "
                "raise context_length"
            )
        length = jnp.zeros(tokens.shape[0], jnp.int32) if cache is None else cache.length
        if positions is None:
            positions = length[:, None] + jnp.arange(tokens.shape[1])
        embedding = nn.Embed(
            c.vocab_size,
            c.d_model,
            dtype=c.dtype,
            param_dtype=c.param_dtype,
            embedding_init=nn.initializers.normal(0.02 if c.tied_head else 1.0),
            name="embedding",
        )
        x = scale_embeddings(c, embedding(tokens)) if hidden is None else hidden
        if hidden is None and c.positions == "sinusoidal":
            x = x + sinusoidal(positions, c.d_model).astype(x.dtype)
        elif hidden is None and c.positions == "learned":
            table = nn.Embed(
                c.context_length, c.d_model, dtype=c.dtype, param_dtype=c.param_dtype, name="position_embedding"
            )
            # Drafted nodes may lie past the context. They are never accepted, but a look-up there would be NaN, and one
            # NaN in the cache spoils all that attends around it: its weight is 0, and 0 times NaN is NaN.
            x = x + table(jnp.minimum(positions, c.context_length - 1))
        if hidden is None:
            x = nn.Dropout(c.dropout, deterministic=not train)(x)

        block = nn.remat(Block, static_argnums=(6,)) if c.remat and cache is None else Block
        features = {first: x}
        keys, values = ([], []) if cache is None else (list(cache.keys), list(cache.values))
        for i in range(first, last):
            cached = None if cache is None else (cache.keys[i], cache.values[i])
            out, cached = block(c, c.slides(i), name=f"layer_{i}")(x, cached, length, positions, mask, train)
            x = out if layer_keep is None else jnp.where(layer_keep[:, i, None, None], out, x)
            if cached is not None:
                keys[i], values[i] = cached
            features[i + 1] = x
        if cache is not None:
            cache = KVCache(keys=tuple(keys), values=tuple(values), length=length + tokens.shape[1])

        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[..., None], 1)
        if c.final_norm:
            x = make_norm(c, "final_norm")(x)
        if c.tied_head:
            logits = attend_to_table(x, embedding.embedding.astype(x.dtype))
        else:
            logits = make_dense(c, c.vocab_size, c.head_bias, "head")(x)
        chosen = jnp.concatenate([features[i] for i in feature_layers], -1) if feature_layers else None
        return logits, cache, chosen


@struct.dataclass
class LanguageModel:
    """A transformer's static config and its parameters, kept together."""

    config: TransformerConfig = struct.field(pytree_node=False)
    params: Any

    @classmethod
    def init(cls, config: TransformerConfig, key) -> "LanguageModel":
        tokens = jnp.zeros((1, 1), jnp.int32)
        return cls(config, jax.jit(Transformer(config).init)(key, tokens)["params"])

    @property
    def num_params(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.params))

    def __call__(self, tokens, cache=None, **kwargs):
        """`Transformer.__call__` with these parameters."""
        return apply(self.config, self.params, tokens, cache, **kwargs)

    def check(self, role: str) -> None:
        """Raises ValueError when the parameters are not those of the config; `role` names the model."""
        check_params(self.config, self.params, role)


def apply(config: TransformerConfig, params, tokens, cache=None, **kwargs):
    """`Transformer.__call__` as a function of its parameters."""
    return Transformer(config).apply({"params": params}, tokens, cache, **kwargs)


def check_params(config: TransformerConfig, params, role: str) -> None:
    """Compare parameter names, shapes and dtypes with what the config builds, without compiling anything.

    Raises:
        ValueError: naming the first difference, what was expected and what came.
    """
    check_params_against(_expected_params(config), params, f"the {role}")


@functools.lru_cache(maxsize=64)
def _expected_params(config: TransformerConfig):
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]
