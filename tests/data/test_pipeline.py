"""The pipeline: every token once, the same again, resumed exactly, sharded without overlap or loss."""

import math
import subprocess
import sys
from collections import Counter

import grain
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.data.pipeline import (
    PipelineConfig,
    TokenizedText,
    bits_per_byte,
    cut_prompts,
    encode_documents,
    evaluation_batches,
    pipeline_fingerprint,
    training_batches,
)
from specjax.data.text import Document
from specjax.data.tokenizer import ByteTokenizer

TOKENS = np.arange(1000, dtype=np.int32)
CONFIG = PipelineConfig(window=7, batch_size=8, seed=3)  # 142 windows, 17.75 batches an epoch


def take(iterator, count):
    return [next(iterator)["tokens"] for _ in range(count)]


def rows(batches) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch.tolist()]


def test_documents_are_joined_by_ends_of_text():
    tokenizer = ByteTokenizer()
    text = encode_documents(tokenizer, [Document("a", "hé"), Document("b", "x")])
    assert text.tokens.tolist() == [104, 0xC3, 0xA9, 256, 120, 256] and text.tokens.dtype == np.int32
    assert text.num_bytes == 4 and text.bytes_per_token == 4 / 6
    with pytest.raises(ValueError, match="no documents"):
        encode_documents(tokenizer, [])


