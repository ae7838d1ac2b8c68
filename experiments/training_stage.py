"""One trained model as a stage: `fit` with checkpoints, events and a progress bar, and the best parameters saved."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from specjax.data.pipeline import (
    Batch,
    PipelineConfig,
    TokenizedText,
    cut_prompts,
    pipeline_fingerprint,
    training_batches,
)
from specjax.data.tokenizer import Tokenizer
from specjax.events import EventWriter, Progress
from specjax.training.checkpoints import Checkpoints
from specjax.training.fit import FitResult, Schedule, fit
from specjax.training.precision import computing_in
from specjax.training.state import OptimizerConfig


class TrainingData(Protocol):
    """What a model is trained on."""

    def pipeline(self, config: PipelineConfig) -> tuple[Iterator[Batch], str]:
        """The batches, a grain iterator, and the fingerprint of all that decides them."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokenized text, split into training and held-out documents."""

    tokenizer: Tokenizer
    train: TokenizedText
    held_out: TokenizedText

    def prompts(self, num: int, length: int, seed: int) -> list[np.ndarray]:
        """Held-out prompts of one length, none across the edge of a document."""
        end = self.tokenizer.end_of_text
        return cut_prompts(self.held_out.tokens, num, length, length, seed, end_of_text=end)

    def pipeline(self, config: PipelineConfig) -> tuple[Iterator[Batch], str]:
        tokens = self.train.tokens
        return training_batches(tokens, config), pipeline_fingerprint(tokens, config)


@dataclasses.dataclass(frozen=True)
class TrainingStage:
    """What `Stages.run` calls with a folder.

    Attributes:
        config: of the experiment; its seed is used and all of it is shown in TensorBoard.
        data: where its batches come from.
        objective: what is minimised.
        initial: initial parameters from a key.
        save: writes finished parameters into the stage's folder.
        training: settings: steps, batch_size, window, optimizer, log_every, eval_every, save_every; compute_dtype, in
            which the models compute while they are trained (None: their own).
        evaluators: what is measured while training.
        best: held-out metric whose best checkpoint is kept (None: the last one).
        frozen, prepare: as `fit` takes them.
    """

    config: ConfigDict
    data: TrainingData
    objective: Any
    initial: Callable[[Any], Any]
    save: Callable[[pathlib.Path, Any], None]
    training: ConfigDict
    evaluators: list
    best: str | None = None
    frozen: Any = None
    prepare: Any = None

    def __call__(self, folder: pathlib.Path) -> dict:
        training = self.training
        pipeline, schedule, optimizer = read_training(training, self.config.seed)
        batches, fingerprint = self.data.pipeline(pipeline)
        checkpoints = Checkpoints(folder / "checkpoints", pipeline=fingerprint, best=self.best, keep=1)
        start = checkpoints.latest_step() or 0
        initial = self.initial(jax.random.key(self.config.seed))
        parameters = sum(x.size for x in jax.tree.leaves(initial))
        label = folder.name.replace("_", " ")
        with (
            EventWriter(folder / "events", resume_step=start + 1 if start else None) as writer,
            Progress(training.steps, f"training {label}") as progress,
        ):
            writer.table("config/all", self.config.to_dict())
            result = fit(
                computing_in(self.objective, training.compute_dtype),
                initial,
                batches,
                optimizer,
                schedule,
                frozen=self.frozen,
                prepare=self.prepare,
                evaluators=self.evaluators,
                checkpoints=checkpoints,
                writer=writer,
                progress=progress,
            )
        self.save(folder, self._best_params(checkpoints, result))
        best_step = checkpoints.best_step()
        checkpoints.close()
        chosen = [record for record in result.evaluations if record["step"] == best_step] or result.evaluations[-1:]
        return {
            "parameters": parameters,
            "steps": training.steps,
            "tokens": training.steps * training.batch_size * training.window,
            "tokens_per_second": result.tokens_per_second,
            "flop_utilisation": result.flop_utilisation,
            "matmul_flops_per_second": result.peak_flops,
            "best_step": best_step,
            "held_out": {name: value for name, value in chosen[0].items() if name != "step"},
            "history": [{"step": r["step"], "loss": r["loss"]} for r in result.history],
            "evaluations": result.evaluations,
        }

    def _best_params(self, checkpoints: Checkpoints, result: FitResult):
        step = checkpoints.best_step()
        if step is None or step == int(result.state.step):
            return result.state.eval_params
        return checkpoints.restore(result.state, step=step).eval_params


def read_training(training: ConfigDict, seed: int) -> tuple[PipelineConfig, Schedule, OptimizerConfig]:
    """The settings of a stage as the library takes them.

    Raises:
        ValueError: naming the field of `training`, its value and the limit.
    """
    pipeline = PipelineConfig(training.window, training.batch_size, seed)
    schedule = Schedule(training.steps, training.log_every, training.eval_every, training.save_every, seed)
    computing_in(None, training.compute_dtype)
    try:
        return pipeline, schedule, OptimizerConfig(total_steps=training.steps, **training.optimizer.to_dict())
    except ValueError as error:
        raise ValueError(f"optimizer: {error}") from None


def check_training(name: str, training: ConfigDict) -> None:
    """What a stage would notice only when it begins, which may be after other stages' hours.

    Raises:
        ValueError: as `read_training`, with the name of `training` in the config.
    """
    try:
        read_training(training, seed=0)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None


def plain(inputs: Mapping[str, Any]) -> dict:
    """Inputs of a stage, configs as dicts."""
    return {name: value.to_dict() if isinstance(value, ConfigDict) else value for name, value in inputs.items()}
