"""Texts that a fixed model wrote before training began, and a source of training batches made of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decoding import generate
from specjax.models import LanguageModel
from specjax.sampling import Sampling
from specjax.training.manifest import checksum
from specjax.training.objectives import Batch


def write_texts(
    writer: LanguageModel,
    prompts: Sequence[Sequence[int] | np.ndarray],
    new_tokens: int,
    temperature: float,
    seed: int,
    at_once: int = 32,
) -> np.ndarray:
    """Prompts of one length P with their continuations: token ids [N, P + new_tokens].

    `at_once` rows are written together: on a CPU thirty take twice the time of eight.
    """
    rows, seeds = [], np.random.default_rng(seed).integers(2**62, size=len(prompts))
    for at in range(0, len(prompts), at_once):
        chunk = prompts[at : at + at_once]
        written = generate(
            writer,
            chunk,
            max_new_tokens=new_tokens,
            sampling=Sampling.of(temperature),
            seed=seeds[at : at + len(chunk)],
        )
        rows += [np.concatenate([prompt, text]) for prompt, text in zip(chunk, written.tokens, strict=True)]
    return np.stack(rows).astype(np.int32)


def continuations(tokens: np.ndarray, prompt_length: int) -> Batch:
    """A batch of texts [B, T] of which only what follows the prompt counts in the loss."""
    return {"tokens": tokens, "mask": np.broadcast_to(np.arange(tokens.shape[1]) >= prompt_length, tokens.shape)}


@dataclasses.dataclass(frozen=True)
class Written:
    """A source of training batches: some of the texts, as many as the corpus batch has rows (see `mixture.Mixture`).

    Only the continuations count in the loss.

    Attributes:
        tokens: [N, P + T] prompts and continuations, as wide as a corpus batch.
        prompt_length: P.
    """

    tokens: np.ndarray
    prompt_length: int

    def description(self) -> dict[str, Any]:
        """What tells this source from another, for the checkpoints of a run."""
        return {"type": "Written", "tokens": checksum(self.tokens), "prompt_length": self.prompt_length}

    def __call__(self, params, key, batch: Batch) -> Batch:
        rows, width = batch["tokens"].shape
        if self.tokens.shape[1] != width:
            raise ValueError(
                f"written texts of {self.tokens.shape[1]} tokens must be as wide as the corpus batch, {width}"
            )
        chosen = np.asarray(jax.random.choice(key, len(self.tokens), (rows,), replace=len(self.tokens) < rows))
        return continuations(self.tokens[chosen], self.prompt_length)
