"""A trace is what the loop did: the same text and counts, and p, q and fates that follow from the laws."""

import jax
import numpy as np
import pytest

from specjax.decoding import Origin, generate
from specjax.drafters import Independent, IndependentTree, NGram
from specjax.protocol import WITHOUT_REPLACEMENT
from specjax.report.trace import ACCEPTED, BEHIND, REJECTED, record_trace
from specjax.sampling import Sampling
from specjax.topology import Topology
from tests.decoding.tiny_pair import DRAFTER, PROMPTS, Pair


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def both(pair, prompt, **options):
    options = dict(max_new_tokens=20, buffer_length=32, seed=5) | options
    return record_trace(pair.target, prompt, **options), generate(pair.target, [prompt], **options)


def assert_same(trace, result):
    assert [token.token for token in trace.emitted] == result.tokens[0].tolist()
    assert [token.origin for token in trace.emitted] == result.origins[0].tolist()
    np.testing.assert_allclose([token.logprob for token in trace.emitted], result.logprobs[0], atol=1e-9)
    counts = result.counts
    assert len(trace.rounds) == counts.rounds[0] and trace.finish == result.finish[0]
    assert sum(len(one.drafted) for one in trace.rounds) == counts.drafted[0]
    assert sum(len(one.accepted) for one in trace.rounds) == counts.accepted[0]


def test_a_chain(pair):
    trace, result = both(
        pair, PROMPTS[1], drafter=Independent(DRAFTER, 3), drafter_params=pair.drafter.params, verifier="token"
    )
    assert_same(trace, result)
    text, fates = [*trace.prompt], set()
    for one in trace.rounds:
        drafts = [node.token for node in one.drafted]
        p = np.asarray(jax.nn.softmax(pair.logits([*text, *drafts])))[len(text) - 1 :]
        q = np.asarray(jax.nn.softmax(pair.logits([*text, *drafts], pair.drafter)))[len(text) - 1 :]
        for i, node in enumerate(one.drafted):
            assert (node.node, node.parent, node.depth) == (i + 1, i, i + 1)
            assert node.p == pytest.approx(p[i, node.token]) and node.q == pytest.approx(q[i, node.token])
            assert node.acceptance == pytest.approx(min(1, p[i, node.token] / q[i, node.token]))
        n = len(one.accepted)
        assert [node.fate for node in one.drafted] == [ACCEPTED] * n + ([REJECTED] + [BEHIND] * 9)[: len(drafts) - n]
        assert [token.token for token in one.emitted[:n]] == drafts[:n]
        assert one.emitted[-1].origin == (Origin.CORRECTION if n < len(drafts) else Origin.BONUS)
        text += [token.token for token in one.emitted]
        fates |= {node.fate for node in one.drafted}
    assert fates == {ACCEPTED, REJECTED, BEHIND}


def test_a_tree_and_its_path(pair):
    tree = IndependentTree(DRAFTER, Topology.from_shape((2, 2)), WITHOUT_REPLACEMENT)
    trace, result = both(pair, PROMPTS[2], drafter=tree, drafter_params=pair.drafter.params, verifier="multi_round")
    assert_same(trace, result)
    for one in trace.rounds:
        path = [0, *(node.node for node in one.accepted)]
        assert [node.parent for node in one.accepted] == path[:-1]
        assert [node.depth for node in one.accepted] == list(range(1, len(path)))
        for node in one.drafted:
            if node.fate == REJECTED:  # an earlier sibling of the accepted child, or of none
                assert node.parent in path
            if node.parent not in path:
                assert node.fate == BEHIND
    assert any(len(one.accepted) == 2 for one in trace.rounds)
    assert {node.fate for one in trace.rounds for node in one.drafted} == {ACCEPTED, REJECTED, BEHIND}


def test_chosen_drafts_at_temperature_zero_and_a_stop_token(pair):
    options = dict(drafter=NGram(3), sampling=Sampling.of(0.0), max_new_tokens=24)
    _, free = both(pair, PROMPTS[2], **options)
    trace, result = both(pair, PROMPTS[2], stop_ids=[int(free.tokens[0][10])], **options)
    assert_same(trace, result)
    assert trace.finish == "stop" and trace.temperature == 0 and (trace.drafter, trace.verifier) == ("NGram", "token")
    nodes = [node for one in trace.rounds for node in one.drafted]
    assert nodes and all(node.q == 1 and node.p in (0, 1) for node in nodes)
    assert all((node.fate == ACCEPTED) == (node.p == 1) for node in nodes if node.fate != BEHIND)


def test_without_a_drafter(pair):
    trace, result = both(pair, PROMPTS[4], drafter=None)
    assert_same(trace, result)
    assert all(not one.drafted and [t.origin for t in one.emitted] == [Origin.BONUS] for one in trace.rounds)
