"""Small networks on a model's last hidden state that look more than one token ahead (Medusa, Hydra)."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.config import TransformerConfig
from specjax.models.layers import make_dense, make_norm


class Update(nn.Module):
    """silu(W x), or W₂ silu(W₁ x) when a hidden width is given; 0 for a network that has not been trained."""

    config: TransformerConfig
    hidden_width: int | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B D"]:
        if self.hidden_width is None:
            return nn.silu(make_dense(self.config, self.config.d_model, False, "update", zero=True)(x))
        hidden = nn.silu(make_dense(self.config, self.hidden_width, False, "up")(x))
        return make_dense(self.config, self.config.d_model, False, "down", zero=True)(hidden)


class PredictionHead(nn.Module):
    """What the model's output head is to read in order to predict one particular later token.

    Without a path: residual blocks x + silu(W x) on the feature f (Medusa, section 2.1.1). With the embeddings e₁..e_k
    of a path, the first block sees them too: f + P c + silu(W c), c = [f; e₁; ...; e_k] (Hydra, section 3). Embeddings
    are normalised first, because tied ones are about fifty times smaller than features.

    An untrained head returns f, so the model's own output head gives its next-token law.

    Attributes:
        config: of the model.
        num_blocks: residual blocks.
        hidden_width: of the blocks; None makes them one square matrix each, as published.
        own_output: whether the head has an output matrix of its own and returns logits.

    References:
        Cai et al. 2024, arXiv 2401.10774. Ankner et al. 2024, arXiv 2402.05109.
    """

    config: TransformerConfig
    num_blocks: int = 1
    hidden_width: int | None = None
    own_output: bool = False

    @nn.compact
    def __call__(self, feature: Float[Array, "*B D"], path: Float[Array, "*B P D"] | None = None):
        """[*B, D], or logits [*B, V], from features (behind the final norm) and embeddings of a path."""
        c = self.config
        x = feature
        for i in range(self.num_blocks):
            update = Update(c, self.hidden_width, name=f"block_{i}")
            if i == 0 and path is not None:
                path = make_norm(c, "path_norm")(path)
                seen = jnp.concatenate([feature, path.reshape(*path.shape[:-2], -1)], -1)
                x = feature + make_dense(c, c.d_model, False, "mix", zero=True)(seen) + update(seen)
            else:
                x = x + update(x)
        return make_dense(c, c.vocab_size, c.head_bias, "output")(x) if self.own_output else x
