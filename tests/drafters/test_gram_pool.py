"""The pool against a plain list."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specjax.drafters.gram_pool import GramPool

SIZE, NEW = 5, 4
GRAM = st.tuples(st.integers(0, 1), st.integers(0, 2))
ROUNDS = st.lists(
    st.lists(st.lists(st.tuples(GRAM, st.booleans()), min_size=NEW, max_size=NEW), min_size=2, max_size=2), max_size=5
)
add, find = jax.jit(GramPool.add), jax.jit(GramPool.find, static_argnums=2)


class PlainRing:
    """Slots that are reused in turn; an n-gram that comes again leaves a hole where it was."""

    def __init__(self):
        self.slots, self.end = [None] * SIZE, 0

    def add(self, grams):
        grams = [g for i, g in enumerate(grams) if g not in grams[i + 1 :]]
        self.slots = [None if g in grams else g for g in self.slots]
        for gram in grams:
            self.slots[self.end % SIZE] = gram
            self.end += 1

    def find(self, first, number):
        latest = [self.slots[at % SIZE] for at in range(self.end - 1, self.end - 1 - SIZE, -1)]
        return [g for g in latest if g is not None and g[0] == first][:number]


@given(ROUNDS, st.integers(0, 1), st.integers(1, 4))
def test_it_is_a_ring_of_distinct_grams(rounds, first, number):
    pool, rings = GramPool.empty(2, SIZE, 2), [PlainRing(), PlainRing()]
    for rows in rounds:
        grams = jnp.array([[g for g, _ in row] for row in rows])
        pool = add(pool, grams, jnp.array([[w for _, w in row] for row in rows]))
        for ring, row in zip(rings, rows, strict=True):
            ring.add([g for g, wanted in row if wanted])
    grams, found = find(pool, jnp.array([first, first]), number)
    for row, ring in enumerate(rings):
        wanted = ring.find(first, number)
        assert [tuple(g) for g in grams[row][found[row]].tolist()] == wanted
        assert found[row].tolist() == [True] * len(wanted) + [False] * (number - len(wanted))
    assert np.asarray(grams).min(initial=0) >= 0  # never an id that must not be looked up


def test_a_row_that_adds_nothing_stays_as_it_is():
    pool = add(GramPool.empty(2, SIZE, 2), jnp.array([[[1, 2], [1, 0]]] * 2), jnp.ones((2, 2), bool))
    after = add(pool, jnp.array([[[1, 2], [0, 1]]] * 2), jnp.array([[False, False], [True, True]]))
    assert after.grams[0].tolist() == pool.grams[0].tolist() and after.end.tolist() == [2, 4]
    assert after.grams[1].tolist() == [[-1, -1], [1, 0], [1, 2], [0, 1], [-1, -1]]
