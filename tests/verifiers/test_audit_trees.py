"""The audit on trees: what is drafted, rules that are exact, and rules broken where siblings meet."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.protocol import FIXED, IID, WITHOUT_REPLACEMENT, token_probabilities
from specjax.topology import Topology
from specjax.verifiers import VERIFIERS, CoupledRule, KSequentialRule, MultiRoundRule
from specjax.verifiers.audit import TREES, audit, table
from specjax.verifiers.cases import make_cases
from specjax.verifiers.chain import target_law
from specjax.verifiers.coin_cells import coin_cells
from specjax.verifiers.enumeration import enumerate_drafts
from specjax.verifiers.round_stream import Arithmetic, ratio
from specjax.verifiers.tree_walk import deepest, first_siblings, last_node, path_to

PAIR = Topology.from_shape((2,))
STEM = Topology.from_shape((2, 1))
UNEQUAL = TREES[3][1]
SMALL = ((3, PAIR), (3, STEM))
TREE_RULES = [name for name, make in VERIFIERS.items() if make.lossless and make.trees]


def drafts_of(topology, siblings, name, vocab_size=3):
    (case,) = [
        case
        for case in make_cases(vocab_size, topology, 0)
        if case.siblings == siblings and case.name == name and case.wild
    ]
    return case, enumerate_drafts(case)


@pytest.mark.parametrize("name", TREE_RULES)
def test_lossless_rules_are_exact_on_small_trees(name):
    report = audit(VERIFIERS[name](), worlds=((3, PAIR), (3, UNEQUAL)))
    assert report.exact and report.verdict == "exact", table([report])
    assert {case.siblings for case in report.cases} == VERIFIERS[name].siblings


@pytest.mark.slow
@pytest.mark.parametrize("name", TREE_RULES)
def test_lossless_rules_are_exact_on_all_trees(name):
    report = audit(VERIFIERS[name](), worlds=TREES)
    assert report.exact and report.worst.distance <= 1e-9, table([report])


@pytest.mark.parametrize("topology", [PAIR, STEM, UNEQUAL, Topology.from_shape((2, 2))], ids=str)
@pytest.mark.parametrize("siblings", [IID, WITHOUT_REPLACEMENT, FIXED])
def test_drafts_are_what_their_siblings_kind_says(topology, siblings):
    for case in make_cases(3, topology, 0):
        if case.siblings != siblings:
            continue
        drafts = enumerate_drafts(case)
        assert drafts.probability.sum() == pytest.approx(1, abs=1e-12)
        parents, valid, tokens = np.array((0, *topology.parents)), drafts.valid, drafts.tokens
        for node in range(1, topology.num_nodes + 1):
            here, parent = valid[:, node - 1], parents[node]
            assert parent == 0 or not (here & ~valid[:, parent - 1]).any()
            drawn_from = np.take_along_axis(drafts.law[here, node - 1], tokens[here, node - 1][:, None], 1)
            assert (drawn_from > 0).all() and np.allclose(drafts.law[here, node - 1].sum(1), 1, atol=1e-12)
            for earlier in range(1, node):
                both = here & valid[:, earlier - 1]
                if siblings != IID and parents[earlier] == parent:
                    assert (tokens[both, earlier - 1] != tokens[both, node - 1]).all()
        if siblings == FIXED:
            assert len(tokens) == 1 and set(drafts.law[valid].reshape(-1)) <= {0.0, 1.0}
        if topology.passengers:
            assert not valid[:, -topology.passengers :].any()


def test_probabilities_without_replacement():
    """Two draws: q(a) q(b) / (1 - q(a)), computed apart from the enumeration."""
    case, drafts = drafts_of(PAIR, WITHOUT_REPLACEMENT, "drawn")
    q = case.drafter[0][0]
    assert len(drafts.tokens) == 6
    for (a, b), law, probability in zip(drafts.tokens, drafts.law, drafts.probability, strict=True):
        assert probability == pytest.approx(q[a] * q[b] / (1 - q[a]), abs=1e-12)
        np.testing.assert_allclose(law[1], np.where(np.arange(3) == a, 0, q / (1 - q[a])), atol=1e-12)


def test_nothing_left_to_draw_is_an_invalid_node_without_law():
    _, drafts = drafts_of(PAIR, WITHOUT_REPLACEMENT, "drafter at temperature 0")
    assert drafts.valid.tolist() == [[True, False]] and drafts.tokens[0, 1] not in range(3)
    np.testing.assert_array_equal(drafts.law[0, 1], 0)


def test_fixed_siblings_come_by_rank():
    case, drafts = drafts_of(PAIR, FIXED, "chosen")
    q = case.drafter[0][0]
    assert q[drafts.tokens[0]].tolist() == sorted(q, reverse=True)[:2]


def test_missing_nodes_leave_their_siblings():
    _, drafts = drafts_of(UNEQUAL, IID, "node 1 missing")
    assert (drafts.valid == [False, False, False, True, False]).all()


@pytest.mark.parametrize("world", TREES, ids=str)
def test_trees_hold_what_breaks_rules(world):
    cases = make_cases(*world, 0)
    for siblings in (IID, WITHOUT_REPLACEMENT):
        names = {case.name for case in cases if case.siblings == siblings}
        assert names >= {
            "drawn", "zeros in q", "zeros in p and q", "drafter at temperature 0", "both at temperature 0",
            "both filtered", "disjoint supports", "depth limit 0", "stop token", "node 1 missing",
        }, names  # fmt: skip
        # The largest group holds no more than so many drafts of full size.
        assert {"p = q", "p = q up to rounding"} <= names or (siblings == IID and world == TREES[4])
    assert {case.name for case in cases if case.siblings == FIXED} >= {"chosen", "stop token, chosen"}
    assert any(not enumerate_drafts(case).valid.all(1).any() for case in cases)


@pytest.mark.parametrize("topology", [Topology.chain(2), Topology.chain(3)], ids=str)
def test_a_chain_is_not_audited_twice(topology):
    assert {case.siblings for case in make_cases(3, topology, 0)} == {IID, FIXED}


def test_a_rule_for_draws_without_replacement_is_audited_on_chains():
    @dataclasses.dataclass(frozen=True)
    class Only(MultiRoundRule):
        siblings = frozenset({WITHOUT_REPLACEMENT})

    report = audit(Only(), worlds=((3, Topology.chain(1)),))
    assert report.exact and {case.siblings for case in report.cases} == {WITHOUT_REPLACEMENT}


def test_coin_cells_cover_everything_once():
    rng = np.random.default_rng(0)
    accept = np.array([[0.3, 1.4, 0.0], [0.5, 0.25, np.nextafter(1, 0)], [0.0, 0.0, 0.0]])
    uniforms = rng.random(accept.shape)
    cells = coin_cells(accept, uniforms, rng)
    assert ((cells.coins >= 0) & (cells.coins < 1)).all()
    weight = np.bincount(cells.draft[: cells.num_cells], cells.weight)
    np.testing.assert_allclose(weight, 1, atol=1e-15)
    assert cells.num_cells == 2 + 8 + 1
    # Every row lies in the cell that it names, of the same draft.
    success = cells.coins < accept[cells.draft]
    np.testing.assert_array_equal(success, success[cells.cell])
    np.testing.assert_array_equal(cells.draft, cells.draft[cells.cell])
    np.testing.assert_array_equal(cells.coins[-3:], uniforms)
    probed = cells.coins[cells.num_cells : -3][cells.draft[cells.num_cells : -3] == 0, 0]
    assert {0.0, np.nextafter(0.3, 0), 0.3, np.nextafter(1, 0)} <= set(probed)


@dataclasses.dataclass(frozen=True)
class Rounds(MultiRoundRule):
    """Multi-round rejection in one plain loop, whose parts are broken below."""

    def laws(self, proposal, vocab_size, dtype):
        q = jax.nn.one_hot(proposal.tokens, vocab_size, dtype=dtype) if proposal.law is None else proposal.law
        return jnp.where(self.tried(proposal)[..., None], q, 0)

    def tried(self, proposal):
        return proposal.valid

    def left(self, residual):
        mass = jnp.sum(residual, -1, keepdims=True)
        return residual / jnp.where(mass > 0, mass, 1)

    def arithmetic(self, p, proposal):
        rows, tokens = jnp.arange(p.shape[0]), jnp.clip(proposal.tokens, 0, p.shape[-1] - 1)
        parents = jnp.broadcast_to(proposal.node_parents, tokens.shape)
        laws, tried, residual, accept = self.laws(proposal, p.shape[-1], p.dtype), self.tried(proposal), p, []
        for i in range(proposal.topology.num_nodes):
            r, q = residual[rows, parents[:, i]], laws[:, i]
            accept.append(jnp.where(tried[:, i], ratio(r[rows, tokens[:, i]], q[rows, tokens[:, i]]), 0))
            left = jnp.where(tried[:, i : i + 1], self.left(jnp.maximum(r - q, 0)), r)
            residual = residual.at[rows, parents[:, i]].set(left)
        return Arithmetic(jnp.stack(accept, 1), None, residual)


@dataclasses.dataclass(frozen=True)
class LawOfTheFirstSibling(Rounds):
    """Reports, for draws without replacement, the law that the first sibling was drawn from."""

    siblings = frozenset({WITHOUT_REPLACEMENT})

    def laws(self, proposal, vocab_size, dtype):
        parents = jnp.broadcast_to(proposal.node_parents, proposal.tokens.shape)
        first = jnp.argmax(parents[:, :, None] == parents[:, None], -1)
        q = jnp.take_along_axis(proposal.law, first[..., None], 1)
        return jnp.where(proposal.valid[..., None], q, 0)


@dataclasses.dataclass(frozen=True)
class NotRenormalised(Rounds):
    """Judges the second sibling by max(p - q, 0), whatever its mass."""

    def left(self, residual):
        return residual


@dataclasses.dataclass(frozen=True)
class CorrectionFromTarget(Rounds):
    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        return target_law(p, last_node(num_accepted, path))


@dataclasses.dataclass(frozen=True)
class SortedByQ(Rounds):
    """Tries the two independent siblings of a pair in order of their own q(x)."""

    siblings = frozenset({IID})

    def swapped(self, proposal):
        tokens = jnp.clip(proposal.tokens, 0, proposal.law.shape[-1] - 1)
        q_x = jnp.where(proposal.valid, token_probabilities(proposal.law, tokens), 0)
        return q_x[:, 1:] > q_x[:, :1]

    def arithmetic(self, p, proposal):
        swap = self.swapped(proposal)
        mirrored = proposal.replace(
            tokens=proposal.tokens[:, ::-1], law=proposal.law[:, ::-1], valid=proposal.valid[:, ::-1]
        )
        kept, other = super().arithmetic(p, proposal), super().arithmetic(p, mirrored)
        residual = jnp.where(swap[..., None], other.residual, kept.residual)
        return Arithmetic(jnp.where(swap, other.accept[:, ::-1], kept.accept), None, residual)

    def decide(self, arithmetic, proposal, uniforms):
        success = proposal.valid & (uniforms < arithmetic.accept)
        first = jnp.where(self.swapped(proposal)[:, 0], success[:, 1], ~success[:, 0] & success[:, 1]) + 1
        n = success.any(1).astype(jnp.int32)
        path = jnp.where(jnp.arange(proposal.topology.max_depth) == 0, first[:, None], 0)
        return n, path


@dataclasses.dataclass(frozen=True)
class SkipsDuplicates(Rounds):
    """Passes over a sibling whose token was tried before, as if it had not been drawn."""

    siblings = frozenset({IID})

    def tried(self, proposal):
        parents = jnp.broadcast_to(proposal.node_parents, proposal.tokens.shape)
        same = (parents[:, :, None] == parents[:, None]) & (proposal.tokens[:, :, None] == proposal.tokens[:, None])
        earlier = jnp.tri(proposal.topology.num_nodes, k=-1, dtype=bool)
        return proposal.valid & ~jnp.any(same & earlier & proposal.valid[:, None], -1)


@dataclasses.dataclass(frozen=True)
class ChildOfARejectedNode(Rounds):
    def decide(self, arithmetic, proposal, uniforms):
        success = proposal.valid & (uniforms < arithmetic.accept)
        return path_to(deepest(first_siblings(success, proposal), proposal), proposal)


@dataclasses.dataclass(frozen=True)
class DroppedBonus(Rounds):
    """Repeats a leaf's token in place of a bonus."""

    def next_law(self, p, proposal, arithmetic, num_accepted, path):
        last = last_node(num_accepted, path)
        token = jnp.take_along_axis(proposal.tokens, jnp.maximum(last - 1, 0)[:, None], 1)[:, 0]
        leaf = ~jnp.any(jnp.asarray(proposal.node_parents) == last[:, None], -1)
        law = super().next_law(p, proposal, arithmetic, num_accepted, path)
        return jnp.where(leaf[:, None], jax.nn.one_hot(token, p.shape[-1], dtype=p.dtype), law)


