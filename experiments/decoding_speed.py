"""How fast a pair decodes, and why: survival per depth, cost of the parts of a round, and wall clock, interleaved."""

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax import theory
from specjax.decoding import Generation, generate
from specjax.decoding.run import Run
from specjax.drafters import Independent
from specjax.events import Progress
from specjax.models import LanguageModel
from specjax.protocol import Drafter
from specjax.report import costs, metrics, timing
from specjax.report.metrics import CountTable
from specjax.report.results import comparison_row
from specjax.sampling import Sampling
from specjax.verifiers import VERIFIERS


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way of decoding.

    Attributes:
        label: the drafter's name in tables; "none" for target-only decoding.
        drafter, params: what proposes; None for target-only decoding.
        verifier: name of the rule.
        temperature: of both models.
        batch: prompts decoded at once.
        stop_ids, buffer_length: as `generate` takes them.
    """

    label: str
    drafter: Drafter | None
    params: Any
    verifier: str
    temperature: float
    batch: int = 1
    stop_ids: tuple[int, ...] = ()
    buffer_length: int | None = None

    @classmethod
    def independent(cls, label: str, model: LanguageModel, draft_length: int, verifier: str, temperature: float):
        """A smaller language model drafts a chain."""
        return cls(label, Independent(model.config, draft_length), model.params, verifier, temperature)

    @classmethod
    def target_only(cls, verifier: str, temperature: float, batch: int = 1):
        """The baseline."""
        return cls("none", None, None, verifier, temperature, batch)

    @property
    def draft_length(self) -> int:
        return 0 if self.drafter is None else self.drafter.draft_length

    @property
    def nodes(self) -> int:
        return 0 if self.drafter is None else self.drafter.topology.num_nodes

    @property
    def name(self) -> str:
        return f"{self.label} γ={self.draft_length} {self.verifier} T={self.temperature:g} B={self.batch}"

    @property
    def arguments(self) -> dict[str, Any]:
        """For `generate`."""
        arguments = {
            "verifier": self.verifier,
            "sampling": Sampling.of(self.temperature),
            "stop_ids": self.stop_ids,
            "buffer_length": self.buffer_length,
        }
        if self.drafter is not None:
            arguments |= {"drafter": self.drafter, "drafter_params": self.params}
        return arguments


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round, medians.

    Attributes:
        step: one target-only step, as decoded.
        verify: target forward, laws and verdict, by width.
        draft: what one drafted token adds to a round, in place: (ideal round - verify) / γ. A drafter that runs alone
            keeps its parameters in the caches and looks cheaper than it is between two target forwards.
    """

    step: float
    verify: Mapping[int, float]
    draft: float

    @property
    def cost_ratio(self) -> float:
        """c."""
        return self.draft / self.step

    def verify_ratio(self, draft_length: int) -> float:
        """Cost of verifying γ drafts in target-only steps, interpolated between measured widths."""
        widths = sorted(self.verify)
        return float(np.interp(draft_length + 1, widths, [self.verify[w] for w in widths])) / self.step


def start(target: LanguageModel, setting: Setting, prompts: Sequence, new_tokens: int) -> Run:
    """A call with its prompts prefilled."""
    return Run.start(target, prompts, max_new_tokens=new_tokens, **setting.arguments)


def survey(target: LanguageModel, setting: Setting, prompts: Sequence, new_tokens: int) -> CountTable:
    """Counts of held-out prompts that the target continues, decoded as one batch."""
    return CountTable.of(generate(target, prompts, max_new_tokens=new_tokens, **setting.arguments).counts)


def measure_costs(
    target: LanguageModel,
    setting: Setting,
    prompt,
    new_tokens: int,
    widths: Sequence[int],
    repeats: int,
    turns: int = 30,
) -> Costs:
    """Costs at batch 1, before anything is decoded; the step is the width-1 forward."""
    thunks = costs.probes(start(target, setting, [prompt], new_tokens), tuple(sorted(widths)), turns)
    thunks.pop("draft")
    seconds = {name: np.array(values) / turns for name, values in timing.interleave(thunks, repeats).items()}
    verify = {width: float(np.median(seconds[f"verify {width}"])) for width in widths}
    draft = draft_seconds(seconds["ideal"], seconds["verify"], setting.draft_length)
    return Costs(step=verify[1], verify=verify, draft=float(np.median(draft)))


def draft_seconds(ideal: np.ndarray, verify: np.ndarray, draft_length: int) -> np.ndarray:
    """Seconds that one drafted token adds to a round, turn by turn; never below 0, whatever the clock's noise says."""
    return np.maximum(np.asarray(ideal) - np.asarray(verify), 0) / draft_length


