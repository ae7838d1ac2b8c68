"""What the compiled loop must not contain: copies of a cache, sorts of the vocabulary, calls to the host."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.prefill import prefill
from specjax.decoding.round import Inputs
from specjax.decoding.run import decode
from specjax.decoding.state import Decoder
from specjax.decoding.stop_strings import StopStrings
from specjax.drafters import Empty, Independent
from specjax.keys import row_keys
from specjax.models import Transformer, TransformerConfig
from specjax.penalties import Penalties
from specjax.sampling import Sampling
from specjax.verifiers import CoupledRule, TokenRule

TARGET = TransformerConfig(vocab_size=101, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, context_length=256)
DRAFTER = TransformerConfig(vocab_size=101, d_model=24, num_layers=1, num_heads=2, context_length=256)
BUFFER, DRAFT_LENGTH = 173, 3
OPERATION = re.compile(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(")


def operations(hlo: str) -> list[tuple[str, int]]:
    """(name, number of elements of the result) of all instructions outside the entry computation: the loop's."""
    found, entry = [], False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        match = OPERATION.search(line)
        if match and not entry:
            found.append((match[2], math.prod(int(n) for n in match[1].split(",") if n)))
    return found


def cache_copies(hlo: str, sizes: set[int]) -> list:
    return [op for op in operations(hlo) if op[0] in ("copy", "transpose") and op[1] in sizes]


@functools.cache
def compiled(batch, drafter, rule, extras=False) -> tuple[str, set[int]]:
    """The text of the compiled loop, and the sizes of its caches. Only shapes are needed: no model is made."""
    params = lambda config: jax.eval_shape(  # noqa: E731
        Transformer(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    )["params"]
    sampling = Sampling.of(0.8, top_p=0.9).per_row(batch)
    drafter_params = params(DRAFTER) if isinstance(drafter, Independent) else None
    inputs = Inputs(params(TARGET), drafter_params, sampling, sampling, jnp.full(8, -1))
    if extras:
        penalties = Penalties.of(1.2, 0.5, 0.5, 3, [4, 5]).per_row(batch)
        strings = StopStrings(["ab", "c"], [bytes([97 + i % 5]) for i in range(101)]).tables(101)
        inputs = inputs.replace(penalties=penalties, stop_tables=strings)
    ids = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    decoder = Decoder(TARGET, drafter, rule)
    state, _ = jax.eval_shape(
        functools.partial(prefill, decoder, BUFFER),
        inputs, ids(batch, 16), ids(batch), ids(batch), jax.eval_shape(lambda: row_keys(0, batch)),
    )  # fmt: skip
    caches = [state.target_cache] + ([state.draft_state] if drafter_params is not None else [])
    sizes = {math.prod(x.shape) for cache in caches for x in cache.keys}
    return decode.lower(decoder, inputs, state, np.int32(9)).compile().as_text(), sizes


CASES = [(1, Independent(DRAFTER, DRAFT_LENGTH), TokenRule()), (3, Independent(DRAFTER, DRAFT_LENGTH), TokenRule()),
         (3, Independent(DRAFTER, 1), CoupledRule()), (1, Empty(), TokenRule()),
         (3, Independent(DRAFTER, DRAFT_LENGTH), TokenRule(), True)]  # fmt: skip
NAMES = ["one row", "three rows", "coupled", "target only", "penalties and stop strings"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_no_cache_is_copied_in_the_loop(case):
    hlo, sizes = compiled(*case)
    found = operations(hlo)
    # The caches are updated in the loop, so their sizes must occur there; otherwise nothing would be looked at.
    updated = {size for name, size in found if name in ("dynamic-update-slice", "scatter", "fusion", "while", "call")}
    assert sizes <= updated | {size for name, size in found if name in ("parameter", "get-tuple-element")}
    assert not cache_copies(hlo, sizes)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_no_call_to_the_host_and_no_sort(case):
    hlo, _ = compiled(*case)
    assert not re.search(r"callback|infeed|outfeed|host_compute", hlo)
    assert not [size for name, size in operations(hlo) if name in ("sort", "topk")]


def test_penalties_make_nothing_larger_than_the_logits_per_pair_of_nodes():
    """The laws behind N + 1 nodes need no array over nodes, nodes and vocabulary."""
    hlo, _ = compiled(*CASES[-1])
    sizes, nodes = {size for _, size in operations(hlo)}, DRAFT_LENGTH + 1
    assert 3 * nodes * 101 in sizes
    assert not sizes & {3 * i * j * 101 for i in (nodes - 1, nodes) for j in (nodes - 1, nodes)}


def test_a_copy_would_be_found():
    """A loop that turns its buffer and a loop that keeps an old version of it beside the new one."""

    def turning(x):
        return jax.lax.fori_loop(0, 9, lambda i, x: jnp.cos(x).T @ x.T @ x, x)

    def keeping(x):
        step = lambda i, pair: (pair[0].at[i].add(jnp.sum(pair[1])), pair[0])  # noqa: E731
        return jax.lax.fori_loop(0, 9, step, (x, x))

    x = jax.ShapeDtypeStruct((37, 37), jnp.float32)
    found = [cache_copies(jax.jit(loop).lower(x).compile().as_text(), {37 * 37}) for loop in (turning, keeping)]
    assert any(found)
