"""Pretrained tokenizers: exact round trips, the ids of the original, and special tokens that no user can type."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specjax.data.pretrained_tokenizer import PretrainedTokenizer, load_pretrained_tokenizer
from specjax.data.tokenizer import Tokenizer as Protocol
from tests.data.tiny_vocabularies import CUTS, SPECIAL, TEXT, byte_level, folder_of, gguf_of, sentencepiece

ORIGINALS = {pre: byte_level(pre) for pre in CUTS}
BUILT = {pre: PretrainedTokenizer.from_gguf(gguf_of(original, pre)) for pre, original in ORIGINALS.items()}
BUILT["default"] = PretrainedTokenizer.from_gguf(gguf_of(ORIGINALS["gpt-2"], "default"))
BUILT["llama"] = PretrainedTokenizer.from_gguf(sentencepiece(add_space_prefix=True))
BUILT["gemma"] = PretrainedTokenizer.from_gguf(sentencepiece(add_space_prefix=False))

# Any Unicode text, with what splits words, and what imitates special tokens, well represented.
some_text = st.one_of(
    st.text(),
    st.text(" \t\n\r  _a1é数🙂\x00▁'", max_size=40),
    st.lists(
        st.sampled_from(
            [*SPECIAL, "<s>", "</s>", "<unk>", "<code>", "<0x0A>", "<tool é>", "[PAD1]", " ", "a", "don't", "123"]
        )
    ).map("".join),
    st.integers(0, len(TEXT)).flatmap(lambda start: st.integers(0, 60).map(lambda n: TEXT[start : start + n])),
)


@given(text=some_text)
@pytest.mark.parametrize("name", BUILT)
def test_round_trip_is_exact_and_without_special_tokens(name, text):
    tokenizer = BUILT[name]
    text = unicodedata.normalize("NFC", text) if name == "qwen2" else text  # Qwen's own tokenizer composes characters
    text = text.replace("▁", " ") if name in ("llama", "gemma") else text  # SentencePiece's own sign for a space
    text = text.replace("<code>", "") if name == "llama" else text  # Llama 2 puts a space behind an added token, too
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and tokenizer.special_ids.isdisjoint(ids.tolist())
    assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode()
    (batch,) = tokenizer.encode_batch([text])
    np.testing.assert_array_equal(batch, ids)
    assert tokenizer.decode_bytes(ids, continues=True) == b"".join(tokenizer.token_bytes[i] for i in ids)


@given(text=some_text)
@pytest.mark.parametrize("pre", CUTS)
def test_what_is_rebuilt_gives_the_ids_of_the_original(pre, text):
    original = ORIGINALS[pre]
    expected = original.encode(text, add_special_tokens=False).ids
    assert BUILT[pre].encode(text, parse_special=True).tolist() == expected or "[PAD" in text
    original.encode_special_tokens = True
    expected = original.encode(text, add_special_tokens=False).ids
    original.encode_special_tokens = False
    assert BUILT[pre].encode(text).tolist() == expected


def test_the_kinds_of_cuts_differ():
    """Or the test above could not tell one from another."""
    text = "(x123456 don't 12 .$+ \n\n A's"
    words = {pre: tuple(BUILT[pre]._backend.pre_tokenizer.pre_tokenize_str(text)) for pre in [*CUTS, "default"]}
    assert len(set(words.values())) == len(words)


def merged_by_score(text, tokens, scores):
    """SentencePiece's BPE: of all neighbours, merge those that make the piece of the highest score, leftmost first."""
    parts, ids = list(text), {token: i for i, token in enumerate(tokens)}
    while True:
        made = [
            (-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in ids
        ]
        if not made:
            break
        _, i = min(made)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]
    byte = lambda part: [ids[f"<0x{byte:02X}>"] for byte in part.encode()]  # noqa: E731
    return [i for part in parts for i in ([ids[part]] if part in ids else byte(part))]


