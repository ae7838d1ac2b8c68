"""Typical acceptance: the criterion by hand, the longest path, greedy at temperature 0, and its settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys
from specjax.protocol import FIXED, Proposal
from specjax.topology import Topology
from specjax.verifiers import GreedyRule, LossyTypical
from tests.verifiers.trees import TREE, as_dynamic, parts, random_round


def test_criterion_by_hand():
    """Uniform over 8: exp(-H) = 1/8, so the limit is min(.09, .3 / 8 = .0375); a sure target: min(.09, about .3)."""
    sure = jnp.array([0.95, 0.05, 0, 0, 0, 0, 0, 0])
    p = jnp.stack([jnp.full(8, 1 / 8), sure, sure, sure])[None]
    tokens = jnp.array([[7, 1, 0]])
    proposal = Proposal(tokens, None, jnp.ones((1, 3), bool), Topology((0, 1, 1)), FIXED)
    accept, n, path, law = parts(LossyTypical(), p, proposal, jnp.full((1, 3), 0.99))
    assert accept.tolist() == [[1, 0, 1]] and n[0] == 2 and path.tolist() == [[1, 3]]
    np.testing.assert_array_equal(law, p[:, 3])
    strict = LossyTypical(epsilon=0.9, delta=1.1)  # 1.1 / 8 > 1 / 8: nothing passes at the root
    assert parts(strict, p, proposal, jnp.zeros((1, 3)))[1][0] == 0


def test_no_coin_matters():
    p, proposal = random_round(np.random.default_rng(0), 16, TREE, 4)
    low, high = (parts(LossyTypical(), p, proposal, jnp.full((16, 7), u)) for u in (0.0, 1 - 1e-7))
    for one, other in zip(low, high, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_at_temperature_zero_it_is_greedy(dynamic):
    rng = np.random.default_rng(1)
    p, proposal = random_round(rng, 64, TREE, 3, FIXED)
    p = jax.nn.one_hot(jnp.argmax(p, -1), 3)
    proposal = as_dynamic(proposal) if dynamic else proposal
    source = keys.Noise(keys.row_keys(0, 64), jnp.full((64,), 5), GreedyRule.stream)
    greedy = GreedyRule().verify(p, proposal, source)
    _, n, path, law = parts(LossyTypical(), p, proposal, jnp.zeros((64, 7)))
    np.testing.assert_array_equal(n, greedy.num_accepted)
    np.testing.assert_array_equal(path, greedy.path)
    np.testing.assert_array_equal(jnp.argmax(law, -1), greedy.next_token)
    assert 0 < float((n > 1).mean()) < 1


@pytest.mark.parametrize("settings, words", [
    ({"epsilon": 1.0}, "epsilon must be in"), ({"epsilon": -0.1}, "epsilon must be in"),
    ({"epsilon": float("nan")}, "epsilon must be in"), ({"delta": 0.0}, "delta must be"),
    ({"delta": float("inf")}, "delta must be"),
])  # fmt: skip
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=words):
        LossyTypical(**settings)
