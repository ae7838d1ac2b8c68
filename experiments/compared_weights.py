"""One set of weights in both libraries, and the texts that they are compared on."""

import dataclasses
import functools
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.pretrained_setting import conversation_ids, identity
from specjax.data.prompts import split_prompts
from specjax.data.standard_library_prompts import function_prompts
from specjax.data.text import StandardLibrary
from specjax.models import LanguageModel, init_cache
from specjax.models.transformer import apply
from specjax.pretrained import Pretrained
from specjax.report.stages import Stages
from specjax.weights import load_weights, locate, save_huggingface

ARCHITECTURES = {  # of GGUF
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def other_library():
    """The module that imports torch and transformers.

    Raises:
        ValueError: they are not installed.
    """
    try:
        from experiments import transformers_side
    except ModuleNotFoundError as error:
        raise ValueError(
            f"no package {error.name} here: in an environment of its own, pip install -r requirements.txt -r "
            "requirements-compare.txt"
        ) from None
    return transformers_side


def weights_folder(
    name: str, path: str, stages: Stages, model: Callable[[], LanguageModel] | None = None
) -> pathlib.Path:
    """A Hugging Face folder that both libraries read; stage `name` writes a GGUF file as one, in float32.

    Args:
        name: of the stage.
        path: of the model, or its name on the hub.
        stages: of this run.
        model: gives that model in float32, if it is at hand.
    """
    found = locate(path)
    if found.is_dir():
        return found

    def write(folder: pathlib.Path):
        from specjax.weights.gguf_file import read_metadata

        kind = str(read_metadata(found)["general.architecture"])
        if kind not in ARCHITECTURES:
            raise ValueError(f"{found} is of architecture {kind}; compared are {', '.join(ARCHITECTURES)}")
        loaded = load_weights(found, "float32") if model is None else model()
        save_huggingface(folder / "huggingface", loaded, ARCHITECTURES[kind])

    return stages.run(name, identity(found), write, lambda folder, _: folder / "huggingface")


class Sides:
    """Both libraries' models by dtype, loaded when they are first asked for.

    Args:
        config: settings.
        target: the float32 model here, with its tokenizer, chat template and stop ids.
        folder: where all others are read from.
    """

    def __init__(self, config: ConfigDict, target: Pretrained, folder: pathlib.Path):
        self.config, self.target, self.folder = config, target, folder
        self.ours = functools.cache(self._ours)
        self.theirs = functools.cache(self._theirs)

    def _ours(self, dtype: str) -> Pretrained:
        if dtype == "float32":
            return self.target
        return dataclasses.replace(self.target, model=load_weights(self.folder, dtype))

    def _theirs(self, dtype: str, path: str | None = None):
        return other_library().TransformersModel(path or self.folder, dtype, self.config.threads)

    def our_logits(self, ids: Sequence[int], dtype: str = "float32") -> Iterator[np.ndarray]:
        return chunked_logits(self.ours(dtype).model, ids)


def chunked_logits(model: LanguageModel, ids: Sequence[int], chunk: int = 256) -> Iterator[np.ndarray]:
    """[chunk, V] float32 logits behind every token of a text, in order, read through the cache."""
    cache = init_cache(model.config, 1, -(-len(ids) // chunk) * chunk)
    for begin in range(0, len(ids), chunk):
        part = np.zeros((1, chunk), np.int32)
        size = len(ids[begin : begin + chunk])
        part[0, :size] = ids[begin : begin + chunk]
        logits, cache, _ = _forward(model.config, model.params, jnp.asarray(part), cache)
        yield np.asarray(logits[0, :size].astype(jnp.float32))


_forward = jax.jit(apply, static_argnums=0)


def code_prompts(config: ConfigDict, target: Pretrained) -> list[list[int]]:
    """Ids of prompts about functions of documents on the held-out side, shuffled by the seed."""
    documents = StandardLibrary().documents()
    prompts = function_prompts(documents, config.seed, None, tuple(config.prompt_kinds), config.prompt_chars)
    count = max(config.greedy_prompts, config.timed_prompts)
    return [conversation_ids(target, prompt.chat) for prompt in split_prompts(prompts, config.held_out)[1][:count]]


def passage(kind: str, target: Pretrained, tokens: int) -> list[int]:
    """The first ids of a text that comes with Python: "code", some modules; "prose", what `help` says about topics."""
    if kind == "code":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        text = "\n\n".join((root / name).read_text(encoding="utf-8") for name in ("textwrap.py", "json/decoder.py"))
    else:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics))
    limit = min(tokens, target.model.config.context_length)
    ids = target.prompt_ids(text[: 16 * limit])[:limit]
    if len(ids) < limit:
        raise ValueError(f"the {kind} has {len(ids)} tokens, fewer than {limit}; lower --config.perplexity_tokens")
    return ids
