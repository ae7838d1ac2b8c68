"""The suffix array and its search against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.drafters import corpus_index
from specjax.drafters.corpus_index import build_corpus_index, check_corpus_index
from tests.drafters.test_matching import padded

TOKENS = st.integers(0, 2)
CORPUS = st.lists(TOKENS, min_size=9, max_size=9)
longest_in_corpus = jax.jit(corpus_index.longest_in_corpus, static_argnums=3)
spread_over = jax.jit(corpus_index.spread_over, static_argnums=2)


@given(st.lists(TOKENS, min_size=1, max_size=40))
def test_the_array_sorts_all_suffixes(corpus):
    order = build_corpus_index(corpus)["suffix_array"].tolist()
    assert order == sorted(range(len(corpus)), key=lambda i: corpus[i:])


def test_one_token_repeated_is_the_worst_case():
    assert build_corpus_index([7] * 1000)["suffix_array"].tolist() == list(range(999, -1, -1))


@given(CORPUS, st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=2, max_size=2))
def test_the_search_finds_every_occurrence_that_goes_on(corpus, texts):
    index = build_corpus_index(corpus)
    found = longest_in_corpus(index, *padded(texts, 6), 4)
    for text, matched, first, last in zip(texts, *(x.tolist() for x in found), strict=True):
        wanted, best = [], 0
        for n in range(1, min(4, len(text)) + 1):
            here = [i for i in range(len(corpus) - n) if corpus[i : i + n] == text[-n:]]
            if here:
                wanted, best = here, n
        assert matched == best
        assert sorted(index["suffix_array"].tolist()[first:last]) == wanted


@given(st.integers(0, 3), st.integers(0, 40), st.integers(1, 9))
def test_places_are_spread_over_the_range(first, size, number):
    places = spread_over(jnp.array([first]), jnp.array([first + size]), number)[0].tolist()
    kept = [p for p in places if p >= 0]
    assert len(kept) == min(size, number) and len(places) == number
    exact = range(size) if size <= number else [i * size // number for i in range(number)]
    assert kept == [first + i for i in exact]


def test_refused_corpora_and_indices():
    for bad in ([], [[1, 2]], [0.5], [1, -1]):
        with pytest.raises(ValueError, match="a corpus must be one non-empty sequence of token ids"):
            build_corpus_index(bad)
    good = build_corpus_index([1, 2, 1])
    check_corpus_index(good, 3)
    with pytest.raises(ValueError, match="the corpus holds token id 2; the vocabulary has ids 0 to 1"):
        check_corpus_index(good, 2)
    with pytest.raises(ValueError, match="make it with build_corpus_index"):
        check_corpus_index({"tokens": good["tokens"]}, 3)
    with pytest.raises(ValueError, match="int32 of one length, not empty"):
        check_corpus_index(good | {"tokens": np.zeros(2, np.int32)}, 3)
    with pytest.raises(ValueError, match="every position once"):
        check_corpus_index(good | {"suffix_array": np.zeros(3, np.int32)}, 3)
