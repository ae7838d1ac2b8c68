"""Prompt lookup against plain Python, and in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.decoding.forward import target_forward_in_widths
from specjax.drafters.matching import VOTERS
from specjax.drafters.ngram import NGram
from specjax.models import init_cache
from tests.decoding.tiny_pair import TARGET
from tests.drafters.proposing import context_of, drafts, propose
from tests.drafters.training_free import assert_text_is_the_targets, target

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=3, max_size=3)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def plain(text, drafter):
    """The draft, by trying every length and every place."""
    for n in range(drafter.max_match, drafter.min_match - 1, -1):
        begins = [at for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
        if begins:
            break
    else:
        return []
    if drafter.choice == "most_frequent":
        following = [text[at] for at in begins[-VOTERS:]]
        most = max(map(following.count, following))
        begins = [at for at in begins[-VOTERS:] if following.count(text[at]) == most]
    begin = begins[-1]
    continued = list(text)
    for _ in range(drafter.draft_length):
        continued.append(continued[begin + len(continued) - len(text)])
    draft = continued[len(text) :]
    return draft if drafter.wrap else draft[: len(text) - begin]


@given(TEXTS, st.sampled_from(["latest", "most_frequent"]), st.booleans(), st.sampled_from([(1, 1), (3, 1), (4, 2)]))
def test_it_drafts_what_plain_python_finds(texts, choice, wrap, match):
    drafter = NGram(5, *match, choice=choice, wrap=wrap)
    assert drafts(drafter, texts, fill=texts[0][-1]) == [plain(text, drafter) for text in texts]


def test_the_longest_match_wins_over_a_later_shorter_one():
    text = [1, 2, 3, 7, 8, 0, 3, 9, 0, 1, 2, 3]
    assert drafts(NGram(2), [text]) == [[7, 8]] and drafts(NGram(2, max_match=1), [text]) == [[9, 0]]
    assert drafts(NGram(2, max_match=5, min_match=4), [text]) == [[]]


def test_most_frequent_differs_from_latest():
    text = [4, 1, 4, 1, 4, 1, 4, 2, 4]
    assert drafts(NGram(1, 1), [text]) == [[2]] and drafts(NGram(1, 1, choice="most_frequent"), [text]) == [[1]]


def test_only_the_latest_occurrences_vote():
    text = [4, 1] * (VOTERS + 9) + [4, 2] * (VOTERS // 2 + 1) + [4]
    assert drafts(NGram(1, 1, choice="most_frequent"), [text], width=256) == [[2]]


def test_a_draft_ends_with_the_text_or_wraps():
    text = [7, 3, 5, 3, 5]
    assert drafts(NGram(5), [text]) == [[3, 5]] and drafts(NGram(5, wrap=True), [text]) == [[3, 5, 3, 5, 3]]


def test_a_round_without_a_proposal_is_one_plain_step():
    """The cache shows how wide the forward was: a narrow one touches the slot of the pending token and the next."""
    drafter = NGram(4, max_match=2)
    forward = jax.jit(target_forward_in_widths, static_argnums=(0, 5, 6))
    for texts, width in (([[1, 2, 3], [4, 5]], 1), ([[1, 2, 3], [4, 4]], 5)):
        context = context_of(texts)
        proposal = propose(drafter, None, None, context)
        cache = init_cache(TARGET, 2, 32 + 5).rollback(context.length - 1)
        pending = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)[:, 0]
        _, cache, _ = forward(TARGET, target().params, pending, proposal, cache, (), drafter.widths)
        written = np.abs(np.asarray(cache.keys[0])).sum((1, 3)) > 0
        for row, text in enumerate(texts):
            used = {len(text) - 1 + i for i in range(max(width, 2))}
            assert set(np.flatnonzero(written[row])) == used


def test_nothing_to_find_is_target_only_decoding():
    run = assert_text_is_the_targets(NGram(3, max_match=30, min_match=30), None, "coupled", temperature=1.0)
    assert run.counts.drafted.sum() == 0 and (run.counts.rounds == run.counts.emitted).all()


def test_greedy_text_is_the_targets():
    run = assert_text_is_the_targets(NGram(4), None, "block")
    assert run.counts.accepted.sum() > 10


def test_refused_arguments():
    with pytest.raises(ValueError, match="draft_length must be at least 1; got 0"):
        NGram(0)
    with pytest.raises(ValueError, match="min_match must be 1 to max_match = 3; got 4"):
        NGram(2, min_match=4)
    with pytest.raises(ValueError, match="min_match must be 1 to max_match = 0; got 1"):
        NGram(2, max_match=0)
    with pytest.raises(ValueError, match="choice must be latest or most_frequent; got 'first'"):
        NGram(2, choice="first")
    with pytest.raises(ValueError, match="takes no parameters"):
        NGram(2).check_params({})
