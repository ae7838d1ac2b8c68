"""What decides while training: held-out texts that are really decoded, and texts that models write for training."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import generate
from specjax.models import LanguageModel, TransformerConfig
from specjax.protocol import Drafter
from specjax.sampling import Sampling
from specjax.training.manifest import checksum
from specjax.training.objectives import Batch, Objective
from specjax.training.written_texts import continuations


@dataclasses.dataclass(frozen=True)
class HeldOutLoss:
    """Evaluator: the objective's metrics on held-out batches, under "held_out/".

    Attributes:
        objective: as in training; dropout is off.
        batches: what `data.pipeline.evaluation_batches` yields.
        frozen: as in training.
        bits_per_nat: bits per byte of one nat per token on this text, to report "held_out/bits_per_byte" too.
    """

    objective: Objective
    batches: Sequence[Batch]
    frozen: Any = None
    bits_per_nat: float | None = None

    def __call__(self, params) -> Iterator[tuple[str, float]]:
        totals, positions = {}, 0.0
        for batch in self.batches:
            metrics = jax.device_get(_metrics(params, batch, self.frozen, self.objective))
            count = float(metrics.pop("positions"))
            positions += count
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + count * float(value)
        for name, total in totals.items():
            yield f"held_out/{name}", total / positions
        if "cross_entropy" in totals:
            yield "held_out/perplexity", math.exp(min(totals["cross_entropy"] / positions, 700.0))
        if self.bits_per_nat is not None:
            yield "held_out/bits_per_byte", self.bits_per_nat * totals["cross_entropy"] / positions


@functools.partial(jax.jit, static_argnames="objective")
def _metrics(params, batch, frozen, objective):
    return objective.loss(params, batch, None, frozen)[1]


@dataclasses.dataclass(frozen=True)
class HeldOutDecoding:
    """Evaluator: acceptance rate and block efficiency of the drafter in training, on texts that the target continues.

    Yields "held_out/acceptance_rate", "held_out/block_efficiency" (τ), "held_out/overlap", and the conditional
    acceptance rate at each depth as "depth/acceptance_rate_d". What was never attempted is left out.

    Attributes:
        target: the target.
        drafter: static part of the drafter; its parameters are those being evaluated.
        prompts: held-out prompts, one batch.
        max_new_tokens: tokens per prompt.
        sampling: of both models.
        verifier: the rule.
        seed: of the texts.
        stop_ids: ids that end a text.
    """

    target: LanguageModel
    drafter: Drafter
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    sampling: Sampling
    verifier: str = "token"
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __call__(self, params) -> Iterator[tuple[str, float]]:
        counts = generate(
            self.target,
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            drafter=self.drafter,
            drafter_params=params,
            verifier=self.verifier,
            sampling=self.sampling,
            seed=self.seed,
            stop_ids=self.stop_ids,
        ).counts
        yield "held_out/block_efficiency", counts.emitted.sum() / counts.rounds.sum()
        attempts, acceptances = counts.attempts.sum(0), counts.acceptances.sum(0)
        if not attempts.sum():
            return
        yield "held_out/acceptance_rate", acceptances.sum() / attempts.sum()
        yield "held_out/overlap", counts.overlap_sum.sum() / attempts.sum()
        for depth, (accepted, attempted) in enumerate(zip(acceptances, attempts, strict=True), start=1):
            if attempted:
                yield f"depth/acceptance_rate_{depth}", accepted / attempted


@dataclasses.dataclass(frozen=True)
class TextSample:
    """Evaluator: one text that the model in training writes, under "samples/text".

    Attributes:
        config: the model's architecture.
        prompt: token ids.
        max_new_tokens: how many to write.
        decode: from ids to text.
    """

    config: TransformerConfig
    prompt: Sequence[int]
    max_new_tokens: int
    decode: Callable[[Sequence[int]], str]

    def __call__(self, params) -> Iterator[tuple[str, str]]:
        written = generate(LanguageModel(self.config, params), [self.prompt], max_new_tokens=self.max_new_tokens)
        text = self.decode([*self.prompt, *written.tokens[0]])
        yield "samples/text", "\n".join("    " + line for line in text.splitlines())


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A source of training batches: corpus prompts continued by a model (see `mixture.Mixture`).

    With the target as writer these are the texts that will really be decoded; with the drafter (on-policy) they are
    those where its own mistakes lead. Only the continuation counts in the loss.

    A corpus row is cut into all the prompts it holds, so a sampled batch has `width // prompt_length` times the rows:
    writing eight texts at once takes hardly longer than writing two.

    Attributes:
        config: the writer's architecture.
        params: the writer's parameters, or None to write with those being trained.
        prompt_length: tokens of a prompt.
        temperature: of the writer.
    """

    config: TransformerConfig
    params: Any
    prompt_length: int
    temperature: float = 1.0

    def description(self) -> dict[str, Any]:
        """What tells this source from another: everything but the writer's weights, of which it has a checksum."""
        return {
            "type": "Sampled",
            "config": self.config,
            "params": None if self.params is None else checksum(self.params),
            "prompt_length": self.prompt_length,
            "temperature": self.temperature,
        }

    def __call__(self, params, key, batch: Batch) -> Batch:
        tokens = np.asarray(batch["tokens"])
        width = tokens.shape[1]
        if not 1 <= self.prompt_length < width:
            raise ValueError(f"prompt_length must be from 1 to {width - 1}, the window; got {self.prompt_length}")
        per_row = width // self.prompt_length
        prompts = tokens[:, : per_row * self.prompt_length].reshape(-1, self.prompt_length)
        writer = LanguageModel(self.config, params if self.params is None else self.params)
        written = generate(
            writer,
            list(prompts),
            max_new_tokens=width - self.prompt_length,
            sampling=Sampling.of(self.temperature),
            seed=int(jax.random.bits(key, dtype=jnp.uint32)),
        )
        tokens = np.concatenate([prompts, np.stack(written.tokens)], 1)
        return continuations(tokens, self.prompt_length)
