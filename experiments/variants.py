"""Every drafter family for one target: trained under one budget, decoded on the same prompts, side by side."""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments import decoding_speed as speed
from experiments.acceptance import measure_quality
from experiments.decoding_speed import Setting
from experiments.equal_texts import check_equal_texts, compare_texts, joined
from experiments.families import FAMILIES, Family
from experiments.trained_pair import prepare_text, train_target
from experiments.training_stage import Text, TrainingStage, check_training, plain
from specjax.models import LanguageModel
from specjax.peak_flops import measure_peak_flops
from specjax.protocol import FIXED, Drafter
from specjax.report import metrics, plots
from specjax.report.environment import environment
from specjax.report.results import check_at_least
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.sampling import Sampling
from specjax.training.rollouts import HeldOutDecoding
from specjax.training.saved_drafter import load_drafter, save_drafter

COLUMNS = ("drafter", "verifier", "temperature", "batch", "draft_length", "nodes", "tokens_per_second", "speedup",
           "predicted_speedup", "block_efficiency", "acceptance_rate", "cost_ratio", "verify_ratio")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trained:
    """A family after its stage."""

    family: Family
    params: Any
    forms: dict[str, Drafter]
    record: dict


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Trains, or reuses, one target and every family; decodes; writes the table and the report."""
    begin = time.perf_counter()
    unknown = [name for name in config.families if name not in FAMILIES]
    if unknown or not config.families:
        raise ValueError(f"families must be some of {', '.join(FAMILIES)}; got {', '.join(unknown) or 'none'}")
    for name in ("target_training", "drafter_training"):
        check_training(name, config[name])
    stages = Stages(workdir, borrow=[config.reuse] if config.reuse else [])
    text = prepare_text(config, stages)
    target, target_record = train_target(config, stages, text)
    trained = {name: train_family(config, stages, text, target, name) for name in config.families}

    peak = measure_peak_flops()
    quality = [measure_quality(config, text, target, name, one.family, one.params) for name, one in trained.items()]
    print("\nOne round from each of the same held-out prefixes, temperature 1. overlap d: where d - 1 drafts were "
          "accepted; along text d: where they are the text's own.\n\n" + text_table(quality))  # fmt: skip
    decoded = [measure_speed(config, stages, text, target, name, one) for name, one in trained.items()
               if config.measure_speed]  # fmt: skip
    rows = [row for one in decoded for row in one["rows"]]
    print("\n" + text_table(rows, COLUMNS) if rows else "")
    exact = exactness(decoded) if rows else []
    repetition = decoded[0]["repetition_share"] if rows else None
    results = {
        "rows": rows,
        "checks": exact + expectations(config, rows, quality),
        "quality": quality,
        "best_forms": best_forms(rows),
        "repetition_share": repetition,
        "training": [{"model": "target", **_summary(target_record)}]
        + [{"model": name, **_summary(one.record)} for name, one in trained.items() if one.record],
        "stages": stages.records,
        "seconds": time.perf_counter() - begin,
    }
    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(peak),
        results=results,
        plots=figures(trained, quality, rows),
    )
    if rows:
        print("\nBest form of every family at batch 1:\n\n" + text_table(results["best_forms"]))
    print("\n" + text_table(results["training"]) + "\n\n" + text_table(results["checks"]))
    if rows:
        print(f"\nShare of 4-grams of the target's text seen before in it: {repetition}")
    print(f"This run took {results['seconds']:.0f} s. Tables: {workdir}/report.md   plots: {workdir}/plots")
    return report


def train_family(config: ConfigDict, stages: Stages, text: Text, target: LanguageModel, name: str) -> Trained:
    """Stage "drafter_<name>", for families that are trained: α per depth and τ are measured while it runs."""
    settings = config.family_settings[name]
    family = FAMILIES[name](settings, target, text)
    if family.objective is None:
        params = family.initial(jax.random.key(config.seed))
        return Trained(family, params, family.forms(params), {})
    training = config.drafter_training.copy_and_resolve_references()
    training.optimizer.learning_rate = settings.learning_rate
    prompts = text.prompts(training.eval_prompts, config.decoding.prompt_length, config.seed + 1)
    decoding = HeldOutDecoding(target, family.chain, prompts, training.eval_new_tokens, Sampling.of(1.0))
    run = TrainingStage(
        config,
        text,
        family.objective,
        family.initial,
        lambda folder, params: save_drafter(folder / "drafter", family.chain, family.whole(params)),
        training,
        [lambda params: decoding(family.whole(params))],
        best="held_out/block_efficiency",
        frozen={**target.params, **family.fixed},
    )
    inputs = {"objective": repr(family.objective), "chain": repr(family.chain), "training": training,
              "prompt_length": config.decoding.prompt_length, "seed": config.seed,
              "target": stages.hash_of("target")}  # fmt: skip

    def load(folder: pathlib.Path, record: dict):
        return load_drafter(folder / "drafter", target.config)[1], record

    params, record = stages.run(f"drafter_{name}", plain(inputs), run, load)
    return Trained(family, params, family.forms(params), record)


def settings_of(name: str, one: Trained, batches) -> list[Setting]:
    """All ways in which one family is decoded: every form, by the greedy rule at temperature 0 and, at temperature 1,
    by the rules made for its shape and its siblings; large batches by the best rule only."""
    settings = []
    for form, drafter in one.forms.items():
        label = name if form in ("chain", "window") else f"{name}, {form}"
        chain = drafter.topology.is_chain
        rules = ["token", "block"] if chain else ["multi_round", "traversal"]
        if drafter.siblings == FIXED and form == "best tree":
            rules.append("lossy_typical")
        for batch in batches:
            chosen = rules if batch == 1 else rules[1:2]
            pairs = [("greedy", 0.0), *((rule, 1.0) for rule in chosen)]
            settings += [Setting(label, drafter, one.params, rule, t, batch) for rule, t in pairs]
    return settings


def measure_speed(
    config: ConfigDict, stages: Stages, text: Text, target: LanguageModel, name: str, one: Trained
) -> dict[str, Any]:
    """Stage "decoding_<name>": wall clock of every setting of a family beside target-only decoding in the same turns.

    Returns rows, and how the greedy texts compare with target-only ones. A family at a time, because every setting is
    several compiled programs, and a process can hold only so many.
    """
    decoding = config.decoding
    prompts = text.prompts(decoding.timed_prompts, decoding.prompt_length, config.seed + 3)

    def measure(folder: pathlib.Path) -> dict:
        print(f"\n{name}", flush=True)
        baselines = [Setting.target_only(rule, t, batch) for batch in decoding.batches
                     for rule, t in (("greedy", 0.0), ("token", 1.0))]  # fmt: skip
        records = speed.time_settings(
            target, baselines + settings_of(name, one, decoding.batches), prompts, decoding.new_tokens,
            decoding.repeats, turns=decoding.turns,
        )  # fmt: skip
        rows = []
        for record in records.values():
            setting = record.setting
            like = lambda r, s=setting: (r.setting.temperature, r.setting.batch) == (s.temperature, s.batch)  # noqa: E731
            baseline = next(r for r in records.values() if r.setting.drafter is None and like(r))
            objective = None if setting.drafter is None else one.family.objective
            row = speed.row(record, baseline, None if objective is None else type(objective).__name__)
            shape = "chain" if setting.drafter is None or setting.drafter.topology.is_chain else "tree"
            extra = {} if setting.drafter is None else memory(target, setting, prompts, decoding.new_tokens)
            rows.append(row | {"family": name, "nodes": setting.nodes, "shape": shape} | extra)
        jax.clear_caches()
        return {"rows": rows, **greedy_texts(target, prompts, records)}

    forms = {form: repr(drafter) for form, drafter in one.forms.items()}
    trained = stages.hash_of(f"drafter_{name}") if one.record else None
    inputs = {"forms": forms, "trained": trained, "decoding": decoding, "seed": config.seed,
              "target": stages.hash_of("target")}  # fmt: skip
    return stages.run(f"decoding_{name}", plain(inputs), measure)


def greedy_texts(target: LanguageModel, prompts, records: dict) -> dict[str, Any]:
    """Greedy texts against target-only ones, and how much the target's own texts repeat themselves."""
    cold = [record for record in records.values() if record.setting.temperature == 0]
    plain = next(record.tokens for record in cold if record.setting.drafter is None)
    drafted = [record.tokens for record in cold if record.setting.drafter is not None]
    compared = joined([compare_texts(target, prompts, plain, tokens) for tokens in drafted])
    return compared | {"repetition_share": {f"temperature_{t:g}": repetition_share(records, t) for t in (0.0, 1.0)}}


