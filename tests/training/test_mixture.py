import json

import jax
import numpy as np
import pytest

from specjax.models.config import TransformerConfig
from specjax.training.manifest import describe
from specjax.training.mixture import Mixture
from specjax.training.rollouts import Sampled
from specjax.training.state import OptimizerConfig, create
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
    assert resumed.history == whole.history


@pytest.mark.parametrize(
    "change, message",
    [
        ({"share": 0.6}, "prepare.source_1.share was 0.5 when it was saved and is 0.6 now"),
        ({"temperature": 0.9}, "prepare.source_1.source.temperature was 1.0 .* is 0.9 now"),
        ({"prompt_length": 3}, "prepare.source_1.source.prompt_length was 2 .* is 3 now"),
        ({"params": "others"}, "prepare.source_1.source.params was "),
        ({"width": 16}, r"prepare.source_1.source.config.d_\w+ was .* now"),
        (None, "prepare was .* is None now"),
    ],
)
def test_another_mixture_is_refused_naming_what_differs(change, message, tmp_path):
    def mixture(share=0.5, width=8, params=None, prompt_length=2, temperature=1.0):
        config = TransformerConfig(vocab_size=bigram.VOCAB, d_model=width, num_layers=1, num_heads=1)
        params = {"table": np.ones(3) if params is None else np.zeros(3)}
        return Mixture(((share, Sampled(config, params, prompt_length, temperature)), (0.1, mark(1))))

    def about(prepare):
        saved = bigram.checkpoints(tmp_path)
        saved.describe(prepare=prepare)
        return saved

    state = create(OptimizerConfig(), bigram.initial_params(), jax.random.key(0))
    saved = about(mixture())
    saved.save(state)
    saved.close()
    saved = about(mixture())
    saved.restore(state)
    saved.close()
    saved = about(None if change is None else mixture(**change))
    with pytest.raises(ValueError, match=message) as error:
        saved.restore(state)
    assert "\n" not in str(error.value)
    saved.close()


def test_a_description_holds_no_arrays():
    config = TransformerConfig(vocab_size=bigram.VOCAB, d_model=8, num_layers=1, num_heads=1)
    sources = ((0.5, Sampled(config, {"table": np.ones((100, 100))}, 2)), (0.2, Sampled(config, None, 2)))
    described = describe(Mixture(sources))
    assert len(json.dumps(described)) < 5000
    assert described["source_2"]["source"]["params"] is None
    assert described["source_1"]["share"] == 0.5
