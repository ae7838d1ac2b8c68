"""The exact law of one round's outcome, for every case at once: the two ways in which the audit measures a rule."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from specjax.keys import Noise
from specjax.protocol import FIXED, IID, Proposal, Topology, Verifier
from specjax.sampling import inverse_cdf
from specjax.verifiers.enumeration import (
    Case,
    Drafts,
    completed_law,
    enumerate_drafts,
    follow_noise,
    joint_law,
    texts,
)

LIMIT = 1e-9  # total variation distance up to which a law counts as the target's
SPIKE = 1e6  # added to one token's Gumbel noise, it wins against any log p of a float64


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What the audit found in one case: distances of the joint law from the target's, and breaches of the contract."""

    name: str
    vocab_size: int
    topology: Topology
    distance: float  # total variation
    largest_difference: float
    problems: tuple[str, ...]


@struct.dataclass
class ScriptedNoise(Noise):
    """Noise whose every number is given: uniforms [B, N], next_uniform [B], gumbels [B, max depth + 1, V]."""

    uniforms: Float[Array, "B N"]
    next_uniform: Float[Array, "B"]
    gumbels: Float[Array, "B D1 V"]

    def accept(self, num_nodes):
        return self.uniforms

    def next_token(self):
        return self.next_uniform

    def gumbel(self, depths, vocab_size):
        return self.gumbels[:, depths]


def measure_coins(rule: Verifier, cases: list[Case], rng: np.random.Generator) -> list[CaseResult]:
    """Rules of the round stream: every draft times every cell of every coin.

    Args:
        rule: has the parts of `round_stream.RoundRule`.
        cases: of one topology and vocabulary, all drawn or all chosen.
        rng: for the coins with which `verify` is compared to its parts.

    Raises:
        ValueError: a part returns something of another form.
    """
    drafts, owner = _all_drafts(cases)
    nodes = cases[0].topology.num_nodes
    arithmetic = _jit(rule.arithmetic)(drafts.p, _proposal(drafts, cases[0]))
    accept = _checked(getattr(arithmetic, "accept", None), drafts.tokens.shape, "arithmetic(...).accept")

    def outcome(p, proposal, arithmetic, coins, last):
        decided = rule.decide(arithmetic, proposal, coins)
        if not isinstance(decided, tuple) or len(decided) != 2:
            raise ValueError("decide must return (num_accepted, path)")
        law = rule.next_law(p, proposal, arithmetic, *decided)
        return *decided, law, inverse_cdf(law, last)

    # Behind the rows of the cells come rows of random coins, for which `verify` is compared to its parts.
    rows, cell, coins, weight = _coin_cells(accept)
    num_cells, rows = len(rows), np.concatenate([rows, np.arange(len(owner))])
    uniforms, last = rng.random((len(owner), nodes)), rng.random(len(rows))
    shown, of_rows = _take(drafts, rows), jax.tree.map(lambda x: np.asarray(x)[rows], arithmetic)
    coins = np.concatenate([coins, uniforms])
    n, path, law, token = _jit(outcome)(shown.p, _proposal(shown, cases[0]), of_rows, coins, last)
    n = _checked(n, rows.shape, "num_accepted", integer=True)
    path = _checked(path, (len(rows), cases[0].topology.max_depth), "path", integer=True)
    law = _checked(law, (len(rows), cases[0].vocab_size), "next_law(...)")
    breaches = _path_breaches(shown, cases[0].topology, n, path)
    breaches["a threshold is NaN"] = np.isnan(accept).any(1)[rows]
    # All probes of a cell must agree, or the declared threshold is not the one that the coins meet.
    kept = np.where(np.arange(path.shape[1]) < n[:, None], path, 0)
    signature = np.concatenate([n[:, None], kept], 1)
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    disagree = (signature[:num_cells] != signature[first[inverse.reshape(-1)]]).any(1)
    padding = np.zeros(len(owner), bool)
    breaches["the outcome changes inside a coin's cell: acceptance must be u < accept, strictly"] = np.concatenate(
        [disagree, padding]
    )
    breaches["next_law is not a law: negative, not finite, or not summing to 1"] = ~(
        np.isfinite(law).all(1) & (law >= 0).all(1) & (np.abs(law.sum(1) - 1) <= LIMIT)
    )
    # The method that the loop calls must be the composition of the parts that were enumerated.
    verdict = _jit(rule.verify)(drafts.p, _proposal(drafts, cases[0]), _noise(rule, uniforms, last[num_cells:]))
    differs = (
        (np.asarray(verdict.num_accepted) != n[num_cells:])
        | (np.where(kept[num_cells:] > 0, verdict.path, 0) != kept[num_cells:]).any(1)
        | (np.asarray(verdict.next_token) != np.asarray(token)[num_cells:])
    )
    breaches["verify differs from inverse_cdf(next_law, ...) behind decide(arithmetic, ...)"] = np.concatenate(
        [np.zeros(num_cells, bool), differs]
    )
    weight = np.concatenate([drafts.probability[rows[:num_cells]] * weight, np.zeros(len(owner))])
    return _results(cases, owner[rows], shown, n, path, law, weight, breaches)


