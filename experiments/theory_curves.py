"""Tokens per target call in closed form, beside what introductions claim and what a run measured."""

import json
import pathlib

import numpy as np

from specjax import theory
from specjax.report import plots
from specjax.report.environment import environment
from specjax.report.results import check
from specjax.report.tables import text_table
from specjax.report.writer import write_report

# (α, γ, tokens per target call that introductions state)
STATED = ((0.9, 4, 3.5), (0.3, 4, 1.0))


def run(config, workdir):
    """Returns the report; `results.expected_tokens` tabulates τ, `results.measured` holds the points laid over."""
    measured = read_measured(config.measured) if config.measured else []
    alphas = np.linspace(*config.alpha_range, config.num_alphas)
    forms = {
        "with the bonus token: (1 − α^(γ+1)) / (1 − α)": theory.expected_tokens,
        "without it: (1 − α^γ) / (1 − α)": theory.expected_tokens_without_bonus,
    }
    panels = {name: {gamma: form(alphas, gamma) for gamma in config.draft_lengths} for name, form in forms.items()}
    table = [_tokens(alpha, gamma) for alpha in config.table_alphas for gamma in config.draft_lengths]
    stated = [_tokens(alpha, gamma) | {"stated": claim} for alpha, gamma, claim in STATED]
    speedups = [
        _speedups(alpha, gamma, config.cost_ratio)
        for alpha in config.table_alphas
        for gamma in config.long_draft_lengths
    ]
    optimistic = all(s["speedup_linear"] >= s["speedup_exact"] - 1e-12 for s in speedups)
    bonus = float(theory.expected_tokens(0.8, 5) - theory.expected_tokens_without_bonus(0.8, 5))
    results = {
        "checks": [
            check("the linear form is never below the exact one", optimistic),
            check("the bonus adds α^γ", abs(bonus - 0.8**5) < 1e-12, bonus, f"{0.8**5:g}"),
        ],
        "expected_tokens": table,
        "stated": stated,
        "speedups": speedups,
        "measured": measured,
    }
    for name in ("expected_tokens", "stated", "speedups", "measured"):
        if results[name]:
            print(text_table(results[name]), end="\n\n")
    return write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(),
        results=results,
        plots={"expected_tokens": plots.expected_tokens_curves(alphas, panels, measured)},
    )


def read_measured(path) -> list[dict]:
    """The decoding rows of a report.json that have a measured α and τ, each with the τ that its constant α gives.

    Raises:
        ValueError: no such file, or a file without such rows.
    """
    try:
        rows = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["results"]["rows"]
    except OSError as error:
        raise ValueError(f"measured: cannot read {path}: {error.strerror}; give the report.json of a run") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"measured: {path} is not a report with results.rows; give a decoding run's report.json"
        ) from None
    points = []
    for row in rows:
        if row.get("acceptance_rate") is None or row.get("block_efficiency") is None:
            continue
        names = (
            "drafter",
            "objective",
            "verifier",
            "temperature",
            "draft_length",
            "acceptance_rate",
            "block_efficiency",
        )
        point = {name: row.get(name) for name in names}
        constant = float(theory.expected_tokens(row["acceptance_rate"], row["draft_length"]))
        points.append(
            point | {"constant_alpha": constant, "measured_over_constant": row["block_efficiency"] / constant}
        )
    if not points:
        raise ValueError(f"measured: no row of {path} has a measured acceptance rate; give a run with a drafter")
    return points


def _tokens(alpha, gamma):
    return {
        "acceptance_rate": alpha,
        "draft_length": gamma,
        "with_bonus": float(theory.expected_tokens(alpha, gamma)),
        "without_bonus": float(theory.expected_tokens_without_bonus(alpha, gamma)),
    }


def _speedups(alpha, gamma, cost_ratio):
    """Speed-up with verify as cheap as one step, exactly and with αγ + 1 tokens per round."""
    return {
        "acceptance_rate": alpha,
        "draft_length": gamma,
        "speedup_exact": float(1 / theory.time_per_token(alpha, gamma, cost_ratio, 1.0)),
        "speedup_linear": float(1 / theory.time_per_token_linear(alpha, gamma, cost_ratio, 1.0)),
    }
