"""Transformers and their caches. A transformer never knows whether it is a target or a drafter."""

from specjax.models.cache import KVCache, init_cache
from specjax.models.config import LinearRotaryScaling, RotaryScaling, TransformerConfig
from specjax.models.transformer import LanguageModel, Transformer

__all__ = [
    "KVCache",
    "LanguageModel",
    "LinearRotaryScaling",
    "RotaryScaling",
    "Transformer",
    "TransformerConfig",
    "init_cache",
]
