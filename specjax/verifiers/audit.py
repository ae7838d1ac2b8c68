"""The exact output law of a verifier, by enumeration in float64.

For every case of `cases.make_cases` and every draft, a rule of the round stream is shown every cell of every coin:
[0, h) and [h, 1) for a node of threshold h, each probed at both ends. What it accepts and the law of its next token,
completed by the target, give the joint law of the next γ + 1 tokens without any sampling. A rule of the position
stream (or one for greedy targets only) must emit the target's own text, whatever was drafted, unless it is lossy; it is
shown noise that singles out each text in turn, and random noise. A rule for trees is shown trees with every kind of
siblings that it accepts, as static and as dynamic topologies, beside the chains.

    python -m specjax.verifiers.audit                                       every rule of specjax
    python -m specjax.verifiers.audit my_module:MyRule --kwargs '{"a": 1}'  a rule of your own

The exit status is 1 when a rule that claims to be lossless is not.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from typing import Any

import jax
import numpy as np

from specjax.keys import Stream
from specjax.protocol import IID, WITHOUT_REPLACEMENT, Verifier
from specjax.topology import Topology
from specjax.verifiers import VERIFIERS
from specjax.verifiers.cases import make_cases
from specjax.verifiers.exact_law import LIMIT, CaseResult, measure_coins, measure_pointwise

CHAINS = ((2, Topology.chain(2)), *((3, Topology.chain(length)) for length in range(4)))  # (V, topology)
TREES = (
    (3, Topology.from_shape((2,))),
    (4, Topology.from_shape((3,))),
    (3, Topology.from_shape((2, 1))),
    (3, Topology((0, 1, 1, 0, 4), passengers=1)),  # paths (0, 0), (0, 1), (1,), depth first, and a passenger behind
    (3, Topology.from_shape((2, 2))),
    (2, Topology.from_shape((2, 1, 1))),
)
WORLDS = CHAINS + TREES


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The audit of one rule."""

    rule: str
    lossless: bool
    cases: tuple[CaseResult, ...]

    @property
    def worst(self) -> CaseResult:
        """The case farthest from the target's law."""
        return max(self.cases, key=lambda case: case.distance)

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(problem for case in self.cases for problem in case.problems))

    @property
    def exact(self) -> bool:
        """Whether every joint law is the target's, within `LIMIT`, and no contract is broken."""
        return self.worst.distance <= LIMIT and not self.problems

    @property
    def passed(self) -> bool:
        """A lossless rule must be exact; a lossy one must only keep to the contract, or its distance means nothing."""
        return self.exact if self.lossless else not self.problems

    @property
    def verdict(self) -> str:
        if not self.passed:
            return "FAILED"
        return "exact" if self.lossless else "lossy, measured"


def audit(rule: Any, *, worlds: tuple[tuple[int, Topology], ...] = WORLDS, seed: int = 0) -> AuditReport:
    """Measures how far the output law of a rule is from the target's.

    Args:
        rule: a `specjax.protocol.Verifier`, which is checked here; one on the round stream also has the parts of
            `round_stream.RoundRule`.
        worlds: vocabulary size and topology of the cases; the work grows like (2 V)^N.
        seed: of the random laws.

    Raises:
        ValueError: the rule lacks a part of the interface, or a part returns something of another form.
    """
    _check_interface(rule)
    measure = measure_pointwise if rule.greedy_only or rule.stream is Stream.POSITION else measure_coins
    results, num_trees = [], 0
    with jax.enable_x64(True), jax.default_device(_cpu()):
        for vocab_size, topology in worlds:
            if not (rule.trees or topology.is_chain):
                continue
            cases = _cases_of(rule, vocab_size, topology, seed)
            kinds = sorted({case.siblings for case in cases})
            for number, siblings in enumerate(kinds):
                group = [case for case in cases if case.siblings == siblings]
                # One kind after the other is shown as dynamic trees, too: each time is one more program to compile.
                dynamic = not topology.is_chain and number == num_trees % len(kinds)
                results += measure(rule, group, np.random.default_rng(seed), dynamic)
            num_trees += not topology.is_chain
    if not results:
        raise ValueError(f"rule {rule.name} accepts no proposal of the audit; its siblings are {set(rule.siblings)}")
    return AuditReport(rule.name, rule.lossless, tuple(results))


