"""The one training loop, for every objective.

    batch ─► prepare ─► step t dispatched ─► metrics of step t − 1 fetched ─► every so often: log, evaluate, save

Before anything is saved the newest metrics are fetched and checked, so a checkpoint never holds a diverged model. The
records of the run until then are saved with it, so that a resumed run returns those of the whole run.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.events import EventWriter, Progress
from specjax.training import manifest
from specjax.training.checkpoints import Checkpoints
from specjax.training.interrupts import Interrupts
from specjax.training.objectives import Batch, Objective
from specjax.training.state import OptimizerConfig, TrainState, create
from specjax.training.step import PREPARE, step_key, train_step
from specjax.training.throughput import Throughput

# Yields (name, number) for curves, or (name, text) for samples, from the parameters to evaluate.
Evaluator = Callable[[Any], Iterable[tuple[str, float | str]]]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When things happen, in steps. The last step always logs, evaluates and saves.

    Attributes:
        steps: how many, counted from the start of the run and not from where it was resumed.
        log_every, eval_every, save_every: intervals; None leaves only the last step.
        seed: of the run's key: dropout, sampled batches.
    """

    steps: int
    log_every: int | None = 10
    eval_every: int | None = None
    save_every: int | None = None
    seed: int = 0

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1; got {self.steps}")
        for name in ("log_every", "eval_every", "save_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, or None; got {getattr(self, name)}")

    def due(self, every: int | None, step: int) -> bool:
        """Whether something with this interval happens after `step` steps."""
        return step == self.steps or (every is not None and step % every == 0)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How training went.

    Attributes:
        state: the last state.
        history: one record per logged step: "step", "loss", the objective's metrics, "learning_rate", "gradient_norm";
            of the whole run, also where this call only resumed it.
        evaluations: one record per evaluation: "step" and the numbers that the evaluators gave; of the whole run.
        resumed_at: the step that training went on from; 0 for a fresh run.
        tokens_per_second: over this call, with `prepare`, without the first step, evaluation and saving; None when no
            step was timed.
        flop_utilisation: model FLOPs per second against the machine's float32 matmul peak (median over the log); a step
            that computes in bfloat16 can pass 1. Only the training step's FLOPs count: texts sampled by `prepare` cost
            time and lower it.
        peak_flops: that peak, as last measured, in FLOPs per second.
    """

    state: TrainState
    history: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    resumed_at: int
    tokens_per_second: float | None
    flop_utilisation: float | None
    peak_flops: float


class NonFiniteLoss(ValueError):
    """The loss or the gradient stopped being a number; `step` is where, counted from 1."""

    def __init__(self, step: int, loss: float, norm: float, kept: str):
        self.step = step
        super().__init__(
            f"training stopped at step {step}: loss {loss:g}, gradient norm {norm:g}; {kept}; "
            "lower the learning rate, warm up longer or clip harder"
        )


def fit(
    objective: Objective,
    params: Any,
    batches: Iterable[Batch],
    optimizer: OptimizerConfig,
    schedule: Schedule,
    *,
    frozen: Any = None,
    prepare: Callable[[Any, jax.Array, Batch], Batch] | None = None,
    evaluators: Sequence[Evaluator] = (),
    checkpoints: Checkpoints | None = None,
    writer: EventWriter | None = None,
    progress: Progress | None = None,
) -> FitResult:
    """Trains `params` on `batches`, going on from the latest checkpoint if there is one.

    A run that was killed and resumed is equal, bit for bit, to one that was not: parameters, optimizer and records. A
    signal waits for the evaluation of its step, if one is due: no evaluation is ever left out.

    Args:
        objective: what to minimise; static.
        params: initial parameters; copied, because the step reuses the buffers of its state.
        batches: a grain iterator (needed to resume) or any iterable of batches.
        optimizer, schedule: static settings.
        frozen: parameters that the objective reads without training them.
        prepare: turns (current params, key, corpus batch) into the batch of the step, e.g. `mixture.Mixture`. A
            checkpoint remembers its `description()`, or else its name, and is not resumed with another.
        evaluators: called with the parameters to evaluate (the moving average, if there is one).
        checkpoints: where to save; the best by its held-out metric is saved too.
        writer: where curves and texts go, under "train/", "optimizer/", "speed/" and the evaluators' own names.
        progress: a bar over all steps of the schedule; the caller opens and closes it.

    Raises:
        NonFiniteLoss: naming the step; checkpoints hold only states from before it.
        ValueError: data that end too soon, or that cannot be resumed; a checkpoint that does not fit or is damaged.
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, once the state is saved.
    """
    iterator = iter(batches)
    if checkpoints is not None and not hasattr(iterator, "get_state"):
        raise ValueError(
            f"batches of type {type(iterator).__name__} cannot be resumed; give a grain iterator, or no checkpoints"
        )
    state = create(optimizer, params, jax.random.key(schedule.seed))
    if checkpoints is not None:
        checkpoints.describe(
            objective={type(objective).__name__: objective},
            optimizer=optimizer,
            seed=schedule.seed,
            frozen=None if frozen is None else manifest.checksum(frozen),
            prepare=manifest.identify(prepare),
        )
    run = _Run(objective, optimizer, schedule, frozen, prepare, evaluators, checkpoints, writer, progress)
    if checkpoints is not None and checkpoints.latest_step() is not None:
        state = checkpoints.restore(state, iterator)
        run.recall(checkpoints.records(int(state.step)))
    with Interrupts() as interrupts:
        result = run(state, iterator, interrupts)
    interrupts.leave()
    return result


class _Run:
    """One call of `fit`: the loop and what it has seen."""

    def __init__(self, objective, optimizer, schedule, frozen, prepare, evaluators, checkpoints, writer, progress):
        self.objective, self.optimizer, self.schedule, self.frozen = objective, optimizer, schedule, frozen
        self.prepare, self.evaluators, self.checkpoints = prepare, evaluators, checkpoints
        self.writer, self.progress = writer, progress
        self.learning_rates = jax.jit(optimizer.learning_rates())
        self.throughput = Throughput()
        self.history, self.evaluations, self.utilisations = [], [], []

    def recall(self, records):
        """Takes over the records that were saved with the checkpoint."""
        self.history, self.evaluations = list(records.get("history", [])), list(records.get("evaluations", []))

    def __call__(self, state, iterator, interrupts) -> FitResult:
        step = resumed_at = int(state.step)
        if self.progress is not None and resumed_at:
            self.progress.update(resumed_at)
        pending = None  # metrics of the step that is still running, and its shape
        while step < self.schedule.steps:
            try:
                batch = next(iterator)
            except StopIteration:
                raise ValueError(
                    f"the data ended after {step} of {self.schedule.steps} steps; repeat the data or train fewer steps"
                ) from None
            if self.prepare is not None:
                batch = self.prepare(state.params, step_key(state, PREPARE), batch)
            state, metrics = train_step(state, batch, self.frozen, objective=self.objective, optimizer=self.optimizer)
            if pending is not None:
                self._finish(*pending)
            step += 1
            pending = (step, metrics, batch["tokens"].shape)
            evaluate = self.schedule.due(self.schedule.eval_every, step)
            stop = interrupts.received is not None
            save = self.schedule.due(self.schedule.save_every, step) or stop
            if step == resumed_at + 1 or evaluate or save:
                self._finish(*pending)
                pending = None
                jax.block_until_ready(state)
                self.throughput.pause()
                self._at_rest(state, iterator, step, evaluate, save)
                self.throughput.start()
            if stop:
                break
        self.throughput.pause()
        return FitResult(
            state=state,
            history=self.history,
            evaluations=self.evaluations,
            resumed_at=resumed_at,
            tokens_per_second=self.throughput.overall(),
            flop_utilisation=statistics.median(self.utilisations) if self.utilisations else None,
            peak_flops=self.throughput.peak,
        )

    def _finish(self, step, metrics, shape):
        """Fetches the metrics of a step, which waits for it, and logs them."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not (math.isfinite(values["loss"]) and math.isfinite(values["gradient_norm"])):
            raise NonFiniteLoss(step, values["loss"], values["gradient_norm"], self._kept())
        if "cross_entropy" in values:
            values["perplexity"] = float(np.exp(min(values["cross_entropy"], 700.0)))
        self.throughput.count(shape[0] * (shape[1] - 1))
        if self.schedule.due(self.schedule.log_every, step):
            values["learning_rate"] = float(self.learning_rates(step - 1))
            self.history.append({"step": step, **values})
            self._log(step, values, shape[1] - 1)
        if self.progress is not None:
            self.progress.update(loss=values["loss"])

    def _log(self, step, values, context):
        speed = {"peak_flops": self.throughput.peak}
        rate = self.throughput.read()
        if rate is not None:
            speed["tokens_per_second"] = rate
            speed["flop_utilisation"] = rate * self.objective.flops(context) / self.throughput.peak
            self.utilisations.append(speed["flop_utilisation"])
        if self.writer is not None:
            optimizer = {name: values[name] for name in ("learning_rate", "gradient_norm")}
            train = {name: value for name, value in values.items() if name not in optimizer}
            groups = {"train": train, "optimizer": optimizer, "speed": speed}
            for group, tags in groups.items():
                self.writer.scalars({f"{group}/{name}": value for name, value in tags.items()}, step)

    def _at_rest(self, state, iterator, step, evaluate, save):
        """Evaluation and saving, with nothing running on the device."""
        numbers = self._evaluate(state.eval_params, step) if evaluate else {}
        if self.checkpoints is not None and (save or self.checkpoints.improves(numbers)):
            self.checkpoints.save(state, iterator, numbers, {"history": self.history, "evaluations": self.evaluations})

    def _evaluate(self, params, step):
        numbers = {}
        for evaluator in self.evaluators:
            for name, value in evaluator(params):
                if not isinstance(value, str):
                    numbers[name] = float(value)
                elif self.writer is not None:
                    self.writer.text(name, value, step)
        if numbers:
            self.evaluations.append({"step": step, **numbers})
            if self.writer is not None:
                self.writer.scalars(numbers, step)
        return numbers

    def _kept(self):
        step = self.checkpoints.latest_step() if self.checkpoints is not None else None
        return "no checkpoint was saved" if step is None else f"the checkpoint of step {step} is kept"
