"""Speculative decoding of a pretrained target over a file of prompts, by category, against itself without drafts."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.bench_questions import choose_questions, read_questions, with_answer
from experiments.equal_texts import where_parted, widest_gap
from experiments.generation_settings import make_drafter
from experiments.pretrained_setting import (
    BASELINE,
    Setting,
    check_drafters,
    conversation_ids,
    identity,
)
from specjax.data.prompts import Prompt
from specjax.decoding import Generation, generate
from specjax.decoding.state import shared_context
from specjax.events import Progress
from specjax.peak_flops import measure_peak_flops
from specjax.pretrained import Pretrained, load
from specjax.report import plots
from specjax.report.bootstrap import bootstrap_speedup
from specjax.report.environment import environment
from specjax.report.metrics import PER_DEPTH, PER_ROW, CountTable, bootstrap_block_efficiency
from specjax.report.results import check, comparison_row
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import jsonable, write_report
from specjax.verifiers import VERIFIERS

OVERALL = "overall"
COLUMNS = ("category", "drafter", "prompts", "tokens_per_second", "speedup", "speedup_low", "speedup_high",
           "block_efficiency", "acceptance_rate", "emitted_tokens")  # fmt: skip


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Measures every batch of prompts that an earlier run has not finished, and writes the report."""
    check_config(config)
    asked, left_out = read_questions(config)
    target = load(config.model, config.dtype or None)
    chosen, refused = choose_questions(config, target, asked)
    left_out += refused
    settings = {BASELINE: Setting.of(None, target, config.temperature)}
    for name in config.drafters:
        drafter = make_drafter(config.drafter_settings[name], target)
        settings[name] = Setting.of(drafter, target, config.temperature, config.verifier)
    stages = Stages(workdir)
    peak = measure_peak_flops()
    questions = measure_in_stages(config, stages, target, settings, chosen)
    left_out += [record for question in questions for record in question["left_out"]]
    rows = all_rows(config, settings, questions)
    print("\n" + text_table(rows, COLUMNS))
    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(peak),
        results={
            "rows": rows,
            "checks": checks(config, rows, questions, len(chosen)),
            "parted_texts": [record for question in questions for record in question["parted"]],
            "left_out": left_out,
            "stages": stages.records,
        },
        plots=figures(config, rows),
    )
    print("\n" + text_table(report["results"]["checks"]))
    print(f"\nfloat32 matmul peak {peak / 1e9:.0f} GFLOP/s. Tables: {workdir}/report.md   plots: {workdir}/plots")
    return report


def check_config(config: ConfigDict) -> None:
    """Raises ValueError for what can be wrong before a model is read."""
    for name in ("model", "questions"):
        if not config[name]:
            raise ValueError(f"--config.{name} is empty; name the {'target' if name == 'model' else 'JSON Lines file'}")
    if config.turns not in ("first", "all"):
        raise ValueError(f"turns must be 'first' or 'all'; got {config.turns!r}")
    for name in ("repeats", "prompts_per_stage", "max_new_tokens", "longest_prompt"):
        if config[name] < 1:
            raise ValueError(f"{name} must be at least 1; got {config[name]}")
    check_drafters(config)


def measure_in_stages(
    config: ConfigDict,
    stages: Stages,
    target: Pretrained,
    settings: Mapping[str, Setting],
    prompts: Sequence[Prompt],
) -> list[dict]:
    """One record per prompt; a finished batch of prompts is read back instead of measured."""
    paths = [config.drafter_settings[name].path for name in settings if name != BASELINE]
    shared = {
        "target": identity(config.model),
        "drafters": {name: config.drafter_settings[name].to_dict() for name in settings if name != BASELINE},
        "saved": [identity(path) for path in paths if path],
        **{key: config[key] for key in ("seed", "dtype", "turns", "longest_prompt", "verifier", "temperature",
                                        "max_new_tokens", "repeats", "near_tie")},
    }  # fmt: skip
    records, warm = [], set()
    parts = [prompts[at : at + config.prompts_per_stage] for at in range(0, len(prompts), config.prompts_per_stage)]
    with Progress(len(prompts), "prompts", unit="prompt") as progress:
        for number, part in enumerate(parts):

            def measure(folder, part=part):
                done = []
                for prompt in part:
                    done.append(measure_prompt(config, target, settings, prompt, warm))
                    progress.update()
                return done

            inputs = shared | {"prompts": [dataclasses.asdict(prompt) for prompt in part]}
            records += stages.run(f"prompts_{number:03}", inputs, measure)
    return records


