"""The EAGLE drafter's network: one decoder layer over pairs of a target feature and the token that comes after it.

    position      0        1        2     ...  i           i+1
    token         t0       t1       t2         t_i         t_{i+1}
    feature       f0       f1       f2         f_i                      f_i: of the target at position i
    pair               (f0,t1)  (f1,t2)           (f_i, t_{i+1})
    out of it           ~ f1     ~ f2             ~ f_{i+1}, from which comes the law of t_{i+2}

So the uncertainty about which token was drawn behind f_i is gone before f_{i+1} is predicted. What comes out takes the
place of the feature in the next pair, and that is how several tokens are drafted. Pair i has slot i of the layer's own
cache and rotary position i, in training as in decoding.

Version 1 (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, has the same network): the feature is the target's last
block's output *behind the target's final norm*, so the target's head reads true and predicted features alike.

    [f, e] -> linear -> decoder layer -> predicted f -> target's head

Version 3 (EAGLE-3, arXiv 2503.01840): the outputs of several blocks are fused, and nothing asks the layer's output to
be a feature; it has a final norm and a head of its own, over a part of the vocabulary if wanted.

    g = linear([low, middle, high])                    (of true features; further on g is the layer's last output)
    [norm(e), norm(g)] -> attention -> + g -> MLP -> g of the next pair -> own norm -> own head
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models import ends
from specjax.models.cache import KVCache, init_cache
from specjax.models.config import TransformerConfig
from specjax.models.eagle_modules import Layer1, Layer3, own_position_first
from specjax.models.param_check import check_params_against
from specjax.models.transformer import Transformer

VOCABULARY = "draft_to_target"


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE drafter is made of, however it drafts.

    Attributes:
        target: architecture of the only target it can draft for.
        version: 1 (also for EAGLE-2) or 3.
        feature_layers: target layers it reads, as in `Transformer.__call__`. None stands for the last block (version 1,
            which takes no other), or for a low, a middle and a high one (version 3).
        num_heads, num_kv_heads, d_ff: of its layer (None: the target's).
        draft_vocab: size of a reduced vocabulary (version 3), or None for the target's. Its ids are in the parameters,
            under "draft_to_target".
        feature_scale: what each layer's features are divided by before they are fused (version 3; None: 1). Those of a
            pretrained target grow with depth to sizes beside which an embedding vanishes; see `measure_feature_scale`.
        input_norm: a norm before attention (version 1). The published layer has none, and only that one can be saved
            for vLLM.

    Raises:
        ValueError: a value outside its range, or one that the version does not know.
    """

    target: TransformerConfig
    version: int = 1
    feature_layers: tuple[int, ...] | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    d_ff: int | None = None
    draft_vocab: int | None = None
    feature_scale: tuple[float, ...] | None = None
    input_norm: bool = True

    def __post_init__(self):
        depth = self.target.num_layers
        if self.version not in (1, 3):
            raise ValueError(f"version must be 1 (EAGLE and EAGLE-2) or 3 (EAGLE-3); got {self.version}")
        if self.feature_layers is None:
            # EAGLE-3's choice, for targets deep enough for it.
            fused = (2, depth // 2, depth - 3) if depth >= 8 else (depth // 4, depth // 2, depth)
            object.__setattr__(self, "feature_layers", fused if self.version == 3 else (depth,))
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if self.version == 1 and self.feature_layers != (depth,):
            raise ValueError(f"version 1 reads the target's last layer, {depth}; got {self.feature_layers}")
        if not self.feature_layers or not all(0 <= layer <= depth for layer in self.feature_layers):
            raise ValueError(f"feature_layers must be target layers from 0 to {depth}; got {self.feature_layers}")
        if self.feature_scale is not None:
            object.__setattr__(self, "feature_scale", tuple(self.feature_scale))
            wrong = len(self.feature_scale) != len(self.feature_layers) or not all(x > 0 for x in self.feature_scale)
            if self.version == 1 or wrong:
                raise ValueError(
                    f"feature_scale must be {len(self.feature_layers)} positive numbers, one per feature layer, and is "
                    f"for version 3; got {self.feature_scale} with version {self.version}"
                )
        if self.version == 3 and not self.input_norm:
            raise ValueError("version 3 always has its two norms before attention; leave input_norm out")
        if self.draft_vocab is not None:
            if self.version == 1:
                raise ValueError("version 1 drafts with the target's head and vocabulary; leave draft_vocab out")
            if not 1 <= self.draft_vocab <= self.target.vocab_size:
                raise ValueError(f"draft_vocab must be 1 to {self.target.vocab_size}; got {self.draft_vocab}")
        _ = self.layer

    @functools.cached_property
    def layer(self) -> TransformerConfig:
        """Architecture of the one layer. It always has rotary positions, and pre-norms but for `input_norm`."""
        t = self.target
        heads = t.num_heads if self.num_heads is None else self.num_heads
        shared = heads == t.num_heads
        return t.for_drafting_layers(
            1,
            num_heads=heads,
            num_kv_heads=(t.num_kv_heads if shared else None) if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=t.head_dim if shared else None,
            d_ff=t.d_ff if self.d_ff is None else self.d_ff,
            vocab_size=self.num_draft_tokens,
            tied_head=False,
        )

    @property
    def num_draft_tokens(self) -> int:
        """How many different tokens it can draft."""
        return self.target.vocab_size if self.draft_vocab is None else self.draft_vocab

    def init_params(self, key, target_params=None, draft_to_target: Int[Array, "Vd"] | None = None) -> dict:
        """Fresh parameters.

        Args:
            key: of the initialisation.
            target_params: start version 3's own norm and head from the target's, and some of its attention at the own
                position, without which the token just drawn, one key among all, is hardly seen at first.
            draft_to_target: ids of the reduced vocabulary (default: the first ones).
        """
        params = dict(jax.jit(self._init_layer)(key))
        if self.draft_vocab is not None:
            ids = np.arange(self.draft_vocab) if draft_to_target is None else draft_to_target
            params[VOCABULARY] = jnp.asarray(ids, jnp.int32)
        elif draft_to_target is not None:
            raise ValueError("draft_to_target was given, but the config has no draft_vocab")
        if target_params is not None and self.version == 3:
            t, ids = self.target, params.get(VOCABULARY, slice(None))
            params["head"] = {name: x[..., ids] for name, x in ends.untied_head(t, target_params).items()}
            if t.final_norm:
                params["final_norm"] = dict(target_params["final_norm"])
            params["attention"] = own_position_first(params["attention"], self.layer)
            params = jax.tree.map(jnp.array, params)  # copies: a training step gives its parameters' buffers away
        self.check_params(params)
        return params

    def check_params(self, params) -> None:
        """Raises ValueError, naming the first difference, when the parameters are not those of this config."""
        remedy = "; see EagleConfig.init_params"
        check_params_against(_expected_params(self), params, "the EAGLE drafter", remedy)
        if self.draft_vocab is not None:
            ids = np.asarray(params[VOCABULARY])
            if ids.min() < 0 or ids.max() >= self.target.vocab_size or len(np.unique(ids)) < ids.size:
                raise ValueError(
                    f"{VOCABULARY} must hold {ids.size} different ids from 0 to {self.target.vocab_size - 1}; "
                    f"got {ids.min()} to {ids.max()}, {len(np.unique(ids))} of them different"
                )

    def init_cache(self, batch: int, num_slots: int) -> KVCache:
        """An empty cache of the one layer."""
        return init_cache(self.layer, batch, num_slots)

    def start(self, params, target_params, features: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
        """Features as the target gives them -> as pairs take them: behind the final norm (1), or fused (3)."""
        if self.version == 1:
            return ends.normalise(self.target, target_params, features)
        if self.feature_scale is not None:
            scale = np.repeat(np.asarray(self.feature_scale), self.target.d_model)
            features = features / jnp.asarray(scale, features.dtype)
        return Layer3(self.layer).apply({"params": _trained(params)}, features, method="fuse")

    def without_scale(self, params: dict) -> tuple["EagleConfig", dict]:
        """The same drafter with its `feature_scale` inside the fusion's kernel."""
        if self.feature_scale is None:
            return self, params
        kernel = params["fusion"]["kernel"]
        scale = jnp.asarray(np.repeat(np.asarray(self.feature_scale), self.target.d_model)[:, None], kernel.dtype)
        return dataclasses.replace(self, feature_scale=None), {**params, "fusion": {"kernel": kernel / scale}}

    def run(
        self,
        params,
        target_params,
        features: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        cache: KVCache,
        *,
        positions: Int[Array, "B T"] | None = None,
        mask=None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """The layer's outputs for T pairs, and the cache with T more slots in use.

        Args:
            params, target_params: of the drafter and the target, which lends its embedding (and its head).
            features: true ones, made by `start`, or earlier outputs.
            tokens: the tokens behind them.
            cache: pairs before; these take the next slots.
            positions: of the pairs (default: their slots).
            mask: as in `Transformer.__call__`.
        """
        if positions is None:
            positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
        embedded = ends.embed(self.target, target_params, tokens)
        cached = cache.keys[0], cache.values[0]
        out, (keys, values) = self._module.apply(
            {"params": _trained(params)}, features, embedded, cached, cache.length, positions, mask
        )
        return out, KVCache((keys,), (values,), cache.length + tokens.shape[1])

    def draft_logits(self, params, target_params, out: Float[Array, "*B D"]) -> Float[Array, "*B W"]:
        """Logits, over the draft vocabulary, of the token behind the pairs with these outputs."""
        if self.version == 1:
            return ends.head(self.target, target_params, out)
        return Layer3(self.layer).apply({"params": _trained(params)}, out, method="logits")

    def logits(self, params, target_params, out: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """The same over the target's vocabulary: minus infinity where a token cannot be drafted."""
        logits = self.draft_logits(params, target_params, out)
        if self.draft_vocab is None:
            return logits
        # By gathering from the inverse map: a scatter of every row would be slower than the head.
        column = jnp.full(self.target.vocab_size, -1).at[params[VOCABULARY]].set(jnp.arange(self.draft_vocab))
        return jnp.where(column >= 0, logits[..., jnp.maximum(column, 0)], -jnp.inf)

    def target_ids(self, params, columns: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Ids in the target's vocabulary of columns of `draft_logits`."""
        return columns if self.draft_vocab is None else params[VOCABULARY][columns]

    @property
    def _module(self) -> nn.Module:
        return Layer1(self.layer, self.input_norm) if self.version == 1 else Layer3(self.layer)

    def _init_layer(self, key):
        d, one = self.target.d_model, jnp.zeros((1, 1), jnp.int32)
        row = lambda width: jnp.zeros((1, 1, width), self.target.dtype)  # noqa: E731
        raw = row(d * len(self.feature_layers))
        return self._module.init(key, raw, row(d), None, one[0], one, None, method="everything")["params"]


def measure_feature_scale(
    target: TransformerConfig, target_params, texts: Int[Array, "B T"], layers: tuple[int, ...]
) -> tuple[float, ...]:
    """Per layer, the median over dimensions of the features' root mean square, to three digits.

    The median, because a few dimensions of a pretrained model are tens of times as large as the others, nearly constant
    (Sun et al. 2024, "Massive activations", arXiv 2402.17762), and so is all of the first position, which is left out.
    """

    def run(params, texts):
        model = Transformer(target)
        return model.apply({"params": params}, texts, feature_layers=layers, logits_at=texts[:, :0])[2]

    features = np.asarray(jax.jit(run)(target_params, jnp.asarray(texts)), np.float64)[:, 1:]
    sizes = np.sqrt(np.mean(features**2, (0, 1))).reshape(len(layers), -1)
    return tuple(float(f"{size:.3g}") for size in np.median(sizes, 1))


def split_params(params: dict) -> tuple[dict, dict]:
    """(what is trained, what is not: the ids of a reduced vocabulary). Join them again with `{**trained, **fixed}`."""
    return _trained(params), {name: x for name, x in params.items() if name == VOCABULARY}


def most_frequent(tokens, size: int, vocab_size: int) -> Int[Array, "Vd"]:
    """Ids, in rising order, of the `size` tokens that occur most often: a draft vocabulary (EAGLE-3, section 4)."""
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=vocab_size)
    return jnp.asarray(np.sort(np.argsort(-counts, kind="stable")[:size]), jnp.int32)


def _trained(params):
    return {name: x for name, x in params.items() if name != VOCABULARY}


@functools.lru_cache(maxsize=64)
def _expected_params(config: EagleConfig) -> dict[str, Any]:
    params = dict(jax.eval_shape(config._init_layer, jax.random.key(0)))
    if config.draft_vocab is not None:
        params[VOCABULARY] = jax.ShapeDtypeStruct((config.draft_vocab,), jnp.int32)
    return params
