"""Prompts for a chat model: JSON Lines files in the field's usual shapes, split into training and held-out ones.

One JSON object per line, the prompt under the first of these names that it has with more than null:

    messages        [{"role": "user", "content": ...}, ...]           also with content as a list of text parts
    conversations   [{"from": "human", "value": ...}, ...]            ShareGPT
    turns           [question, follow-up question, ...]               MT-bench, Spec-Bench
    prompt          a text, or messages

A message may be in either form under either name. A conversation is cut behind its last user message: what comes after
it is what the target is to write itself, and may be anything. Answers between user messages stay as context, an empty
system message is left out. Turns have no answers between them, so the first is the prompt and the others are kept as
follow-ups, to be asked once the one before is answered.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from specjax.data.text import matching_files, unit_interval

_SPEAKERS = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "system": ("system", "developer"),
}
ROLES = {name: role for role, names in _SPEAKERS.items() for name in names}
FORMS = {"messages": ("role", "content"), "conversations": ("from", "value")}  # of a message
SHAPES = ("messages", "conversations", "turns", "prompt")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a model is asked.

    Attributes:
        name: where it comes from, unique: file and line, for a function its own name too.
        messages: (role, content) pairs, the last one the user's.
        source: the document that it is split by: all prompts of one document are on the same side.
        kind: category, "" if unknown.
        follow_ups: user messages to come after the answer, one by one.
    """

    name: str
    messages: tuple[tuple[str, str], ...]
    source: str
    kind: str = ""
    follow_ups: tuple[str, ...] = ()

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages as chat templates take them."""
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclasses.dataclass(frozen=True)
class PromptFiles:
    """A JSON Lines file of prompts, or every file under a folder whose name matches `pattern`. UTF-8.

    Attributes:
        path: file or folder.
        pattern: of file names.
        on_broken: "stop" at the first line that holds no prompt, or "skip" such lines.

    Raises:
        ValueError: another value of `on_broken`.
    """

    path: str
    pattern: str = "*.jsonl"
    on_broken: str = "stop"

    def __post_init__(self):
        if self.on_broken not in ("stop", "skip"):
            raise ValueError(f"on_broken must be 'stop' or 'skip'; got {self.on_broken!r}")

    def read(self) -> tuple[list[Prompt], list[str]]:
        """All prompts in order, and one line of text for every broken line that was left out: file, line and reason.

        Blank lines are skipped.

        Raises:
            ValueError: the path is missing, there is no prompt at all, or a line is broken and `on_broken` is "stop".
        """
        prompts, broken = [], []
        for name, path in matching_files(self.path, self.pattern):
            for number, line in enumerate(_read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
                if not line.strip():
                    continue
                try:
                    prompts.append(read_prompt(line, f"{name}:{number}"))
                except ValueError as error:
                    broken.append(f"{path}, line {number}: {error}")
                    if self.on_broken == "stop":
                        remedy = "mend the line, or go on without such lines with on_broken='skip'"
                        raise ValueError(f"{broken[-1]}; {remedy}") from None
        if not prompts:
            beside = f"; {len(broken)} lines are broken, the first: {broken[0]}" if broken else ""
            raise ValueError(f"{self.path} holds no prompts in files that match {self.pattern!r}{beside}")
        return prompts, broken


def read_prompt(line: bytes | str, name: str) -> Prompt:
    """The prompt of one line. ValueError, saying what is wrong in one line, when it holds none."""
    record = _read_object(line)
    shape = next((shape for shape in SHAPES if record.get(shape) is not None), None)
    if shape is None:
        fields = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"no prompt under any of {', '.join(SHAPES)}; the fields of this line: {_short(fields)}")
    value, follow_ups = record[shape], ()
    if shape == "turns":
        if not isinstance(value, list) or not value:
            raise ValueError("'turns' must be a list of questions, at least one")
        first, *follow_ups = (_content(turn, f"turn {i}") for i, turn in enumerate(value, start=1))
        messages = (("user", first),)
    elif isinstance(value, str):
        messages = (("user", _content(value, repr(shape))),)
    else:
        messages = _conversation(value, shape)
    kind = record.get("category")
    kind = _whole(kind, "'category'") if isinstance(kind, str) else ""
    return Prompt(name, messages, name, kind, tuple(follow_ups))


def refused_prompt(name: str, reason: Any, on_broken: str) -> str:
    """What to say of a prompt that a model cannot take and that is left out; `reason` may be an error.

    Raises:
        ValueError: with it, and a remedy, if `on_broken` is "stop".
    """
    said = f"{name}: {reason}"
    if on_broken == "stop":
        raise ValueError(f"{said}; change this prompt, or go on without such prompts with on_broken='skip'") from None
    return said


def split_prompts(prompts: Sequence[Prompt], held_out: float) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held out), by each prompt's source alone; of equal prompts only the first is kept.

    A source that is a document is on the side where `load_corpus` puts it, wherever that has no side to fill.

    Raises:
        ValueError: a share outside (0, 1), or one that leaves a side empty.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is the share of prompts kept from training, in (0, 1); got {held_out}")
    first: dict[tuple, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.messages, prompt)
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in first.values():
        sides[unit_interval(prompt.source) < held_out].append(prompt)
    if not all(sides):
        raise ValueError(
            f"{len(prompts)} prompts split at held_out {held_out} into {len(sides[0])} for training and "
            f"{len(sides[1])} held out; add prompts or change held_out"
        )
    return sides


def _read_object(line: bytes | str) -> dict[str, Any]:
    try:
        # As floats: of integers with thousands of digits Python makes an error.
        record = json.loads(line.decode("utf-8") if isinstance(line, bytes) else line, parse_int=float)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{_type(record)} where one JSON object is expected")
    return record


def _conversation(value: Any, shape: str) -> tuple[tuple[str, str], ...]:
    """(role, content) of every message up to the last of the user's; what comes after that is not looked at."""
    if not isinstance(value, list):
        raise ValueError(f"{shape!r} must be a list of messages; got {_type(value)}")
    forms = sorted(FORMS.values(), key=lambda form: form != FORMS.get(shape, FORMS["messages"]))
    asked = [number for number, message in enumerate(value, start=1) if _is_users(message, forms)]
    messages = []
    for number, message in enumerate(value[: asked[-1]] if asked else value, start=1):
        where = f"message {number} of {shape!r}"
        role_key, content_key = _form(message, forms)
        if not isinstance(message, dict) or role_key not in message or content_key not in message:
            raise ValueError(f"{where} must have {role_key!r} and {content_key!r}")
        speaker, content = message[role_key], message[content_key]
        if not isinstance(speaker, str):
            raise ValueError(f"{role_key!r} of {where} must be text; got {_type(speaker)}")
        if speaker not in ROLES:
            raise ValueError(f"{where} is from {_short(repr(speaker))}; known are {', '.join(ROLES)}")
        if ROLES[speaker] != "system" or not _is_empty(content):
            messages.append((ROLES[speaker], _content(content, where)))
    if not asked:
        raise ValueError(f"{shape!r} holds no message of a user")
    return tuple(messages)


