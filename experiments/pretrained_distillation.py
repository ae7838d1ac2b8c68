"""Train a drafter for a real target, from nothing but prompts: the target answers, the drafter learns from the answers.

    prompts ──► answers ──► drafter_<family> ──► decoding_<family>, along_answers_<family>

Every stage goes on where it was stopped. What is measured, while training and at the end, is measured by decoding
prompts from documents that no training prompt came from.
"""

import dataclasses
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments import decoding_speed as speed
from experiments.acceptance import along_texts
from experiments.answer_stage import AnswerData, TokenPrompt, answer_prompts, prepare_prompts
from experiments.decoding_speed import Setting
from experiments.equal_texts import check_equal_texts, compare_texts, joined
from experiments.families import FAMILIES, Family
from experiments.training_stage import TrainingStage, check_training, plain
from specjax import pretrained
from specjax.data.pipeline import encode_documents
from specjax.data.text import StandardLibrary, load_corpus
from specjax.drafters import BlockDrafter
from specjax.drafters.heads import PredictionHeads
from specjax.peak_flops import measure_peak_flops
from specjax.protocol import Drafter
from specjax.report import metrics, plots
from specjax.report.environment import environment
from specjax.report.results import check_at_least
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.sampling import Sampling
from specjax.topology import Topology
from specjax.training.manifest import checksum
from specjax.training.mixture import Mixture
from specjax.training.rollouts import HeldOutDecoding
from specjax.training.saved_drafter import load_drafter, save_drafter

