"""Every node of a static tree is drawn from the law behind its own path."""

import jax
import numpy as np
import pytest

from specjax.drafters.eagle_tree import EagleTree
from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT
from specjax.sampling import Sampling
from specjax.topology import Topology
from tests.decoding.tiny_pair import LIMITS, PROMPTS
from tests.drafters.families import BUSHY
from tests.drafters.tiny_eagle import EAGLE1, REDUCED, logits_along, rounds, softmax


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def path_to(topology, node):
    """Nodes from depth 1 to this one."""
    path = []
    while node:
        path, node = [node, *path], topology.parents[node - 1]
    return path


@pytest.mark.parametrize(
    "model, siblings, rule",
    [
        pytest.param(REDUCED, IID, "k_sequential", marks=pytest.mark.slow),
        (EAGLE1, WITHOUT_REPLACEMENT, "multi_round"),
    ],
)
def test_laws_are_those_of_a_whole_forward_along_each_path(model, siblings, rule):
    sampling, accepted, before, compared = Sampling.of(1.5), set(), None, 0
    drafter = EagleTree(model, BUSHY, siblings)
    for state, _, proposal in rounds(drafter, sampling, rule, PROMPTS[:3], LIMITS[:3]):
        for row, length in enumerate(state.length):
            if before is not None:
                accepted.add(int(state.counts.accepted[row] - before[row]))
            if length == 1:
                assert not proposal.valid[row].any()
                continue
            assert proposal.valid[row].all()
            for node in range(1, BUSHY.num_nodes + 1):
                path = path_to(BUSHY, node)
                text = [*state.tokens[row, :length], *proposal.tokens[row, np.array(path[:-1], int) - 1]]
                law = softmax(logits_along(model, text, length)[-1], 1.5)
                if siblings == WITHOUT_REPLACEMENT:
                    parents = np.array(BUSHY.parents)
                    earlier = np.flatnonzero((parents == parents[node - 1]) & (np.arange(6) < node - 1))
                    law[proposal.tokens[row, earlier]] = 0
                np.testing.assert_allclose(proposal.law[row, node - 1], law / law.sum(), atol=1e-10)
                compared += 1
        before = state.counts.accepted
    assert accepted >= {0, 1, 2} and compared > 50


def test_fixed_siblings_are_the_most_probable():
    drafter = EagleTree(EAGLE1, Topology.from_shape((3, 2)), FIXED)
    for state, _, proposal in rounds(drafter, Sampling.of(1.0), "multi_round", PROMPTS[1:3], [6, 6]):
        assert proposal.law is None
        for row, length in enumerate(state.length):
            text = state.tokens[row, :length].tolist()
            best = np.argsort(-logits_along(EAGLE1, text, length)[-1])
            assert proposal.tokens[row, :3].tolist() == best[:3].tolist()
            for child in range(3):
                best = np.argsort(-logits_along(EAGLE1, [*text, proposal.tokens[row, child]], length)[-1])
                assert proposal.tokens[row, 3 + 2 * child :][:2].tolist() == best[:2].tolist()


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="at least one node"):
        EagleTree(EAGLE1, Topology(()))
    with pytest.raises(ValueError, match="siblings must be"):
        EagleTree(EAGLE1, BUSHY, "twins")
    with pytest.raises(ValueError, match="7 children of one node need as many tokens; the drafter knows 6"):
        EagleTree(REDUCED, Topology.from_shape((7,)))
