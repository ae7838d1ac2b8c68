"""Chat templates: messages to the text, and to the tokens, that a model was trained to answer."""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specjax.data.pretrained_tokenizer import PretrainedTokenizer

# Unicode sets these apart for use inside a program; no text holds them.
_NONCHARACTERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]


class ChatTemplate:
    """A template of a model, run in jinja2's sandbox: it reads the messages and can reach nothing else."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = ""):
        """`source`: the template. ValueError, in one line, if it cannot be parsed."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self.source, self.bos_token, self.eos_token = source, bos_token, eos_token
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            line = f"line {error.lineno}: " if getattr(error, "lineno", None) else ""
            raise ValueError(f"the chat template cannot be parsed ({line}{_one_line(error)})") from None

    def render(self, messages: Any, add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            messages: a list of dicts, each with `role` and `content`, both texts.
            add_generation_prompt: whether the text ends where the model is to answer.

        Raises:
            ValueError: messages of another form, or a template that fails or refuses them.
        """
        _check(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                tools=None,
                documents=None,
            )
        except Exception as error:  # whatever a template does wrong, it does in Python
            raise ValueError(f"the chat template failed ({_one_line(error)})") from None

    def encode(
        self, messages: Any, tokenizer: PretrainedTokenizer, add_generation_prompt: bool = True
    ) -> Int[np.ndarray, "T"]:
        """The tokens of a conversation; special tokens that somebody typed into a message stay text.

        They are marked before the template runs, so that those of the template alone are found in its output.
        """
        _check(messages)
        special = tokenizer.special_pattern
        if not any(special.search(message["content"]) for message in messages):
            return tokenizer.encode(self.render(messages, add_generation_prompt), parse_special=True)
        mark = next(c for c in _NONCHARACTERS if not any(c in message["content"] for message in messages))
        marked = [
            {**message, "content": special.sub(lambda found: found[0][:1] + mark + found[0][1:], message["content"])}
            for message in messages
        ]
        text, ids, end = self.render(marked, add_generation_prompt), [], 0
        for found in special.finditer(text):
            ids.append(tokenizer.encode(text[end : found.start()].replace(mark, "")))
            ids.append(tokenizer.encode(found[0], parse_special=True))
            end = found.end()
        ids.append(tokenizer.encode(text[end:].replace(mark, "")))
        return np.concatenate(ids)


def load_chat_template(path: str | os.PathLike) -> ChatTemplate | None:
    """The template of a model folder (chat_template.jinja, or in tokenizer_config.json) or of a .gguf file, if any.

    Raises:
        ValueError: a file that is damaged, or a template that cannot be parsed; one line that names it.
    """
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        from specjax.data.gguf_metadata import read_metadata  # the gguf package is needed for these files alone

        metadata = read_metadata(path)
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        source = metadata.get("tokenizer.chat_template")
        bos, eos = (_token(tokens, metadata.get(f"tokenizer.ggml.{name}_token_id")) for name in ("bos", "eos"))
        file = path
    else:
        folder = path if path.is_dir() else path.parent
        file = folder / "tokenizer_config.json"
        settings = _read_object(file)
        source, bos, eos = (settings.get(name) for name in ("chat_template", "bos_token", "eos_token"))
        if (folder / "chat_template.jinja").is_file():
            file = folder / "chat_template.jinja"
            source = file.read_text(encoding="utf-8")
        elif (folder / "chat_template.json").is_file():
            file = folder / "chat_template.json"
            source = _read_object(file).get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    if source is None:
        return None
    bos, eos = (token.get("content") if isinstance(token, dict) else token for token in (bos, eos))
    try:
        return ChatTemplate(source, bos or "", eos or "")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _check(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("messages must be a list of at least one message with role and content")
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str) or (key == "role" and not value):
                raise ValueError(f"message {i} must be a dict with a text for {key!r}; got {str(message)[:80]!r}")


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Not jinja2's own, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _token(tokens: list, i: int | None) -> str | None:
    return tokens[i] if i is not None and 0 <= i < len(tokens) else None


def _read_object(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({_one_line(error)})") from None
    return content if isinstance(content, dict) else {}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
