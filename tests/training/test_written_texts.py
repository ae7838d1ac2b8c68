"""Texts written before training: the writer's own, drawn by key, and not counted where they were given."""

import jax
import numpy as np
import pytest

from specjax.decoding import generate
from specjax.models import LanguageModel, TransformerConfig
from specjax.sampling import Sampling
from specjax.training.written_texts import Written, write_texts

TARGET = TransformerConfig(vocab_size=11, d_model=16, num_layers=2, num_heads=2, context_length=64)
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1], [2, 2, 2]]


@pytest.fixture(scope="module")
def target():
    return LanguageModel.init(TARGET, jax.random.key(0))


def test_greedy_texts_are_the_writers_own_however_many_are_written_at_once(target):
    plain = generate(target, PROMPTS, max_new_tokens=9, sampling=Sampling.of(0.0))
    wanted = np.concatenate([np.array(PROMPTS), np.stack(plain.tokens)], 1)
    for at_once in (2, 5, 32):
        np.testing.assert_array_equal(write_texts(target, PROMPTS, 9, 0.0, seed=0, at_once=at_once), wanted)


def test_sampled_texts_depend_on_the_seed_alone(target):
    one, other = (write_texts(target, PROMPTS, 9, 1.0, seed=3, at_once=n) for n in (2, 32))
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, write_texts(target, PROMPTS, 9, 1.0, seed=4))
    same = write_texts(target, [PROMPTS[0]] * 5, 9, 1.0, seed=3)
    assert len({tuple(row) for row in same.tolist()}) > 1


def test_a_batch_is_some_of_the_texts_with_their_prompts_masked():
    tokens = np.arange(60, dtype=np.int32).reshape(5, 12)
    source = Written(tokens, 4)
    corpus = {"tokens": np.zeros((3, 12), np.int32)}
    batch = source(None, jax.random.key(1), corpus)
    chosen = batch["tokens"][:, 0] // 12
    np.testing.assert_array_equal(batch["tokens"], tokens[chosen])
    assert len(set(chosen.tolist())) == 3
    assert batch["mask"].shape == (3, 12) and not batch["mask"][:, :4].any() and batch["mask"][:, 4:].all()
    np.testing.assert_array_equal(source(None, jax.random.key(1), corpus)["tokens"], batch["tokens"])
    drawn = {int(source(None, jax.random.key(k), corpus)["tokens"][0, 0]) for k in range(40)}
    assert drawn == {0, 12, 24, 36, 48}
    assert source(None, jax.random.key(0), {"tokens": np.zeros((8, 12), np.int32)})["tokens"].shape == (8, 12)


def test_texts_of_another_width_are_refused():
    with pytest.raises(ValueError, match="written texts of 12 tokens must be as wide as the corpus batch, 13"):
        Written(np.zeros((5, 12), np.int32), 4)(None, jax.random.key(0), {"tokens": np.zeros((3, 13), np.int32)})


def test_a_checkpoint_tells_other_texts_from_these():
    tokens = np.zeros((5, 12), np.int32)
    assert Written(tokens, 4).description() == Written(tokens.copy(), 4).description()
    assert Written(tokens + 1, 4).description() != Written(tokens, 4).description()