def memory(target: LanguageModel, setting: Setting, prompts, new_tokens: int) -> dict[str, int]:
    """What a drafter takes beside the target: parameters, and bytes of these, of an index and of its state."""
    run = speed.start(target, setting, prompts[: setting.batch], new_tokens)
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    leaves = jax.tree.leaves(setting.params)
    return {
        "drafter_parameters": sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)),
        "drafter_bytes": size(setting.params) + size(run.state.draft_state),
    }


def exactness(decoded: list[dict]) -> list[dict]:
    """Whether greedy texts are target-only ones; where one parts, a near-tie must explain it."""
    return [check_equal_texts("temperature 0: every family, form and batch gives target-only text", joined(decoded))]


def expectations(config: ConfigDict, rows: list[dict], quality: list[dict]) -> list[dict]:
    """What the papers lead one to expect; what fails is shown, not hidden."""
    checks = []
    if rows:
        faster = {row["family"] for row in rows
                  if row["drafter"] != "none" and row["batch"] == 1 and row["speedup"] > 1}  # fmt: skip
        checks.append(check_at_least("families faster than target-only at batch 1", len(faster), 3))
    of = {row["drafter"]: row for row in quality}
    pairs = [("eagle", "medusa", f"along_text_{d}") for d in range(2, config.quality.depths + 1)]
    pairs += [("medusa", "ngram", "overlap_1"), ("eagle", "ngram", "overlap_1")]
    for better, worse, key in pairs:
        if better in of and worse in of:
            over = None if None in (of[better][key], of[worse][key]) else of[better][key] - of[worse][key]
            checks.append(check_at_least(f"{key.replace('_', ' ')}: {better} above {worse}", over, 0.0))
    if {"eagle", "eagle3"} <= of.keys():
        last = f"along_text_{config.quality.depths}"
        fall = {name: of[name]["along_text_1"] - of[name][last] for name in ("eagle", "eagle3")}
        name = f"along the text, eagle3's overlap falls less from depth 1 to {config.quality.depths} than eagle's"
        checks.append(check_at_least(name, fall["eagle"] - fall["eagle3"], 0.0))
    return checks


