"""Recorded rounds are those that decoding runs, survive the file, and say what they cannot hold."""

import jax
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.drafters import Independent, Lookahead
from specjax.report.recorded_rounds import RecordedRounds, record_rounds
from specjax.topology import Topology
from tests.decoding.tiny_pair import DRAFTER, LIMITS, PROMPTS, Pair


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def test_rounds_of_a_call(pair, tmp_path):
    options = dict(max_new_tokens=LIMITS[:4], drafter=Independent(DRAFTER, 3), drafter_params=pair.drafter.params,
                   verifier="token", buffer_length=32, seed=5)  # fmt: skip
    rounds = record_rounds(pair.target, PROMPTS[:4], **options)
    counts = generate(pair.target, PROMPTS[:4], **options).counts
    np.testing.assert_array_equal(np.bincount(rounds.prompt), counts.rounds)
    np.testing.assert_array_equal(np.bincount(rounds.prompt, rounds.valid.sum(-1)), counts.drafted)
    assert rounds.p.shape == (len(rounds.prompt), 4, 11) and np.allclose(rounds.p.sum(-1), 1)
    first = [np.flatnonzero(rounds.prompt == row)[0] for row in range(4)]
    for row, at in enumerate(first):  # the first round's p is that of plain forwards
        logits = pair.logits([*PROMPTS[row], *rounds.tokens[at]])[len(PROMPTS[row]) - 1 :]
        np.testing.assert_allclose(rounds.p[at], jax.nn.softmax(logits), atol=1e-9)
    rounds.save(tmp_path / "rounds.npz")
    again = RecordedRounds.load(tmp_path / "rounds.npz")
    assert again.topology == Topology.chain(3) and again.siblings == "iid"
    for name in ("p", "law", "tokens", "valid", "prompt"):
        np.testing.assert_array_equal(getattr(again, name), getattr(rounds, name))
    kept = rounds.proposal(np.array([True, True, False]))
    assert not kept.valid[:, 2].any() and (np.asarray(kept.valid)[:, :2] == rounds.valid[:, :2]).all()


def test_what_cannot_be_recorded_or_read(pair, tmp_path):
    with pytest.raises(ValueError, match="static topology of candidates"):
        record_rounds(pair.target, PROMPTS[:1], max_new_tokens=4, drafter=Lookahead(2, 2, 1), verifier="coupled",
                      buffer_length=32)  # fmt: skip
    with pytest.raises(ValueError, match="holds no recorded rounds"):
        RecordedRounds.load(tmp_path / "nothing.npz")
    rounds = RecordedRounds(*(np.zeros(1),) * 3, np.ones((1, 2), bool), np.zeros(1, int), Topology.chain(2), "iid")
    with pytest.raises(ValueError, match="node 2 is kept without its parent"):
        rounds.proposal(np.array([False, True]))
