"""The same weights, prompts and lengths through transformers and through specjax: do they agree, and who is faster?"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import interleaved_texts as texts
from experiments.agreement import compare_logits, gap_between, perplexity
from experiments.compared_weights import Sides, code_prompts, other_library, passage, weights_folder
from experiments.equal_texts import first_difference
from experiments.generation_settings import make_drafter
from experiments.interleaved_texts import OURS, THEIRS, is_plain
from experiments.loading_cost import measure_first_token, measure_peak_memory
from experiments.pretrained_setting import BASELINE, Setting, check_drafters, identity
from experiments.transformers_checks import all_checks
from specjax.peak_flops import measure_peak_flops
from specjax.pretrained import independent_drafter, load
from specjax.report import plots
from specjax.report.bootstrap import bootstrap_speedup
from specjax.report.environment import environment
from specjax.report.results import comparison_row
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.weights import load_weights, locate

COLUMNS = ("library", "dtype", "drafter", "tokens_per_second", "speedup", "over_plain", "block_efficiency",
           "acceptance_rate", "prefill_seconds")  # fmt: skip


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Runs the parts that an earlier run has not finished, and writes the report."""
    check_config(config)
    versions = other_library().VERSIONS
    limit_cores(config.threads)
    stages = Stages(workdir)
    peak = measure_peak_flops()
    target = load(config.model, "float32")
    folder = weights_folder("weights", config.model, stages, lambda: target.model)
    draft_folder = weights_folder("draft_weights", config.draft_model, stages) if config.draft_model else None
    if folder != locate(config.model):  # the same numbers; here, from the very file that the other side reads
        target = dataclasses.replace(target, model=load_weights(folder, "float32"))
    sides = Sides(config, target, folder)
    prompts = code_prompts(config, target)
    inputs = {"target": identity(config.model), "threads": config.threads, "versions": versions}
    agreement = {
        name: stages.run(name, inputs | about, function)
        for name, about, function in (
            ("logits", {"positions": config.logit_positions}, lambda _: agreement_of_logits(config, sides)),
            ("perplexity", {"tokens": config.perplexity_tokens}, lambda _: agreement_of_perplexity(config, sides)),
            ("greedy", {"prompts": prompts[: config.greedy_prompts], "new_tokens": config.greedy_new_tokens},
             lambda _: agreement_of_texts(config, sides, prompts[: config.greedy_prompts])),
        )
    }  # fmt: skip
    loading = stages.run("loading", inputs | {"repeats": config.load_repeats}, functools.partial(loading_cost, config,
                                                                                               folder))  # fmt: skip
    timed = prompts[: config.timed_prompts]
    about = {key: config[key] for key in ("dtypes", "drafters", "drafter_settings", "draft_model", "prompt_lookup",
                                          "max_new_tokens", "repeats", "settle_seconds")}  # fmt: skip
    paths = [config.draft_model, *(config.drafter_settings[name].path for name in config.drafters)]
    about = {**ConfigDict(about).to_dict(), "saved": [identity(path) for path in paths if path], "prompts": timed}
    speed = stages.run("timing", inputs | about, lambda _: timing(config, sides, timed, draft_folder))
    rows = all_rows(config, speed["records"])
    print("\n" + text_table(rows, COLUMNS))
    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(peak) | versions,
        results={
            "rows": rows,
            "checks": all_checks(config, agreement, loading, speed),
            "logits": agreement["logits"],
            "perplexity": agreement["perplexity"],
            "greedy_texts_that_part": agreement["greedy"]["parted"],
            "speculative_texts_that_part": speed["parted"],
            "first_token": loading["first_token"],
            "memory": loading["memory"],
            "left_out": speed["left_out"],
            "stages": stages.records,
        },
        plots=figures(rows),
    )
    print("\n" + text_table(report["results"]["checks"]))
    print(f"\nfloat32 matmul peak {peak / 1e9:.0f} GFLOP/s. Tables: {workdir}/report.md   plots: {workdir}/plots")
    return report