def _form(message: Any, forms: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The names of speaker and text in a message: of the first form that it names a speaker in."""
    found = (form for form in forms if isinstance(message, dict) and message.get(form[0]) is not None)
    return next(found, forms[0])


def _is_users(message: Any, forms: Sequence[tuple[str, str]]) -> bool:
    speaker = message.get(_form(message, forms)[0]) if isinstance(message, dict) else None
    return isinstance(speaker, str) and ROLES.get(speaker) == "user"


def _content(value: Any, where: str) -> str:
    """The text of a message, also of one that is given in parts."""
    if isinstance(value, list) and all(map(_is_text_part, value)):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text; got {_type(value)}")
    if not value.strip():
        raise ValueError(f"{where} is empty")
    return _whole(value, where)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_empty(content: Any) -> bool:
    """Whether it is text, perhaps in parts, without a character that shows."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return all(_is_text_part(part) and not part["text"].strip() for part in parts)


def _whole(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where} holds half of a surrogate pair, which is not text") from None
    return text


def _type(value: Any) -> str:
    """What JSON calls it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {dict: "a JSON object", list: "a JSON list", str: "a JSON string"}
    return names.get(type(value), "a JSON number")


def _short(text: str, longest: int = 200) -> str:
    return text if len(text) <= longest else text[:longest] + "..."


def _read_bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