@dataclasses.dataclass(frozen=True)
class EqualThresholdsWithoutReplacement(KSequentialRule):
    siblings = frozenset({WITHOUT_REPLACEMENT})


@dataclasses.dataclass(frozen=True)
class FirstRowsTree(Rounds):
    """Takes the first row's parents for everybody's: right for static trees only."""

    def arithmetic(self, p, proposal):
        parents = jnp.broadcast_to(jnp.asarray(proposal.node_parents)[:1], proposal.tokens.shape)
        return super().arithmetic(p, proposal if proposal.parents is None else proposal.replace(parents=parents))


@dataclasses.dataclass(frozen=True)
class StaticTreesOnly(Rounds):
    def arithmetic(self, p, proposal):
        assert len(proposal.topology.parents) == proposal.tokens.shape[1]
        return super().arithmetic(p, proposal)


@dataclasses.dataclass(frozen=True)
class CoupledTakesAnyChild(CoupledRule):
    """Goes down to the last child whatever its token."""

    def verify(self, p, proposal, noise):
        verdict = super().verify(p, proposal, noise)
        last = jnp.max(jnp.where(jnp.asarray(proposal.node_parents) == 0, jnp.arange(1, p.shape[1]), 0), -1)
        last = jnp.broadcast_to(last, verdict.num_accepted.shape)
        moved = (verdict.num_accepted == 1) & jnp.take_along_axis(proposal.valid, last[:, None] - 1, 1)[:, 0]
        return verdict.replace(path=jnp.where(moved[:, None], last[:, None], verdict.path))