def _check_interface(rule):
    """Raises ValueError when the rule is not what the loop can call."""
    kind = type(rule).__name__
    parts = ["name", "lossless", "stream", "siblings", "greedy_only", "trees", "verify"]
    if getattr(rule, "stream", None) is Stream.ROUND and not getattr(rule, "greedy_only", False):
        parts += ["arithmetic", "decide", "next_law"]
    missing = [part for part in parts if not hasattr(rule, part)]
    if missing:
        raise ValueError(f"{kind} lacks {', '.join(missing)}; see specjax.protocol.Verifier and round_stream.RoundRule")
    if not rule.lossless and not rule.name.startswith("lossy_"):
        raise ValueError(f'the name of a rule that is not lossless must start with "lossy_"; got {rule.name!r}')
    if not isinstance(rule.stream, Stream):
        raise ValueError(f"{kind}.stream must be a specjax.keys.Stream; got {rule.stream!r}")
    try:
        hash(rule)
    except TypeError:
        raise ValueError(f"{kind} must be hashable: declare it with @dataclasses.dataclass(frozen=True)") from None


def _cases_of(rule, vocab_size, topology, seed):
    """The cases about which the rule claims anything."""
    cases = make_cases(vocab_size, topology, seed)
    if topology.is_chain and IID not in rule.siblings:  # without siblings, drawing with or without replacement is one
        cases = [dataclasses.replace(c, siblings=WITHOUT_REPLACEMENT) if c.siblings == IID else c for c in cases]
    greedy = lambda case: all(((law == 0) | (law == 1)).all() for law in case.target)  # noqa: E731
    return [case for case in cases if case.siblings in rule.siblings and (not rule.greedy_only or greedy(case))]


def _cpu():
    """The CPU, where float64 is exact, unless JAX was told to do without."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def table(reports: list[AuditReport]) -> str:
    """The reports as aligned text, one rule per line, then what was wrong."""
    rows = [("rule", "lossless", "worst TV", "verdict", "cases", "worst case")]
    for report in reports:
        worst = report.worst
        where = _describe(worst) if worst.distance > LIMIT else ""
        claim = "yes" if report.lossless else "no"
        rows.append((report.rule, claim, f"{worst.distance:.2e}", report.verdict, str(len(report.cases)), where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{report.rule}: {problem}" for report in reports for problem in report.problems]
    return "\n".join(lines)


def _describe(case: CaseResult) -> str:
    size = f"V={case.vocab_size}, N={case.topology.num_nodes}"
    if case.topology.is_chain:
        return f"{case.name}, {size}"
    return f"{case.name}, {size}, siblings {case.siblings}, parents {'-'.join(map(str, case.topology.parents))}"


def load_rule(address: str, settings: dict) -> Verifier:
    """The rule at `module:Class`, or the one of that name in VERIFIERS, built with the given settings.

    Raises:
        ValueError: no such module, class or setting.
    """
    module_name, colon, attribute = address.partition(":")
    if not colon:
        if address not in VERIFIERS:
            raise ValueError(f"no rule {address!r}; give my_module:MyRule or one of {', '.join(VERIFIERS)}")
        make = VERIFIERS[address]
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever the user's own module raises while it is imported
            raise ValueError(f"cannot import {module_name!r}: {type(error).__name__}: {error}") from error
        if not callable(make := getattr(module, attribute, None)):
            raise ValueError(f"module {module_name!r} has no class {attribute!r}")
    try:
        return make(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot build {address} with {settings}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status: 0 all as claimed, 1 a rule failed, 2 nothing could be audited."""
    parser = argparse.ArgumentParser(prog="python -m specjax.verifiers.audit", description=__doc__.partition("\n")[0])
    parser.add_argument("rule", nargs="?", help="my_module:MyRule or a name; left out: every rule of specjax")
    parser.add_argument("--kwargs", default="{}", help="the rule's settings as JSON")
    options = parser.parse_args(arguments)
    try:
        try:
            settings = json.loads(options.kwargs)
        except json.JSONDecodeError as error:
            raise ValueError(f"--kwargs must be JSON like '{{\"alpha\": 0.5}}'; got {options.kwargs!r}") from error
        if not isinstance(settings, dict):
            raise ValueError(f"--kwargs must be a JSON object; got {options.kwargs!r}")
        rules = [load_rule(options.rule, settings)] if options.rule else [make() for make in VERIFIERS.values()]
        reports = [audit(rule) for rule in rules]
    except ValueError as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    print(table(reports))
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
