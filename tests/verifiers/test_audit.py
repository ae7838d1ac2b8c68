"""The audit passes what is lossless, measures what is not, and rejects rules broken on purpose."""

import dataclasses
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from specjax import sampling
from specjax.protocol import Topology, Verdict, token_probabilities
from specjax.verifiers import VERIFIERS, BlockRule, CoupledRule, GreedyRule, LossyFixedAcceptance, TokenRule
from specjax.verifiers.audit import AuditReport, audit, load_rule, main, table
from specjax.verifiers.chain import chain_path, leading_run, target_law
from specjax.verifiers.enumeration import enumerate_drafts, joint_law, make_cases
from specjax.verifiers.round_stream import Arithmetic, residual_law

LOSSLESS = [name for name, make in VERIFIERS.items() if make().lossless]
SMALL = ((3, Topology.chain(2)),)


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_rules_are_exact(name):
    report = audit(VERIFIERS[name]())
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


@dataclasses.dataclass(frozen=True)
class NotStrict(TokenRule):
    def decide(self, arithmetic, proposal, uniforms):
        return leading_run(proposal.valid & (uniforms <= arithmetic.accept)), chain_path(proposal)


@dataclasses.dataclass(frozen=True)
class BlockNotStrict(BlockRule):
    def decide(self, arithmetic, proposal, uniforms):
        path = chain_path(proposal)
        good = proposal.valid & (uniforms <= arithmetic.accept)
        return jnp.max(jnp.where(good, path, 0), -1, initial=0), path


@dataclasses.dataclass(frozen=True)
class BlockWithTokenResidual(BlockRule):
    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        return residual_law(p, proposal, num_accepted)


@dataclasses.dataclass(frozen=True)
class BlockStopsAtFirstFailure(BlockRule):
    def decide(self, arithmetic, proposal, uniforms):
        return leading_run(uniforms < arithmetic.accept), chain_path(proposal)


@dataclasses.dataclass(frozen=True)
class DroppedBonus(TokenRule):
    """Repeats the last draft in place of a bonus."""

    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        last = jax.nn.one_hot(proposal.tokens[:, -1], p.shape[-1], dtype=p.dtype)
        full = num_accepted == proposal.tokens.shape[1]
        return jnp.where(full[:, None], last, super().next_law(p, proposal, arithmetic, num_accepted, path))


@dataclasses.dataclass(frozen=True)
class WrongNode(TokenRule):
    """Judges each draft by the law behind it instead of the law before it."""

    def arithmetic(self, p, proposal):
        tokens = jnp.clip(proposal.tokens, 0, p.shape[-1] - 1)
        q = 1 if proposal.law is None else token_probabilities(proposal.law, tokens)
        return Arithmetic(jnp.where(proposal.valid, token_probabilities(p[:, 1:], tokens) / q, 0))


@dataclasses.dataclass(frozen=True)
class ParentLaw(TokenRule):
    """Corrects by the law of the last accepted node instead of the rejected one."""

    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        if proposal.law is not None:
            proposal = proposal.replace(law=jnp.roll(proposal.law, 1, 1))
        return residual_law(p, proposal, num_accepted)


@dataclasses.dataclass(frozen=True)
class Epsilon(TokenRule):
    def arithmetic(self, p, proposal):
        return Arithmetic(jnp.where(proposal.valid, super().arithmetic(p, proposal).accept + 1e-6, 0))


@dataclasses.dataclass(frozen=True)
class HiddenEpsilon(TokenRule):
    """Declares the right threshold and applies another."""

    def decide(self, arithmetic, proposal, uniforms):
        return leading_run(proposal.valid & (uniforms < arithmetic.accept + 1e-12)), chain_path(proposal)


@dataclasses.dataclass(frozen=True)
class AcceptsInvalid(TokenRule):
    def arithmetic(self, p, proposal):
        return Arithmetic(jnp.where(proposal.valid, super().arithmetic(p, proposal).accept, 0.5))


@dataclasses.dataclass(frozen=True)
class LooksAtInvalid(TokenRule):
    """Subtracts the reported law of a node that does not exist."""

    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        return residual_law(p, proposal.replace(valid=jnp.ones_like(proposal.valid)), num_accepted)


@dataclasses.dataclass(frozen=True)
class MutatedTarget(TokenRule):
    """Judges later nodes by what an earlier correction left of p."""

    def arithmetic(self, p, proposal):
        if proposal.law is None or proposal.law.shape[1] < 2:
            return super().arithmetic(p, proposal)
        left = jnp.maximum(p[:, 1] - proposal.law[:, 0], 0)
        return super().arithmetic(p.at[:, 1].set(left), proposal)


