"""Rules compared on identical drafts: real rounds are recorded once, and every rule, γ or tree is scored on them."""

import pathlib

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.trained_pair import finished_stages, load_text
from specjax.drafters import Independent, IndependentTree
from specjax.report import metrics, plots
from specjax.report.environment import environment
from specjax.report.recorded_rounds import RecordedRounds, record_rounds
from specjax.report.results import check, check_at_least
from specjax.report.stages import Stages
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.sampling import Sampling
from specjax.topology import Topology
from specjax.training.saved_model import load_model
from specjax.verifiers import VERIFIERS
from specjax.verifiers.expected import expected_accepted


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Records chains and trees of the models in `config.models`, scores them and writes the report."""
    stages = Stages(workdir)
    chains = _recorded(config, stages, "chains", Topology.chain(config.draft_length))
    trees = _recorded(config, stages, "trees", Topology.from_shape(config.tree_shape))
    rows = [row for rule in config.chain_rules for row in score_chains(rule, chains, config.draft_lengths)]
    tree_rows = [row for rule in config.tree_rules for row in score_trees(rule, trees, config.children)]
    print("\nTokens per target call expected on the recorded chains:\n\n" + text_table(rows))
    print("\nOn the recorded trees, keeping the first k children of every node:\n\n" + text_table(tree_rows))
    report = write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(),
        results={"chains": rows, "trees": tree_rows, "checks": checks(rows, tree_rows), "stages": stages.records},
        plots=figures(config, rows, tree_rows),
    )
    print("\n" + text_table(report["results"]["checks"]))
    return report


def _recorded(config: ConfigDict, stages: Stages, name: str, topology: Topology) -> RecordedRounds:
    """Stage: rounds of held-out prompts at temperature 1, drafted in this shape with independent siblings."""
    needed = ("text", "target", f"drafter_{config.drafter}")
    trained, results = finished_stages(config.models, needed)

    def record(folder: pathlib.Path):
        text = load_text(trained / "text", results["text"]["result"])
        model = load_model(trained / needed[2] / "model")
        chain = Independent(model.config, topology.max_depth)
        rounds = record_rounds(
            load_model(trained / "target" / "model"),
            text.prompts(config.prompts, config.prompt_length, config.seed),
            max_new_tokens=config.new_tokens,
            drafter=chain if topology.is_chain else IndependentTree(model.config, topology, "iid"),
            drafter_params=model.params,
            sampling=Sampling.of(1.0),
            seed=config.seed,
        )
        rounds.save(folder / "rounds.npz")
        return {"rounds": len(rounds.prompt)}

    settings = {key: config[key] for key in ("prompts", "prompt_length", "new_tokens", "seed")}
    # Not only what went into a stage: it may have been run again by other code.
    runs = {stage: {key: result[key] for key in ("hash", "finished_at")} for stage, result in results.items()}
    inputs = {"topology": topology, **settings, **runs}
    return stages.run(name, inputs, record, lambda folder, _: RecordedRounds.load(folder / "rounds.npz"))


def score_chains(rule: str, rounds: RecordedRounds, lengths) -> list[dict]:
    """One row per draft length: expected tokens per target call, and the gain over the token rule, draft by draft."""
    depths = rounds.topology.depths[1:]
    return [_row(rule, "token", rounds, depths <= length, {"draft_length": length}) for length in lengths]


def score_trees(rule: str, rounds: RecordedRounds, children) -> list[dict]:
    """One row per number k of children, likewise, over multi-round rejection with the same k."""
    ranks, parents = rounds.topology.ranks, rounds.topology.parents
    rows = []
    for k in children:
        kept = np.zeros(len(parents), bool)
        for i, parent in enumerate(parents):
            kept[i] = ranks[i] < k and (parent == 0 or kept[parent - 1])
        rows.append(_row(rule, "multi_round", rounds, kept, {"children": k}))
    return rows


def _row(rule: str, reference: str, rounds: RecordedRounds, nodes: np.ndarray, about: dict) -> dict:
    scores = {name: _expected(name, rounds, nodes) for name in {rule, reference}}
    per_prompt = lambda values: np.bincount(rounds.prompt, values)  # noqa: E731
    ones = per_prompt(np.ones(len(rounds.prompt)))
    tokens = metrics.bootstrap_ratio(per_prompt(1 + scores[rule]), ones)
    gain = metrics.bootstrap_ratio(per_prompt(scores[rule] - scores[reference]), ones)
    return {
        "verifier": rule,
        "lossless": VERIFIERS[rule].lossless,
        **about,
        "nodes": int(nodes.sum()),
        "expected_tokens": tokens.estimate,
        "expected_tokens_low": tokens.low,
        "expected_tokens_high": tokens.high,
        f"gain_over_{reference}": gain.estimate,
        "gain_low": gain.low,
        "gain_high": gain.high,
    }


def _expected(rule: str, rounds: RecordedRounds, nodes: np.ndarray) -> np.ndarray:
    """E[accepted] of every recorded round."""
    values = expected_accepted(VERIFIERS[rule](), jnp.asarray(rounds.p), rounds.proposal(nodes))
    return np.asarray(values, float)


def checks(rows: list[dict], tree_rows: list[dict]) -> list[dict]:
    """What theory promises in expectation over drafts: on a single draft a rule that looks further can accept less."""
    result = []
    for rule, reference, table in (("block", "token", rows), ("traversal", "multi_round", tree_rows)):
        for row in (row for row in table if row["verifier"] == rule):
            size = f"γ = {row['draft_length']}" if "draft_length" in row else f"k = {row['children']}"
            value = f"{row[f'gain_over_{reference}']:+.4f} ({row['gain_low']:+.4f} to {row['gain_high']:+.4f})"
            name = f"{rule} accepts no less than {reference} on the same drafts, {size}"
            result.append(check(name, row["gain_high"] >= -1e-4, value, "interval not below 0"))
    for rule in dict.fromkeys(row["verifier"] for row in tree_rows):
        mine = sorted((row for row in tree_rows if row["verifier"] == rule), key=lambda row: row["children"])
        if len(mine) > 1:
            more = mine[-1]["expected_tokens"] - mine[0]["expected_tokens"]
            name = f"{rule}: k = {mine[-1]['children']} over k = {mine[0]['children']}, tokens per target call"
            result.append(check_at_least(name, more, 0.0))
    return result


def figures(config: ConfigDict, rows: list[dict], tree_rows: list[dict]) -> dict:
    lengths = list(config.draft_lengths)
    curves = {
        rule: (lengths, [row["expected_tokens"] for row in rows if row["verifier"] == rule])
        for rule in config.chain_rules
    }
    bars = {f"{row['verifier']}, k = {row['children']}": row["expected_tokens"] for row in tree_rows}
    return {
        "chains": plots.training_curves(
            curves, quantity="tokens per target call", title="Rules on the same drafts", steps="draft length (tokens)"
        ),
        "trees": plots.bars(bars, quantity="tokens per target call", title="Rules on the same trees"),
    }