@given(text=st.one_of(st.text(" adefnrtu<(:)数\n", max_size=30), st.integers(0, 400).map(lambda n: TEXT[n : n + 40])))
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_pieces_are_merged_by_score_and_the_rest_are_bytes(name, text):
    metadata = sentencepiece(add_space_prefix=name == "llama")
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    prefix = "▁" if name == "llama" and text else ""
    expected = merged_by_score(prefix + text.replace(" ", "▁"), tokens, scores)
    assert BUILT[name].encode(text).tolist() == expected


def test_a_space_before_the_first_word_goes_both_ways():
    llama, gemma = BUILT["llama"], BUILT["gemma"]
    ids = llama.encode("return")
    assert llama.strips_space and llama.token_bytes[ids[0]].startswith(b" ")
    assert llama.decode(ids) == "return" and llama.decode(ids, continues=True) == " return"
    assert not gemma.strips_space and gemma.decode(gemma.encode(" return")) == " return"


@pytest.mark.parametrize("name", BUILT)
def test_bytes_of_tokens(name):
    tokenizer = BUILT[name]
    assert isinstance(tokenizer, Protocol)
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.token_bytes)
    for i, text in enumerate(tokenizer.token_bytes):
        assert (text == b"") == (i in tokenizer.special_ids)
        assert tokenizer.decode_bytes([i], continues=True) == text
    assert tokenizer.end_of_text == tokenizer.eos_ids[0] and set(tokenizer.eos_ids) <= tokenizer.special_ids


def test_special_tokens_are_parsed_on_request_alone():
    tokenizer = BUILT["smollm"]
    text = "a<|start|>b<|end|>"
    parsed, typed = tokenizer.encode(text, parse_special=True), tokenizer.encode(text)
    assert [i for i in parsed if i in tokenizer.special_ids] == [0, 1] and tokenizer.decode(parsed) == "ab"
    assert tokenizer.special_ids.isdisjoint(typed.tolist()) and tokenizer.decode(typed) == text
    np.testing.assert_array_equal(tokenizer.encode(text), typed)  # asking for it once changes nothing after
    added = tokenizer.encode("x<tool é>")
    assert tokenizer.token_bytes[added[-1]] == "<tool é>".encode() and tokenizer.decode(added) == "x<tool é>"


def test_a_unigram_model_does_not_take_typed_special_tokens_for_words(tmp_path):
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in "▁abs</>")], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_pretrained_tokenizer(tmp_path)
    assert backend.encode("</s>").ids == [1] and tokenizer.eos_ids == (1,)
    assert tokenizer.decode(tokenizer.encode("a </s>b")) == "a </s>b"
    assert 1 in tokenizer.encode("a</s>", parse_special=True)


@pytest.mark.parametrize("name", ["smollm", "llama"])
def test_ids_past_the_vocabulary_decode_to_nothing(name):
    tokenizer = BUILT[name]
    ids = tokenizer.encode("end")
    padded = [tokenizer.vocab_size, *ids.tolist(), 10**6]
    assert tokenizer.decode(padded) == "end"
    assert tokenizer.decode([]) == "" and tokenizer.decode(iter(ids)) == "end"
    for wrong in ([-1], [0.5], [0, -100]):
        with pytest.raises(ValueError, match="token ids"):
            tokenizer.decode(wrong)


def test_half_a_surrogate_pair_is_refused():
    for encode in (BUILT["smollm"].encode, lambda text: BUILT["smollm"].encode_batch(["a", text])):
        with pytest.raises(ValueError, match="character 2 .* surrogate"):
            encode("ab\ud800")


def test_a_folder_names_beginnings_and_ends(tmp_path):
    backend = byte_level("smollm")
    unnamed = Tokenizer.from_str(backend.to_str().replace("<|end|>", "<|enough|>"))
    plain = load_pretrained_tokenizer(folder_of(tmp_path / "plain", unnamed))
    assert plain.bos_id is None and not plain.add_bos and plain.eos_ids == ()
    assert plain.end_of_text == plain.vocab_size and isinstance(plain, Protocol)
    settings = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>", "add_bos_token": True}
    generation = {"eos_token_id": [2, 1]}
    folder = folder_of(tmp_path / "named", backend, tokenizer_config=settings, generation_config=generation)
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = load_pretrained_tokenizer(path)
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (0, (1, 2), True)
    settings["eos_token"] = "Ġt"
    folder = folder_of(tmp_path / "made special", backend, tokenizer_config=settings)
    tokenizer = load_pretrained_tokenizer(folder)
    assert tokenizer.token_bytes[tokenizer.eos_ids[0]] == b""
    settings["eos_token"] = "nowhere"
    with pytest.raises(ValueError, match="gives no tokenizer .*eos_token 'nowhere'"):
        load_pretrained_tokenizer(folder_of(tmp_path / "wrong", backend, tokenizer_config=settings))