def measure_prompt(
    config: ConfigDict, target: Pretrained, settings: Mapping[str, Setting], prompt: Prompt, warm: set
) -> dict[str, Any]:
    """Every turn of one prompt under every setting, interleaved; the target-only answer is what a follow-up refers to.

    Args:
        warm: (setting, shapes) that have been compiled and run; grows.

    Returns:
        {"prompt", "category", "turns": per turn, by setting {"emitted_tokens", "seconds" per repeat,
        "prefill_seconds", "counts"}, "parted": greedy texts that differ from the target-only one, "left_out"}
    """
    record = {"prompt": prompt.name, "category": prompt.kind, "turns": [], "parted": [], "left_out": []}
    messages, follow_ups = prompt.chat, prompt.follow_ups if config.turns == "all" else ()
    for number, follow_up in enumerate([*follow_ups, None], start=1):
        context = min(shared_context(target.model.config, setting.drafter) for setting in settings.values())
        longest = min(config.longest_prompt, context - config.max_new_tokens)
        try:
            ids = conversation_ids(target, messages)
            reason = f"{len(ids)} tokens, over {longest}" if len(ids) > longest else None
        except ValueError as error:  # by what the target answered, else it had been refused before
            reason = error
        if reason is not None:
            reason = f"turn {number}: {reason}"
            record["left_out"].append({"prompt": prompt.name, "category": prompt.kind, "reason": reason})
            break
        results = measure_turn(config, target, settings, ids, warm)
        record["turns"].append({name: summary(runs) for name, runs in results.items()})
        plain = results[BASELINE][-1].tokens[0]
        if config.temperature == 0:
            record["parted"] += [
                {"prompt": prompt.name, "turn": number, "drafter": name} | parted
                for name, runs in results.items()
                if (parted := where_parted(target.model, ids, plain, runs[-1].tokens[0])) is not None
            ]
        answer = target.tokenizer.decode([token for token in plain.tolist() if token not in target.stop_ids])
        messages = with_answer(messages, answer, follow_up)
    return record


