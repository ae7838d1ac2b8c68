"""The audit passes what is lossless, measures what is not, and can be run on a rule of one's own."""

import dataclasses
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import pytest

from specjax.topology import Topology
from specjax.verifiers import VERIFIERS, GreedyRule, LossyFixedAcceptance, TokenRule
from specjax.verifiers.audit import CHAINS, AuditReport, audit, load_rule, main, table
from specjax.verifiers.cases import make_cases
from specjax.verifiers.chain import target_law
from specjax.verifiers.enumeration import enumerate_drafts, joint_law
from specjax.verifiers.round_stream import Arithmetic

LOSSLESS = [name for name, make in VERIFIERS.items() if make().lossless]
SMALL = ((3, Topology.chain(2)),)


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_rules_are_exact_on_chains(name):
    report = audit(VERIFIERS[name](), worlds=CHAINS)
    assert report.exact and report.passed and report.verdict == "exact", table([report])
    assert report.worst.distance <= 1e-9
    assert len(report.cases) >= 30


@pytest.mark.parametrize("settings", [{}, {"alpha": 1.0}])
def test_fixed_acceptance_distance(settings):
    rule = LossyFixedAcceptance(**settings)
    report = audit(rule, worlds=SMALL)
    assert report.passed and not report.exact and report.verdict == "lossy, measured"
    by_name = {case.name: case.distance for case in report.cases}
    assert by_name["drawn"] == pytest.approx({0.8: 0.5391763, 1.0: 0.6837265}[rule.alpha], abs=1e-6)
    assert by_name["depth limit 0"] <= 1e-9  # nothing drafted, nothing lost


def test_resampling_from_the_target_distance():
    report = audit(VERIFIERS["lossy_resample_from_target"](), worlds=SMALL)
    assert report.passed and not report.exact
    by_name = {case.name: case.distance for case in report.cases}
    assert by_name["drawn"] == pytest.approx(0.0651883, abs=1e-6)
    assert by_name["p = q"] <= 1e-9  # never rejects
    assert by_name["disjoint supports"] <= 1e-9  # never accepts, and the residual is p


def test_cases_cover_what_breaks_rules():
    cases = make_cases(3, Topology.chain(2), 0)
    drafts = {case.name: enumerate_drafts(case) for case in cases}
    for case in cases:
        assert joint_law(case.target).sum() == pytest.approx(1, abs=1e-12)
        assert drafts[case.name].probability.sum() == pytest.approx(1, abs=1e-12)
        assert case.target[0].dtype == "float64"
    assert len(drafts["drawn"].tokens) == 9
    assert not drafts["depth limit 0"].valid.any()
    ragged = drafts["stop token"].valid
    assert ragged[:, 0].all() and 0 < ragged[:, 1].sum() < len(ragged)
    assert any((enumerate_drafts(case).tokens == -1).any() for case in cases)
    assert any((enumerate_drafts(case).tokens == 3 + 7).any() for case in cases)
    assert any((law == 0).any() for case in cases if case.name == "zeros in p" for law in case.target)


@dataclasses.dataclass(frozen=True)
class CorrectionFromTarget(TokenRule):
    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        return target_law(p, num_accepted)


def test_report_names_the_worst_case():
    report = audit(CorrectionFromTarget(), worlds=SMALL)
    assert report.worst.distance == max(case.distance for case in report.cases) > 0.01
    line = table([report]).splitlines()[1]
    assert "FAILED" in line and report.worst.name in line


def test_interface_errors_are_clear():
    class Nothing:
        pass

    with pytest.raises(ValueError, match="Nothing lacks name, lossless"):
        audit(Nothing())

    @dataclasses.dataclass(frozen=True)
    class Misnamed(TokenRule):
        lossless = False

    with pytest.raises(ValueError, match="lossy_"):
        audit(Misnamed())

    @dataclasses.dataclass(frozen=True)
    class WrongShape(TokenRule):
        def arithmetic(self, p, proposal):
            return Arithmetic(p[:, :, 0])

    with pytest.raises(ValueError, match=r"arithmetic\(...\).accept must be float64"):
        audit(WrongShape(), worlds=SMALL)


def test_the_callers_precision_is_left_alone():
    assert isinstance(audit(GreedyRule(), worlds=((3, Topology.chain(1)),)), AuditReport)
    assert jnp.ones(()).dtype == jnp.float32


MY_MODULE = """
    import dataclasses
    from specjax.verifiers import TokenRule
    from specjax.verifiers.chain import target_law

    @dataclasses.dataclass(frozen=True)
    class Good(TokenRule):
        name = "good"

    @dataclasses.dataclass(frozen=True)
    class Bad(TokenRule):
        name = "bad"
        scale: float = 1.0

        def next_law(self, p, proposal, arithmetic, num_accepted, path):
            return target_law(p, num_accepted)
"""


@pytest.fixture
def my_module(tmp_path, monkeypatch):
    (tmp_path / "rules_of_mine.py").write_text(textwrap.dedent(MY_MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "rules_of_mine"


def test_command_in_the_users_folder(my_module, capsys):
    assert main([f"{my_module}:Good"]) == 0
    assert "good" in capsys.readouterr().out
    assert main([f"{my_module}:Bad", "--kwargs", '{"scale": 2.0}']) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no_such_module:Rule"], "cannot import 'no_such_module'"),
        (["rules_of_mine:Missing"], "has no class 'Missing'"),
        (["rules_of_mine:dataclasses"], "has no class 'dataclasses'"),
        (["tokne"], "no rule 'tokne'"),
        (["token", "--kwargs", "{"], "--kwargs must be JSON"),
        (["token", "--kwargs", "[1]"], "--kwargs must be a JSON object"),
        (["token", "--kwargs", '{"alpha": 1}'], "cannot build token"),
        (["lossy_fixed_acceptance", "--kwargs", '{"alpha": 2}'], "alpha must be in [0, 1]; got 2"),
    ],
)
def test_wrong_arguments_end_in_one_line(my_module, capsys, arguments, words):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_settings_reach_the_rule():
    assert load_rule("lossy_fixed_acceptance", {"alpha": 0.5}) == LossyFixedAcceptance(alpha=0.5)


def test_module_can_be_run(tmp_path):
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "specjax.verifiers.audit", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("audit: no rule 'nothing'")