def check_config(config: ConfigDict) -> None:
    """Raises ValueError for what can be wrong before a model is read."""
    if not config.model:
        raise ValueError("there is no model: --config.model=PATH, a folder, a .gguf file or a name on the hub")
    if "float32" not in config.dtypes or not set(config.dtypes) <= {"float32", "bfloat16"}:
        raise ValueError(f"dtypes must be float32, or float32 and bfloat16; got {', '.join(config.dtypes)}")
    for name in ("threads", "repeats", "load_repeats", "timed_prompts", "greedy_prompts", "greedy_new_tokens",
                 "max_new_tokens"):  # fmt: skip
        if config[name] < 1:
            raise ValueError(f"{name} must be at least 1; got {config[name]}")
    check_drafters(config)


def limit_cores(threads: int) -> None:
    """Both libraries take the cores that the process may run on, so it gets as many as there are threads.

    Raises:
        ValueError: there are fewer.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < threads:
        raise ValueError(f"threads is {threads}, but this process may run on {len(cores)} cores; set --config.threads")
    os.sched_setaffinity(0, cores[:threads])


def agreement_of_logits(config: ConfigDict, sides: Sides) -> dict[str, Any]:
    ids = passage("code", sides.target, config.logit_positions)
    return compare_logits(sides.our_logits(ids), sides.theirs("float32").logits(ids))


def agreement_of_perplexity(config: ConfigDict, sides: Sides) -> list[dict]:
    """One record per text."""
    records = []
    for kind in ("code", "prose"):
        ids = passage(kind, sides.target, config.perplexity_tokens)
        values = [perplexity(logits, ids) for logits in (sides.our_logits(ids), sides.theirs("float32").logits(ids))]
        difference = abs(values[0] / values[1] - 1)
        records.append({"text": kind, "tokens": len(ids), OURS: values[0], THEIRS: values[1], "difference": difference})
    return records


def agreement_of_texts(config: ConfigDict, sides: Sides, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Greedy float32 texts, stop tokens not obeyed, so that all have full length; where they part, both gaps."""
    target, theirs = sides.ours("float32"), sides.theirs("float32")
    new = config.greedy_new_tokens
    write = texts.our_writer(target, Setting.of(None, target, 0.0), new, ())
    parted = []
    for number, ids in enumerate(prompts):
        one, other = write(ids)["tokens"], theirs.greedy(ids, new)["tokens"]
        position = first_difference(one, other)
        if position is None:
            continue
        record = {"prompt": number, "position": position, "our_gap": None, "gap": None}
        if position < min(len(one), len(other)):
            shared, tokens = [*ids, *one[:position]], (one[position], other[position])
            for name, logits in (("our_gap", sides.our_logits(shared)), ("gap", theirs.logits(shared))):
                record[name] = gap_between(list(logits)[-1][-1], *tokens)
            record |= {name: target.tokenizer.decode([token]) for name, token in zip((OURS, THEIRS), tokens,
                                                                                   strict=True)}  # fmt: skip
        parted.append(record)
    return {"prompts": len(prompts), "new_tokens": new, "parted": parted}


