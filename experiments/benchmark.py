"""Where the time of decoding goes: width and batch, draft steps, the loop itself; and which draft length is best."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments import decoding_speed as speed
from experiments.decoding_speed import Setting
from experiments.trained_pair import finished_stages, load_text
from experiments.training_stage import Text
from specjax.decoding.run import Run, decode
from specjax.decoding.state import State
from specjax.drafters import Empty, IndependentTree
from specjax.events import Progress
from specjax.keys import Source
from specjax.models import LanguageModel, TransformerConfig
from specjax.models.transformer import apply
from specjax.peak_flops import measure_peak_flops
from specjax.report import costs, plots, timing
from specjax.report.environment import environment
from specjax.report.results import check_at_most, check_between
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.sampling import Sampling, draw, first_max
from specjax.topology import Topology
from specjax.training.saved_model import load_model

ROW_COLUMNS = (
    "temperature",
    "draft_length",
    "tokens_per_second",
    "speedup",
    "predicted_speedup",
    "block_efficiency",
    "acceptance_rate",
    "cost_ratio",
    "verify_ratio",
    "round_seconds",
    "ideal_round_ratio",
    "overhead_seconds",
)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Measures the models that a training run left in `config.models`."""
    stages, finished = finished_stages(config.models, ("text", "target", f"drafter_{config.drafter}"))
    target = load_model(stages / "target" / "model")
    drafter = load_model(stages / f"drafter_{config.drafter}" / "model")
    text = load_text(stages / "text", finished["text"]["result"])
    prompts = text.prompts(config.prompts, config.prompt_length, config.seed)
    peak = measure_peak_flops()

    widths = width_curve(config, target, prompts)
    print("\nSeconds of one target forward with laws and verdict:\n\n" + text_table(widths))
    plain = minimal_loop(config, target, prompts[0])
    print("\nTarget-only decoding against a minimal hand-written loop:\n\n" + text_table(plain))
    trees = tree_cost(config, text, target, drafter)
    print("\nVerifying a tree against a chain of as many tokens:\n\n" + text_table(trees))
    rows = draft_lengths(config, target, drafter, prompts)
    print("\n" + text_table(rows, ROW_COLUMNS))
    best = {row["temperature"]: max(rows_at(rows, row["temperature"]), key=lambda r: r["speedup"]) for row in rows}
    for temperature, row in best.items():
        print(f"\ntemperature {temperature:g}: best draft length {row['draft_length']}, speed-up {row['speedup']:.2f}")

    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(peak),
        results={
            "rows": rows,
            "checks": checks(rows, plain, trees),
            "best_draft_length": {f"temperature_{t:g}": row["draft_length"] for t, row in best.items()},
            "width_seconds": widths,
            "target_only": plain,
            "tree_cost": trees,
        },
        plots=figures(rows, widths),
    )
    print("\n" + text_table(report["results"]["checks"]))
    print(f"\nfloat32 matmul peak {peak / 1e9:.0f} GFLOP/s. Tables: {workdir}/report.md   plots: {workdir}/plots")
    return report


def rows_at(rows: list[dict], temperature: float) -> list[dict]:
    return [row for row in rows if row["temperature"] == temperature]


