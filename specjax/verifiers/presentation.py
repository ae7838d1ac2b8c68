"""How the audit shows enumerated drafts to a rule, and how it reads what the rule returns."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from specjax.keys import Noise
from specjax.protocol import FIXED, Proposal, Verdict, Verifier
from specjax.topology import DynamicTopology, Topology
from specjax.verifiers.enumeration import Case, Drafts, enumerate_drafts


@struct.dataclass
class ScriptedNoise(Noise):
    """Noise whose every number is given: uniforms [B, N], next_uniform [B], gumbels [B, max depth + 1, V]."""

    uniforms: Float[Array, "B N"]
    next_uniform: Float[Array, "B"]
    gumbels: Float[Array, "B D1 V"]

    def accept(self, num_nodes):
        return self.uniforms

    def next_token(self):
        return self.next_uniform

    def gumbel(self, depths, vocab_size):
        if jnp.ndim(depths) == 2:  # each row's nodes have depths of their own
            return jnp.take_along_axis(self.gumbels, depths[..., None], 1)
        return self.gumbels[:, depths]


def all_drafts(cases: list[Case]) -> tuple[Drafts, np.ndarray]:
    """The drafts of all cases, and the number of the case that each belongs to."""
    parts = [enumerate_drafts(case) for case in cases]
    owner = np.repeat(np.arange(len(cases)), [len(part.probability) for part in parts])
    return Drafts.concatenate(parts), owner


def take(drafts: Drafts, rows: np.ndarray) -> Drafts:
    return Drafts(*(getattr(drafts, field.name)[rows] for field in dataclasses.fields(Drafts)))


def proposal_of(drafts: Drafts, case: Case) -> Proposal:
    """The drafts as the rows of one proposal, with the topology and siblings of the case."""
    law = None if case.siblings == FIXED else drafts.law
    return Proposal(drafts.tokens, law, drafts.valid, case.topology, case.siblings)


def noise_of(rule: Verifier, uniforms, next_uniform, gumbels=None) -> ScriptedNoise:
    return ScriptedNoise(None, None, rule.stream, uniforms, next_uniform, gumbels)


def unlike_on_dynamic_topology(
    rule: Verifier, case: Case, drafts: Drafts, noise: ScriptedNoise, verdict: Verdict, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Rows whose verdict changes when their tree comes as a DynamicTopology; at most 64 are looked at.

    Between them stand rows of another tree, so that a rule that reads one row's parents for all is found out, and the
    topology allows for one level more than the tree has.

    Args:
        case: any of the drafts'.
        noise, verdict: what the rule was shown with the static tree, and what it said.

    Returns:
        By problem, [R] flags.
    """
    topology, total = case.topology, len(drafts.probability)
    depth = min(topology.max_depth + 1, topology.num_nodes)
    other = tuple(i if i < depth else 0 for i in range(topology.num_nodes))
    sample = rng.choice(total, min(total, 64), replace=False)
    rows = np.repeat(sample, 2)
    parents = np.where(np.arange(len(rows))[:, None] % 2, topology.parents, other).astype(np.int32)
    dynamic = DynamicTopology(topology.num_nodes, depth, topology.passengers)
    shown = proposal_of(take(drafts, rows), case).replace(topology=dynamic, parents=parents)
    gumbels = noise.gumbels
    if gumbels is not None:
        gumbels = np.pad(gumbels[rows], ((0, 0), (0, depth - topology.max_depth), (0, 0)))
    noise = noise_of(rule, noise.uniforms[rows], noise.next_uniform[rows], gumbels)
    try:
        found = compiled(rule.verify)(drafts.p[rows], shown, noise)
    except (AttributeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        return {f"cannot verify a dynamic topology: {type(error).__name__}: {reason}": np.ones(total, bool)}
    n = checked(found.num_accepted, (len(rows),), "num_accepted", integer=True)[1::2]
    path = checked(found.path, (len(rows), depth), "path", integer=True)[1::2]
    token = checked(found.next_token, (len(rows),), "next_token", integer=True)[1::2]
    expected = np.asarray(verdict.num_accepted)[sample]
    width = topology.max_depth
    differs = (n != expected) | (token != np.asarray(verdict.next_token)[sample])
    differs |= (kept_path(expected, path[:, :width]) != kept_path(expected, np.asarray(verdict.path)[sample])).any(1)
    flags = np.zeros(total, bool)
    flags[sample] = differs
    return {"the verdict changes when the same tree comes as a dynamic topology": flags}


def kept_path(num_accepted: np.ndarray, path: np.ndarray) -> np.ndarray:
    """[R, D] the path with 0 behind the accepted nodes."""
    return np.where(np.arange(path.shape[1]) < num_accepted[:, None], path, 0)


def path_tokens(drafts: Drafts, path: np.ndarray) -> np.ndarray:
    """[R, D] the tokens of a path's nodes; anything for a node that does not exist."""
    return np.take_along_axis(drafts.tokens, np.clip(path - 1, 0, max(drafts.tokens.shape[1] - 1, 0)), 1)


def path_breaches(drafts: Drafts, topology: Topology, n: np.ndarray, path: np.ndarray) -> dict[str, np.ndarray]:
    """By problem, [R] flags of the rows whose accepted path leaves the tree, or holds an invalid node."""
    nodes = topology.num_nodes
    on_path = np.arange(path.shape[1]) < n[:, None]
    parents = np.array((-1, *topology.parents))
    node = np.clip(path, 0, nodes)
    before = np.concatenate([np.zeros((len(n), 1), int), path], 1)[:, : path.shape[1]]
    rooted = (path >= 1) & (path <= nodes) & (parents[node] == before)
    valid = np.concatenate([np.zeros((len(n), 1), bool), drafts.valid], 1)
    return {
        "num_accepted is outside 0..max depth": (n < 0) | (n > path.shape[1]),
        "the accepted path does not lead down from the root": (on_path & ~rooted).any(1),
        "an invalid node is accepted": (on_path & ~np.take_along_axis(valid, node, 1)).any(1),
    }


# Each program runs once or twice on small arrays, so nearly all the time of an audit is compilation.
COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def compiled(function: Callable) -> Callable:
    """Compiled without optimisation."""
    return jax.jit(function, compiler_options=_known_options())


@functools.cache
def _known_options():
    """Those of `COMPILE_FAST` that the installed XLA knows; they come and go with its versions."""
    known = {}
    for name, value in COMPILE_FAST.items():
        try:
            jax.jit(lambda x: x, compiler_options={name: value}).lower(np.zeros(())).compile()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


def checked(value, shape, what: str, integer: bool = False) -> np.ndarray:
    """The value as numpy, after `check_form`."""
    check_form(value, shape, what, integer)
    return np.asarray(value)


def check_form(value, shape, what: str, integer: bool = False) -> None:
    """Raises ValueError when a value, traced or not, has another shape or dtype."""
    kind, name = (jnp.integer, "integers") if integer else (jnp.float64, "float64, as the laws it was given")
    if not hasattr(value, "shape") or tuple(value.shape) != tuple(shape) or not jnp.issubdtype(value.dtype, kind):
        found = f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise ValueError(f"{what} must be {name}, of shape {list(shape)}; got {found}")
