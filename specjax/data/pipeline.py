"""From documents to batches: one flat token array, fixed windows over it, shuffled and sharded by grain.

    documents   [a a a a] [b b] [c c c]            each followed by an end of text •
    tokens       a a a a • b b • c c c •           flat, int32
    windows     |a a a a •|b b • c| ...            stride T, T + 1 tokens wide: neighbours share one token,
                        |• b b • c|                so every token but the first is predicted exactly once

Windows, not grain's own packing, because then the whole position of the iterator is one number, the step, and a
restored iterator yields the same batches bit for bit.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence

import grain
import numpy as np
from jaxtyping import Int

from specjax.data.text import Document
from specjax.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]

# Without end, for any purpose. Grain's own endless repeat overflows when it is cut into batches of one row.
_EPOCHS = 2**31


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """Documents as one token array.

    Attributes:
        tokens: every document's ids, each followed by an end of text; int32 [n].
        num_bytes: UTF-8 bytes of the documents (an end of text counts as none).
    """

    tokens: Int[np.ndarray, "n"]
    num_bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / len(self.tokens)


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> TokenizedText:
    """Encodes and joins the documents. ValueError if there are none."""
    if not documents:
        raise ValueError("no documents to encode")
    end = np.array([tokenizer.end_of_text], np.int32)
    encoded = tokenizer.encode_batch([document.text for document in documents])
    tokens = np.concatenate([part for ids in encoded for part in (ids, end)])
    return TokenizedText(tokens, sum(len(document.text.encode("utf-8")) for document in documents))


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How windows become training batches.

    Attributes:
        window: T, the tokens predicted per row; a batch is T + 1 wide.
        batch_size: B, rows per batch over all processes.
        seed: of the shuffle.
    """

    window: int
    batch_size: int
    seed: int = 0

    def __post_init__(self):
        for name, least in (("window", 1), ("batch_size", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.seed >= 2**32:
            raise ValueError(f"seed must be under 2**32; got {self.seed}")


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Random access to the windows, as grain's sources want it."""

    tokens: Int[np.ndarray, "n"]
    window: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.window

    def __getitem__(self, index: int) -> dict[str, Int[np.ndarray, "W"]]:
        start = index * self.window
        return {"tokens": self.tokens[start : start + self.window + 1]}

    def __repr__(self) -> str:
        return f"Windows({len(self)} of {self.window} tokens)"


def training_batches(
    tokens: Int[np.ndarray, "n"], config: PipelineConfig, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """An endless iterator of {"tokens": int32 [B / process_count, T+1]}, reshuffled every epoch.

    Step s of all processes together holds the same rows for any number of processes, and `get_state()` is the number
    of steps taken: an iterator made with the same arguments and given that state, by `set_state` or by
    `grain.checkpoint.CheckpointRestore`, goes on exactly. Batches are made when asked for, in the calling thread:
    a fraction of a millisecond each, with no worker or thread to stop.

    Args:
        tokens: one flat array of ids.
        config: window, batch size and seed.
        process_index, process_count: which share of every batch is this process's.

    Raises:
        ValueError: the text is shorter than one window, or the batch does not divide over the processes.
    """
    source = _Windows(np.ascontiguousarray(tokens, np.int32), config.window)
    if not len(source):
        raise ValueError(f"a window of {config.window} needs {config.window + 1} tokens; the text has {len(tokens)}")
    return endless_batches(source, config, process_index, process_count)


def endless_batches(
    source, config: PipelineConfig, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """What `training_batches` says, of any source of windows: `len(source)`, and `source[i]` as a dict of arrays."""
    if config.batch_size % process_count or not 0 <= process_index < process_count:
        raise ValueError(
            f"batch_size {config.batch_size} must be a multiple of process_count {process_count}, "
            f"and process_index {process_index} in [0, {process_count})"
        )
    # Repeated before it is sliced, so that processes stay in step where the windows do not divide over them.
    dataset = grain.MapDataset.source(source).seed(config.seed).shuffle().repeat(_EPOCHS)[process_index::process_count]
    dataset = dataset.batch(config.batch_size // process_count)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def evaluation_batches(
    tokens: Int[np.ndarray, "n"], window: int, batch_size: int, max_batches: int | None = None
) -> Iterator[Batch]:
    """One pass in order: {"tokens": int32 [B, T+1], "mask": bool [B, T+1]}, the mask false where a row is padding.

    A loss over `tokens[:, 1:]` where `mask[:, 1:]` counts every token but the first exactly once. All batches have one
    shape. With `max_batches`, that many batches evenly spread over the text.
    """
    starts = np.arange(0, len(tokens) - 1, window)
    count = math.ceil(len(starts) / batch_size)
    chosen = range(count) if max_batches is None else sorted({i * count // max_batches for i in range(max_batches)})
    for number in chosen:
        shape = (batch_size, window + 1)
        batch = {"tokens": np.zeros(shape, np.int32), "mask": np.zeros(shape, bool)}
        for row, start in enumerate(starts[number * batch_size : (number + 1) * batch_size]):
            ids = tokens[start : start + window + 1]
            batch["tokens"][row, : len(ids)] = ids
            batch["mask"][row, : len(ids)] = True
        yield batch


def pipeline_fingerprint(tokens: Int[np.ndarray, "n"], config: PipelineConfig) -> str:
    """SHA-256 (hex) of all that decides the batches.

    To be stored beside a checkpoint and compared before it is restored: grain takes its state over other data silently.
    """
    digest = hashlib.sha256(repr(dataclasses.astuple(config)).encode())
    digest.update(np.ascontiguousarray(tokens, np.dtype("<i4")))
    return digest.hexdigest()


def cut_prompts(
    tokens: Int[np.ndarray, "n"], num: int, min_len: int, max_len: int, seed: int, end_of_text: int | None = None
) -> list[Int[np.ndarray, "..."]]:
    """Prompts cut from a text at random places, all different.

    Args:
        tokens: ids, flat.
        num: how many prompts.
        min_len, max_len: their lengths are uniform in this range, both ends included.
        seed: decides places and lengths.
        end_of_text: where given, no prompt contains it, so none runs over the edge of a document.

    Returns:
        `num` int32 arrays.

    Raises:
        ValueError: lengths out of order, or too few places for that many prompts.
    """
    if not 1 <= min_len <= max_len or num < 1:
        raise ValueError(f"prompts need 1 <= min_len <= max_len and num >= 1; got {min_len}, {max_len} and {num}")
    tokens = np.asarray(tokens, np.int32)
    inner = np.flatnonzero(tokens == end_of_text) if end_of_text is not None else np.array([], np.int64)
    ends = np.append(inner, len(tokens))
    positions = np.arange(len(tokens))
    places = np.flatnonzero(ends[np.searchsorted(ends, positions)] - positions >= max_len)
    if len(places) < num:
        raise ValueError(f"{num} prompts of up to {max_len} tokens need as many places; the text has {len(places)}")
    rng = np.random.default_rng(seed)
    starts = rng.choice(places, num, replace=False)
    lengths = rng.integers(min_len, max_len, num, endpoint=True)
    return [tokens[start : start + length].copy() for start, length in zip(starts, lengths, strict=True)]


def bits_per_byte(nats_per_token: float, tokens: int, bytes: int) -> float:
    """Mean loss in nats per token, over `tokens` tokens of `bytes` bytes in all, as bits per byte of text."""
    return nats_per_token * tokens / (bytes * math.log(2))