COLUMNS = ("drafter", "temperature", "draft_length", "tokens_per_second", "speedup", "predicted_speedup",
           "block_efficiency", "acceptance_rate", "cost_ratio", "verify_ratio")  # fmt: skip


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Runs all stages and writes the report into `workdir`."""
    begin = time.perf_counter()
    check_config(config)
    target = load_target(config)
    stages = Stages(workdir, borrow=[config.reuse] if config.reuse else [])
    prompts = prepare_prompts(config, stages, target)
    data, answered = answer_prompts(config, stages, target, prompts)
    family, params, record = train_drafter(config, stages, target, data, prompts[1])
    peak = measure_peak_flops()
    decoded = measure(config, stages, target, family, params, prompts[1])
    quality = measure_along_answers(config, stages, target, family, params, data)

    rows = decoded["rows"]
    results = {
        "rows": rows,
        "checks": checks(config, decoded),
        "answers": [{"prompts": name, **side} for name, side in answered.items()],
        "training": [summary(config.family, record)] if record else [],
        "survey": decoded["survey"],
        "quality": [quality],
        "stages": stages.records,
        "seconds": time.perf_counter() - begin,
    }
    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(peak),
        results=results,
        plots=figures(config.family, record, decoded),
    )
    for table in (results["answers"], results["training"], results["survey"], results["quality"]):
        print("\n" + text_table(table) if table else "")
    print("\n" + text_table(rows, COLUMNS) + "\n\n" + text_table(results["checks"]))
    print(f"\nThis run took {results['seconds']:.0f} s. Tables: {workdir}/report.md   plots: {workdir}/plots")
    if record:
        print(f"The drafter: {stages.folder / f'drafter_{config.family}' / 'drafter'}")
    return report


def check_config(config: ConfigDict) -> None:
    """What would otherwise be found only after minutes."""
    if config.family not in FAMILIES or config.family not in config.family_settings:
        known = ", ".join(name for name in FAMILIES if name in config.family_settings)
        raise ValueError(f"family must be one of {known}; got {config.family!r}")
    if config.answers.drafter not in ("none", "ngram"):
        raise ValueError(f"answers.drafter must be none or ngram; got {config.answers.drafter!r}")
    if not config.answers.temperatures or config.answers.batch % len(config.answers.temperatures):
        raise ValueError(
            f"answers.batch {config.answers.batch} must be a multiple of the number of answers.temperatures, "
            f"{len(config.answers.temperatures)}, so that every batch has the same mixture"
        )
    check_training("training", config.training)
    if not 0 <= config.training.corpus_fraction < 1:
        raise ValueError(f"training.corpus_fraction must be in [0, 1); got {config.training.corpus_fraction}")
    if not 1 <= config.training.context <= config.training.window:
        raise ValueError(
            f"training.context must be 1 to training.window {config.training.window}; got {config.training.context}"
        )
    needed = max(config.training.eval_prompts + config.decoding.prompts, config.answers.held_out_count)
    if config.prompts.held_out_count < needed or config.answers.held_out_count < 1:
        raise ValueError(
            f"prompts.held_out_count {config.prompts.held_out_count} must be at least {needed}: training.eval_prompts "
            "and decoding.prompts, which are kept apart, and answers.held_out_count, at least 1"
        )
    if config.decoding.repeats < 5:
        raise ValueError(f"decoding.repeats must be at least 5; got {config.decoding.repeats}")


def load_target(config: ConfigDict):
    """The pretrained model that `config.model` names."""
    if not config.model:
        raise ValueError("model is empty; give the path of a model: --config.model=PATH (see the config's docstring)")
    is_path = config.model.startswith((".", "/", "~")) or config.model.endswith(".gguf")
    if is_path and not os.path.exists(os.path.expanduser(config.model)):
        raise ValueError(f"no model at {config.model} (from {os.getcwd()}); the config's docstring says how to get one")
    target = pretrained.load(os.path.expanduser(config.model) if is_path else config.model, dtype=config.dtype)
    context, longest = target.model.config.context_length, config.prompts.max_tokens
    new_tokens = max(config.answers.max_new_tokens, config.training.eval_new_tokens, config.decoding.new_tokens)
    if longest + new_tokens > context or config.training.window > context:
        raise ValueError(
            f"prompts.max_tokens {longest} + {new_tokens} new tokens, and training.window {config.training.window}, "
            f"must fit into the target's context of {context}; lower them"
        )
    return target


def train_drafter(
    config: ConfigDict, stages: Stages, target, data: AnswerData, held_out: list[TokenPrompt]
) -> tuple[Family, Any, dict]:
    """Stage "drafter_<family>": (family, all of the drafter's parameters, what the stage recorded)."""
    name, training = config.family, config.training
    settings = config.family_settings[name]
    family = FAMILIES[name](settings, target.model, data.text(target.tokenizer))
    if family.objective is None:
        return family, family.initial(jax.random.key(config.seed)), {}
    optimizer = ConfigDict(training.optimizer.to_dict() | {"learning_rate": settings.learning_rate})
    own = settings.get("training", ConfigDict()).to_dict()  # what a family wants otherwise, such as fewer rows
    schedule = ConfigDict(training.to_dict() | {"optimizer": optimizer} | own)
    temperature = float(training.eval_temperature)
    decoding = HeldOutDecoding(
        target.model,
        family.chain,
        [prompt.ids for prompt in held_out[: training.eval_prompts]],
        training.eval_new_tokens,
        Sampling.of(temperature),
        verifier="greedy" if temperature == 0 else "token",
        stop_ids=tuple(target.stop_ids),
    )
    stage = TrainingStage(
        config,
        data,
        family.objective,
        family.initial,
        lambda folder, params: save_drafter(folder / "drafter", family.chain, family.whole(params)),
        schedule,
        [lambda params: decoding(family.whole(params))],
        best="held_out/block_efficiency",
        frozen={**target.model.params, **family.fixed},
        prepare=corpus_mixture(training, target.tokenizer, config.prompts.held_out),
    )
    inputs = {"objective": repr(family.objective), "chain": repr(family.chain), "training": schedule,
              "seed": config.seed, "answers": stages.hash_of("answers")}  # fmt: skip

    def load(folder: pathlib.Path, record: dict):
        return load_drafter(folder / "drafter", target.model.config)[1], record

    params, record = stages.run(f"drafter_{name}", plain(inputs), stage, load)
    return family, params, record


@dataclasses.dataclass(frozen=True, eq=False)
class CorpusWindows:
    """A source of batches for `Mixture`: windows of plain text at random places, every token counted."""

    tokens: np.ndarray

    def description(self) -> dict[str, str]:
        return {"type": "CorpusWindows", "tokens": checksum({"tokens": self.tokens})}

    def __call__(self, params, key, batch):
        rows, width = batch["tokens"].shape
        starts = np.asarray(jax.random.randint(key, (rows,), 0, len(self.tokens) - width))
        tokens = np.stack([self.tokens[start : start + width] for start in starts])
        return {"tokens": tokens, "mask": np.ones(tokens.shape, bool)}


def corpus_mixture(training: ConfigDict, tokenizer, held_out: float) -> Mixture | None:
    """Steps on plain source code, the training side of the standard library, in the share that the config wants."""
    if not training.corpus_fraction:
        return None
    documents, characters = load_corpus(StandardLibrary(), held_out).train, 0
    order = np.random.default_rng(0).permutation(len(documents))
    chosen = []
    for index in order:
        chosen.append(documents[index])
        characters += len(documents[index].text)
        if characters >= training.corpus_characters:
            break
    tokens = encode_documents(tokenizer, chosen).tokens
    return Mixture(((float(training.corpus_fraction), CorpusWindows(tokens)),))


def with_draft_length(drafter: Drafter, length: int) -> Drafter | None:
    """The same chain with another γ, or None where the parameters do not allow it."""
    if isinstance(drafter, PredictionHeads):
        return None if length > drafter.num_heads else dataclasses.replace(drafter, topology=Topology.chain(length))
    if isinstance(drafter, BlockDrafter) and length != drafter.draft_length:
        return None  # its number of masks is trained
    return dataclasses.replace(drafter, draft_length=length)


def measure(
    config: ConfigDict, stages: Stages, target, family: Family, params, held_out: list[TokenPrompt]
) -> dict[str, Any]:
    """Stage "decoding_<family>": wall clock of target-only decoding and of the drafter with several draft lengths, in
    turns, at temperature 0 on held-out prompts; and counts on all of these at temperature 0 and 1."""
    decoding, name = config.decoding, config.family
    prompts = [prompt.ids for prompt in held_out[config.training.eval_prompts :][: decoding.prompts]]
    chains = {length: with_draft_length(family.chain, length) for length in decoding.draft_lengths}
    plain_chains = [chain for chain in [*chains.values(), family.chain] if chain is not None]
    drafters = dict.fromkeys(plain_chains, name)
    if decoding.trees:
        drafters |= {tree: f"{name}, {form}" for form, tree in family.trees(params).items()}
    buffer_length = max(map(len, prompts)) + decoding.new_tokens
    how = {"stop_ids": tuple(int(i) for i in target.stop_ids), "buffer_length": buffer_length}

    def run(folder: pathlib.Path) -> dict:
        longest = max(plain_chains, key=lambda chain: chain.draft_length)
        survey = []
        for temperature, rule in ((0.0, "greedy"), (1.0, "token")):
            setting = Setting(name, longest, params, rule, temperature, len(prompts), **how)
            counts = speed.survey(target.model, setting, prompts, decoding.new_tokens)
            interval = metrics.bootstrap_block_efficiency(counts)
            survey.append({
                "drafter": name, "temperature": temperature, "draft_length": longest.draft_length,
                "prompts": len(prompts), "block_efficiency": interval.estimate, "block_efficiency_low": interval.low,
                "block_efficiency_high": interval.high, "acceptance_rate": metrics.acceptance_rate(counts),
                "survival_per_depth": metrics.survival_per_depth(counts),
            })  # fmt: skip
        settings = [Setting.target_only("greedy", 0.0)]
        settings += [Setting(label, drafter, params, "greedy", 0.0) for drafter, label in drafters.items()]
        settings = [dataclasses.replace(setting, **how) for setting in settings]
        timed_prompts = prompts[: decoding.timed_prompts]
        records = speed.time_settings(
            target.model, settings, timed_prompts, decoding.new_tokens, decoding.repeats, turns=decoding.turns
        )
        alone, *others = records.values()
        objective = None if family.objective is None else type(family.objective).__name__
        compared = [compare_texts(target.model, timed_prompts, alone.tokens, record.tokens) for record in others]
        return {
            "rows": [speed.row(record, alone, None if record is alone else objective) for record in records.values()],
            "survey": survey,
            **joined(compared),
        }

    trained = stages.hash_of(f"drafter_{name}") if family.objective is not None else None
    inputs = {"drafters": {repr(drafter): label for drafter, label in drafters.items()}, "decoding": decoding,
              "trained": trained, "answers": stages.hash_of("answers"), "eval_prompts": config.training.eval_prompts,
              "seed": config.seed}  # fmt: skip
    return stages.run(f"decoding_{name}", plain(inputs), run)


def measure_along_answers(
    config: ConfigDict, stages: Stages, target, family: Family, params, data: AnswerData
) -> dict[str, Any]:
    """Stage "along_answers_<family>": Σ min(p, q) at every depth of the same held-out answers, at temperature 1."""
    name, depths = config.family, config.decoding.depths
    inputs = {"trained": stages.hash_of(f"drafter_{name}") if family.objective is not None else None,
              "answers": stages.hash_of("answers"), "window": config.training.window, "depths": depths}  # fmt: skip

    def run(folder: pathlib.Path) -> dict:
        frozen = {**target.model.params, **family.fixed}
        windows = data.held_out_windows(config.training.window)
        return {"drafter": name, **along_texts(frozen, family, params, windows, depths)}

    return stages.run(f"along_answers_{name}", plain(inputs), run)


def checks(config: ConfigDict, decoded: dict) -> list[dict]:
    """Exactness, and what the config leads one to expect."""
    rows = [row for row in decoded["rows"] if row["drafter"] != "none"]
    tau = max((row["block_efficiency"] for row in rows if row["block_efficiency"] is not None), default=None)
    return [
        check_equal_texts(
            "temperature 0: every draft length gives target-only text", decoded, config.expected.near_tie
        ),
        check_at_least("temperature 0: block efficiency", tau, config.expected.block_efficiency),
        check_at_least("temperature 0: best speed-up", max(row["speedup"] for row in rows), config.expected.speedup),
    ]  # fmt: skip


def figures(name: str, record: dict, decoded: dict) -> dict:
    survival = {f"temperature {row['temperature']:g}": row["survival_per_depth"] for row in decoded["survey"]}
    speeds = {f"{row['drafter']}, γ = {row['draft_length']}": row["speedup"] for row in decoded["rows"]}
    result = {
        "survival": plots.per_depth(survival, quantity="survival", title="Drafts that survive to each depth"),
        "speedup": plots.bars(speeds, quantity="speed-up", title="Speed-up, temperature 0, batch 1", reference=1.0),
    }
    if record:
        loss = {name: ([r["step"] for r in record["history"]], [r["loss"] for r in record["history"]])}
        tau = {name: ([e["step"] for e in record["evaluations"]],
                      [e["held_out/block_efficiency"] for e in record["evaluations"]])}  # fmt: skip
        result["loss"] = plots.training_curves(loss, quantity="training loss (nats per token)", title="Training")
        result["block_efficiency"] = plots.training_curves(tau, quantity="τ, held out", title="While training")
    return result


def summary(name: str, record: dict) -> dict:
    """The numbers of a training stage that make a row of a table."""
    held_out = {key.removeprefix("held_out/"): value for key, value in record["held_out"].items()}
    names = ("parameters", "steps", "tokens", "tokens_per_second", "flop_utilisation", "best_step")
    kept = {key: held_out.get(key) for key in ("block_efficiency", "acceptance_rate")}
    return {"drafter": name, **{key: record[key] for key in names}, **kept}
