"""The random worlds that the audit shows to a rule, chosen for what breaks rules."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.protocol import FIXED, WITHOUT_REPLACEMENT
from specjax.sampling import Sampling
from specjax.topology import Topology
from specjax.verifiers.enumeration import Case, enumerate_drafts

# Outcomes that are enumerated at most in one topology for one kind of siblings. Only trees of six nodes come near.
LARGEST_GROUP = 300_000


@functools.lru_cache(maxsize=32)
def make_cases(vocab_size: int, topology: Topology, seed: int) -> tuple[Case, ...]:
    """Random worlds that hold what breaks rules: zeros, equal laws, disjoint supports, ragged rows, filters.

    On a tree, every world with drawn siblings comes twice: independent ones and ones drawn without replacement. On a
    chain the two are the same. Worlds that would take a kind of siblings past `LARGEST_GROUP` are left out.
    """
    rng = np.random.default_rng((seed, vocab_size, *topology.parents))
    depths = range(topology.max_depth + 1)

    def logits(scale=1.5):
        return [scale * rng.normal(size=(vocab_size**d, vocab_size)) for d in depths]

    def tables(sampling=None, values=None):
        return _laws(sampling or Sampling.of(), values or logits())

    def case(name, target=None, drafter=None, **settings):
        return Case(name, topology, target or tables(), drafter or tables(), **settings)

    greedy, zeros, nucleus = Sampling.of(0), Sampling.of(top_k=max(1, vocab_size - 1)), Sampling.of(top_p=0.7)
    hot_min_p = Sampling.of(1.7, min_p=0.4)
    same = logits()
    equal = tables(values=same)
    nearly = tables(values=[x + 1e-15 * rng.normal(size=x.shape) for x in same])
    lone = [rng.integers(vocab_size, size=(vocab_size**d, 1)) == np.arange(vocab_size) for d in depths]
    masked = lambda side: [np.where(one == side, x, -np.inf) for one, x in zip(lone, logits(), strict=True)]  # noqa: E731
    shared = logits()
    chosen = {"siblings": FIXED}
    cases = [
        case("drawn"),
        case("drawn, far apart", tables(values=logits(4)), tables(values=logits(4))),
        case("chosen", **chosen),
        case("chosen, target filtered", tables(zeros), **chosen),
        case("zeros in p", target=tables(zeros)),
        case("zeros in q", drafter=tables(zeros)),
        case("zeros in p and q", tables(zeros), tables(zeros)),
        case("p = q", equal, equal),
        case("p = q up to rounding", equal, nearly),
        case("disjoint supports", *(tables(values=masked(side)) for side in (True, False))),
        case("target at temperature 0", target=tables(greedy)),
        case("drafter at temperature 0", drafter=tables(greedy)),
        case("both at temperature 0", tables(greedy, shared), tables(greedy, shared)),
        case("target at temperature 0, chosen", tables(greedy), **chosen),
        case("target: top-p", tables(nucleus, shared), tables(values=shared)),
        case("drafter: temperature 1.7, min-p", tables(values=shared), tables(hot_min_p, shared)),
        case("both filtered", tables(nucleus), tables(hot_min_p)),
    ]
    for limit in range(topology.max_depth):
        cases.append(case(f"depth limit {limit}", depth_limit=limit))
        cases.append(case(f"depth limit {limit}, chosen", depth_limit=limit, wild=False, **chosen))
    for wild in (True, False):
        cases.append(case("stop token", stop_token=0, wild=wild))
        cases.append(case("stop token, chosen", stop_token=0, wild=wild, **chosen))
        cases.append(case("stop token, target at temperature 0", tables(greedy), stop_token=0, wild=wild))
    if topology.is_chain:
        return tuple(cases)
    for node in (1, 2):
        cases.append(case(f"node {node} missing", missing=(node,)))
        cases.append(case(f"node {node} missing, chosen", missing=(node,), wild=False, **chosen))
    again = [dataclasses.replace(case, siblings=WITHOUT_REPLACEMENT) for case in cases if case.siblings != FIXED]
    return _affordable([*cases, *again])


def _affordable(cases):
    """The cases in order, without the largest that do not fit into their kind's allowance."""
    left, kept = dict.fromkeys((case.siblings for case in cases), LARGEST_GROUP), set()
    for size, number in sorted((_num_outcomes(case), number) for number, case in enumerate(cases)):
        siblings = cases[number].siblings
        if size <= left[siblings]:
            left[siblings] -= size
            kept.add(number)
    return tuple(case for number, case in enumerate(cases) if number in kept)


def _num_outcomes(case):
    """An upper bound: each draft meets every cell of its valid nodes' coins, or every text of the target."""
    drafts = enumerate_drafts(case)
    num_texts = case.vocab_size ** (case.topology.max_depth + 1)
    return int(np.maximum(2 ** drafts.valid.sum(1), num_texts).sum())


_jitted_law = jax.jit(Sampling.law)


def _laws(sampling, logits):
    """The laws behind all prefixes, in one call of a shape that most cases share."""
    ends = np.cumsum([len(x) for x in logits])
    rows = np.concatenate([*logits, np.zeros((-ends[-1] % 64, logits[0].shape[-1]))])
    with jax.enable_x64(True):
        law = np.asarray(_jitted_law(sampling, jnp.asarray(rows)))
    return tuple(np.split(law[: ends[-1]], ends[:-1]))