def measure_pointwise(
    rule: Verifier, cases: list[Case], rng: np.random.Generator, random_draws: int = 8
) -> list[CaseResult]:
    """Rules that emit the target's own text: every draft times every text that the noise can single out.

    Arguments and errors are those of `measure_coins`; `random_draws` vectors of unrestricted noise per case are added,
    for which the text is compared, too.

    A lossy rule may emit other texts, as far as its distance tells. That distance takes one noise for each text of the
    target, so the rule must do the same for every noise that singles out this text; otherwise a problem is filed.
    """
    drafts, owner = _all_drafts(cases)
    depth, vocab = cases[0].topology.max_depth, cases[0].vocab_size
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
    shown = _take(drafts, rows)
    noise = _noise(rule, rng.random(shown.tokens.shape), rng.random(len(rows)), gumbels)
    verdict = _jit(rule.verify)(shown.p, _proposal(shown, cases[0]), noise)
    n = _checked(verdict.num_accepted, rows.shape, "num_accepted", integer=True)
    path = _checked(verdict.path, (len(rows), depth), "path", integer=True)
    last = _checked(verdict.next_token, rows.shape, "next_token", integer=True)
    breaches = _path_breaches(shown, cases[0].topology, n, path)
    emitted = np.concatenate([_path_tokens(shown, path), np.zeros((len(rows), 1), int)], 1)
    emitted[np.arange(len(rows)), np.clip(n, 0, depth)] = last
    compared = np.arange(depth + 1) <= n[:, None]
    if rule.lossless:
        breaches["the emitted tokens are not those of target-only decoding with the same noise"] = (
            compared & (emitted != expected)
        ).any(1)
    else:
        unlike = (n != n[twins]) | (compared & (emitted != emitted[twins])).any(1)
        breaches["the outcome depends on more than the drafts and the target's text: its law is not measured"] = unlike
    law = np.eye(vocab)[np.clip(last, 0, vocab - 1)]
    return _results(cases, owner[rows], shown, n, path, law, weight, breaches)


def _results(cases, owner, shown, n, path, law, weight, breaches):
    tokens, n = np.clip(_path_tokens(shown, path), 0, law.shape[-1] - 1), np.clip(n, 0, path.shape[1])
    law, results = np.nan_to_num(law), []
    for i, case in enumerate(cases):
        mine = owner == i
        joint = completed_law(case.target, tokens[mine], n[mine], law[mine], weight[mine])
        difference = np.abs(joint - joint_law(case.target))
        problems = tuple(problem for problem, where in breaches.items() if where[mine].any())
        distance = float(difference.sum() / 2)
        results.append(
            CaseResult(case.name, case.vocab_size, case.topology, distance, float(difference.max()), problems)
        )
    return results


def _coin_cells(accept):
    """Rows of drafts and coins for every cell: (draft of each row, its cell, coins [R, N], probability [R])."""
    num_drafts, nodes = accept.shape
    h = np.clip(np.nan_to_num(accept), 0, 1)
    probes = np.stack([np.zeros_like(h), np.nextafter(h, -1), h, np.full_like(h, np.nextafter(1, 0))], -1)
    chance = np.stack([h, h, 1 - h, 1 - h], -1) / 2  # two probes per cell
    combination = np.array(list(itertools.product(range(4), repeat=nodes)), int).reshape(4**nodes, nodes)
    column = np.arange(nodes)
    coins, chance = (x[:, column, combination] for x in (probes, chance))  # [D, 4^N, N]
    draft, which = np.nonzero((chance > 0).all(-1))  # empty cells cannot happen
    cell_number = (combination // 2) @ (2**column)
    return draft, draft * 2**nodes + cell_number[which], coins[draft, which], chance[draft, which].prod(-1)


def _path_breaches(drafts, topology, n, path):
    """Rows whose accepted path leaves the tree, or holds an invalid node."""
    nodes = topology.num_nodes
    on_path = np.arange(path.shape[1]) < n[:, None]
    parents = np.array((-1, *topology.parents))
    node = np.clip(path, 0, nodes)
    before = np.concatenate([np.zeros((len(n), 1), int), path], 1)[:, : path.shape[1]]
    rooted = (path >= 1) & (path <= nodes) & (parents[node] == before)
    valid = np.concatenate([np.zeros((len(n), 1), bool), drafts.valid], 1)
    return {
        "num_accepted is outside 0..max depth": (n < 0) | (n > path.shape[1]),
        "the accepted path does not lead down from the root": (on_path & ~rooted).any(1),
        "an invalid node is accepted": (on_path & ~np.take_along_axis(valid, node, 1)).any(1),
    }


def _path_tokens(drafts, path):
    return np.take_along_axis(drafts.tokens, np.clip(path - 1, 0, max(drafts.tokens.shape[1] - 1, 0)), 1)


def _all_drafts(cases):
    parts = [enumerate_drafts(case) for case in cases]
    owner = np.repeat(np.arange(len(cases)), [len(part.probability) for part in parts])
    drafts = Drafts.concatenate(parts)
    return drafts, owner


def _take(drafts, rows):
    return Drafts(*(getattr(drafts, field.name)[rows] for field in dataclasses.fields(Drafts)))


def _proposal(drafts, case: Case):
    law, siblings = (drafts.law, IID) if case.drawn else (None, FIXED)
    return Proposal(drafts.tokens, law, drafts.valid, case.topology, siblings)


def _noise(rule, uniforms, next_uniform, gumbels=None):
    return ScriptedNoise(None, None, rule.stream, uniforms, next_uniform, gumbels)


def _jit(function):
    """Compiled without optimisation: each program runs once or twice."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def _checked(value, shape, what, integer=False):
    """The value as numpy, after a look at its form."""
    kind, name = (jnp.integer, "integers") if integer else (jnp.float64, "float64, as the laws it was given")
    if not hasattr(value, "shape") or tuple(value.shape) != tuple(shape) or not jnp.issubdtype(value.dtype, kind):
        found = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise ValueError(f"{what} must be {name}, of shape {list(shape)}; got {found}")
    return np.asarray(value)
