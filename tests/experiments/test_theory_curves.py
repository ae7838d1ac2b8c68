"""The closed forms as a report, with a measured run laid over."""

import json

import pytest

from configs import theory_curves as config_file
from experiments import theory_curves
from specjax import theory


def test_report_with_measured_points(tmp_path):
    rows = [
        {"drafter": "independent", "draft_length": 4, "acceptance_rate": 0.8, "block_efficiency": 3.5},
        {"drafter": "none", "draft_length": 0, "acceptance_rate": None, "block_efficiency": 1.0},
    ]
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"results": {"rows": rows}}))
    config = config_file.get_config()
    config.measured = str(measured)
    results = theory_curves.run(config.lock(), tmp_path / "run")["results"]
    assert all(check["passed"] for check in results["checks"])
    (point,) = results["measured"]
    assert point["constant_alpha"] == pytest.approx(theory.expected_tokens(0.8, 4))
    assert point["measured_over_constant"] == pytest.approx(3.5 / 3.3616)
    stated = {(s["acceptance_rate"], s["draft_length"]): s for s in results["stated"]}
    assert stated[0.9, 4]["with_bonus"] == pytest.approx(4.0951)
    assert stated[0.9, 4]["without_bonus"] == pytest.approx(3.439)
    assert (tmp_path / "run" / "plots" / "expected_tokens.png").exists()


@pytest.mark.parametrize("text", [None, "not json", "{}", '{"results": {"rows": []}}'])
def test_a_wrong_measured_file_ends_in_one_line(tmp_path, text):
    config = config_file.get_config()
    config.measured = str(tmp_path / "measured.json")
    if text is not None:
        (tmp_path / "measured.json").write_text(text)
    with pytest.raises(ValueError, match="measured"):
        theory_curves.run(config, tmp_path / "run")
