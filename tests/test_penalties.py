"""Penalties at every node of random trees, against a definition in plain numpy; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.penalties import Penalties
from specjax.topology import Topology

# float32 holds all of these exactly, so that the definition can work in float64.
VALUES = {
    "repetition": [1.5, 0.75, 1.0, 2.0],
    "presence": [0.25, -0.5, 0.0, 1.0],
    "frequency": [0.5, 0.125, -0.25, 0.0],
    "min_new_tokens": [6, 0, 3, 9],
    "banned_ids": [[5], [0, 7], [], [1, 3, 10]],
}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def penalised(logits, prompt, new, stop_ids, *, repetition, presence, frequency, min_new_tokens, banned_ids):
    """The definition: what one row's logits [V] become behind `prompt` and then `new`."""
    out = np.array(logits, np.float64)
    for token in range(len(out)):
        if repetition is not None and token in [*prompt, *new]:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= (frequency or 0) * list(new).count(token) + (presence or 0) * (token in new)
        if token in banned_ids or (token in stop_ids and len(new) < (min_new_tokens or 0)):
            out[token] = -np.inf
    return out


@st.composite
def situations(draw):
    """A batch of two rows: which penalties are on, prompts, what was emitted in two rounds, and a tree of 5 nodes."""
    tokens = lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=2, max_size=2)  # noqa: E731
    on = draw(st.sets(st.sampled_from(list(VALUES)), min_size=1))
    parents = tuple(draw(st.integers(0, node)) for node in range(5))
    counts = draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
    return on, draw(tokens(4)), draw(tokens(6)), counts, parents, draw(tokens(5)), draw(st.integers(0, 99))


@given(situations())
def test_every_node_has_the_penalties_of_its_own_text(situation):
    on, prompts, emitted, counts, parents, drafted, seed = situation
    values = [{name: VALUES[name][row] if name in on else None for name in VALUES} for row in (0, 3)]
    bans = [[ids for ids in VALUES["banned_ids"][row] if ids < 5] if "banned_ids" in on else [] for row in (0, 3)]
    values = [v | {"banned_ids": b} for v, b in zip(values, bans, strict=True)]
    penalties = Penalties.of(**{
        name: None if name not in on else [v[name] for v in values] for name in VALUES if name != "banned_ids"
    }, banned_ids=bans).per_row(2)  # fmt: skip
    lengths = np.array([4, 2])
    history = penalties.start(jnp.array(prompts), jnp.array(lengths), 5)
    assert (history is None) == (not on & {"repetition", "presence", "frequency"})
    first, second = jnp.array(counts[:2]), jnp.array(counts[2:])
    if history is not None:
        pieces = jnp.array(emitted)
        history = history.add(pieces[:, :3], first).add(pieces[:, 3:], second)
    topology = Topology(parents)
    logits = 2 * np.random.default_rng(seed).normal(size=(2, 6, 5))
    out = penalties.apply(
        jnp.array(logits), history, jnp.array(drafted), topology.ancestors[None], first + second, jnp.array([2, -1])
    )
    for row in range(2):
        new = emitted[row][: counts[row]] + emitted[row][3 : 3 + counts[2 + row]]
        for node in range(6):
            path = [drafted[row][i - 1] for i in np.flatnonzero(topology.ancestors[node]) if i]
            text = new + path
            expected = penalised(logits[row, node], prompts[row][: lengths[row]], text, [2], **values[row])
            np.testing.assert_allclose(out[row, node], expected, atol=1e-12)


BAD = [
    (dict(repetition=0), "repetition must be finite and > 0, or one such per row; got 0"),
    (dict(repetition=-1.0), "repetition must be finite and > 0"),
    (dict(repetition=[1.0, np.nan]), "repetition must be"),
    (dict(presence="x"), "presence must be a finite number or one per row; got 'x'"),
    (dict(frequency=np.inf), "frequency must be a finite number"),
    (dict(min_new_tokens=-1), "min_new_tokens must be an integer >= 0 or one per row; got -1"),
    (dict(min_new_tokens=1.5), "min_new_tokens must be an integer"),
    (dict(banned_ids=3), "banned_ids must be a list of token ids >= 0, or one list per row; got 3"),
    (dict(banned_ids=[-1]), "banned_ids must be a list"),
    (dict(banned_ids=[1.5]), "banned_ids must be a list"),
    (dict(banned_ids=[[1], 2]), "banned_ids must be a list"),
]


@pytest.mark.parametrize("values, message", BAD, ids=range(len(BAD)))
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        Penalties.of(**values)
    assert "\n" not in str(caught.value)


def test_penalties_are_a_pytree_of_what_is_on():
    penalties = Penalties.of(repetition=1.5, banned_ids=[1, 2])
    assert len(jax.tree.leaves(penalties)) == 2
    assert dataclasses.replace(penalties, repetition=None, banned_ids=None).on is False
