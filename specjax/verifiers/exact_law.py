"""The exact law of one round's outcome, for every case at once: the two ways in which the audit measures a rule."""

import dataclasses

import jax
import numpy as np

from specjax.protocol import Verifier
from specjax.sampling import inverse_cdf
from specjax.topology import Topology
from specjax.verifiers.coin_cells import coin_cells
from specjax.verifiers.enumeration import Case, completed_law, follow_noise, joint_law, texts
from specjax.verifiers.presentation import (
    all_drafts,
    check_form,
    checked,
    compiled,
    kept_path,
    noise_of,
    path_breaches,
    path_tokens,
    proposal_of,
    take,
    unlike_on_dynamic_topology,
)

LIMIT = 1e-9  # total variation distance up to which a law counts as the target's
SPIKE = 1e6  # added to one token's Gumbel noise, it wins against any log p of a float64


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What the audit found in one case: distances of the joint law from the target's, and breaches of the contract."""

    name: str
    vocab_size: int
    topology: Topology
    siblings: str
    distance: float  # total variation
    largest_difference: float
    problems: tuple[str, ...]


def measure_coins(
    rule: Verifier, cases: list[Case], rng: np.random.Generator, dynamic: bool = False
) -> list[CaseResult]:
    """Rules of the round stream: every draft times every cell of every coin.

    Args:
        rule: has the parts of `round_stream.RoundRule`.
        cases: of one topology, vocabulary and kind of siblings.
        rng: for the coins with which `verify` is compared to its parts.
        dynamic: whether the verdicts are compared to those on a dynamic topology, too.

    Raises:
        ValueError: a part returns something of another form.
    """
    (drafts, owner), topology = all_drafts(cases), cases[0].topology

    def thresholds_and_verdict(p, proposal, noise):
        arithmetic = rule.arithmetic(p, proposal)
        check_form(getattr(arithmetic, "accept", None), proposal.tokens.shape, "arithmetic(...).accept")
        return arithmetic, rule.verify(p, proposal, noise)

    def outcome(p, proposal, arithmetic, coins, last):
        decided = rule.decide(arithmetic, proposal, coins)
        if not isinstance(decided, tuple) or len(decided) != 2:
            raise ValueError("decide must return (num_accepted, path)")
        law = rule.next_law(p, proposal, arithmetic, *decided)
        return *decided, law, inverse_cdf(law, last)

    noise = noise_of(rule, rng.random(drafts.tokens.shape), rng.random(len(owner)))
    arithmetic, verdict = compiled(thresholds_and_verdict)(drafts.p, proposal_of(drafts, cases[0]), noise)
    accept = np.asarray(arithmetic.accept)
    cells = coin_cells(accept, noise.uniforms, rng)
    rows = cells.draft
    last = np.concatenate([np.zeros(len(rows) - len(owner)), noise.next_uniform])
    shown, of_rows = take(drafts, rows), jax.tree.map(lambda x: np.asarray(x)[rows], arithmetic)
    n, path, law, token = compiled(outcome)(shown.p, proposal_of(shown, cases[0]), of_rows, cells.coins, last)
    n = checked(n, rows.shape, "num_accepted", integer=True)
    path = checked(path, (len(rows), topology.max_depth), "path", integer=True)
    law = checked(law, (len(rows), cases[0].vocab_size), "next_law(...)")
    breaches = path_breaches(shown, topology, n, path)
    breaches["a threshold is NaN"] = np.isnan(accept).any(1)[rows]
    # All probes of a cell must agree, or the declared threshold is not the one that the coins meet.
    outcomes = np.concatenate([n[:, None], kept_path(n, path)], 1)
    breaches["the outcome changes inside a coin's cell: acceptance must be u < accept, strictly"] = (
        outcomes != outcomes[cells.cell]
    ).any(1)
    breaches["next_law is not a law: negative, not finite, or not summing to 1"] = ~(
        np.isfinite(law).all(1) & (law >= 0).all(1) & (np.abs(law.sum(1) - 1) <= LIMIT)
    )
    # The method that the loop calls must be the composition of the parts that were enumerated.
    at_random = np.arange(len(rows) - len(owner), len(rows))
    differs = (
        (np.asarray(verdict.num_accepted) != n[at_random])
        | (kept_path(n[at_random], np.asarray(verdict.path)) != outcomes[at_random, 1:]).any(1)
        | (np.asarray(verdict.next_token) != np.asarray(token)[at_random])
    )
    padded = lambda flags: np.concatenate([np.zeros(len(rows) - len(flags), bool), flags])  # noqa: E731
    breaches["verify differs from inverse_cdf(next_law, ...) behind decide(arithmetic, ...)"] = padded(differs)
    if dynamic:
        unlike = unlike_on_dynamic_topology(rule, cases[0], drafts, noise, verdict, rng)
        breaches |= {problem: padded(flags) for problem, flags in unlike.items()}
    weight = np.zeros(len(rows))
    weight[: cells.num_cells] = drafts.probability[rows[: cells.num_cells]] * cells.weight
    return _results(cases, owner[rows], shown, n, path, law, weight, breaches)


