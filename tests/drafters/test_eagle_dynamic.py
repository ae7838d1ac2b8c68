"""The dynamic tree against the paper's two phases in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.drafters.eagle_dynamic import EagleDynamic, keep_best
from specjax.protocol import FIXED
from specjax.sampling import Sampling
from tests.decoding.tiny_pair import LIMITS, PROMPTS
from tests.drafters.tiny_eagle import EAGLE1, REDUCED, VOCAB, logits_along, rounds


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def reference(model, text, drafter):
    """{path of tokens: log confidence} of the nodes that EAGLE-2 proposes."""

    def children(path, score):
        logits = logits_along(model, [*text, *path], len(text))[-1]
        log_q = logits - np.logaddexp.reduce(logits)
        return [((*path, int(x)), score + log_q[x]) for x in np.argsort(-log_q)[: drafter.beam]]

    best = lambda nodes, n: sorted(nodes, key=lambda node: -node[1])[:n]  # noqa: E731
    level = children((), 0.0)
    candidates = list(level)
    for _ in range(drafter.max_depth - 1):
        level = [child for node in best(level, drafter.beam) for child in children(*node)]
        candidates += level
    return dict(best(candidates, drafter.num_nodes))


@pytest.mark.parametrize("model, temperature", [(EAGLE1, 1.0), pytest.param(REDUCED, 0.0, marks=pytest.mark.slow)])
def test_the_tree_of_every_round_is_that_of_the_paper(model, temperature):
    sampling = Sampling.of(temperature)
    drafter = EagleDynamic(model, num_nodes=8, max_depth=3, beam=3)
    shapes, accepted = set(), 0
    for state, _, proposal in rounds(drafter, sampling, "multi_round", PROMPTS[:3], LIMITS[:3]):
        assert proposal.law is None and proposal.siblings == FIXED
        for row, length in enumerate(state.length):
            assert proposal.valid[row].all() == proposal.valid[row].any() == (length > 1)
            if length > 1:
                parents, paths = proposal.parents[row].tolist(), [()]
                assert all(0 <= parent < node for node, parent in enumerate(parents, start=1))
                paths += [None] * len(parents)
                for node, parent in enumerate(parents, start=1):
                    paths[node] = (*paths[parent], int(proposal.tokens[row, node - 1]))
                wanted = reference(model, state.tokens[row, :length].tolist(), drafter)
                assert set(paths[1:]) == set(wanted) and len(wanted) == drafter.num_nodes
                scores = [wanted[path] for path in paths[1:]]
                assert scores == sorted(scores, reverse=True)  # so siblings too: the more confident first
                shapes.add(tuple(parents))
        accepted = state.counts.accepted.sum()
    assert len(shapes) > 3 and accepted > 0


@st.composite
def candidates(draw):
    """Trees with many ties: a child's score is its parent's, or lower by a whole number."""
    count = draw(st.integers(2, 20))
    parents = [-1] + [draw(st.integers(-1, i - 1)) for i in range(1, count)]
    scores = []
    for parent in parents:
        scores.append((scores[parent] if parent >= 0 else 0.0) - draw(st.integers(0, 1)))
    return parents, scores, draw(st.integers(1, count))


@given(candidates())
def test_the_kept_ones_are_the_best_and_closed_under_parents(case):
    parents, scores, keep = case
    count = len(parents)
    pad = 20 - count  # one shape for all examples; what is padded is worse than all else
    tokens = jnp.arange(20)[None]
    padded_scores = jnp.array([scores + [-100.0] * pad])
    kept, new_parents = keep_best(tokens, padded_scores, jnp.array([parents + [-1] * pad]), 20)
    kept, new_parents = kept[0, :keep].tolist(), new_parents[0, :keep].tolist()
    assert sorted(scores[i] for i in kept) == sorted(sorted(scores, reverse=True)[:keep])
    for number, (candidate, parent) in enumerate(zip(kept, new_parents, strict=True), start=1):
        assert parent < number
        assert (-1 if parent == 0 else kept[parent - 1]) == parents[candidate]
    one = keep_best(tokens, padded_scores, jnp.array([parents + [-1] * pad]), min(keep, 3))
    assert one[0][0].tolist() == kept[:3] and one[1][0].tolist() == new_parents[:3]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_nodes=4, max_depth=0, beam=2), "max_depth must be at least 1; got 0"),
        (dict(num_nodes=4, max_depth=2, beam=VOCAB + 1), "beam must be 1 to 11"),
        (dict(num_nodes=7, max_depth=2, beam=2), "num_nodes must be 2, the depth, to 6, the candidates.*got 7"),
        (dict(num_nodes=2, max_depth=3, beam=2), "num_nodes must be 3, the depth.*got 2"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        EagleDynamic(EAGLE1, **settings)
    with pytest.raises(ValueError, match="beam must be 1 to 6, the tokens that can be drafted; got 7"):
        EagleDynamic(REDUCED, 4, 2, 7)
