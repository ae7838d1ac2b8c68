"""Text that comes token by token: the same as all at once, and never half a character."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.data.incremental import IncrementalText
from specjax.data.pretrained_tokenizer import PretrainedTokenizer
from specjax.data.tokenizer import ByteTokenizer
from tests.data.tiny_vocabularies import byte_level, gguf_of, sentencepiece

TOKENIZERS = {
    "byte level": PretrainedTokenizer.from_gguf(gguf_of(byte_level("smollm"), "smollm")),
    "pieces": PretrainedTokenizer.from_gguf(sentencepiece(add_space_prefix=False)),
    "pieces after a space": PretrainedTokenizer.from_gguf(sentencepiece(add_space_prefix=True)),
    "specjax's bytes": ByteTokenizer(),
}


# Random ids, special ones, bytes that are no UTF-8 and padding among them; and texts.
groups = st.lists(st.one_of(st.lists(st.integers(0, 450), max_size=4), st.just(" a"), st.text(max_size=3)), max_size=8)


@given(groups=groups)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_joined_are_the_text(name, groups):
    tokenizer = TOKENIZERS[name]
    last = 256 if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocab_size + 3
    groups = [tokenizer.encode(g).tolist() if isinstance(g, str) else [min(i, last) for i in g] for g in groups]
    text = IncrementalText(tokenizer)
    pieces = [*[text.push(group) for group in groups], text.finish()]
    assert "".join(pieces) == tokenizer.decode([i for group in groups for i in group])


@given(text=st.text("aé数🙂 \n", min_size=1, max_size=20), continues=st.booleans())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_characters_come_whole_and_at_once(name, text, continues):
    """Byte by byte, each character is given with its last byte and nothing before."""
    tokenizer = TOKENIZERS[name]
    id_of = {tokenizer.decode_bytes([i], **_continues(tokenizer, True)): i for i in range(tokenizer.vocab_size)}
    bytewise = lambda text: [id_of[bytes([byte])] for byte in text.encode()]  # noqa: E731
    incremental, done = IncrementalText(tokenizer, continues), ""
    for end, character in enumerate(text, 1):
        *first, last = bytewise(character)
        assert [incremental.push(i) for i in first] == [""] * len(first)
        done += incremental.push(np.int32(last))
        assert done == tokenizer.decode(bytewise(text[:end]), **_continues(tokenizer, continues))
    assert incremental.finish() == ""


def _continues(tokenizer, value):
    return {} if isinstance(tokenizer, ByteTokenizer) else {"continues": value}


def test_half_a_character_is_held_back_until_the_end():
    text = IncrementalText(ByteTokenizer())
    assert text.push([0x61, 0xF0, 0x9F]) == "a" and text.push([0x99]) == "" and text.finish() == "\ufffd"
    text = IncrementalText(ByteTokenizer())
    assert text.push([0xF0, 0x9F]) == "" and text.push(0x61) == "\ufffda"
