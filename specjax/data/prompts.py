"""Prompts for a chat model: JSON Lines files in the field's usual shapes, split into training and held-out ones.

One JSON object per line, the prompt under the first of these names that it has:

    messages        [{"role": "user", "content": ...}, ...]           also with content as a list of text parts
    conversations   [{"from": "human", "value": ...}, ...]            ShareGPT
    turns           [question, follow-up question, ...]               MT-bench, Spec-Bench
    prompt          a text, or messages

A conversation is cut behind its last user message: what comes after it is what the target is to write itself. Answers
between user messages stay as context. Turns have no answers between them, so the first is the prompt and the others
are kept as follow-ups, to be asked once the one before is answered.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from specjax.data.text import _files

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
         "system": "system"}  # fmt: skip
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
        for name, path in _files(self.path, self.pattern):
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
    """The prompt of one line. ValueError, saying what is wrong, when it holds none."""
    try:
        record = json.loads(line.decode("utf-8") if isinstance(line, bytes) else line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__} where one JSON object is expected")
    shape = next((shape for shape in SHAPES if shape in record), None)
    if shape is None:
        fields = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"no prompt under any of {', '.join(SHAPES)}; the fields of this line: {fields}")
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
    return Prompt(name, messages, name, kind if isinstance(kind, str) else "", tuple(follow_ups))


def split_prompts(prompts: Sequence[Prompt], held_out: float) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held out), by the hash of each prompt's source alone; of equal prompts only the first is kept.

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
        digest = hashlib.sha256(prompt.source.encode("utf-8", "surrogateescape")).digest()
        sides[int.from_bytes(digest[:6], "big") / 2**48 < held_out].append(prompt)
    if not all(sides):
        raise ValueError(
            f"{len(prompts)} prompts split at held_out {held_out} into {len(sides[0])} for training and "
            f"{len(sides[1])} held out; add prompts or change held_out"
        )
    return sides


def _conversation(value: Any, shape: str) -> tuple[tuple[str, str], ...]:
    """(role, content) of every message up to the last of the user's."""
    role_key, content_key = ("from", "value") if shape == "conversations" else ("role", "content")
    if not isinstance(value, list):
        raise ValueError(f"{shape!r} must be a list of messages; got a {type(value).__name__}")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or role_key not in message or content_key not in message:
            raise ValueError(f"message {number} of {shape!r} must have {role_key!r} and {content_key!r}")
        role = message[role_key]
        if role not in ROLES:
            raise ValueError(f"message {number} of {shape!r} is from {role!r}; known are {', '.join(ROLES)}")
        messages.append((ROLES[role], _content(message[content_key], f"message {number} of {shape!r}")))
    asked = [i for i, (role, _) in enumerate(messages) if role == "user"]
    if not asked:
        raise ValueError(f"{shape!r} holds no message of a user")
    return tuple(messages[: asked[-1] + 1])


def _content(value: Any, where: str) -> str:
    """The text of a message, also of one that is given in parts."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text; got a {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{where} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where} holds half of a surrogate pair, which is not text") from None
    return value


def _read_bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