def measure_pointwise(
    rule: Verifier, cases: list[Case], rng: np.random.Generator, dynamic: bool = False, random_draws: int = 8
) -> list[CaseResult]:
    """Rules that emit the target's own text: every draft times every text that the noise can single out.

    Arguments and errors are those of `measure_coins`; `random_draws` vectors of unrestricted noise per case are added,
    for which the text is compared, too.

    A lossy rule may emit other texts, as far as its distance tells. That distance takes one noise for each text of the
    target, so the rule must do the same for every noise that singles out this text; otherwise a problem is filed.
    """
    (drafts, owner), topology = all_drafts(cases), cases[0].topology
    depth, vocab = topology.max_depth, cases[0].vocab_size
    rows, expected, gumbels, weight, twins = [], [], [], [], []
    for i, case in enumerate(cases):
        law = joint_law(case.target)
        spiked = texts(vocab, depth + 1)[law > 0]
        noise = rng.gumbel(size=(random_draws, depth + 1, vocab))
        told = np.concatenate([spiked, follow_noise(case.target, noise)])
        noise = np.concatenate([SPIKE * np.eye(vocab)[spiked], noise])
        chance = np.concatenate([law[law > 0], np.zeros(random_draws)])
        mine = np.flatnonzero(owner == i)
        # For each row, the one with the same draft whose noise singles out the same text by a spike.
        twin = (told[:, None] == spiked).all(-1).argmax(1)
        twins.append((sum(map(len, rows)) + len(told) * np.arange(len(mine))[:, None] + twin).reshape(-1))
        rows.append(np.repeat(mine, len(told)))
        expected.append(np.tile(told, (len(mine), 1)))
        gumbels.append(np.tile(noise, (len(mine), 1, 1)))
        weight.append(np.outer(drafts.probability[mine], chance).reshape(-1))
    rows, expected, gumbels, weight, twins = map(np.concatenate, (rows, expected, gumbels, weight, twins))
    shown = take(drafts, rows)
    noise = noise_of(rule, rng.random(shown.tokens.shape), rng.random(len(rows)), gumbels)
    verdict = compiled(rule.verify)(shown.p, proposal_of(shown, cases[0]), noise)
    n = checked(verdict.num_accepted, rows.shape, "num_accepted", integer=True)
    path = checked(verdict.path, (len(rows), depth), "path", integer=True)
    last = checked(verdict.next_token, rows.shape, "next_token", integer=True)
    breaches = path_breaches(shown, topology, n, path)
    emitted = np.concatenate([path_tokens(shown, path), np.zeros((len(rows), 1), int)], 1)
    emitted[np.arange(len(rows)), np.clip(n, 0, depth)] = last
    compared = np.arange(depth + 1) <= n[:, None]
    if rule.lossless:
        breaches["the emitted tokens are not those of target-only decoding with the same noise"] = (
            compared & (emitted != expected)
        ).any(1)
    else:
        unlike = (n != n[twins]) | (compared & (emitted != emitted[twins])).any(1)
        breaches["the outcome depends on more than the drafts and the target's text: its law is not measured"] = unlike
    if dynamic:
        breaches |= unlike_on_dynamic_topology(rule, cases[0], shown, noise, verdict, rng)
    law = np.eye(vocab)[np.clip(last, 0, vocab - 1)]
    return _results(cases, owner[rows], shown, n, path, law, weight, breaches)


def _results(cases, owner, shown, n, path, law, weight, breaches):
    tokens, n = np.clip(path_tokens(shown, path), 0, law.shape[-1] - 1), np.clip(n, 0, path.shape[1])
    law, results = np.nan_to_num(law), []
    for i, case in enumerate(cases):
        mine = owner == i
        joint = completed_law(case.target, tokens[mine], n[mine], law[mine], weight[mine])
        difference = np.abs(joint - joint_law(case.target))
        problems = tuple(problem for problem, where in breaches.items() if where[mine].any())
        distance = float(difference.sum() / 2)
        found = (distance, float(difference.max()), problems)
        results.append(CaseResult(case.name, case.vocab_size, case.topology, case.siblings, *found))
    return results
