"""Answers that a model gave, in shards on disk, and the training batches made of them.

    <folder>/answers-00000.arrayrecord     records, read by `grain.sources.ArrayRecordDataSource`
             answers-00001.arrayrecord
             shards.json                   what they answer, and the number and SHA-256 of every finished shard

A shard is written under another name, renamed when it is complete, and then entered in shards.json, so whatever stops
the writing costs at most the shard in progress: going on writes the shards that are missing or damaged and no others.

Training windows are T + 1 tokens wide. A record that fits is padded; a longer one is cut so that every answer token
counts once, each cut beginning with `context` tokens that only give context:

    record     p p p p a a a a a a a a         p prompt, a answer; T + 1 = 6, context 2
    windows    . . p p A A A A                 capitals count
                       . . a a A A A A
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

import grain
import numpy as np
from array_record.python import array_record_module
from flax import serialization
from jaxtyping import Bool, Int

from specjax.data.pipeline import PipelineConfig, endless_batches

MANIFEST = "shards.json"


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """A prompt and what was answered.

    Attributes:
        prompt: name of the prompt.
        tokens: prompt and answer, int32 [n].
        mask: which of them the model wrote, the stop token included.
        temperature: it wrote at.
    """

    prompt: str
    tokens: Int[np.ndarray, "n"]
    mask: Bool[np.ndarray, "n"]
    temperature: float

    def to_bytes(self) -> bytes:
        return serialization.msgpack_serialize(dataclasses.asdict(self))

    @classmethod
    def from_bytes(cls, record: bytes) -> "Answer":
        return cls(**serialization.msgpack_restore(record))


class AnswerWriter:
    """Writes shards of a folder, in any order, each whole or not at all.

    Args:
        folder: made if missing.
        about: says what is answered and how; a folder that holds answers to something else is refused.

    Raises:
        ValueError: the folder holds other answers, or cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, about: str):
        self.folder, self.about = pathlib.Path(folder), about
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for part in self.folder.glob(".*.part"):
                part.unlink()
        self.shards: dict[str, dict] = {}
        if (self.folder / MANIFEST).exists():
            manifest = _read_manifest(self.folder)
            if manifest["about"] != about:
                raise ValueError(f"{self.folder} holds answers to other prompts; choose another folder or remove it")
            self.shards = manifest["shards"]

    def missing(self, count: int) -> list[int]:
        """Which of the first `count` shards are not there, or not as they were written."""
        return [i for i in range(count) if _problem(self.folder, shard_name(i), self.shards.get(shard_name(i)))]

    def write(self, index: int, answers: Sequence[Answer]) -> None:
        """Writes one shard and enters it.

        Raises:
            ValueError: the disk is full or cannot be written; what was finished before is kept.
        """
        name = shard_name(index)
        path, part = self.folder / name, self.folder / f".{name}.part"
        with _explained(self.folder):
            try:
                write_records(part, [answer.to_bytes() for answer in answers])
                digest = _sha256(part)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
            self.shards[name] = {"answers": len(answers), "sha256": digest}
            self._write_manifest()

    def finish(self, count: int) -> None:
        """Says that the first `count` shards are all there are."""
        keep = {shard_name(i) for i in range(count)}
        self.shards = {name: entry for name, entry in sorted(self.shards.items()) if name in keep}
        with _explained(self.folder):
            self._write_manifest()

    def _write_manifest(self):
        part = self.folder / f".{MANIFEST}.part"
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"about": self.about, "shards": dict(sorted(self.shards.items()))}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.folder / MANIFEST)