def width_curve(config: ConfigDict, target: LanguageModel, prompts) -> list[dict]:
    """Seconds of a verify by batch and width."""
    records = []
    with Progress(len(config.batches), "width curve", unit="batch size") as progress:
        for batch in config.batches:
            rows = [prompts[i % len(prompts)] for i in range(batch)]
            run = Run.start(
                target, rows, max_new_tokens=config.new_tokens, sampling=Sampling.of(1.0), verifier="token"
            )
            turns = max(2, config.turns // batch)
            seconds = timing.interleave(costs.probes(run, tuple(config.widths), turns), config.repeats)
            for width in config.widths:
                median = timing.timing(seconds[f"verify {width}"])
                each = {"seconds": median.median / turns, "iqr_seconds": median.iqr / turns}
                records.append(
                    {"batch": batch, "width": width, **each, "seconds_per_token": each["seconds"] / width / batch}
                )
            progress.update()
    return records


def tree_cost(config: ConfigDict, text: Text, target: LanguageModel, drafter: LanguageModel) -> list[dict]:
    """Seconds of forward, rule and compaction for a tree and for a chain of as many nodes, by cache length."""
    tree = Topology.from_shape(config.tree_shape)
    settings = {
        "chain": Setting.independent("chain", drafter, tree.num_nodes, "token", 1.0),
        **{f"tree, {rule}": Setting("tree", IndependentTree(drafter.config, tree), drafter.params, rule, 1.0)
           for rule in ("multi_round", "traversal")},
    }  # fmt: skip
    records = []
    for length in config.cache_lengths:
        prompt = text.prompts(1, length, config.seed)
        runs = {name: speed.start(target, setting, prompt, tree.num_nodes + 2) for name, setting in settings.items()}
        thunks = {name: costs.probes(run, (), config.turns)["verify"] for name, run in runs.items()}
        seconds = timing.interleave(thunks, config.loop_repeats)
        for name, values in seconds.items():
            records.append({
                "cache_length": length, "nodes": tree.num_nodes, "shape": name,
                "seconds": float(np.median(values)) / config.turns,
                "over_chain": timing.median_of_ratios(values, seconds["chain"]),
            })  # fmt: skip
    return records


def minimal_loop(config: ConfigDict, target: LanguageModel, prompt) -> list[dict]:
    """γ = 0 of the decoding loop against the least that a decoding loop can do, in turns."""
    records = []
    for temperature, verifier in ((0.0, "greedy"), (1.0, "token")):
        sampling = Sampling.of(temperature)
        run = Run.start(target, [prompt], max_new_tokens=config.new_tokens, sampling=sampling, verifier=verifier)
        assert isinstance(run.decoder.drafter, Empty)
        # `decode` reuses the buffers it is given; the copies are made by one program, not by one for each of them.
        fresh = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
        thunks = {
            "loop": lambda: decode(run.decoder, run.inputs, fresh(run.state), np.int32(10**6)).tokens,  # noqa: B023
            "minimal": functools.partial(
                minimal_decode, target.config, sampling.greedy, target.params, run.state
            ),
        }
        seconds = timing.interleave(thunks, config.loop_repeats, warmup=2)
        records.append(
            {
                "temperature": temperature,
                "loop_seconds_per_token": timing.timing(seconds["loop"]).median / config.new_tokens,
                "minimal_seconds_per_token": timing.timing(seconds["minimal"]).median / config.new_tokens,
                "ratio": timing.median_of_ratios(seconds["loop"], seconds["minimal"]),
            }
        )
    return records


@functools.partial(jax.jit, static_argnums=(0, 1))
def minimal_decode(config: TransformerConfig, greedy: bool, params, start: State):
    """Target-only decoding of one row with nothing but the model, a draw and the token buffer."""

    def body(carry):
        tokens, cache, length, token = carry
        logits, cache, _ = apply(config, params, token[:, None], cache)
        if greedy:
            token = first_max(logits[:, 0])
        else:
            uniform = jax.random.uniform(jax.random.fold_in(start.row_keys[0], length[0]))[None]
            token = draw(jax.nn.softmax(logits[:, 0]), Source(uniform=uniform))
        return jax.lax.dynamic_update_slice(tokens, token[:, None], (0, length[0])), cache, length + 1, token

    carry = start.tokens, start.target_cache, start.length, start.pending
    return jax.lax.while_loop(lambda carry: jnp.any(carry[2] < start.limit), body, carry)[0]


def draft_lengths(config: ConfigDict, target: LanguageModel, drafter: LanguageModel, prompts) -> list[dict]:
    """One row per temperature and draft length, γ = 0 among them."""
    rows = []
    for temperature, verifier in ((0.0, "greedy"), (1.0, "token")):
        settings = [Setting.target_only(verifier, temperature)]
        settings += [
            Setting.independent(config.drafter, drafter, length, verifier, temperature)
            for length in config.draft_lengths
        ]
        arguments = (settings, prompts, config.new_tokens, config.repeats)
        timed = list(speed.time_settings(target, *arguments, turns=config.turns).values())
        for record in timed:
            row = speed.row(record, timed[0], None if record.setting.drafter is None else "see models")
            ideal = record.parts.get("ideal")
            rounds = np.array(record.seconds) / record.calls
            extra = {
                "ideal_round_ratio": float(np.median(rounds / np.array(ideal))) if ideal else None,
                "overhead_seconds": float(np.median(rounds - np.array(ideal))) if ideal else None,
            }
            rows.append(row | extra)
    return rows


def checks(rows: list[dict], plain: list[dict], trees: list[dict]) -> list[dict]:
    """The loop's own costs, and whether the cost model describes what was measured."""
    result = [check_at_most(f"temperature {r['temperature']:g}: γ = 0 / minimal loop", r["ratio"], 1.03) for r in plain]
    for row in trees:
        if row["shape"] != "chain":
            name = f"{row['shape']} rule, {row['nodes']} nodes, cache length {row['cache_length']}: verify / chain's"
            result.append(check_at_most(name, row["over_chain"], 1.15))
    for row in rows:
        if row["draft_length"]:
            name = f"temperature {row['temperature']:g}, γ = {row['draft_length']}"
            result.append(check_at_most(f"{name}: round / ideal round", row["ideal_round_ratio"], 1.10))
            ratio = row["speedup"] / row["predicted_speedup"]
            result.append(check_between(f"{name}: measured / predicted speed-up", ratio, 0.9, 1.1))
    return result


def figures(rows: list[dict], widths: list[dict]) -> dict:
    lengths = sorted({row["draft_length"] for row in rows})
    series = {}
    for quantity in ("speedup", "predicted_speedup"):
        series[quantity] = {
            f"temperature {t:g}": [row[quantity] for row in rows_at(rows, t)]
            for t in sorted({r["temperature"] for r in rows})
        }
    curves = {}
    for record in widths:
        curves.setdefault(record["batch"], ([], []))
        curves[record["batch"]][0].append(record["width"])
        curves[record["batch"]][1].append(record["seconds"])
    return {
        "speedup": plots.speedup_by_draft_length(lengths, series["speedup"], series["predicted_speedup"]),
        "width": plots.width_curve(curves),
    }
