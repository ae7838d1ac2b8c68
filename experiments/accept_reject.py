"""The accept/reject rule on a handful of fixed drafts, many trials in one call of the token rule."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax import theory
from specjax.keys import Noise, Stream, row_keys
from specjax.protocol import Proposal
from specjax.report import plots
from specjax.report.environment import environment
from specjax.report.results import check_between
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.topology import Topology
from specjax.verifiers.token import TokenRule

STANDARD_ERRORS = 4.5  # two-sided false alarm 7e-6 for each measured rate


def run(config, workdir):
    """Returns the report; `results.positions` has one record per drafted token."""
    tokens, q, p = (np.asarray(config[k]) for k in ("draft_tokens", "draft_probabilities", "target_probabilities"))
    _check(tokens, q, p, config.trials)
    accepted = simulate(tokens, q, p, trials=config.trials, seed=config.seed)

    conditional = np.minimum(1, p / q)
    survival = theory.survival_from_acceptance(conditional)
    positions, checks = [], []
    for i, token in enumerate(tokens.tolist()):
        reached, kept = int(np.sum(accepted >= i)), int(np.sum(accepted > i))
        record = {
            "depth": i + 1,
            "token": token,
            "draft_probability": float(q[i]),
            "target_probability": float(p[i]),
            "acceptance_theory": float(conditional[i]),
            "acceptance_measured": kept / reached if reached else None,
            "kept_theory": float(survival[i]),
            "kept_measured": kept / config.trials,
            "reached_trials": reached,
            "kept_trials": kept,
        }
        positions.append(record)
        if reached:
            checks.append(_near(f"depth {i + 1}, acceptance", record["acceptance_measured"], conditional[i], reached))
        checks.append(_near(f"depth {i + 1}, kept", record["kept_measured"], survival[i], config.trials))

    results = {
        "checks": checks,
        "positions": positions,
        "first_trial": {"accepted_tokens": tokens[: accepted[0]].tolist(), "drafted_tokens": tokens.tolist()},
        "expected_tokens": {
            "theory": theory.expected_tokens_from_survival(survival),
            "measured": 1 + float(np.mean(accepted)),
        },
        "exercises": exercises(),
    }
    print(f"{config.trials:,} trials; the first accepted {results['first_trial']['accepted_tokens']}\n")
    print(text_table(positions), end="\n\n")
    print(text_table(results["exercises"]))
    series = {
        "accepted if reached": [r["acceptance_measured"] for r in positions],
        "kept": [r["kept_measured"] for r in positions],
    }
    expected = {"accepted if reached": conditional, "kept": survival}
    figure = plots.per_depth(
        series, expected, quantity="share of trials", title="Accepted if reached, and kept over all trials"
    )
    return write_report(
        workdir,
        experiment=config.experiment,
        config=config.to_dict(),
        environment=environment(),
        results=results,
        plots={"acceptance": figure},
    )


def simulate(tokens, q, p, *, trials: int, seed: int) -> np.ndarray:
    """[trials] accepted drafts of one round each, by the token rule on laws with the stated probabilities.

    What the laws say of other tokens plays no part in acceptance; their mass is spread evenly.
    """
    vocab = int(tokens.max()) + 2
    law_q, law_p = (_laws(tokens, probabilities, vocab) for probabilities in (q, p))
    law_p = np.concatenate([law_p, np.full((1, vocab), 1 / vocab)])  # the bonus follows any law

    @jax.jit
    def accepted(keys):
        spread = lambda law: jnp.broadcast_to(jnp.asarray(law, jnp.float32), (trials, *law.shape))  # noqa: E731
        proposal = Proposal(
            tokens=jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (trials, len(tokens))),
            law=spread(law_q),
            valid=jnp.ones((trials, len(tokens)), bool),
            topology=Topology.chain(len(tokens)),
        )
        noise = Noise(row_keys=keys, length=jnp.ones((trials,), jnp.int32), stream=Stream.ROUND)
        return TokenRule().verify(spread(law_p), proposal, noise).num_accepted

    return np.asarray(accepted(row_keys(seed, trials)))


def exercises() -> list[dict]:
    """Three textbook exercises by both formulas; `asserted` is the value that introductions give."""
    records = [
        {"exercise": 1, "quantity": "acceptance, p = 0.8, q = 0.5", "asserted": 1.0, "value": min(1.0, 0.8 / 0.5)},
    ]
    for exercise, alpha, gamma, asserted in ((2, 0.8, 5, 4.096), (3, 1.0, 4, 5.0), (3, 0.5, 4, 1.875)):
        records.append(
            {
                "exercise": exercise,
                "quantity": f"tokens, α = {alpha}, γ = {gamma}",
                "asserted": asserted,
                "value": float(theory.expected_tokens(alpha, gamma)),
                "value_without_bonus": float(theory.expected_tokens_without_bonus(alpha, gamma)),
            }
        )
    return records


def _near(name, measured, expected, trials):
    tolerance = STANDARD_ERRORS * float(np.sqrt(expected * (1 - expected) / trials))
    return check_between(name, measured, float(expected) - tolerance - 1e-9, float(expected) + tolerance + 1e-9)


def _laws(tokens, probabilities, vocab):
    law = np.repeat((1 - probabilities)[:, None] / (vocab - 1), vocab, 1)
    law[np.arange(len(tokens)), tokens] = probabilities
    return law


def _check(tokens, q, p, trials):
    if trials < 1 or np.any(tokens < 0):
        raise ValueError(f"trials must be at least 1 and draft_tokens ids >= 0; got {trials} and {tokens.tolist()}")
    if not len(tokens) == len(q) == len(p) > 0:
        raise ValueError(
            f"draft_tokens and both probabilities need one length > 0; got {len(tokens)}, {len(q)}, {len(p)}"
        )
    if not (np.all((q > 0) & (q <= 1)) and np.all((p >= 0) & (p <= 1))):
        raise ValueError(f"draft_probabilities must be in (0, 1] and target_probabilities in [0, 1]; got {q} and {p}")
