import jax
import numpy as np
import pytest

from specjax.training.mixture import Mixture
from tests.training import bigram


def mark(number):
    return lambda params, key, batch: {**batch, "source": number}


def source_of(mixture, seed):
    return mixture({}, jax.random.key(seed), {"tokens": np.zeros((1, 2), np.int32), "source": 0})["source"]


def test_shares_are_those_asked_for():
    """Three shares over 600 keys of a fixed seed; five standard deviations, so the false-alarm rate is about 1e-6."""
    mixture = Mixture(((0.5, mark(1)), (0.2, mark(2))))
    counts = np.bincount([source_of(mixture, seed) for seed in range(600)], minlength=3) / 600
    shares = np.array([0.3, 0.5, 0.2])
    assert np.all(np.abs(counts - shares) < 5 * np.sqrt(shares * (1 - shares) / 600))


def test_extremes_and_determinism():
    assert {source_of(Mixture(()), seed) for seed in range(5)} == {0}
    assert {source_of(Mixture(((1.0, mark(1)),)), seed) for seed in range(5)} == {1}
    assert {source_of(Mixture(((0.0, mark(1)), (1.0, mark(2)))), seed) for seed in range(5)} == {2}
    half = Mixture(((0.5, mark(1)),))
    assert [source_of(half, seed) for seed in range(20)] == [source_of(half, seed) for seed in range(20)]


def test_source_gets_the_current_parameters_and_a_key_of_its_own():
    seen = []

    def source(params, key, batch):
        seen.append((params, key))
        return batch

    Mixture(((1.0, source),))("params", jax.random.key(0), {"tokens": np.zeros((1, 2), np.int32)})
    assert seen[0][0] == "params" and not np.array_equal(*map(jax.random.key_data, (seen[0][1], jax.random.key(0))))


@pytest.mark.parametrize("shares", [(-0.1,), (0.7, 0.7), (1.1,)])
def test_bad_shares_are_named(shares):
    with pytest.raises(ValueError, match="shares of a mixture"):
        Mixture(tuple((share, mark(1)) for share in shares))


def test_a_resumed_run_mixes_as_one_that_was_not_killed(tmp_path):
    def reversed_text(params, key, batch):
        scale = 1 + int(jax.random.randint(key, (), 0, 3)) + int(params["table"][0, 0] > 0)
        return {"tokens": np.asarray((batch["tokens"][:, ::-1] * scale) % bigram.VOCAB, np.int32)}

    mixture = Mixture(((0.5, reversed_text),))
    whole = bigram.train(prepare=mixture)
    assert whole.history != bigram.train().history
    bigram.train(tmp_path, steps=5, prepare=mixture)
    resumed = bigram.train(tmp_path, prepare=mixture)
    assert resumed.resumed_at == 5
    assert resumed.history == whole.history[5:]
