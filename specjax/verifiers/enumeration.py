"""Small worlds in which everything that can happen in one round is listed, with its exact probability.

A case has a vocabulary of two or three tokens, a law of the target and of the drafter for every prefix, and a rule
for when drafting stops. Prefixes are indexed by reading their tokens as digits: the laws behind prefixes of length d
are one array [V^d, V]. Everything is numpy in float64; nodes are expanded through the topology's parents, so a tree
needs no other code than a chain.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.protocol import Topology
from specjax.sampling import Sampling

Tables = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One world.

    Attributes:
        name: what reports call it.
        topology: of the proposal.
        target, drafter: laws behind every prefix; entry d is [V^d, V].
        drawn: whether drafts are drawn from the drafter's law; if not, the drafter chooses its most probable token and
            reports no law.
        depth_limit: nodes deeper than this are invalid.
        stop_token: nodes behind this token are invalid (None: no such token).
        wild: whether invalid nodes hold NaN laws and ids outside the vocabulary instead of plausible ones.
    """

    name: str
    topology: Topology
    target: Tables
    drafter: Tables
    drawn: bool = True
    depth_limit: int = 10**9
    stop_token: int | None = None
    wild: bool = True

    @property
    def vocab_size(self) -> int:
        return self.target[0].shape[-1]


@dataclasses.dataclass
class Drafts:
    """Every proposal that can be drafted in one case: D of them.

    Attributes:
        tokens, valid: [D, N].
        law: [D, N, V] laws the nodes were drawn from, one-hot when they were chosen.
        p: [D, N + 1, V] target laws behind the root and the nodes.
        probability: [D], summing to 1.
    """

    tokens: np.ndarray
    valid: np.ndarray
    law: np.ndarray
    p: np.ndarray
    probability: np.ndarray

    @classmethod
    def concatenate(cls, parts: "list[Drafts]") -> "Drafts":
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(cls)))


@functools.lru_cache(maxsize=32)
def make_cases(vocab_size: int, topology: Topology, seed: int) -> tuple[Case, ...]:
    """Random worlds that hold what breaks rules: zeros, equal laws, disjoint supports, ragged rows, filters."""
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
    cases = [
        case("drawn"),
        case("drawn, far apart", tables(values=logits(4)), tables(values=logits(4))),
        case("chosen", drawn=False),
        case("chosen, target filtered", tables(zeros), drawn=False),
        case("zeros in p", target=tables(zeros)),
        case("zeros in q", drafter=tables(zeros)),
        case("zeros in p and q", tables(zeros), tables(zeros)),
        case("p = q", equal, equal),
        case("p = q up to rounding", equal, nearly),
        case("disjoint supports", *(tables(values=masked(side)) for side in (True, False))),
        case("target at temperature 0", target=tables(greedy)),
        case("drafter at temperature 0", drafter=tables(greedy)),
        case("both at temperature 0", tables(greedy, shared), tables(greedy, shared)),
        case("target at temperature 0, chosen", tables(greedy), drawn=False),
        case("target: top-p", tables(nucleus, shared), tables(values=shared)),
        case("drafter: temperature 1.7, min-p", tables(values=shared), tables(hot_min_p, shared)),
        case("both filtered", tables(nucleus), tables(hot_min_p)),
    ]
    for limit in range(topology.max_depth):
        cases.append(case(f"depth limit {limit}", depth_limit=limit))
        cases.append(case(f"depth limit {limit}, chosen", depth_limit=limit, drawn=False, wild=False))
    for wild in (True, False):
        cases.append(case("stop token", stop_token=0, wild=wild))
        cases.append(case("stop token, chosen", stop_token=0, drawn=False, wild=wild))
        cases.append(case("stop token, target at temperature 0", tables(greedy), stop_token=0, wild=wild))
    return tuple(cases)


_jitted_law = jax.jit(Sampling.law)


def _laws(sampling, logits):
    """The laws behind all prefixes, in one call of a shape that most cases share."""
    ends = np.cumsum([len(x) for x in logits])
    rows = np.concatenate([*logits, np.zeros((-ends[-1] % 64, logits[0].shape[-1]))])
    with jax.enable_x64(True):
        law = np.asarray(_jitted_law(sampling, jnp.asarray(rows)))
    return tuple(np.split(law[: ends[-1]], ends[:-1]))