class AnswerSource:
    """The answers of a folder, by number: a source as grain wants it.

    Raises:
        ValueError: no finished shards, or one whose bytes are not what was written.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = pathlib.Path(folder)
        if not (self.folder / MANIFEST).exists():
            raise ValueError(f"{self.folder} holds no answers ({MANIFEST} is missing); write them first")
        shards = _read_manifest(self.folder)["shards"]
        for name, entry in shards.items():
            problem = _problem(self.folder, name, entry)
            if problem:
                raise ValueError(f"{self.folder / name} {problem}; remove {self.folder} and answer the prompts again")
        if not shards:
            raise ValueError(f"{self.folder} holds no finished shard; write the answers first")
        self.fingerprint = hashlib.sha256("".join(entry["sha256"] for entry in shards.values()).encode()).hexdigest()
        self._records = grain.sources.ArrayRecordDataSource([str(self.folder / name) for name in shards])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Answer:
        return Answer.from_bytes(self._records[int(index)])

    def __repr__(self) -> str:
        return f"AnswerSource({str(self.folder)!r})"

    def tokens(self) -> Int[np.ndarray, "N"]:
        """All answers one after the other, without their prompts."""
        return np.concatenate([answer.tokens[answer.mask] for answer in self]).astype(np.int32)

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def shard_name(index: int) -> str:
    return f"answers-{index:05d}.arrayrecord"


def write_records(path: pathlib.Path, records: Sequence[bytes]) -> None:
    """One ArrayRecord file on disk, complete. OSError or RuntimeError when it cannot be written."""
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    try:
        for record in records:
            writer.write(record)
    finally:
        writer.close()
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def cut_windows(mask: Bool[np.ndarray, "n"], window: int, context: int) -> list[tuple[int, int]]:
    """(first token, first token that counts) of the windows of T + 1 tokens over one record; see above.

    A record without answer tokens has none.
    """
    counted = np.flatnonzero(mask)
    if not counted.size:
        return []
    if len(mask) <= window + 1:
        return [(0, 0)]
    windows, position = [], int(counted[0])
    while position <= counted[-1]:
        start = max(0, position - context)
        windows.append((start, position))
        position = start + window + 1
    return windows


@dataclasses.dataclass(frozen=True, repr=False)
class _Windows:
    """Random access to the windows of all answers."""

    answers: AnswerSource
    places: list[tuple[int, int, int]]
    width: int

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number, start, first = self.places[index]
        answer, end = self.answers[number], start + self.width
        counts = answer.mask & (np.arange(len(answer.mask)) >= first)
        padding = (0, max(0, end - len(answer.tokens)))
        return {
            "tokens": np.pad(answer.tokens[start:end], padding).astype(np.int32),
            "mask": np.pad(counts[start:end], padding),
        }

    def __repr__(self) -> str:
        return f"Windows({len(self)} of {self.width} tokens)"


def answer_windows(answers: AnswerSource, window: int, context: int) -> _Windows:
    """All windows in order, by number: {"tokens": int32 [T+1], "mask": bool [T+1]}.

    Raises:
        ValueError: a context that leaves nothing to count, or no answer at all.
    """
    if not 1 <= context <= window:
        raise ValueError(f"context must be 1 to {window}, the window; got {context}")
    places = [
        (number, *place) for number, answer in enumerate(answers) for place in cut_windows(answer.mask, window, context)
    ]
    if not places:
        raise ValueError(f"{answers.folder} holds no answer tokens to train on")
    return _Windows(answers, places, window + 1)


def answer_batches(
    answers: AnswerSource, config: PipelineConfig, context: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """An endless iterator of {"tokens": int32, "mask": bool}, both [B / process_count, T+1], reshuffled every epoch.

    The mask is on the answer tokens, each of which counts once in an epoch. As with `pipeline.training_batches`,
    `get_state()` is the number of steps taken, and an iterator given that state goes on exactly.

    Args:
        answers: from disk.
        config: window, batch size and seed.
        context: tokens before the counted ones in a window that is cut out of a longer record.
        process_index, process_count: which share of every batch is this process's.

    Raises:
        ValueError: a context that leaves nothing to count, no answer at all, or a batch that does not divide over the
            processes.
    """
    return endless_batches(answer_windows(answers, config.window, context), config, process_index, process_count)


def answers_fingerprint(answers: AnswerSource, config: PipelineConfig, context: int) -> str:
    """SHA-256 (hex) of all that decides the batches, to be stored beside a checkpoint."""
    return hashlib.sha256(repr((dataclasses.astuple(config), context, answers.fingerprint)).encode()).hexdigest()


class _explained:
    """Turns what the disk says into one line with a remedy."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError | RuntimeError):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
            raise ValueError(
                f"cannot write to {self.folder}: {reason}; make room or choose another folder, and run the same "
                "command again: finished shards are kept"
            ) from error
        return False


def _read_manifest(folder: pathlib.Path) -> dict:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(manifest["about"], str) and isinstance(manifest["shards"], dict):
            return manifest
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{folder / MANIFEST} is damaged; remove {folder} and answer the prompts again")


def _problem(folder: pathlib.Path, name: str, entry: dict | None) -> str | None:
    """What is wrong with a shard, or None."""
    if entry is None or not (folder / name).exists():
        return "is missing"
    return None if _sha256(folder / name) == entry.get("sha256") else "was changed since it was written (SHA-256)"


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
