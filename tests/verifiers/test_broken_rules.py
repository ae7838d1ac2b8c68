"""The audit rejects rules broken on purpose, and measures lossy ones."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax import sampling
from specjax.protocol import Verdict, token_probabilities
from specjax.topology import Topology
from specjax.verifiers import BlockRule, CoupledRule, GreedyRule, TokenRule
from specjax.verifiers.audit import audit, table
from specjax.verifiers.cases import make_cases
from specjax.verifiers.chain import chain_path, leading_run, target_law
from specjax.verifiers.round_stream import Arithmetic, residual_law

SMALL = ((3, Topology.chain(2)),)


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
    cases = sorted(make_cases(3, Topology.chain(0), 0), key=lambda case: case.siblings)
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