def loading_cost(config: ConfigDict, weights: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Of the model as it was given, and memory also of the folder that it was written to."""
    cache, given = folder / "compiled", locate(config.model)
    runs = measure_first_token(given, "float32", cache, config.load_repeats)
    memory = [
        {"format": "gguf" if path.is_file() else "safetensors", **measure_peak_memory(path, "float32", cache)}
        for path in dict.fromkeys((given, weights))
    ]
    return {"first_token": runs, "memory": memory}


def timing(
    config: ConfigDict, sides: Sides, prompts: Sequence[Sequence[int]], draft_folder: pathlib.Path | None = None
) -> dict[str, Any]:
    """All settings of both libraries in turns: records by name, texts that part, settings that do not fit.

    `draft_folder`: `config.draft_model`, as the other library reads it.
    """
    writers, about, left_out = {}, {}, []
    stop_ids, new = sides.target.stop_ids, config.max_new_tokens

    def add(library, dtype, drafter, draft_length, write):
        name = f"{library} {dtype} {drafter}"
        about[name] = {"library": library, "dtype": dtype, "drafter": drafter, "draft_length": draft_length}
        writers[name] = write

    for dtype in config.dtypes:
        theirs, target = sides.theirs(dtype), sides.ours(dtype)
        greedy = functools.partial(theirs.greedy, max_new_tokens=new, stop_ids=stop_ids)
        add(THEIRS, dtype, BASELINE, 0, greedy)
        for length in config.prompt_lookup:
            add(THEIRS, dtype, f"prompt lookup {length}", length, functools.partial(greedy, prompt_lookup=length))
        choices = {BASELINE: lambda target: None}
        choices |= {
            name: functools.partial(make_drafter, config.drafter_settings[name]) for name in config.drafters
        }
        if draft_folder:
            assistant = sides.theirs(dtype, draft_folder)
            add(THEIRS, dtype, "assisted", None, functools.partial(greedy, assistant=assistant))
            choices["draft model"] = lambda target: independent_drafter(config.draft_model, target, 4)
        for name, choose in choices.items():
            try:
                setting = Setting.of(choose(target), target, 0.0)
            except ValueError as error:  # such as a drafter that was trained for the target in another dtype
                left_out.append({"setting": f"{OURS} {dtype} {name}", "reason": str(error)})
                continue
            add(OURS, dtype, name, setting.drafter.draft_length, texts.our_writer(target, setting, new, stop_ids))
    answers = texts.time_texts(writers, prompts, config.repeats, config.settle_seconds)
    records = {name: about[name] | {"answers": answers[name]} for name in writers}
    models = {dtype: sides.ours(dtype).model for dtype in config.dtypes}
    return {"records": records, "parted": texts.parted_texts(records, models, prompts), "left_out": left_out}


def all_rows(config: ConfigDict, records: Mapping[str, Mapping]) -> list[dict]:
    """One row per setting, beside the fastest target-only setting of both libraries."""
    baseline = texts.fastest([one for one in records.values() if is_plain(one)])
    sums = lambda one: ([a["timed_tokens"] for a in one["answers"]],  # noqa: E731
                        [np.median(a["seconds"]) for a in one["answers"]])  # fmt: skip
    rows = []
    for one in records.values():
        (plain,) = (other for other in records.values() if is_plain(other)
                    and (other["library"], other["dtype"]) == (one["library"], one["dtype"]))  # fmt: skip
        interval = bootstrap_speedup(*sums(one), *sums(baseline), seed=config.seed)
        turns = texts.rates(one)
        row = comparison_row(
            drafter=one["drafter"],
            objective=None,
            verifier="greedy",
            lossless=True,
            temperature=0.0,
            batch=1,
            draft_length=one["draft_length"],
            counts=texts.count_table(one),
            tokens_per_second=texts.tokens_per_second(one),
            baseline_tokens_per_second=texts.tokens_per_second(baseline),
            library=one["library"],
            dtype=one["dtype"],
            tokens_per_second_range=[float(turns.min()), float(turns.max())],
            speedup_low=interval.low,
            speedup_high=interval.high,
            over_plain=texts.over(one, plain),
            prefill_seconds=float(np.mean([np.median(answer["prefill_seconds"]) for answer in one["answers"]])),
        )
        rows.append(row | {"speedup": texts.over(one, baseline)})
    return rows


def figures(rows: Sequence[dict]) -> dict:
    speeds = {f"{row['library']} {row['dtype']}, {row['drafter']}": row["tokens_per_second"] for row in rows}
    speeds = dict(sorted(speeds.items(), key=lambda item: -item[1]))
    title = "Code prompts, greedy, batch 1"
    return {"tokens_per_second": plots.bars(speeds, quantity="tokens per second", title=title)}
