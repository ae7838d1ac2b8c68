"""Texts part where they first differ, and only a near-tie excuses it; also after a report has been written and read."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.equal_texts import check_equal_texts, compare_texts, gap_where_texts_part, joined, where_parted
from specjax.models import LanguageModel, TransformerConfig
from specjax.report.stages import Stages

PROMPT = np.array([6, 7])
LONG, SHORT = np.array([1, 2, 3, 4]), np.array([1, 5])


@pytest.fixture(scope="module")
def target():
    return LanguageModel.init(TransformerConfig(11, 8, 1, 2, context_length=16), jax.random.key(0))


def test_texts_part_where_they_first_differ_whatever_their_lengths(target):
    """One may have stopped. A text that is only the beginning of another is explained by no near-tie."""
    gap = functools.partial(gap_where_texts_part, target, PROMPT)
    assert gap(LONG, LONG) is None
    assert gap(LONG, SHORT) == gap(SHORT, LONG) == gap(LONG[:2], SHORT) < math.inf
    assert gap(LONG, LONG[:2]) == gap(LONG[:2], LONG) == math.inf
    found = [where_parted(target, PROMPT, *pair) for pair in ((LONG, SHORT), (LONG, LONG[:2]), (LONG, LONG))]
    assert found[0] == {"position": 1, "gap": gap(LONG, SHORT)}
    assert found[1:] == [{"position": 2, "gap": None}, None]


def test_the_gap_is_that_of_the_models_best_two_logits(target):
    logits = np.sort(np.asarray(target(jnp.array([[6, 7, 1]]))[0][0, -1], np.float64))
    assert gap_where_texts_part(target, PROMPT, LONG, SHORT) == pytest.approx(logits[-1] - logits[-2], rel=1e-6)


@pytest.mark.parametrize(
    ("drafted", "near_tie", "passed", "said"),
    [
        (LONG, 0.0, True, "1 of 1 texts equal"),
        (SHORT, 100.0, True, "0 of 1 texts equal; largest gap"),
        (SHORT, 0.0, False, "0 of 1 texts equal; largest gap"),
        (LONG[:2], 100.0, False, "0 of 1 texts equal; largest gap of the two best where one parts: inf"),
        (np.array([], int), 100.0, False, "parts: inf"),
    ],
)
def test_what_a_stage_kept_is_judged_like_what_it_measured(target, tmp_path, drafted, near_tie, passed, said):
    compared = compare_texts(target, [PROMPT], [LONG], [drafted])
    kept = Stages(tmp_path).run("decoding", {}, lambda folder: compared)
    for found in (compared, kept):
        check = check_equal_texts("the texts", found, near_tie)
        assert check["passed"] is passed and said in check["value"]


def test_comparisons_join_to_one(target):
    several = [compare_texts(target, [PROMPT] * 2, [LONG] * 2, pair) for pair in ([LONG, SHORT], [LONG, LONG])]
    assert joined(several) == {"texts": 4, "parted": several[0]["parted"]}
    assert joined([]) == {"texts": 0, "parted": []}
