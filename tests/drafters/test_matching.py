"""Searches over the text against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specjax.drafters import matching

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=3, max_size=3)
match_lengths = jax.jit(matching.match_lengths, static_argnums=2)
latest, vote = jax.jit(matching.latest, static_argnums=1), jax.jit(matching.vote)


def padded(texts, width=14, fill=0):
    """(tokens, length) with whatever `fill` says behind the text."""
    rows = [text + [fill] * (width - len(text)) for text in texts]
    return jnp.array(rows), jnp.array([len(text) for text in texts])


def plain_match(text, at, max_match):
    n = 0
    while n < max_match and n < at and text[at - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n


@given(TEXTS, st.integers(1, 5), st.integers(0, 2))
def test_match_lengths(texts, max_match, fill):
    """Also: what lies past the end is not looked at, although it would match."""
    tokens, length = padded(texts, fill=fill)
    counts = np.asarray(match_lengths(tokens, length, max_match))
    for text, row in zip(texts, counts, strict=True):
        wanted = [plain_match(text, at, max_match) if at < len(text) else 0 for at in range(14)]
        assert row.tolist() == wanted


@given(st.lists(st.booleans(), min_size=7, max_size=7), st.integers(1, 9))
def test_latest(flags, number):
    wanted = [i for i in reversed(range(7)) if flags[i]][:number]
    got = latest(jnp.array([flags]), number)[0].tolist()
    assert got == (wanted + [-1] * 9)[: min(number, 7)]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=6, max_size=6))
def test_vote(voters):
    tokens, voting = jnp.array([[t for t, _ in voters]]), jnp.array([[v for _, v in voters]])
    winner, votes, total = (int(x[0]) for x in vote(tokens, voting))
    counts = [sum(v and t == token for t, v in voters) if own else 0 for token, own in voters]
    assert (winner, votes, total) == (counts.index(max(counts)), max(counts), sum(v for _, v in voters))
