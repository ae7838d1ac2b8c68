import json

import grain
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from specjax.data import answers as module
from specjax.data.answers import Answer, AnswerSource, AnswerWriter, answer_batches, answers_fingerprint, cut_windows
from specjax.data.pipeline import PipelineConfig


def answer(number, prompt=4, length=9):
    tokens = np.arange(length, dtype=np.int32) + 100 * number
    return Answer(f"p{number}", tokens, np.arange(length) >= prompt, 0.5 * (number % 2))


def shard(index, size=3):
    return [answer(index * size + i, 2 + i, 6 + 2 * index + i) for i in range(size)]


def write(folder, shards=2, about="prompts"):
    writer = AnswerWriter(folder, about)
    for index in writer.missing(shards):
        writer.write(index, shard(index))
    writer.finish(shards)
    return AnswerSource(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(a, b):
    return (a.prompt, a.tokens.tolist(), a.mask.tolist(), a.temperature) == (
        b.prompt, b.tokens.tolist(), b.mask.tolist(), b.temperature,
    )  # fmt: skip


def test_answers_come_back_as_they_were_written(tmp_path):
    source = write(tmp_path)
    expected = shard(0) + shard(1)
    assert len(source) == 6 and all(same(a, b) for a, b in zip(source, expected, strict=True))
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert source.tokens().tolist() == [
        t for a in expected for t, counts in zip(a.tokens, a.mask, strict=True) if counts
    ]
    assert source[0].tokens.dtype == np.int32 and source[0].mask.dtype == bool
    shards = [str(tmp_path / name) for name in json.loads((tmp_path / "shards.json").read_text())["shards"]]
    assert same(Answer.from_bytes(grain.sources.ArrayRecordDataSource(shards)[5]), expected[5])  # grain's own reader


def test_a_writer_that_was_stopped_writes_what_is_missing_and_ends_with_the_same_bytes(tmp_path):
    write(tmp_path / "whole", 3)
    writer = AnswerWriter(tmp_path / "stopped", "prompts")
    writer.write(0, shard(0))
    writer.write(2, shard(2))
    (tmp_path / "stopped" / ".answers-00001.arrayrecord.part").write_bytes(b"killed while writing")
    again = AnswerWriter(tmp_path / "stopped", "prompts")
    assert again.missing(3) == [1]
    write(tmp_path / "stopped", 3)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_a_shard_that_was_renamed_but_not_entered_is_written_again(tmp_path):
    """Killed between the two."""
    write(tmp_path, 1)
    name = module.shard_name(1)
    (tmp_path / name).write_bytes(b"complete, but nobody knows")
    assert AnswerWriter(tmp_path, "prompts").missing(2) == [1]
    assert len(write(tmp_path, 2)) == 6


@pytest.mark.parametrize("damage", ["changed", "shortened", "removed"])
def test_a_shard_that_is_not_what_was_written_is_named_and_can_be_written_again(tmp_path, damage):
    write(tmp_path)
    before, path = contents(tmp_path), tmp_path / module.shard_name(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink() if damage == "removed" else path.write_bytes(data if damage == "changed" else data[:-1])
    with pytest.raises(ValueError, match="answers-00001.arrayrecord (was changed since|is missing).*; remove .* again"):
        AnswerSource(tmp_path)
    assert AnswerWriter(tmp_path, "prompts").missing(2) == [1]
    write(tmp_path)
    assert contents(tmp_path) == before


def test_a_full_disk_costs_the_shard_in_progress_and_ends_in_one_line(tmp_path, monkeypatch):
    writer, real = AnswerWriter(tmp_path, "prompts"), module.write_records
    writer.write(0, shard(0))
    before = contents(tmp_path)

    def full(path, records):
        real(path, records[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_records", full)
    with pytest.raises(ValueError, match="cannot write to .*: No space left on device; make room .*are kept") as caught:
        writer.write(1, shard(1))
    assert "\n" not in str(caught.value) and contents(tmp_path) == before
    monkeypatch.setattr(module, "write_records", lambda path, records: (_ for _ in ()).throw(RuntimeError("a\nb")))
    with pytest.raises(ValueError, match="cannot write to .*: a b; make room"):
        writer.write(1, shard(1))
    monkeypatch.undo()
    assert len(write(tmp_path)) == 6


def test_folders_of_something_else_are_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match="holds answers to other prompts; choose another folder"):
        AnswerWriter(tmp_path, "others")
    with pytest.raises(ValueError, match="holds no answers"):
        AnswerSource(tmp_path / "empty")
    (tmp_path / "shards.json").write_text("{")
    with pytest.raises(ValueError, match="shards.json is damaged"):
        AnswerSource(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to .*file"):
        AnswerWriter(tmp_path / "file", "prompts")


@hypothesis.given(
    prompt=st.integers(1, 30), length=st.integers(0, 60), window=st.integers(1, 25), context=st.integers(1, 25)
)
def test_every_answer_token_counts_once_with_its_context(prompt, length, window, context):
    context = min(context, window)
    mask = np.arange(prompt + length) >= prompt
    counted = np.zeros(len(mask), int)
    for start, first in cut_windows(mask, window, context):
        inside = np.arange(len(mask))
        inside = (inside >= max(start, first)) & (inside < start + window + 1) & mask
        counted += inside
        assert 0 <= start and inside.any()
        if len(mask) > window + 1:
            assert np.flatnonzero(inside)[0] - start >= min(context, np.flatnonzero(inside)[0])
        else:
            assert start == 0
    assert (counted == mask).all()


def test_the_picture_in_the_docstring():
    assert cut_windows(np.arange(12) >= 4, 5, 2) == [(2, 4), (6, 8)]


def test_batches_hold_every_answer_token_once_an_epoch_padded_and_masked(tmp_path):
    source = write(tmp_path, 3)
    config = PipelineConfig(window=7, batch_size=1, seed=3)
    places = sum(len(cut_windows(a.mask, 7, 2)) for a in source)
    batches = answer_batches(source, config, context=2)
    seen = []
    for _ in range(places):
        batch = next(batches)
        assert batch["tokens"].shape == batch["mask"].shape == (1, 8)
        assert batch["tokens"].dtype == np.int32 and batch["mask"].dtype == bool
        seen += batch["tokens"][batch["mask"]].tolist()
    assert sorted(seen) == sorted(source.tokens().tolist()) and places > len(source)


def test_batches_are_shuffled_repeatable_and_go_on_from_a_number(tmp_path):
    source = write(tmp_path, 3)
    config = PipelineConfig(window=9, batch_size=2, seed=5)
    first = answer_batches(source, config, 3)
    taken = [next(first) for _ in range(20)]
    assert first.get_state() == {"next_index": 20} or "20" in str(first.get_state())
    again = answer_batches(AnswerSource(tmp_path), config, 3)
    again.set_state(_state_after(source, config, 11))
    for batch in taken[11:]:
        other = next(again)
        assert (batch["tokens"] == other["tokens"]).all() and (batch["mask"] == other["mask"]).all()
    assert len({tuple(batch["tokens"][:, 0]) for batch in taken}) > 5
    half = [next(answer_batches(source, config, 3, i, 2)) for i in range(2)]
    assert sorted(np.concatenate([h["tokens"] for h in half])[:, 0]) == sorted(taken[0]["tokens"][:, 0])


def _state_after(source, config, steps):
    iterator = answer_batches(source, config, 3)
    for _ in range(steps):
        next(iterator)
    return iterator.get_state()


def test_the_fingerprint_tells_batches_apart(tmp_path):
    one, config = write(tmp_path / "a"), PipelineConfig(window=7, batch_size=2)
    prints = {
        answers_fingerprint(one, config, 2),
        answers_fingerprint(one, config, 3),
        answers_fingerprint(one, PipelineConfig(window=8, batch_size=2), 2),
        answers_fingerprint(write(tmp_path / "b", 3), config, 2),
    }
    assert len(prints) == 4 and answers_fingerprint(AnswerSource(tmp_path / "a"), config, 2) in prints


def test_wrong_settings_of_batches_are_named(tmp_path):
    source, config = write(tmp_path), PipelineConfig(window=7, batch_size=3)
    for context in (0, 8):
        with pytest.raises(ValueError, match=f"context must be 1 to 7, the window; got {context}"):
            answer_batches(source, config, context)
    with pytest.raises(ValueError, match="batch_size 3 must be a multiple of process_count 2"):
        answer_batches(source, config, 2, 0, 2)
    writer = AnswerWriter(tmp_path / "silent", "x")
    writer.write(0, [answer(0, prompt=9)])
    with pytest.raises(ValueError, match="no answer tokens"):
        answer_batches(AnswerSource(tmp_path / "silent"), config, 2)
