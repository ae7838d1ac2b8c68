"""Rows own their randomness, the two streams never meet, and only the position stream may be looked at twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.keys import Noise, Stream, row_keys
from specjax.sampling import draw, gumbel_max


def noise(seeds, lengths, stream=Stream.ROUND):
    return Noise(row_keys(seeds, len(lengths)), jnp.asarray(lengths, jnp.int32), stream)


def everything(n: Noise) -> list[np.ndarray]:
    """All numbers a round can draw, rows first."""
    if n.stream is Stream.ROUND:
        return [np.asarray(n.draft(4).uniform).T, np.asarray(n.accept(4)), np.asarray(n.next_token())[:, None]]
    return [
        np.asarray(jax.random.key_data(n.draft(4).key)).swapaxes(0, 1),
        np.asarray(n.gumbel(jnp.arange(5), 7)),
    ]


@pytest.mark.parametrize("stream", Stream)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50)), min_size=3, max_size=3), st.permutations(range(3)))
def test_a_row_sees_the_same_noise_in_any_slot_and_any_batch(stream, rows, order):
    seeds, lengths = zip(*rows, strict=True)
    together = everything(noise(seeds, lengths, stream))
    shuffled = everything(noise([seeds[i] for i in order], [lengths[i] for i in order], stream))
    for a, b in zip(together, shuffled, strict=True):
        np.testing.assert_array_equal(a[list(order)], b)
    alone = everything(noise(seeds[:1], lengths[:1], stream))
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[:1], b)


def test_rows_of_one_seed_differ_and_are_the_same_again():
    a, b = (jax.random.key_data(row_keys(3, 50)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert len(np.unique(a, axis=0)) == 50
    np.testing.assert_array_equal(jax.random.key_data(row_keys(3, 7)), a[:7])  # row i does not depend on the batch size


def test_no_number_of_the_round_stream_is_drawn_twice():
    """Over rows, rounds, depths and roles: 3 * 20 * 9 different uniforms."""
    drawn = np.concatenate([np.concatenate(everything(noise(0, [n] * 3)), 1) for n in range(1, 21)], 1)
    assert drawn.shape == (3, 180) and len(np.unique(drawn)) == drawn.size
    assert (drawn >= 0).all() and (drawn < 1).all()


def test_the_round_stream_is_fresh_where_a_later_round_revisits_a_position():
    early, late = noise(0, [10]), noise(0, [11])
    assert early.draft(3).uniform[1, 0] != late.draft(3).uniform[0, 0]  # both draft the token at position 11
    assert early.accept(3)[0, 1] != late.accept(3)[0, 0]


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
def test_the_position_stream_is_a_function_of_the_position_alone(position, before, other):
    views = []
    for back in (before, other):  # the token at `position`, seen by rounds that start at different lengths
        n = noise([5], [position + 5 - back], Stream.POSITION)
        views.append((n.gumbel(jnp.arange(6), 7)[0, back], jax.random.key_data(n.draft(6).key)[back, 0]))
    for a, b in zip(*views, strict=True):
        np.testing.assert_array_equal(a, b)


def test_neighbouring_positions_have_different_noise():
    gumbel = noise([5], [3], Stream.POSITION).gumbel(jnp.arange(20), 11)
    assert len(np.unique(gumbel)) == 220


def test_drafter_and_coupled_rule_see_the_same_gumbel_noise():
    """The draft of depth d + 1 and the target's token behind the node of depth d stand at the same position."""
    law = jax.nn.softmax(jax.random.normal(jax.random.key(1), (8, 13)) * 2)
    n = noise(0, range(4, 12), Stream.POSITION)
    sources, gumbel = n.draft(3), n.gumbel(jnp.arange(3), 13)
    tokens = [draw(law, jax.tree.map(lambda x, d=d: x[d], sources)) for d in range(3)]
    for depth in range(3):
        np.testing.assert_array_equal(tokens[depth], gumbel_max(law, gumbel[:, depth]))
    assert len(np.unique(np.stack(tokens))) > 1


def test_the_streams_differ():
    """The same row and number: a position key is never the round key, so nothing drawn from one repeats the other."""
    uniform = np.asarray(noise(0, range(1, 60), Stream.ROUND).draft(4).uniform)
    keys = noise(0, range(1, 60), Stream.POSITION).draft(4).key
    assert not np.isin(np.asarray(jax.vmap(jax.vmap(jax.random.uniform))(keys)), uniform).any()


def test_uniforms_are_uniform():
    """Chi-square over 20 cells with 19 degrees of freedom; fixed seed, false alarm rate 1e-3 per array."""
    n = noise(0, [9] * 20_000)
    for sample in (*n.draft(2).uniform, n.accept(2)[:, 1], n.next_token()):
        observed, _ = np.histogram(sample, 20, (0, 1))
        assert ((observed - 1000) ** 2 / 1000).sum() < 43.82
    correlation = np.corrcoef(np.stack([*n.draft(2).uniform, *n.accept(2).T, n.next_token()]))
    assert np.abs(correlation - np.eye(5)).max() < 4.4 / np.sqrt(20_000)  # 10 pairs, false alarm rate about 1e-4


@pytest.mark.parametrize("seed", [None, 1.5, "1", True, [1, 2], [1, 2, 3, 4], [[1, 2, 3]], 2**63, [0.0, 1.0, 2.0]])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match="seed must be"):
        row_keys(seed, 3)


@pytest.mark.parametrize("seed", [0, -1, 2**40, 2**63 - 1, np.uint8(3), [4, 4, 5], np.arange(3)])
def test_good_seeds(seed):
    assert row_keys(seed, 3).shape == (3,)


def test_all_64_bits_of_a_seed_count():
    seeds = [7, 2**32 + 7, 2**33 + 7, 2**32, 0, -1]
    alone = [jax.random.key_data(row_keys(seed, 1)).tolist() for seed in seeds]
    rows = jax.random.key_data(row_keys(seeds, len(seeds))).tolist()
    assert len({str(key) for key in alone}) == len({str(key) for key in rows}) == len(seeds)


def test_children_of_the_round_stream_are_all_different_and_the_first_is_a_chains():
    n = noise([3, 4], [5, 5])
    numbers = [np.asarray(n.draft_children(depth, 3, 2).uniform) for depth in (1, 2)]
    assert numbers[0].shape == (2, 3, 2)
    coins = [np.asarray(n.accept(9)).ravel(), np.asarray(n.next_token())]
    everything_drawn = np.concatenate([*(x.ravel() for x in numbers), *coins])
    assert len(np.unique(everything_drawn)) == everything_drawn.size
    np.testing.assert_array_equal(np.stack([x[:, 0, 0] for x in numbers]), n.draft(2).uniform)


def test_children_of_the_position_stream_share_the_positions_noise():
    """Without replacement all take it (the Gumbel top-k); with replacement the first does, whatever the parent."""
    n = noise([3, 4], [5, 8], Stream.POSITION)
    bits = lambda key: np.asarray(jax.random.key_data(key))  # noqa: E731
    chain = bits(n.draft(2).key)[1]
    without = bits(n.draft_children(2, 3, 2, replace=False).key)
    assert (without == chain[:, None, None]).all()
    drawn = bits(n.draft_children(2, 3, 2, replace=True).key)
    assert (drawn[:, :, 0] == chain[:, None]).all() and (drawn[:, :, 1] != chain[:, None]).any(-1).all()
