"""One prompt decoded under many seeds, the settings that are compared taking turns; and what a round of each costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import theory
from specjax.decoding.generation import Generation
from specjax.decoding.run import Run
from specjax.drafters import Independent
from specjax.events import Progress
from specjax.keys import row_keys
from specjax.models import LanguageModel
from specjax.report.costs import probes
from specjax.report.metrics import CountTable, survival_per_depth
from specjax.report.results import comparison_row
from specjax.report.timing import Timing, interleave, timing
from specjax.sampling import Sampling

PROBE_TURNS = 50


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to continue one prompt.

    Attributes:
        prompt: token ids.
        temperature: of the target.
        draft_length: γ; 0 decodes target-only.
        model: the drafter, and how it was trained in `objective`.
        draft_temperature: the drafter's own; None takes the target's.
    """

    prompt: tuple[int, ...]
    temperature: float
    draft_length: int = 0
    model: LanguageModel | None = None
    objective: str | None = None
    draft_temperature: float | None = None

    @property
    def task(self):
        """Settings with the same task can be compared."""
        return self.prompt, self.temperature

    def start(self, target: LanguageModel, max_new_tokens: int) -> Run:
        """The call, prefilled."""
        drafting = {}
        if self.draft_length:
            drafting = {
                "drafter": Independent(self.model.config, self.draft_length),
                "drafter_params": self.model.params,
                "draft_sampling": Sampling.of(
                    self.temperature if self.draft_temperature is None else self.draft_temperature
                ),
            }
        sampling = Sampling.of(self.temperature)
        return Run.start(target, [self.prompt], max_new_tokens=max_new_tokens, sampling=sampling,
                         verifier="token", **drafting)  # fmt: skip


def decode_in_turns(
    target: LanguageModel, settings: dict[str, Setting], max_new_tokens: int, seeds: range, title: str
) -> dict[str, list[Generation]]:
    """By label, one generation per seed; seed s of all settings, then seed s + 1 of all, everything compiled before."""
    starts = {label: setting.start(target, max_new_tokens) for label, setting in settings.items()}
    for start in starts.values():
        _with_seed(start, seeds[0]).advance()
    calls = {label: [] for label in settings}
    with Progress(len(seeds) * len(settings), title, unit="text") as progress:
        for seed in seeds:
            for label, start in starts.items():
                call = _with_seed(start, seed)
                call.advance()
                calls[label].append(call)
                progress.update()
    return {label: [call.result() for call in runs] for label, runs in calls.items()}


def _with_seed(start: Run, seed: int) -> Run:
    """A prefilled call of one row, to be run with another seed; nothing before decoding depends on it."""
    state = jax.tree.map(jnp.copy, start.state).replace(row_keys=row_keys(seed, 1))
    return Run(start.decoder, start.inputs, jax.block_until_ready(state), start.prompt_lengths, start.prefill_seconds)


def rows(settings: dict[str, Setting], generations: dict[str, list[Generation]]) -> list[dict]:
    """A record of `results.rows` per setting; the baseline is target-only decoding of the same task."""
    timings = {label: timing([g.decode_seconds for g in runs]) for label, runs in generations.items()}
    tables = {label: CountTable.concatenate(g.counts for g in runs) for label, runs in generations.items()}
    speeds = {
        label: tables[label].emitted.sum() / len(runs) / timings[label].median for label, runs in generations.items()
    }
    baselines = {setting.task: speeds[label] for label, setting in settings.items() if not setting.draft_length}
    return [
        _row(label, setting, tables[label], timings[label], speeds[label], baselines[setting.task])
        for label, setting in settings.items()
    ]


def _row(label, setting: Setting, counts: CountTable, timed: Timing, speed: float, baseline: float):
    return comparison_row(
        drafter="independent" if setting.draft_length else "none",
        objective=setting.objective,
        verifier="token",
        lossless=True,
        temperature=setting.temperature,
        batch=1,
        draft_length=setting.draft_length,
        counts=counts,
        tokens_per_second=speed,
        baseline_tokens_per_second=baseline,
        setting=label,
        prompt=setting.prompt,
        draft_temperature=setting.draft_temperature,
        calls_saved=1 - int(counts.rounds.sum()) / int(counts.emitted.sum()),
        attempts=int(counts.attempts.sum()),
        survival_per_depth=survival_per_depth(counts),
        seconds=timed.median,
        seconds_iqr=timed.iqr,
    )


def first_run(label: str, setting: Setting, generation: Generation) -> dict:
    """One text by itself."""
    counts = CountTable.of(generation.counts)
    emitted, calls = int(counts.emitted.sum()), int(counts.rounds.sum())
    return {
        "setting": label,
        "target_calls": calls,
        "drafted_tokens": int(counts.drafted.sum()),
        "accepted_tokens": int(counts.accepted.sum()),
        "emitted_tokens": emitted,
        "calls_saved": 1 - calls / emitted,
        "text": " ".join(map(str, [*setting.prompt, *generation.tokens[0].tolist()])),
    }


def part_seconds(
    target: LanguageModel, setting: Setting, max_new_tokens: int, draft_lengths: list[int]
) -> dict[str, float]:
    """Seconds of one draft step ("draft") and of a target forward with its verdict, by its width ("verify 5")."""
    widths = tuple(sorted({1, *(gamma + 1 for gamma in draft_lengths)}))
    thunks = probes(setting.start(target, max_new_tokens), widths, PROBE_TURNS)
    thunks.pop("ideal", None)
    seconds = {part: timing(measured).median / PROBE_TURNS for part, measured in interleave(thunks).items()}
    seconds["draft"] /= setting.draft_length
    return seconds


def with_prediction(row: dict, seconds: dict[str, float]) -> dict:
    """The row with c and the cost of a verify, in steps one token wide, and the speed-up if a round were just those.

    `round_seconds` is what a round took in fact, its share of the start of the call included.
    """
    row = row | {"round_seconds": row["block_efficiency"] / row["tokens_per_second"]}
    gamma = row["draft_length"]
    if not gamma:
        return row | {"verify_ratio": None, "draft_and_verify_seconds": None}
    cost_ratio = seconds["draft"] / seconds["verify 1"]
    verify_ratio = seconds[f"verify {gamma + 1}"] / seconds["verify 1"]
    return row | {
        "cost_ratio": cost_ratio,
        "verify_ratio": verify_ratio,
        "predicted_speedup": theory.predicted_speedup(survival(row), cost_ratio, verify_ratio),
        "draft_and_verify_seconds": gamma * seconds["draft"] + seconds[f"verify {gamma + 1}"],
    }


def survival(row: dict) -> list[float]:
    """Survival per depth; a depth that was never reached adds nothing."""
    return [0.0 if s is None else s for s in row["survival_per_depth"]]


def rows_that_differ(texts: list[np.ndarray], others: list[np.ndarray]) -> int:
    """How many texts are not equal, token for token."""
    return sum(not np.array_equal(a, b) for a, b in zip(texts, others, strict=True))
