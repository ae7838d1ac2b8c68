"""The probes repeat what a real round does, turn after turn, with nothing left out or moved out of the loop."""

import re

import jax
import numpy as np
import pytest

from specjax.decoding.run import Run, decode
from specjax.drafters import Independent
from specjax.models import LanguageModel, TransformerConfig
from specjax.report import costs
from specjax.sampling import Sampling

TARGET = TransformerConfig(vocab_size=11, d_model=16, num_layers=2, num_heads=2, context_length=64)
DRAFTER = TransformerConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=1, context_length=64)


@pytest.fixture(scope="module")
def run():
    target, drafter = (LanguageModel.init(c, jax.random.key(i)) for i, c in enumerate((TARGET, DRAFTER)))
    arguments = dict(drafter=Independent(DRAFTER, 3), drafter_params=drafter.params, sampling=Sampling.of(1.0))
    return Run.start(target, [[1, 2, 3], [4]], max_new_tokens=30, **arguments)


def matrix_products(lowered) -> int:
    return len(re.findall(r"dot_general", lowered.as_text()))


def test_the_ideal_round_has_the_forwards_of_the_real_one(run):
    ideal = costs._ideal.lower(run.decoder, 5, run.inputs, run.state)
    real = decode.lower(run.decoder, run.inputs, run.state, np.int32(5))
    assert matrix_products(ideal) == matrix_products(real) > 0


def test_every_turn_depends_on_the_one_before(run):
    """Otherwise XLA could compute a turn once and skip the rest: more turns must give other results."""
    for part in (costs._draft, costs._ideal):
        few, many = (part(run.decoder, turns, run.inputs, run.state) for turns in (3, 8))
        leaves = zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True)
        assert any(not np.array_equal(a, b) for a, b in leaves)
    few, many = (costs._verify(run.decoder, turns, 4, run.inputs, run.state) for turns in (3, 8))
    assert not np.array_equal(few, many)


def test_probes_leave_the_run_as_it_was(run):
    before = run.result()
    for thunk in costs.probes(run, (1, 4), turns=2).values():
        jax.block_until_ready(thunk())
    np.testing.assert_array_equal(run.result().counts.rounds, before.counts.rounds)
    run.advance()
    assert run.finished


def test_target_only_runs_have_no_draft_to_measure():
    target = LanguageModel.init(TARGET, jax.random.key(0))
    run = Run.start(target, [[1]], max_new_tokens=4)
    assert set(costs.probes(run, (1, 2), turns=2)) == {"verify 1", "verify 2"}
