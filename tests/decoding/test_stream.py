"""Streaming is generating, seen in pieces."""

import numpy as np
import pytest

from specjax.decoding import stream
from specjax.drafters import Independent
from tests.decoding.tiny_pair import DRAFTER, LIMITS, PROMPTS


def options(pair):
    return dict(
        max_new_tokens=LIMITS[:3],
        buffer_length=32,
        drafter=Independent(DRAFTER, 3),
        drafter_params=pair.drafter.params,
        seed=[40, 41, 42],
        stop_ids=[6],
    )


@pytest.mark.parametrize("rounds_per_yield", [1, 2, 7, 1000])
def test_the_pieces_make_up_the_generation(pair, rounds_per_yield):
    whole = pair.run(seed=[40, 41, 42], stop_ids=[6])
    pieces, snapshots = zip(
        *stream(pair.target, PROMPTS[:3], rounds_per_yield=rounds_per_yield, **options(pair)), strict=True
    )
    last = snapshots[-1]
    for i in range(3):
        joined = np.concatenate([piece[i] for piece in pieces])
        assert joined.tolist() == last.tokens[i].tolist() == whole.tokens[i].tolist()
        np.testing.assert_array_equal(last.logprobs[i], whole.logprobs[i])
        assert last.origins[i].tolist() == whole.origins[i].tolist()
    assert last.finish == whole.finish and (last.counts.rounds == whole.counts.rounds).all()
    assert len(pieces) == -(-whole.counts.rounds.max() // rounds_per_yield)
    for number, (piece, so_far) in enumerate(zip(pieces, snapshots, strict=True), start=1):
        assert any(len(row) for row in piece)
        assert (so_far.counts.rounds <= number * rounds_per_yield).all()
        for i in range(3):
            cut = len(so_far.tokens[i]) < len(whole.tokens[i])
            assert so_far.finish[i] == ("running" if cut else whole.finish[i])
            assert so_far.counts.emitted[i] == len(so_far.tokens[i])


def test_errors_come_at_once(pair):
    with pytest.raises(ValueError, match="rounds_per_yield must be at least 1; got 0"):
        stream(pair.target, PROMPTS[:3], rounds_per_yield=0, **options(pair))
    with pytest.raises(ValueError, match="prompts is empty"):
        stream(pair.target, [], **options(pair))
