"""Suffix matching against plain Python, and in the loop."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.decoding import generate
from specjax.drafters.corpus_index import build_corpus_index
from specjax.drafters.matching import VOTERS
from specjax.drafters.suffix import Suffix
from tests.decoding.tiny_pair import LIMITS, PROMPTS, VOCAB
from tests.drafters.proposing import drafts
from tests.drafters.training_free import assert_text_is_the_targets, target, target_only

TOKENS = st.integers(0, 2)
FORMS = st.sampled_from([(1, 1, 0.35), (3, 1, 0.0), (8, 2, 0.6), (3, 1, 1.0)])  # max_match, min_match, min_score
TEXTS = st.lists(st.lists(TOKENS, min_size=1, max_size=14), min_size=3, max_size=3)
CORPUS = st.lists(TOKENS, min_size=17, max_size=17)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def occurrences(source, text, max_match, order=None):
    """(n, continuations): of the longest end of `text` that goes on in `source`, latest first or in a given order."""
    for n in range(min(max_match, len(text)), 0, -1):
        places = order if order is not None else reversed(range(len(source)))
        begins = [i + n for i in places if i + n < len(source) and source[i : i + n] == text[-n:]]
        if begins:
            return n, [source[at:] for at in begins]
    return 0, []


def plain(text, drafter, corpus=None):
    """The draft from lists of continuations that are narrowed token by token."""
    own_n, own = occurrences(text, text, drafter.max_match)
    corpus_n, more = 0, []
    if corpus is not None:
        order = sorted(range(len(corpus)), key=lambda i: corpus[i:])
        corpus_n, more = occurrences(corpus, text, drafter.max_match, order)
    longest = max(own_n, corpus_n)
    if longest < drafter.min_match:
        return []
    alive = (own if own_n == longest else []) + (more if corpus_n == longest else [])
    draft, score = [], np.float32(1)
    for _ in range(drafter.draft_length):
        alive = [rest for rest in alive if rest]
        if not alive:
            break
        following = [rest[0] for rest in alive]
        token = max(following, key=following.count)  # the first of the most frequent
        score = np.float32(score * following.count(token)) / np.float32(len(following))
        if score < np.float32(drafter.min_score):
            break
        draft.append(token)
        alive = [rest[1:] for rest in alive if rest[0] == token]
    return draft


@given(TEXTS, FORMS)
def test_it_drafts_what_plain_python_finds_in_the_text(texts, form):
    drafter = Suffix(6, *form)
    assert drafts(drafter, texts, fill=texts[0][-1]) == [plain(text, drafter) for text in texts]


@given(TEXTS, CORPUS, FORMS)
def test_it_drafts_what_plain_python_finds_in_text_and_corpus(texts, corpus, form):
    drafter = Suffix(6, *form, vocab_size=3)
    wanted = [plain(text, drafter, corpus) for text in texts]
    assert drafts(drafter, texts, build_corpus_index(corpus), fill=texts[0][-1]) == wanted


def test_the_draft_ends_before_its_score_falls_below_the_limit():
    """After 1 2: always 3; then 4 in two of three, then 5 in one of those two."""
    text = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 7, 0, 1, 2]
    by_score = {1.0: [3], 0.67: [3], 0.66: [3, 4], 0.34: [3, 4], 0.33: [3, 4, 6]}
    for min_score, wanted in by_score.items():
        assert drafts(Suffix(3, 2, min_score=min_score), [text]) == [wanted]


def test_the_longer_match_wins_and_equal_ones_add_up():
    drafter = Suffix(1, vocab_size=9)
    corpus = build_corpus_index([5, 1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 8])
    assert drafts(drafter, [[1, 2, 7, 3, 1, 2]], corpus) == [[7]]  # 7 twice, 8 twice: the own text speaks first
    assert drafts(drafter, [[1, 2, 6, 3, 1, 2]], corpus) == [[8]]
    assert drafts(drafter, [[2, 6, 3, 5, 1, 2]], corpus) == [[7]]  # 5 1 2 occurs in the corpus only
    assert drafts(drafter, [[3, 1, 2, 6, 4, 3, 1, 2]], corpus) == [[6]]  # 3 1 2 in the own text only


def test_many_occurrences_in_the_corpus_are_sampled_evenly():
    corpus = ([1, 2] * 3 + [1, 3] * 2 + [1, 4]) * (VOTERS * 2)
    index = build_corpus_index(corpus)
    for min_score, wanted in ((0.45, [2]), (0.55, [])):
        assert drafts(Suffix(1, min_score=min_score, vocab_size=5), [[0, 1]], index) == [wanted]


CORPUS_INDEX = build_corpus_index(np.random.default_rng(0).integers(0, VOCAB, 300))


def test_a_corpus_of_such_texts_speeds_up_rows_without_a_past():
    """The corpus holds the target's own greedy texts; one of noise gives the same texts in more rounds."""
    written = [np.r_[p, t] for p, t in zip(PROMPTS, target_only(0.0), strict=True)]
    pad = lambda ids: np.resize(ids, 300)  # noqa: E731  (one length, one compiled program)
    drafter = Suffix(4, vocab_size=VOCAB)
    knowing = assert_text_is_the_targets(drafter, build_corpus_index(pad(np.concatenate(written))), "greedy")
    other = assert_text_is_the_targets(drafter, CORPUS_INDEX, "greedy")
    assert other.counts.accepted.sum() > 10
    fewest = np.ceil(np.array(LIMITS) / 5)
    assert knowing.counts.rounds.sum() < other.counts.rounds.sum() and (knowing.counts.rounds >= fewest).all()


def test_refused_arguments():
    with pytest.raises(ValueError, match="draft_length must be at least 1; got 0"):
        Suffix(0)
    with pytest.raises(ValueError, match="min_match must be 1 to max_match = 16; got 17"):
        Suffix(2, min_match=17)
    with pytest.raises(ValueError, match=r"min_score must be in \[0, 1\]; got 1.5"):
        Suffix(2, min_score=1.5)
    with pytest.raises(ValueError, match="a corpus index and vocab_size, or neither; got vocab_size None and an index"):
        generate(target(), [[1]], max_new_tokens=2, drafter=Suffix(2), drafter_params=CORPUS_INDEX)
    with pytest.raises(ValueError, match="or neither; got vocab_size 5 and no index"):
        Suffix(2, vocab_size=5).check_params(None)
    with pytest.raises(ValueError, match="the drafter's vocabulary has 12 tokens and the target's 11"):
        other = dataclasses.replace(Suffix(2), vocab_size=12)
        generate(target(), [[1]], max_new_tokens=2, drafter=other, drafter_params=CORPUS_INDEX)