def test_the_post_processor_tells_whether_texts_get_a_beginning(tmp_path):
    from tokenizers.processors import TemplateProcessing

    backend = byte_level("llama-bpe")
    backend.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    tokenizer = load_pretrained_tokenizer(folder_of(tmp_path, backend, tokenizer_config=settings))
    assert tokenizer.add_bos and 0 not in tokenizer.encode("a")
    settings["add_bos_token"] = False
    assert not load_pretrained_tokenizer(folder_of(tmp_path, backend, tokenizer_config=settings)).add_bos


def test_gguf_files_say_whether_texts_get_a_beginning():
    assert BUILT["llama"].add_bos and BUILT["llama-bpe"].add_bos and not BUILT["smollm"].add_bos
    metadata = sentencepiece(True) | {"tokenizer.ggml.add_bos_token": False}
    assert not PretrainedTokenizer.from_gguf(metadata).add_bos
    assert BUILT["smollm"].eos_ids == (1, 2) and BUILT["smollm"].bos_id == 0


def test_the_fingerprint_is_that_of_the_vocabulary(tmp_path):
    same = [BUILT["smollm"], load_pretrained_tokenizer(folder_of(tmp_path, ORIGINALS["smollm"]))]
    assert len({tokenizer.fingerprint for tokenizer in same}) == 1
    changed = gguf_of(ORIGINALS["smollm"], "smollm")
    tokens = changed["tokenizer.ggml.tokens"]
    tokens[0], tokens[1] = tokens[1], tokens[0]
    others = [BUILT["llama"], PretrainedTokenizer.from_gguf(changed)]
    assert len({tokenizer.fingerprint for tokenizer in [*others, same[0]]}) == 3


@pytest.mark.parametrize("name", BUILT)
def test_saved_and_loaded_is_the_same(name, tmp_path):
    tokenizer = BUILT[name]
    tokenizer.save(tmp_path / "saved.json")
    loaded = load_pretrained_tokenizer(tmp_path / "saved.json")
    for what in ("fingerprint", "token_bytes", "special_ids", "bos_id", "eos_ids", "add_bos", "strips_space"):
        assert getattr(loaded, what) == getattr(tokenizer, what), what
    np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))


def test_damaged_files_are_named_in_one_line(tmp_path):
    content = byte_level("gpt-2").to_str()
    (tmp_path / "cut").mkdir()
    cases = {"cut/tokenizer.json": content[: len(content) // 2], "other.json": '{"a": 1}', "kind.json": "[]"}
    wordpiece = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    cases |= {"wordpiece.json": wordpiece.to_str(), "bytes.gguf": "GGUF and nothing else"}
    cases["saved.json"] = BUILT["llama"].to_json()[:-100]
    for name, text in cases.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=name) as error:
            load_pretrained_tokenizer(tmp_path / name)
        assert "\n" not in str(error.value)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none.json", tmp_path / "none.gguf"):
        with pytest.raises(ValueError, match=str(path)):
            load_pretrained_tokenizer(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported; known are gpt2, llama"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not supported; known are .*smollm"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "token_type has 1 entries for"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "holds 'a' twice"),
        ({"merges": ["a zzz"]}, "merges holds 'a zzz'"),
    ],
)
def test_metadata_that_do_not_fit_are_named(change, message):
    metadata = gguf_of(ORIGINALS["gpt-2"], "gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        PretrainedTokenizer.from_gguf(metadata)
