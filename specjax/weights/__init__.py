"""Pretrained weights in and out: Hugging Face folders, GGUF files and saved drafters."""

import os
from collections.abc import Mapping

from specjax.models import LanguageModel
from specjax.weights.checksums import check_sha256
from specjax.weights.hub import locate
from specjax.weights.huggingface import load_huggingface, save_huggingface

__all__ = ["load_huggingface", "load_weights", "locate", "save_huggingface"]


def load_weights(
    path: str | os.PathLike, dtype=None, *, sha256: Mapping[str, str] | None = None
) -> LanguageModel:
    """A pretrained model from a Hugging Face folder, a GGUF file or the hub.

    Args:
        path: a folder with config.json and safetensors, a `.gguf` file, or an id on the hub, `owner/name`.
        dtype: of parameters and activations (default: that of the folder; float32 for a GGUF file).
        sha256: digests, in hexadecimal, that the model's files must have, by file name.

    Raises:
        ValueError: nothing there, or something wrong with it, in one line.
    """
    found = locate(path)
    check_sha256(found, sha256 or {})
    if found.is_dir():
        return load_huggingface(found, dtype)
    if found.suffix.lower() != ".gguf":
        raise ValueError(f"{found} is neither a folder with config.json nor a .gguf file")
    from specjax.weights.gguf_file import load_gguf  # the gguf package is needed for these files alone

    return load_gguf(found) if dtype is None else load_gguf(found, dtype)
