"""Tokenizers: exact round trips, determinism, and an end of text that no text can imitate."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.data.text import Document
from specjax.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer

TEXT = "def accept(p, q, u):\n    return u < p / q  # strict, ünïcode 数学\n\n\nclass Rule:\n    pass\n" * 20
DOCUMENTS = [Document("one", TEXT), Document("two", "for i in range(10):\n\tprint(i ** 2, 'two')\r\n" * 20)]
TOKENIZERS = {"byte": ByteTokenizer(), "bpe": BPETokenizer.train(DOCUMENTS, 320)}

# Any Unicode text, with what splits words well represented. Surrogates have no UTF-8 form and get an error instead.
any_text = st.one_of(st.text(), st.text(" \t\n\r  _a1é数🙂\x00", max_size=40))


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


@given(text=any_text)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_round_trip_is_exact(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.end_of_text not in ids
    assert len(ids) == 0 or 0 <= ids.min() and ids.max() < tokenizer.vocab_size


@given(texts=st.lists(any_text, max_size=5))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_batch_is_its_texts(name, texts):
    tokenizer = TOKENIZERS[name]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


@given(text=any_text, cut=st.integers(0, 20))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_cut_anywhere_still_decode(name, text, cut):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids[:cut]) + tokenizer.decode_bytes(ids[cut:]) == text.encode()
    assert isinstance(tokenizer.decode(ids[:cut]), str)


def test_end_of_text_is_the_last_id_and_decodes_to_nothing(tokenizer):
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1
    end = [tokenizer.end_of_text]
    assert tokenizer.decode([*tokenizer.encode("a"), *end, *tokenizer.encode("b")]) == "ab"


@pytest.mark.parametrize("ids", [[-1], [9999], [0.5], [0, -100]])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, ids):
    with pytest.raises(ValueError, match="token ids"):
        tokenizer.decode(ids)


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(ValueError, match="character 2 .* surrogate") as error:
        tokenizer.encode("ab\ud800")
    assert "\n" not in str(error.value)


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.vocab_size == tokenizer.vocab_size
    np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"kind": "other"}', '{"kind": "bpe", "model": {}}', "\x00"])
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json") as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


def test_bpe_has_the_size_asked_for_and_compresses():
    tokenizer = TOKENIZERS["bpe"]
    assert tokenizer.vocab_size == 320
    assert len(tokenizer.encode(TEXT)) < 0.6 * len(ByteTokenizer().encode(TEXT))


def test_bpe_of_little_text_has_fewer_tokens():
    assert 257 < BPETokenizer.train([Document("a", "ab ab")], 1000).vocab_size < 1000


def test_bytes_are_the_first_ids():
    for tokenizer in TOKENIZERS.values():
        assert [tokenizer.decode_bytes([byte]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_bpe_training_is_bounded_and_ignores_the_order_of_documents():
    documents = [Document(f"file{i}", f"word{i} " * 50) for i in range(20)]
    bounded = BPETokenizer.train(documents, 300, max_bytes=900)
    assert bounded == BPETokenizer.train(documents[::-1], 300, max_bytes=900)
    assert bounded != BPETokenizer.train(documents, 300)


def test_bpe_refuses_what_cannot_be_trained():
    with pytest.raises(ValueError, match="257"):
        BPETokenizer.train(DOCUMENTS, 256)
    with pytest.raises(ValueError, match="no text"):
        BPETokenizer.train([], 300)


def test_fingerprints_differ():
    other = BPETokenizer.train(DOCUMENTS[:1], 320)
    assert len({other.fingerprint, *(tokenizer.fingerprint for tokenizer in TOKENIZERS.values())}) == 3


def test_another_process_trains_the_same_and_forks_without_a_warning():
    """Another hash seed, threads of the tokenizers library used before a fork: same result, nothing on stderr."""
    code = (
        "import os\n"
        "from specjax.data.text import Document\n"
        "from specjax.data.tokenizer import BPETokenizer\n"
        f"tokenizer = BPETokenizer.train([Document('one', {TEXT!r}), Document('two', {DOCUMENTS[1].text!r})], 320)\n"
        "tokenizer.encode_batch(['a b c'] * 10)\n"
        "child = os.fork()\n"
        "if not child: os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(tokenizer.fingerprint)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment |= {"PYTHONHASHSEED": "7", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert run.stdout.strip() == TOKENIZERS["bpe"].fingerprint and run.stderr == ""
