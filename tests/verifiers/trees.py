"""Random trees of drafts, and expected accepted lengths without noise, for the tests of the rules on trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT, Proposal
from specjax.topology import DynamicTopology, Topology
from specjax.verifiers import BlockRule, TraversalRule
from specjax.verifiers.enumeration import Case, enumerate_drafts

KINDS = (IID, WITHOUT_REPLACEMENT, FIXED)
TREE = Topology((0, 0, 1, 1, 2, 5, 0))
compiled_arithmetic = jax.jit(lambda rule, p, proposal: rule.arithmetic(p, proposal), static_argnums=0)


def random_laws(rng, *shape, concentration=0.5):
    law = rng.gamma(concentration, size=shape) + 1e-9
    return law / law.sum(-1, keepdims=True)


def random_round(rng, batch, topology, vocab, siblings=IID, dtype=jnp.float32):
    """(p, proposal) as a drafter with one law behind every node would draw it; all nodes valid."""
    p = random_laws(rng, batch, topology.num_nodes + 1, vocab)
    behind = random_laws(rng, batch, topology.num_nodes + 1, vocab)
    tokens = np.zeros((batch, topology.num_nodes), np.int32)
    law = np.zeros((batch, topology.num_nodes, vocab))
    for i, parent in enumerate(topology.parents):
        earlier = [j for j in range(i) if topology.parents[j] == parent]
        left = behind[:, parent].copy()
        if siblings != IID:
            for j in earlier:
                left[np.arange(batch), tokens[:, j]] = 0
        law[:, i] = left / left.sum(-1, keepdims=True)
        best = law[:, i].argmax(-1)
        drawn = [rng.choice(vocab, p=row) for row in law[:, i]]
        tokens[:, i] = best if siblings == FIXED else drawn
    valid = jnp.ones(tokens.shape, bool)
    q = None if siblings == FIXED else jnp.asarray(law, dtype)
    return jnp.asarray(p, dtype), Proposal(jnp.asarray(tokens), q, valid, topology, siblings)


def as_dynamic(proposal):
    """The same tree with parents that are arrays."""
    topology = proposal.topology
    parents = jnp.broadcast_to(jnp.asarray(topology.parents, jnp.int32), proposal.tokens.shape)
    dynamic = DynamicTopology(topology.num_nodes, topology.max_depth, topology.passengers)
    return proposal.replace(topology=dynamic, parents=parents)


@functools.partial(jax.jit, static_argnums=0)
def parts(rule, p, proposal, coins):
    """(thresholds, num_accepted, accepted nodes padded with 0, next law) of a rule that tosses coins."""
    arithmetic = rule.arithmetic(p, proposal)
    n, path = rule.decide(arithmetic, proposal, coins)
    kept = jnp.where(jnp.arange(path.shape[1]) < n[:, None], path, 0)
    accept = jnp.clip(jnp.where(proposal.valid, arithmetic.accept, 0), 0, 1)
    return accept, n, kept, rule.next_law(p, proposal, arithmetic, n, path)


def random_case(rng, topology, siblings, vocab=3, concentration=0.5):
    """A world with laws of target and drafter for every prefix."""
    tables = [
        tuple(random_laws(rng, vocab**d, vocab, concentration=concentration) for d in range(topology.max_depth + 1))
        for _ in range(2)
    ]
    return Case("random", topology, *tables, siblings=siblings)


def expected_length(rule, case):
    """Expected number of accepted tokens over all drafts and coins, by recursion over the nodes; call it in float64."""
    drafts = enumerate_drafts(case)
    law = None if case.siblings == FIXED else jnp.asarray(drafts.law)
    valid = jnp.asarray(drafts.valid)
    proposal = Proposal(jnp.asarray(drafts.tokens), law, valid, case.topology, case.siblings)
    accept = compiled_arithmetic(rule, jnp.asarray(drafts.p), proposal).accept
    h = np.where(drafts.valid, np.clip(np.asarray(accept), 0, 1), 0)
    bottom_up = isinstance(rule, BlockRule | TraversalRule)
    length = _bottom_up(h, case.topology) if bottom_up else _top_down(h, case.topology, 0)
    return float((length * drafts.probability).sum())


def children(topology, node):
    return [i for i, parent in enumerate(topology.parents, start=1) if parent == node]


def post_order(topology, node=0):
    """Nodes below `node`, each behind its descendants."""
    return [n for child in children(topology, node) for n in (*post_order(topology, child), child)]


def _top_down(h, topology, node):
    failed, total = 1.0, 0.0
    for child in children(topology, node):
        total = total + failed * h[:, child - 1] * (1 + _top_down(h, topology, child))
        failed = failed * (1 - h[:, child - 1])
    return total


def _bottom_up(h, topology):
    failed, total = 1.0, 0.0
    for node in post_order(topology):
        total = total + failed * h[:, node - 1] * topology.depths[node]
        failed = failed * (1 - h[:, node - 1])
    return total
