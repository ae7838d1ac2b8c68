"""Small worlds in which everything that can happen in one round is listed, with its exact probability.

A case has a vocabulary of a few tokens, a law of the target and of the drafter for every prefix, a way in which the
children of a node come about, and a rule for when drafting stops. Prefixes are indexed by reading their tokens as
digits: the laws behind prefixes of length d are one array [V^d, V]. Everything is numpy in float64; nodes are expanded
through the topology's parents, so a tree needs no other code than a chain.
"""

import dataclasses
import functools

import numpy as np

from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT
from specjax.topology import Topology

Tables = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One world.

    Attributes:
        name: what reports call it.
        topology: of the proposal.
        target, drafter: laws behind every prefix; entry d is [V^d, V].
        siblings: how the children of a node come about: drawn from the drafter's law (`iid`), drawn from what earlier
            siblings leave of it (`without_replacement`), or its most probable tokens in order (`fixed`: no law).
        depth_limit: nodes deeper than this are invalid.
        stop_token: nodes behind this token are invalid (None: no such token).
        missing: nodes that the drafter leaves out, whatever it drafts.
        wild: whether invalid nodes hold NaN laws and ids outside the vocabulary instead of plausible ones.
    """

    name: str
    topology: Topology
    target: Tables
    drafter: Tables
    siblings: str = IID
    depth_limit: int = 10**9
    stop_token: int | None = None
    missing: tuple[int, ...] = ()
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


@functools.lru_cache(maxsize=1024)
def enumerate_drafts(case: Case) -> Drafts:
    """Every proposal of positive probability, node by node."""
    topology, vocab = case.topology, case.vocab_size
    partial = [((), (), (), (0,), 1.0)]  # tokens, valid, laws, prefix index of the root and each node (None: invalid)
    for node, parent in enumerate(topology.parents, start=1):
        grown = []
        for tokens, valid, laws, prefixes, probability in partial:
            law = None if _excluded(case, node, tokens, prefixes) else _law_of_node(case, node, tokens, prefixes)
            if law is None or not law.any():
                token, unread = _garbage(case, node)
                law = unread if law is None else law
                grown.append(((*tokens, token), (*valid, False), (*laws, law), (*prefixes, None), probability))
                continue
            for x in np.flatnonzero(law):
                here = prefixes[parent] * vocab + int(x)
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


def _excluded(case, node, tokens, prefixes):
    """Whether a node may not be drafted, whatever the drafter's law."""
    topology, parent = case.topology, case.topology.parents[node - 1]
    passenger = node > topology.num_nodes - topology.passengers
    stopped = parent > 0 and tokens[parent - 1] == case.stop_token
    too_deep = topology.depths[node] > case.depth_limit
    return prefixes[parent] is None or stopped or too_deep or passenger or node in case.missing


def _law_of_node(case, node, tokens, prefixes):
    """[V] the law that a node is drawn from, one-hot when it is chosen; zero when nothing is left for it."""
    topology, parent = case.topology, case.topology.parents[node - 1]
    law = case.drafter[topology.depths[node] - 1][prefixes[parent]]
    if case.siblings == FIXED:
        rank = topology.ranks[node - 1]
        best = np.argsort(-law, kind="stable")[rank : rank + 1]
        return (np.arange(case.vocab_size)[:, None] == best).any(1).astype(law.dtype)
    if case.siblings == WITHOUT_REPLACEMENT:
        earlier = [n for n in range(1, node) if topology.parents[n - 1] == parent and prefixes[n] is not None]
        left = law.copy()
        left[[tokens[n - 1] for n in earlier]] = 0
        return left / left.sum() if earlier and left.any() else left
    return law


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