@dataclasses.dataclass
class Timed:
    """Repeated wall clock of one setting over the same prompts, and what its rounds are made of."""

    setting: Setting
    seconds: list[float] = dataclasses.field(default_factory=list)
    prefill_seconds: list[float] = dataclasses.field(default_factory=list)
    parts: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    counts: CountTable | None = None

    @property
    def tokens_per_second(self) -> float:
        return float(self.counts.emitted.sum() / np.median(self.seconds))

    @property
    def round_seconds(self) -> float:
        return float(np.median(self.seconds) / self.calls)

    @property
    def calls(self) -> int:
        """Rounds of the loop: a batch goes on until its last row has finished."""
        rounds, size = self.counts.rounds, self.setting.batch
        return int(sum(rounds[at : at + size].max() for at in range(0, len(rounds), size)))


def time_settings(
    target: LanguageModel,
    settings: Sequence[Setting],
    prompts: Sequence,
    new_tokens: int,
    repeats: int,
    turns: int = 12,
) -> dict[str, Timed]:
    """Decode all prompts, a setting's batch at a time, under every setting, in turns, `repeats` times.

    The ideal round and its verify are timed in the same turns, so that a prediction made of them shares the machine's
    drift. Everything is compiled and run once before the clock starts; seconds exclude prefill.
    """
    timed = {setting.name: Timed(setting) for setting in settings}
    parts = {}

    def decode(setting: Setting) -> list[Generation]:
        batches = [range(at, min(at + setting.batch, len(prompts))) for at in range(0, len(prompts), setting.batch)]
        return [
            generate(
                target, [prompts[i] for i in rows], max_new_tokens=new_tokens, seed=list(rows), **setting.arguments
            )
            for rows in batches
        ]

    def warm_up(setting: Setting) -> None:
        # The cost model is of one row, and of rounds that all draft and verify the same number of nodes.
        if setting.drafter is not None and setting.batch == 1 and len(setting.drafter.widths) == 1:
            probes = costs.probes(start(target, setting, prompts[: setting.batch], new_tokens), (), turns)
            parts[setting.name] = {"ideal": probes["ideal"], "verify": probes["verify"]}
            jax.block_until_ready([thunk() for thunk in parts[setting.name].values()])
        decode(setting)

    with Progress((repeats + 1) * len(settings), "timing", unit="run") as progress:
        # Compiling is most of it, and keeps little more than one core busy.
        with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for _ in pool.map(warm_up, settings):
                progress.update()
        for _, (name, record) in itertools.product(range(repeats), timed.items()):
            results = decode(record.setting)
            for part, thunk in parts.get(name, {}).items():
                record.parts.setdefault(part, []).append(timing.seconds_of(thunk) / turns)
            progress.update()
            record.seconds.append(sum(result.decode_seconds for result in results))
            record.prefill_seconds.append(sum(result.prefill_seconds for result in results))
            record.tokens = [tokens for result in results for tokens in result.tokens]
            record.counts = CountTable.concatenate([result.counts for result in results])
    return timed


def row(record: Timed, baseline: Timed, objective: str | None) -> dict[str, Any]:
    """The record of `results.rows` of one setting; speed-ups are medians of the ratios within a turn."""
    setting, counts = record.setting, record.counts
    extra: dict[str, Any] = {
        "round_seconds": record.round_seconds,
        "prefill_seconds": float(np.median(record.prefill_seconds)) / len(record.tokens),
    }
    predicted = cost_ratio = None
    if record.parts:
        step = np.array(baseline.seconds) / baseline.calls
        draft = draft_seconds(record.parts["ideal"], record.parts["verify"], setting.draft_length)
        cost_ratio = float(np.median(draft / step))
        verify_ratio = float(np.median(np.array(record.parts["verify"]) / step))
        survival = metrics.survival_per_depth(counts, unreached=0.0)
        predicted = float(theory.predicted_speedup(survival, cost_ratio, verify_ratio))
        alpha = metrics.acceptance_rate(counts)  # None when nothing was judged
        constant = (
            None
            if alpha is None
            else theory.constant_alpha_speedup(alpha, cost_ratio, setting.draft_length, verify_ratio)
        )
        extra |= {
            "verify_ratio": verify_ratio,
            "constant_alpha_speedup": constant if constant is None else float(constant),
            "survival_per_depth": metrics.survival_per_depth(counts),
        }
    result = comparison_row(
        drafter=setting.label,
        objective=objective,
        verifier=setting.verifier,
        lossless=VERIFIERS[setting.verifier].lossless,
        temperature=setting.temperature,
        batch=setting.batch,
        draft_length=setting.draft_length,
        counts=counts,
        tokens_per_second=record.tokens_per_second,
        baseline_tokens_per_second=baseline.tokens_per_second,
        predicted_speedup=predicted,
        cost_ratio=cost_ratio,
        **extra,
    )
    ratios = (
        np.array(baseline.seconds) * counts.emitted.sum() / (np.array(record.seconds) * baseline.counts.emitted.sum())
    )
    return result | {"speedup": float(np.median(ratios)), "speedup_range": [float(ratios.min()), float(ratios.max())]}


def fastest(records: Sequence[Timed]) -> Timed:
    """The target-only setting that others are compared with."""
    return max(records, key=lambda record: record.tokens_per_second)