@dataclasses.dataclass(frozen=True)
class NoFallback(TokenRule):
    """Divides by the residual's mass, whatever it is."""

    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        q = jnp.zeros_like(p) if proposal.law is None else jnp.pad(proposal.law, ((0, 0), (0, 1), (0, 0)))
        residual = target_law(jnp.maximum(p - q, 0), num_accepted)
        return residual / jnp.sum(residual, -1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class VerifyUnlikeItsParts(TokenRule):
    def verify(self, p, proposal, noise):
        verdict = super().verify(p, proposal, noise)
        return verdict.replace(next_token=sampling.inverse_cdf(p[:, 0], noise.next_token()))


@dataclasses.dataclass(frozen=True)
class SinglePrecision(TokenRule):
    def arithmetic(self, p, proposal):
        rounded = super().arithmetic(p, proposal).accept.astype(jnp.float32)
        return Arithmetic(rounded.astype(jnp.float64))


@dataclasses.dataclass(frozen=True)
class CoupledKeepsTheDraft(CoupledRule):
    """Emits the rejected draft instead of the target's token."""

    def verify(self, p, proposal, noise):
        verdict = super().verify(p, proposal, noise)
        last = jnp.minimum(verdict.num_accepted, proposal.tokens.shape[1] - 1)[:, None]
        rejected = jnp.take_along_axis(proposal.tokens, last, 1)[:, 0]
        return verdict.replace(next_token=jnp.clip(rejected, 0, p.shape[-1] - 1))


@dataclasses.dataclass(frozen=True)
class CoupledWithoutTheLaw(CoupledRule):
    """Adds the noise to p instead of log p: right for noise of one spike only."""

    def target_tokens(self, p, gumbel):
        return sampling.first_max(p + gumbel)


@dataclasses.dataclass(frozen=True)
class GreedyAcceptsAll(GreedyRule):
    def verify(self, p, proposal, noise):
        n = leading_run(proposal.valid)
        return Verdict(n, chain_path(proposal), sampling.first_max(target_law(p, n)))


@dataclasses.dataclass(frozen=True)
class LossyGreedy(GreedyRule):
    """Keeps every draft."""

    name = "lossy_greedy"
    lossless = False
    path_shift: int = 0

    def verify(self, p, proposal, noise):
        n = leading_run(proposal.valid)
        return Verdict(n, chain_path(proposal) + self.path_shift, sampling.first_max(target_law(p, n)))


@dataclasses.dataclass(frozen=True)
class LossyCoupled(CoupledRule):
    """The target's own text, with token 0 in place of whatever it would add."""

    name = "lossy_coupled"
    lossless = False

    def verify(self, p, proposal, noise):
        verdict = super().verify(p, proposal, noise)
        return verdict.replace(next_token=jnp.zeros_like(verdict.next_token))


@dataclasses.dataclass(frozen=True)
class LossyByTheSizeOfTheNoise(CoupledRule):
    """Nothing but the noise of a real draw makes it lossy, so spikes cannot measure it."""

    name = "lossy_by_the_size_of_the_noise"
    lossless = False

    def verify(self, p, proposal, noise):
        verdict = super().verify(p, proposal, noise)
        spiked = noise.gumbel(jnp.arange(1), p.shape[-1]).max((1, 2)) > 1e5
        return verdict.replace(next_token=jnp.where(spiked, verdict.next_token, 0))


@pytest.mark.parametrize("rule", [LossyGreedy(), LossyCoupled()], ids=lambda rule: rule.name)
def test_a_lossy_rule_that_emits_other_texts_is_measured(rule):
    report = audit(rule, worlds=SMALL)
    assert report.passed and not report.exact and report.verdict == "lossy, measured", table([report])
    assert report.worst.distance > 0.1
    claims = dataclasses.make_dataclass("Claims", [], bases=(type(rule),), namespace={"lossless": True}, frozen=True)
    assert not audit(claims(), worlds=SMALL).passed


def test_the_distance_of_a_lossy_coupled_rule_is_that_of_its_law():
    """Nothing drafted: the next token is 0 for sure, so the distance is the target's chance of another."""
    report = audit(LossyCoupled(), worlds=((3, Topology.chain(0)),))
    cases = sorted(make_cases(3, Topology.chain(0), 0), key=lambda case: not case.drawn)
    assert [case.name for case in cases] == [case.name for case in report.cases]
    for case, measured in zip(cases, report.cases, strict=True):
        assert measured.distance == pytest.approx(1 - case.target[0].reshape(-1)[0], abs=1e-12)


def test_a_lossy_rule_must_still_keep_to_the_contract():
    report = audit(LossyGreedy(path_shift=7), worlds=SMALL)
    assert report.verdict == "FAILED" and any("lead down from the root" in problem for problem in report.problems)


def test_a_lossy_rule_that_spikes_cannot_measure_is_told_so():
    report = audit(LossyByTheSizeOfTheNoise(), worlds=SMALL)
    assert report.verdict == "FAILED" and any("its law is not measured" in problem for problem in report.problems)


BROKEN = [
    CorrectionFromTarget, NotStrict, BlockNotStrict, BlockWithTokenResidual, BlockStopsAtFirstFailure, DroppedBonus,
    WrongNode, ParentLaw, Epsilon, HiddenEpsilon, AcceptsInvalid, LooksAtInvalid, MutatedTarget, NoFallback,
    VerifyUnlikeItsParts, SinglePrecision, CoupledKeepsTheDraft, CoupledWithoutTheLaw, GreedyAcceptsAll,
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda rule: rule.__name__)
def test_broken_rules_are_rejected(broken):
    report = audit(broken(), worlds=SMALL)
    assert report.lossless and not report.passed, table([report])
    assert report.verdict == "FAILED"


def test_probes_at_the_threshold_expose_a_rule_that_is_not_strict():
    assert any("u < accept, strictly" in problem for problem in audit(NotStrict(), worlds=SMALL).problems)


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
