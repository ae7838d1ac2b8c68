"""The 1,000 trials: conditional rates and running products are two different columns."""

import json

import numpy as np
import pytest

from configs import accept_reject as config_file
from experiments import accept_reject


def test_report(tmp_path):
    report = accept_reject.run(config_file.get_config().lock(), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    # 4.5 standard errors for each of 8 rates: false alarm 6e-5, and the seed is fixed.
    assert all(check["passed"] for check in report["results"]["checks"])
    positions = report["results"]["positions"]
    np.testing.assert_allclose([p["acceptance_theory"] for p in positions], [1, 1, 1 / 3, 0.2])
    np.testing.assert_allclose([p["kept_theory"] for p in positions], [1, 1, 1 / 3, 1 / 15])
    assert [p["reached_trials"] for p in positions[1:]] == [p["kept_trials"] for p in positions[:-1]]
    assert (tmp_path / "plots" / "acceptance.png").exists()


def test_trials_are_independent_and_seeded():
    tokens, q, p = np.array([3, 1]), np.array([0.5, 0.5]), np.array([0.25, 0.25])
    first = accept_reject.simulate(tokens, q, p, trials=400, seed=0)
    np.testing.assert_array_equal(first, accept_reject.simulate(tokens, q, p, trials=400, seed=0))
    assert set(first.tolist()) == {0, 1, 2}
    assert np.any(first != accept_reject.simulate(tokens, q, p, trials=400, seed=1))


def test_a_certain_draft_and_an_impossible_one():
    tokens = np.array([0, 1])
    accepted = accept_reject.simulate(tokens, np.array([1.0, 1.0]), np.array([1.0, 0.0]), trials=50, seed=0)
    assert set(accepted.tolist()) == {1}


@pytest.mark.parametrize(
    "field, value", [("draft_probabilities", (0.0, 0.7, 0.6, 0.5)), ("trials", 0), ("draft_tokens", (1, 2))]
)
def test_wrong_settings_end_in_one_line(tmp_path, field, value):
    config = config_file.get_config()
    config[field] = value
    with pytest.raises(ValueError, match=field):
        accept_reject.run(config, tmp_path)
