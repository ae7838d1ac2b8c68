"""Texts that count round and round: after one token the next is certain."""

from collections.abc import Iterator

import numpy as np


def cyclic_texts(num_sequences: int, sequence_length: int, pattern_length: int) -> np.ndarray:
    """[num_sequences, sequence_length] ids; text i holds (i + j) mod pattern_length + 1 at place j."""
    places = np.arange(num_sequences)[:, None] + np.arange(sequence_length)
    return (places % pattern_length + 1).astype(np.int32)


def epochs_of_batches(texts: np.ndarray, batch_size: int, epochs: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches in order, epoch after epoch; the last of an epoch is filled up with rows that the mask leaves out."""
    for _ in range(epochs):
        for start in range(0, len(texts), batch_size):
            rows = texts[start : start + batch_size]
            missing = ((0, batch_size - len(rows)), (0, 0))
            yield {"tokens": np.pad(rows, missing), "mask": np.pad(np.ones(rows.shape, bool), missing)}
