"""Speculative decoding research in JAX and Flax: train a target, distil a drafter, decode losslessly.

`specjax.load(path)` reads a pretrained model and its tokenizer, see `specjax.pretrained`.
"""

import importlib


def __getattr__(name: str):
    """`load` is imported on first use: every room imports this file, so it imports none."""
    if name == "load":
        return importlib.import_module("specjax.pretrained").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
