"""The static description of a decoder-only transformer."""

import dataclasses

import jax.numpy as jnp

_CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "norm_position": ("pre", "post", "sandwich"),
    "positions": ("rotary", "sinusoidal", "learned"),
    "mlp": ("swiglu", "geglu", "gelu", "relu"),
}


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Llama 3's frequency scaling: long wavelengths are slowed by `factor`, short ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True)
class LinearRotaryScaling:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): all positions are divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder; covers the Llama family, Gemma 3, GPT-2 and the MiniGPT of textbooks.

    Attributes:
        vocab_size: V.
        d_model: D, the width.
        num_layers: blocks of attention and MLP.
        num_heads: query heads.
        num_kv_heads: key-value heads K (None: as many as query heads; fewer is grouped-query attention).
        head_dim: width of one head (None: d_model / num_heads).
        d_ff: width of the MLP (None: 4 * d_model).
        context_length: longest text, in tokens.
        norm, norm_eps: "rmsnorm" or "layernorm".
        norm_offset: what is added to the learned scale of every RMSNorm (Gemma: 1).
        norm_position: "pre" (norm, sublayer, add), "post" (sublayer, add, norm) or "sandwich" (norm, sublayer, norm,
            add).
        final_norm: a norm before the output head.
        positions: "rotary", "sinusoidal" or "learned".
        rotary_base: θ of the rotary frequencies.
        rotary_fraction: share of each head that is rotated (partial rotary).
        rotary_scaling: Llama 3's or linear scaling of the frequencies, or None.
        sliding_window: positions, its own included, that a token sees in a sliding layer; None for no such layer.
        sliding_layers: which blocks, from 0, slide (None: all, if there is a window).
        sliding_rotary_base: θ in the sliding layers, without scaling (None: as in the others).
        attention_scale: what query-key products are multiplied by (None: head_dim ** -0.5).
        embedding_scale: what embeddings are multiplied by on the way in (Gemma: √d_model).
        mlp: "swiglu", "geglu", "gelu" (both with the tanh approximation) or "relu".
        qkv_bias, attention_bias, mlp_bias, head_bias: biases of the query/key/value, attention output, MLP and head.
        tied_head: the head reuses the embedding.
        qk_norm: RMSNorm on queries and keys of each head, before rotation.
        dropout: rate on the embedding and on each sublayer's output, while training.
        dtype: of activations; param_dtype: of parameters. Anything `jnp.dtype` takes.
        remat: recompute each block in the backward pass instead of storing its activations.

    Raises:
        ValueError: a value outside its range, or numbers that do not divide; the message names them.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    context_length: int = 512
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_position: str = "pre"
    final_norm: bool = True
    positions: str = "rotary"
    rotary_base: float = 10_000.0
    rotary_fraction: float = 1.0
    rotary_scaling: RotaryScaling | LinearRotaryScaling | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    sliding_rotary_base: float | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    mlp: str = "swiglu"
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tied_head: bool = True
    qk_norm: bool = False
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.dtype("float32")
    param_dtype: jnp.dtype = jnp.dtype("float32")
    remat: bool = False

    def __post_init__(self):
        fill = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.num_kv_heads is None:
            fill("num_kv_heads", self.num_heads)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim is None:
            if self.d_model % self.num_heads:
                raise ValueError(
                    f"d_model {self.d_model} must be a multiple of num_heads {self.num_heads}, or set head_dim"
                )
            fill("head_dim", self.d_model // self.num_heads)
        if self.d_ff is None:
            fill("d_ff", 4 * self.d_model)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.norm_offset and self.norm != "rmsnorm":
            raise ValueError(f"norm_offset {self.norm_offset} is for norm 'rmsnorm'; got {self.norm!r}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, or None; got {self.sliding_window}")
        slides = () if self.sliding_layers is None else tuple(self.sliding_layers)
        if slides and self.sliding_window is None or not all(0 <= i < self.num_layers for i in slides):
            raise ValueError(
                f"sliding_layers must be blocks from 0 to {self.num_layers - 1}, with a sliding_window; got {slides}"
            )
        if self.sliding_layers is None and self.sliding_window is not None:
            slides = tuple(range(self.num_layers))
        # Both or neither, so that a config made from this one by `replace` means the same.
        fill("sliding_layers", tuple(sorted(set(slides))) or None)
        fill("sliding_window", self.sliding_window if slides else None)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1); got {self.dropout}")
        if self.positions == "rotary" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction} of head_dim {self.head_dim} must be an even number >= 2"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model; got {self.d_model}")
        fill("dtype", jnp.dtype(self.dtype))
        fill("param_dtype", jnp.dtype(self.param_dtype))

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP has a gate beside its way up."""
        return self.mlp in ("swiglu", "geglu")

    def slides(self, layer: int) -> bool:
        """Whether block `layer`, from 0, sees a sliding window only."""
        return self.sliding_layers is not None and layer in self.sliding_layers

    def for_drafting_layers(self, num_layers: int, **changes) -> "TransformerConfig":
        """The config of layers that read this model's features: rotary, norms before the sublayers, all of the text."""
        plain = dict(positions="rotary", norm_position="pre", sliding_window=None, sliding_layers=None, dropout=0.0)
        return dataclasses.replace(self, num_layers=num_layers, **(plain | changes))

    def differing_fields(self, other: "TransformerConfig") -> list[str]:
        """Names of the fields in which two configs differ."""
        names = [field.name for field in dataclasses.fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]