def best_forms(rows: list[dict]) -> list[dict]:
    """Per family and temperature at batch 1: the fastest lossless chain and the fastest lossless tree."""
    table = []
    families = dict.fromkeys(row["family"] for row in rows)
    for family in families:
        for temperature in (0.0, 1.0):
            mine = [row for row in rows if row["family"] == family and row["drafter"] != "none" and row["batch"] == 1
                    and row["temperature"] == temperature and row["lossless"]]  # fmt: skip
            record: dict[str, Any] = {"drafter": family, "temperature": temperature}
            for kind in ("chain", "tree"):
                chosen = [r for r in mine if r["shape"] == kind]
                best = max(chosen, key=lambda row: row["speedup"], default=None)
                record |= {
                    f"best_{kind}": None if best is None else f"{best['drafter']} / {best['verifier']}",
                    f"{kind}_speedup": best and best["speedup"],
                    f"{kind}_block_efficiency": best and best["block_efficiency"],
                }
            table.append(record)
    return table


def repetition_share(records: dict, temperature: float) -> float | None:
    """Share of 4-grams of the target-only texts that occurred before in the same text: what flatters n-grams."""
    alone = [r for r in records.values() if r.setting.drafter is None and r.setting.temperature == temperature]
    texts = alone[0].tokens
    seen = total = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        seen += len(grams) - len(set(grams))
        total += len(grams)
    return metrics.ratio(seen, total)


def figures(trained: dict[str, Trained], quality: list[dict], rows: list[dict]) -> dict:
    curves = {
        name: ([e["step"] for e in one.record["evaluations"]],
               [e["held_out/block_efficiency"] for e in one.record["evaluations"]])
        for name, one in trained.items() if one.record
    }  # fmt: skip
    overlap = {row["drafter"]: [v for k, v in row.items() if k.startswith("overlap_")] for row in quality}
    result = {
        "block_efficiency": plots.training_curves(curves, quantity="τ, held out", title="Block efficiency in training"),
        "overlap": plots.per_depth(
            overlap, quantity="overlap", title="Overlap with the target where the drafts so far were accepted"
        ),
    }
    for temperature in (0.0, 1.0) if rows else ():
        best = {}
        for row in rows:
            if row["temperature"] == temperature and row["batch"] == 1 and row["drafter"] != "none":
                best[f"{row['drafter']}, {row['verifier']}"] = row["speedup"]
        result[f"speedup_temperature_{temperature:g}"] = plots.bars(
            best, quantity="speed-up", title=f"Speed-up at batch 1, temperature {temperature:g}", reference=1.0
        )
    return result


def _summary(record: dict) -> dict:
    seconds = None if not record["tokens_per_second"] else record["tokens"] / record["tokens_per_second"]
    held_out = {name.removeprefix("held_out/"): value for name, value in record["held_out"].items()}
    kept = {name: held_out.get(name) for name in ("bits_per_byte", "block_efficiency", "acceptance_rate")}
    names = ("parameters", "steps", "tokens", "tokens_per_second", "flop_utilisation")
    return {name: record[name] for name in names} | {"seconds": seconds} | kept