def test_the_rule_that_is_broken_below_is_exact():
    report = audit(Rounds(), worlds=SMALL)
    assert report.exact, table([report])


BIASED = [
    LawOfTheFirstSibling, NotRenormalised, CorrectionFromTarget, SkipsDuplicates, ChildOfARejectedNode, DroppedBonus,
    EqualThresholdsWithoutReplacement,
]  # fmt: skip


@pytest.mark.parametrize("broken", BIASED, ids=lambda rule: rule.__name__)
def test_rules_broken_on_trees_are_rejected(broken):
    report = audit(broken(), worlds=((3, STEM),))
    assert report.verdict == "FAILED", table([report])
    assert max(case.distance for case in report.cases if case.name == "drawn") > 1e-3, table([report])


def test_independent_siblings_may_not_be_sorted():
    report = audit(SortedByQ(), worlds=((3, PAIR),))
    assert not report.problems and report.worst.distance > 0.05, table([report])
    by_name = {case.name: case.distance for case in report.cases}
    assert by_name["drafter at temperature 0"] <= 1e-9 and by_name["depth limit 0"] <= 1e-9  # nothing to sort


@pytest.mark.parametrize(
    "broken, words",
    [
        (FirstRowsTree, "the verdict changes when the same tree comes as a dynamic topology"),
        (StaticTreesOnly, "cannot verify a dynamic topology: AttributeError"),
        (CoupledTakesAnyChild, "not those of target-only decoding"),
    ],
)
def test_breaches_of_the_contract_on_trees(broken, words):
    report = audit(broken(), worlds=((3, STEM),))
    assert report.verdict == "FAILED" and any(words in problem for problem in report.problems), table([report])


def test_the_table_names_the_tree_and_the_siblings():
    report = audit(SkipsDuplicates(), worlds=((3, STEM),))
    assert "V=3, N=4, siblings iid, parents 0-0-1-2" in table([report])
