"""What a config of text generation asks for: mode, prompts, drafter and the options of `Pretrained.generate`."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from specjax.data.prompts import PromptFiles, refused_prompt
from specjax.drafters import EagleSuffix, NGram, Suffix
from specjax.penalties import Penalties
from specjax.pretrained import Pretrained, independent_drafter, saved_drafter
from specjax.pretrained.drafters import with_params
from specjax.pretrained.fitting import why_too_long
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS

FROM_A_FOLDER = ("saved", "eagle_suffix", "independent")
DRAFTER_KINDS = ("none", "ngram", "suffix", *FROM_A_FOLDER)
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
    if config.on_broken not in ("stop", "skip"):
        raise ValueError(f"on_broken must be 'stop' or 'skip'; got {config.on_broken!r}")
    if config.raw and config.system:
        raise ValueError("a system message needs the chat template; leave out --config.system or --config.raw")
    return mode


def options_of(config: ConfigDict) -> dict:
    """Keyword arguments of `Pretrained.generate`, checked before the model is read."""
    try:
        jnp.dtype(config.dtype or "float32")
    except TypeError:
        raise ValueError(f"dtype must be float32, bfloat16 or float16; got {config.dtype!r}") from None
    if config.drafter.kind not in DRAFTER_KINDS:
        raise ValueError(f"drafter.kind must be one of {', '.join(DRAFTER_KINDS)}; got {config.drafter.kind!r}")
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


def read_prompts(config: ConfigDict, say: Callable[[str], None]) -> tuple[list[tuple[str, Any]], list[str]]:
    """(name, text or messages) of every line of `config.file`, and which lines were left out, and why.

    Raises:
        ValueError: no such file, no prompts in it, or a broken line while `on_broken` is "stop".
    """
    path = pathlib.Path(config.file)
    if not path.is_file():
        raise ValueError(f"there is no file {path} of prompts")
    if path.suffix == ".jsonl":
        prompts, left_out = PromptFiles(str(path), on_broken=config.on_broken).read()
        unasked = sum(len(prompt.follow_ups) for prompt in prompts)
        if unasked:
            say(f"{unasked} follow-up questions are not asked here, only first turns")
        return [(prompt.name, prompt.chat) for prompt in prompts], left_out
    lines, left_out = [], []
    for number, line in enumerate(_read_bytes(path).removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        try:
            lines.append((f"{path.name}:{number}", line.decode("utf-8")))
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 (byte {error.start})"
            left_out.append(refused_prompt(f"{path}, line {number}", reason, config.on_broken))
    lines = [(name, line) for name, line in lines if line.strip()]
    if not lines:
        why = f"{len(left_out)} lines are broken, the first: {left_out[0]}" if left_out else "every line of it is blank"
        raise ValueError(f"{path} holds no prompts: {why}")
    return lines, left_out


def usable_prompts(
    config: ConfigDict, model: Pretrained, prompts: Sequence[tuple[str, Any]], options: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], list[str]]:
    """(name, what `Pretrained.generate` takes) of all prompts that the model can continue; why others are left out.

    Args:
        options: those of `generate`; drafter and max_new_tokens are used.

    Raises:
        ValueError: one that the model cannot take while `on_broken` is "stop", or no other prompt.
    """
    usable, left_out = [], []
    drafter, _ = with_params(options["drafter"], model.model)
    for name, prompt in prompts:
        try:
            prompt = as_prompt(config, prompt)
            ids = model.prompt_ids(prompt)
            reason = why_too_long(model.name, ids, options["max_new_tokens"], model.model.config, drafter)
        except ValueError as error:
            reason = error
        if reason is None:
            usable.append((name, prompt))
        else:
            left_out.append(refused_prompt(name, reason, config.on_broken))
    if not usable:
        raise ValueError(f"{model.name} can take none of the {len(left_out)} prompts; the first: {left_out[0]}")
    return usable, left_out


def as_prompt(config: ConfigDict, prompt: Any) -> Any:
    """The text itself for raw completion, else messages with the config's system message before them."""
    if config.raw:
        if not isinstance(prompt, str) and len(prompt) > 1:
            raise ValueError(f"{len(prompt)} messages cannot be continued as plain text; leave out --config.raw")
        return prompt if isinstance(prompt, str) else prompt[0]["content"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return ([{"role": "system", "content": config.system}] if config.system else []) + messages


def _read_bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
