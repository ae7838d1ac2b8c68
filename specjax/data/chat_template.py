"""Chat templates: messages to the text, and to the tokens, that a model was trained to answer."""

import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specjax.data.pretrained_tokenizer import PretrainedTokenizer
from specjax.data.settings_file import read_settings, read_text

# Unicode sets these apart for use inside a program; no text holds them.
_NONCHARACTERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, Hugging Face's marks around what a model is trained to say."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A template of a model, run in jinja2's sandbox: it reads the messages and can reach nothing else.

    Attributes:
        source, bos_token, eos_token, special_tokens: as given.
        fault: why the template cannot be parsed, in one line; None for one that can.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: Mapping[str, Any] | None = None,
        file: str | os.PathLike | None = None,
    ):
        """A template that cannot be parsed is an error of `render`, not of a model that may well do without it.

        Args:
            source: the template.
            bos_token, eos_token: what it may write for the beginning and the end of a text.
            special_tokens: further names that it may use, such as pad_token, with what they stand for.
            file: where it comes from, for messages of errors.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self.source, self.bos_token, self.eos_token = source, bos_token, eos_token
        self.special_tokens, self.fault = dict(special_tokens or {}), None
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            line = f"line {error.lineno}: " if getattr(error, "lineno", None) else ""
            where = "" if file is None else f"{file}: "
            self.fault = f"{where}the chat template cannot be parsed ({line}{_one_line(error)})"

    def render(self, messages: Any, add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            messages: a list of dicts, each with `role` and `content`, both texts.
            add_generation_prompt: whether the text ends where the model is to answer.

        Raises:
            ValueError: messages of another form, or a template that cannot be parsed, fails or refuses them.
        """
        _check(messages)
        if self.fault is not None:
            raise ValueError(f"{self.fault}; mend it, or give a text to continue instead of messages")
        names = self.special_tokens | {"bos_token": self.bos_token, "eos_token": self.eos_token}
        names |= {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names | {"tools": None, "documents": None})
        except Exception as error:  # whatever a template does wrong, it does in Python
            raise ValueError(f"the chat template failed ({_one_line(error)})") from None

    def encode(
        self, messages: Any, tokenizer: PretrainedTokenizer, add_generation_prompt: bool = True
    ) -> Int[np.ndarray, "T"]:
        """The tokens of a conversation; special tokens that somebody typed into a message stay text.

        Those are set aside before the template runs, so that its own are found in its output. See `render` for errors.
        """
        _check(messages)
        special, said = tokenizer.special_pattern, [text for message in messages for text in _texts(message).values()]
        if not any(map(special.search, said)):
            return tokenizer.encode(self.render(messages, add_generation_prompt), parse_special=True)
        mark = next(c for c in _NONCHARACTERS if not any(c in text for text in said))
        typed: list[str] = []

        def set_aside(found: re.Match) -> str:
            typed.append(found[0])
            return f"{mark}{len(typed) - 1}{mark}"

        def put_back(text: str) -> str:
            return re.sub(f"{mark}([0-9]+){mark}", lambda found: typed[int(found[1])], text)

        marked = [
            {**message, **{name: special.sub(set_aside, text) for name, text in _texts(message).items()}}
            for message in messages
        ]
        text, parts, end = self.render(marked, add_generation_prompt), [], 0
        id_of = {written: i for i, written in tokenizer.special_texts.items()}
        for found in special.finditer(text):
            parts += [put_back(text[end : found.start()]), id_of[found[0]]]
            end = found.end()
        return tokenizer.encode_mixed([part for part in [*parts, put_back(text[end:])] if part != ""])


def load_chat_template(path: str | os.PathLike) -> ChatTemplate | None:
    """The template of a model folder (chat_template.jinja, or in tokenizer_config.json) or of a .gguf file, if any.

    Raises:
        ValueError: a file that is damaged, in one line that names it. A template that cannot be parsed is none yet.
    """
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        from specjax.data.gguf_metadata import read_metadata  # the gguf package is needed for these files alone

        metadata = read_metadata(path)
        source, file, special = metadata.get("tokenizer.chat_template"), path, _special_tokens_of_gguf(metadata)
    else:
        folder = path if path.is_dir() else path.parent
        file = folder / "tokenizer_config.json"
        settings = read_settings(folder / "special_tokens_map.json") | read_settings(file)
        source, special = settings.get("chat_template"), _special_tokens(settings)
        if (folder / "chat_template.jinja").is_file():
            file = folder / "chat_template.jinja"
            source = read_text(file)
        elif (folder / "chat_template.json").is_file():
            file = folder / "chat_template.json"
            source = read_settings(file).get("chat_template")
    if isinstance(source, list):  # several templates by name
        named = [one for one in source if isinstance(one, dict)]
        source = next((one.get("template") for one in named if one.get("name") == "default"), None)
    if source is None:
        return None
    bos, eos = (special.pop(name, "") for name in ("bos_token", "eos_token"))
    return ChatTemplate(source, bos, eos, special, file)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer_config.json names: `*_token`, each a text, and the list additional_special_tokens."""
    further = settings.get("extra_special_tokens")
    named = settings | further if isinstance(further, dict) else settings
    special = {name: _written(value) for name, value in named.items() if name.endswith("_token")}
    special = {name: text for name, text in special.items() if text is not None}
    more = settings.get("additional_special_tokens") or (further if isinstance(further, list) else None)
    if isinstance(more, list):
        special["additional_special_tokens"] = [text for text in map(_written, more) if text is not None]
    return special


def _special_tokens_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a GGUF file, which names them by id."""
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), {"unknown": "unk", "padding": "pad", "seperator": "sep"}
    special = {}
    for name in ("bos", "eos", "unknown", "padding", "seperator", "cls", "mask"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None and 0 <= i < len(tokens):
            special[f"{kinds.get(name, name)}_token"] = tokens[i]
    return special


def _written(token: Any) -> str | None:
    """A token as tokenizer_config.json writes it: a text, or an object that holds one."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _texts(message: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in message.items() if isinstance(value, str)}


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


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