@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_an_epoch_holds_every_window_once_in_a_new_order(length, window, batch, seed):
    windows = (length - 1) // window
    if not windows:
        return
    batches = take(training_batches(TOKENS[:length], PipelineConfig(window, batch, seed)), -(-2 * windows // batch))
    assert all(each.shape == (batch, window + 1) and each.dtype == np.int32 for each in batches)
    expected = Counter(tuple(range(i * window, (i + 1) * window + 1)) for i in range(windows))
    assert Counter(rows(batches)[:windows]) == expected == Counter(rows(batches)[windows : 2 * windows])


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = (rows(take(training_batches(TOKENS, CONFIG), 36))[i * 142 : (i + 1) * 142] for i in (0, 1))
    other = rows(take(training_batches(TOKENS, PipelineConfig(7, 8, seed=4)), 18))[:142]
    assert len({tuple(order) for order in (first, second, other, sorted(first))}) == 4


@pytest.fixture(scope="module")
def whole():
    return take(training_batches(TOKENS, CONFIG), 70)


@given(cut=st.integers(0, 60))
def test_resumed_is_never_interrupted(cut, whole):
    """Any cut, within the first epoch (17.75 batches), at its edge and in later ones."""
    before = training_batches(TOKENS, CONFIG)
    take(before, cut)
    after = training_batches(TOKENS, CONFIG)
    after.set_state(before.get_state())
    np.testing.assert_array_equal(take(after, 10), whole[cut : cut + 10])


def test_orbax_saves_and_restores_the_iterator_with_the_state(tmp_path, whole):
    iterator, state = training_batches(TOKENS, CONFIG), {"w": jnp.arange(3.0)}
    take(iterator, 20)
    with ocp.CheckpointManager(tmp_path) as manager:
        save = grain.checkpoint.CheckpointSave(iterator)
        manager.save(20, args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=save))
        take(iterator, 1)  # going on while the save runs must not change what is saved
        manager.wait_until_finished()
    resumed = training_batches(TOKENS, CONFIG)
    with ocp.CheckpointManager(tmp_path) as manager:
        restore = grain.checkpoint.CheckpointRestore(resumed)
        manager.restore(20, args=ocp.args.Composite(state=ocp.args.StandardRestore(state), data=restore))
    np.testing.assert_array_equal(take(resumed, 30), whole[20:50])


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 40))
def test_processes_share_out_what_one_would_read(count, cut):
    """At every step, after any cut, the shards together are the one-process batch."""
    single = training_batches(TOKENS, CONFIG)
    shards = [training_batches(TOKENS, CONFIG, index, count) for index in range(count)]
    for iterator in (single, *shards):
        iterator.set_state({"next_index": cut})
    for step in range(4):
        parts = [next(shard)["tokens"] for shard in shards]
        assert all(part.shape == (8 // count, 8) for part in parts), step
        assert sorted(rows(parts)) == sorted(rows([next(single)["tokens"]]))


@pytest.mark.parametrize("index, count", [(0, 3), (2, 2), (-1, 2)])
def test_batches_that_do_not_divide_are_refused(index, count):
    with pytest.raises(ValueError, match="process_count"):
        training_batches(TOKENS, CONFIG, index, count)


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="7 needs 8 tokens; the text has 7"):
        training_batches(TOKENS[:7], CONFIG)


@pytest.mark.parametrize("values", [{"window": 0}, {"batch_size": 0}, {"seed": -1}, {"seed": 2**32}])
def test_senseless_settings_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        PipelineConfig(**{"window": 7, "batch_size": 8, **values})


@given(st.integers(0, 999), st.integers(1, 10_000))
def test_fingerprint_sees_any_changed_token(place, change):
    changed = TOKENS.copy()
    changed[place] += change
    before = pipeline_fingerprint(TOKENS, CONFIG)
    assert before == pipeline_fingerprint(TOKENS.copy(), CONFIG) != pipeline_fingerprint(changed, CONFIG)


def test_fingerprint_sees_every_setting_and_the_length():
    others = [PipelineConfig(8, 8, 3), PipelineConfig(7, 9, 3), PipelineConfig(7, 8, 4)]
    prints = [pipeline_fingerprint(TOKENS, config) for config in [CONFIG, *others]]
    assert len({*prints, pipeline_fingerprint(TOKENS[:-1], CONFIG)}) == 5


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_evaluation_predicts_every_token_but_the_first_once(length, window, batch_size):
    tokens = TOKENS[:length] + 1
    batches = list(evaluation_batches(tokens, window, batch_size))
    assert all(batch["tokens"].shape == batch["mask"].shape == (batch_size, window + 1) for batch in batches)
    predicted = [batch["tokens"][:, 1:][batch["mask"][:, 1:]] for batch in batches]
    np.testing.assert_array_equal(np.concatenate([np.array([], int), *predicted]), tokens[1:])
    assert all((batch["tokens"][~batch["mask"]] == 0).all() for batch in batches)
    for batch in batches:  # a predicted token has the token before it in view
        before, after = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        assert ((after - before)[batch["mask"][:, 1:]] == 1).all()


def test_part_of_the_evaluation_is_spread_over_the_text():
    whole = [batch["tokens"][0, 0] for batch in evaluation_batches(TOKENS, 10, 4)]
    part = [batch["tokens"][0, 0] for batch in evaluation_batches(TOKENS, 10, 4, max_batches=5)]
    assert part == whole[::5] and len(list(evaluation_batches(TOKENS, 10, 4, max_batches=999))) == len(whole)


@given(st.integers(1, 12), st.integers(0, 8), st.integers(0, 99))
def test_prompts_come_from_one_document_each(min_len, extra, seed):
    documents = [Document(str(i), chr(97 + i) * (10 * i + 5)) for i in range(8)]
    tokenizer = ByteTokenizer()
    text: TokenizedText = encode_documents(tokenizer, documents)
    draw = lambda seed: cut_prompts(text.tokens, 20, min_len, min_len + extra, seed, 256)  # noqa: E731
    prompts = draw(seed)
    assert len(prompts) == 20 and {prompt.dtype for prompt in prompts} == {np.dtype(np.int32)}
    for prompt in prompts:
        assert min_len <= len(prompt) <= min_len + extra
        assert any(tokenizer.decode(prompt) in document.text for document in documents) and 256 not in prompt
    assert all(np.array_equal(a, b) for a, b in zip(prompts, draw(seed), strict=True))


def test_prompts_are_distinct_spread_and_use_every_place():
    prompts = cut_prompts(TOKENS, 996, 3, 5, seed=0)  # 996 places, each once
    assert sorted(prompt[0] for prompt in prompts) == list(range(996))
    assert {len(prompt) for prompt in prompts} == {3, 4, 5}
    assert all(np.array_equal(prompt, np.arange(prompt[0], prompt[0] + len(prompt))) for prompt in prompts)
    some, others = (cut_prompts(TOKENS, 5, 3, 5, seed) for seed in (1, 2))
    assert [prompt[0] for prompt in some] != [prompt[0] for prompt in others]


@pytest.mark.parametrize("num, low, high", [(1, 0, 4), (1, 5, 4), (0, 1, 4), (997, 3, 5), (1, 1, 2000)])
def test_impossible_prompts_are_refused(num, low, high):
    with pytest.raises(ValueError, match="prompts"):
        cut_prompts(TOKENS, num, low, high, seed=0)


def test_bits_per_byte_of_uniform_bytes_is_eight():
    assert math.isclose(bits_per_byte(math.log(256), 100, 100), 8)
    assert math.isclose(bits_per_byte(math.log(2), 100, 250), 0.4)


def test_batches_come_without_parsed_flags():
    code = (
        "import numpy as np\n"
        "from specjax.data.pipeline import PipelineConfig, training_batches\n"
        "iterator = training_batches(np.arange(100), PipelineConfig(7, 2))\n"
        "print(sum(next(iterator)['tokens'].shape[0] for _ in range(50)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, "--unknown_flag"], capture_output=True, text=True, timeout=120)
    assert (run.stdout.strip(), run.returncode) == ("100", 0), run.stderr