@functools.lru_cache(maxsize=1024)
def enumerate_drafts(case: Case) -> Drafts:
    """Every proposal of positive probability, node by node."""
    topology, vocab = case.topology, case.vocab_size
    partial = [((), (), (), (0,), 1.0)]  # tokens, valid, laws, prefix index of the root and each node (None: invalid)
    for node, parent in enumerate(topology.parents, start=1):
        depth, grown = int(topology.depths[node]), []
        for tokens, valid, laws, prefixes, probability in partial:
            prefix = prefixes[parent]
            stopped = parent > 0 and tokens[parent - 1] == case.stop_token
            if prefix is None or stopped or depth > case.depth_limit:
                token, law = _garbage(case, node)
                grown.append(((*tokens, token), (*valid, False), (*laws, law), (*prefixes, None), probability))
                continue
            law = case.drafter[depth - 1][prefix]
            if not case.drawn:
                law = np.eye(vocab)[np.argmax(law)]
            for x in np.flatnonzero(law):
                here = prefix * vocab + int(x)
                grown.append(((*tokens, x), (*valid, True), (*laws, law), (*prefixes, here), probability * law[x]))
        partial = grown
    nodes = topology.num_nodes
    behind_invalid = np.full(vocab, np.nan if case.wild else 1 / vocab)
    laws_behind = lambda prefixes: [  # noqa: E731
        behind_invalid if prefix is None else case.target[depth][prefix]
        for prefix, depth in zip(prefixes, topology.depths, strict=True)
    ]
    return Drafts(
        tokens=np.array([row[0] for row in partial], np.int32).reshape(len(partial), nodes),
        valid=np.array([row[1] for row in partial], bool).reshape(len(partial), nodes),
        law=np.array([row[2] for row in partial], np.float64).reshape(len(partial), nodes, vocab),
        p=np.array([laws_behind(row[3]) for row in partial]),
        probability=np.array([row[4] for row in partial]),
    )


def _garbage(case, node):
    """Token and law of an invalid node: what no rule may look at."""
    if case.wild:
        return (-1 if node % 2 else case.vocab_size + 7), np.full(case.vocab_size, np.nan)
    return 0, np.full(case.vocab_size, 1 / case.vocab_size)


def texts(vocab_size: int, length: int) -> np.ndarray:
    """[V^length, length]: every text, in the order of the prefix index."""
    digits = np.indices((vocab_size,) * length).reshape(length, -1).T
    return digits.astype(np.int32)


def joint_law(tables: Tables) -> np.ndarray:
    """[V^(d + 1)]: the law of the next d + 1 tokens, drawn one after the other."""
    joint = np.ones(1)
    for law in tables:
        joint = (joint[:, None] * law).reshape(-1)
    return joint


def follow_noise(tables: Tables, gumbel: np.ndarray) -> np.ndarray:
    """[K, d + 1]: the texts that the target alone emits from Gumbel noise [K, d + 1, V]."""
    prefix, tokens = np.zeros(len(gumbel), int), []
    for n, table in enumerate(tables):
        with np.errstate(divide="ignore"):
            tokens.append(np.argmax(np.log(table[prefix]) + gumbel[:, n], -1))
        prefix = prefix * table.shape[-1] + tokens[-1]
    return np.stack(tokens, 1)


def completed_law(
    tables: Tables, path_tokens: np.ndarray, num_accepted: np.ndarray, law: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """The law of the next d + 1 tokens when R weighted outcomes of a round are completed by the target.

    Args:
        tables: the target's laws.
        path_tokens: [R, d] accepted tokens; looked at up to num_accepted only.
        num_accepted: [R].
        law: [R, V] law of the token behind the accepted ones.
        weight: [R] probability of each outcome.

    Returns:
        [V^(d + 1)].
    """
    vocab = law.shape[-1]
    mass = np.zeros(1)
    prefix = np.zeros(len(num_accepted), int)
    for n, table in enumerate(tables):
        here = num_accepted == n
        mass = (mass[:, None] * table) if n else np.zeros_like(table)  # texts that ended before go on from the target
        np.add.at(mass, prefix[here], weight[here, None] * law[here])
        mass = mass.reshape(-1)
        if n + 1 < len(tables):
            prefix = np.where(num_accepted > n, prefix * vocab + path_tokens[:, n], 0)
    return mass
