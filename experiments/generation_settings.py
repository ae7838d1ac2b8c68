"""What a config of text generation asks for: mode, prompts, drafter and the options of `Pretrained.generate`."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from specjax.data.prompts import PromptFiles
from specjax.drafters import EagleSuffix, NGram, Suffix
from specjax.penalties import Penalties
from specjax.pretrained import Pretrained, independent_drafter, saved_drafter
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS

FROM_A_FOLDER = ("saved", "eagle_suffix", "independent")
DRAFTERS = ("none", "ngram", "suffix", *FROM_A_FOLDER)
MODES = ("prompt", "file", "chat")


def mode_of(config: ConfigDict) -> str:
    """What the config asks for. ValueError when it contradicts itself."""
    if not config.model:
        raise ValueError("there is no model: --config.model=PATH, a folder, a .gguf file or a name on the hub")
    mode = config.mode or ("file" if config.file else "prompt" if config.prompt else "chat")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if (config.file and mode != "file") or (config.prompt and mode != "prompt"):
        raise ValueError(f"mode {mode} with prompt {config.prompt[:40]!r} and file {config.file!r}: give one of them")
    if config.html and mode != "prompt":
        raise ValueError(f"html {config.html} is a page of one prompt; in mode {mode} leave it out")
    if config.raw and config.system:
        raise ValueError("a system message needs the chat template; leave out --config.system or --config.raw")
    return mode


def options_of(config: ConfigDict) -> dict:
    """Keyword arguments of `Pretrained.generate`, checked before the model is read."""
    try:
        jnp.dtype(config.dtype or "float32")
    except TypeError:
        raise ValueError(f"dtype must be float32, bfloat16 or float16; got {config.dtype!r}") from None
    if config.drafter.kind not in DRAFTERS:
        raise ValueError(f"drafter.kind must be one of {', '.join(DRAFTERS)}; got {config.drafter.kind!r}")
    if config.drafter.kind in FROM_A_FOLDER and not config.drafter.path:
        raise ValueError(f"drafter.kind {config.drafter.kind} needs a folder: --config.drafter.path=PATH")
    if config.verifier and config.verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}; got {config.verifier!r}")
    penalties = Penalties.of(**config.penalties.to_dict())
    return dict(
        max_new_tokens=config.max_new_tokens,
        verifier=config.verifier or None,
        sampling=Sampling.of(**config.sampling.to_dict()),
        penalties=penalties if penalties.on else None,
        stop=tuple(config.stop),
    )


def make_drafter(settings: ConfigDict, target: Pretrained) -> Any:
    """What `Pretrained.generate` takes for a drafter."""
    length = settings.draft_length
    if settings.kind == "ngram":
        return NGram(_or(length, 8), _or(settings.max_match, 3))
    if settings.kind == "suffix":
        return Suffix(_or(length, 8), _or(settings.max_match, 16))
    if settings.kind == "saved":
        return saved_drafter(settings.path, target.model, length)
    if settings.kind == "eagle_suffix":
        drafter, params = saved_drafter(settings.path, target.model, length)
        suffix = dataclasses.replace(EagleSuffix.suffix, max_match=_or(settings.max_match, 16))
        return EagleSuffix.of(drafter, suffix=suffix), params
    if settings.kind == "independent":
        return independent_drafter(settings.path, target, _or(length, 4))
    return None


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def read_prompts(config: ConfigDict, say: Callable[[str], None]) -> list[tuple[str, Any]]:
    """(name, prompt) of every line of `config.file`."""
    path = pathlib.Path(config.file)
    if not path.is_file():
        raise ValueError(f"there is no file {path} of prompts")
    if path.suffix == ".jsonl":
        prompts, broken = PromptFiles(str(path), on_broken=config.on_broken).read()
        for line in broken:
            say(f"skipped: {line}")
        unasked = sum(len(prompt.follow_ups) for prompt in prompts)
        if unasked:
            say(f"{unasked} follow-up questions are not asked here, only first turns")
        return [(prompt.name, as_prompt(config, prompt.chat)) for prompt in prompts]
    lines = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        try:
            lines.append((f"{path.name}:{number}", line.decode("utf-8")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None
    lines = [(name, as_prompt(config, line)) for name, line in lines if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompts: every line of it is blank")
    return lines


def as_prompt(config: ConfigDict, prompt: Any) -> Any:
    """The text itself for raw completion, else messages with the config's system message before them."""
    if config.raw:
        if not isinstance(prompt, str) and len(prompt) > 1:
            raise ValueError(f"{len(prompt)} messages cannot be continued as plain text; leave out --config.raw")
        return prompt if isinstance(prompt, str) else prompt[0]["content"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return ([{"role": "system", "content": config.system}] if config.system else []) + messages