def measure_turn(
    config: ConfigDict, target: Pretrained, settings: Mapping[str, Setting], ids: Sequence[int], warm: set
) -> dict[str, list[Generation]]:
    """`repeats` runs of each setting in turns (A B C, B C A, ...), compiled and run once before any clock starts."""

    def once(setting: Setting) -> Generation:
        return generate(
            target.model,
            [ids],
            max_new_tokens=config.max_new_tokens,
            stop_ids=target.stop_ids,
            seed=config.seed,
            **setting.arguments(config.temperature),
        )

    shapes = (len(ids) - 1).bit_length(), (len(ids) + config.max_new_tokens - 1).bit_length()
    for name, setting in settings.items():
        if (name, shapes) not in warm:
            once(setting)
            warm.add((name, shapes))
    runs: dict[str, list[Generation]] = {name: [] for name in settings}
    names = list(settings)
    for turn in range(config.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            runs[name].append(once(settings[name]))
    return runs


def summary(runs: Sequence[Generation]) -> dict[str, Any]:
    """What is kept of the repeats of one answer: they have one text and one set of counts."""
    counts = runs[-1].counts
    return jsonable(
        {
            "emitted_tokens": len(runs[-1].tokens[0]),
            "seconds": [run.decode_seconds for run in runs],
            "prefill_seconds": [run.prefill_seconds for run in runs],
            "counts": {name: getattr(counts, name)[0] for name in PER_ROW + PER_DEPTH},
        }
    )


def all_rows(config: ConfigDict, settings: Mapping[str, Setting], questions: Sequence[dict]) -> list[dict]:
    """One row per category and setting, then one per setting over all prompts."""
    questions = [question for question in questions if question["turns"]]
    categories = list(dict.fromkeys(question["category"] for question in questions))
    groups = {name: [q for q in questions if q["category"] == name] for name in categories}
    groups[OVERALL] = questions
    return [
        row(config, category, name, setting, group)
        for category, group in groups.items()
        for name, setting in settings.items()
        if group
    ]


def row(config: ConfigDict, category: str, name: str, setting: Setting, questions: Sequence[dict]) -> dict[str, Any]:
    """Sums over prompts first, ratios last; seconds of an answer are the median of its repeats."""
    counts, tokens, seconds = totals(questions, name)
    _, plain_tokens, plain_seconds = totals(questions, BASELINE)
    answers = [turn[name] for question in questions for turn in question["turns"]]
    speedup = bootstrap_speedup(tokens, seconds, plain_tokens, plain_seconds, seed=config.seed)
    efficiency = bootstrap_block_efficiency(counts, seed=config.seed)
    return comparison_row(
        drafter=name,
        objective=None,
        verifier=setting.verifier,
        lossless=VERIFIERS[setting.verifier].lossless,
        temperature=config.temperature,
        batch=1,
        draft_length=setting.drafter.draft_length,
        counts=counts,
        tokens_per_second=float(tokens.sum() / seconds.sum()),
        baseline_tokens_per_second=float(plain_tokens.sum() / plain_seconds.sum()),
        category=category,
        prompts=len(questions),
        answers=len(answers),
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        block_efficiency_low=efficiency.low,
        block_efficiency_high=efficiency.high,
        prefill_seconds=float(np.mean([np.median(answer["prefill_seconds"]) for answer in answers])),
    )


def totals(questions: Sequence[dict], name: str) -> tuple[CountTable, np.ndarray, np.ndarray]:
    """(counts, tokens, seconds) of a setting, one entry per prompt: the sum of its turns."""
    per_question = []
    for question in questions:
        answers = [turn[name] for turn in question["turns"]]
        counts = {key: np.sum([answer["counts"][key] for answer in answers], 0) for key in PER_ROW + PER_DEPTH}
        seconds = sum(np.median(answer["seconds"]) for answer in answers)
        per_question.append((counts, sum(answer["emitted_tokens"] for answer in answers), seconds))
    counts, tokens, seconds = zip(*per_question, strict=True)
    table = CountTable.of({key: np.stack([one[key] for one in counts]) for key in PER_ROW + PER_DEPTH})
    return table, np.array(tokens), np.array(seconds)


def checks(config: ConfigDict, rows: Sequence[dict], questions: Sequence[dict], chosen: int) -> list[dict]:
    """All prompts measured, greedy texts equal but for near-ties, and each drafter surely faster than none."""
    measured = sum(bool(question["turns"]) for question in questions)
    result = [check("prompts measured", measured == chosen, measured, f"{chosen}")]
    if config.temperature == 0:
        parted = [record for question in questions for record in question["parted"]]
        worst = widest_gap(parted)
        name = f"greedy texts equal the target-only text ({len(parted)} part): largest logit gap where they part"
        result.append(check(name, worst <= config.near_tie, worst, f"<= {config.near_tie:g}"))
    for one in rows:
        if one["category"] == OVERALL and one["drafter"] != BASELINE:
            low = one["speedup"] if one["speedup_low"] is None else one["speedup_low"]
            result.append(check(f"{one['drafter']}: lower end of the overall speed-up", low > 1, low, "> 1"))
    return result


def figures(config: ConfigDict, rows: Sequence[dict]) -> dict:
    """Speed-up by category, one plot per drafter."""
    return {
        f"speedup_{name}": plots.bars(
            {row["category"]: row["speedup"] for row in rows if row["drafter"] == name},
            quantity="speed-up over target-only (×)",
            title=f"Speed-up by category: {name}",
            reference=1.0,
        )
        for name in config.drafters
    }
