"""A target and a drafter of a few hundred parameters in float64, and plain references for what the loop must do."""

import jax
import numpy as np

from specjax.decoding import generate
from specjax.drafters import Independent
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.transformer import apply

VOCAB, CONTEXT = 11, 64
DOUBLE = dict(dtype="float64", param_dtype="float64")
TARGET = TransformerConfig(VOCAB, 8, 1, 2, num_kv_heads=1, d_ff=16, context_length=CONTEXT, tied_head=False, **DOUBLE)
DRAFTER = TransformerConfig(VOCAB, 8, 1, 2, d_ff=16, context_length=CONTEXT, tied_head=False, **DOUBLE)
PROMPTS = [
    [3],
    [1, 2, 3, 4, 5, 6, 7],
    [9, 0, 9, 0],
    [4, 4],
    [10, 1, 8, 2, 7, 3],
    [5, 5, 5],
    [2, 6, 1, 0, 8, 3, 9, 10],
    [0],
]
LIMITS = [12, 9, 20, 14, 1, 17, 2, 11]

_forward = jax.jit(apply, static_argnums=0)


def models() -> tuple[LanguageModel, LanguageModel]:
    """A pair that often agrees without being equal: the drafter is the target with other layers and some noise."""
    target, drafter = LanguageModel.init(TARGET, jax.random.key(1)), LanguageModel.init(DRAFTER, jax.random.key(2))

    def spread(lm, by, seed):
        leaves, tree = jax.tree.flatten(lm.params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        moved = [x + by * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
        return lm.replace(params=jax.tree.unflatten(tree, moved))

    target = spread(target, 0.5, 3)
    drafter.params.update({name: value for name, value in target.params.items() if name != "layer_0"})
    return target, spread(drafter, 0.25, 4)


class Pair:
    """The models with the defaults that let tests share compiled programs."""

    def __init__(self):
        with jax.enable_x64(True):
            self.target, self.drafter = models()

    def run(self, prompts=None, *, draft_length=3, **options):
        """`generate` on the first prompts, with `draft_length` 0 for target-only decoding."""
        prompts = PROMPTS[:3] if prompts is None else prompts
        options = {"max_new_tokens": LIMITS[: len(prompts)], "buffer_length": 32} | options
        if draft_length:
            options["drafter"] = Independent(DRAFTER, draft_length)
            options["drafter_params"] = self.drafter.params
        return generate(self.target, prompts, **options)

    def logits(self, text, model=None) -> np.ndarray:
        """[len(text), V]: one plain forward of the whole text, without a cache."""
        model = self.target if model is None else model
        padded = np.zeros((1, 40), np.int32)
        padded[0, : len(text)] = text
        return np.asarray(_forward(model.config, model.params, padded)[0][0, : len(text)])
