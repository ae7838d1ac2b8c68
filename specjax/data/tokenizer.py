"""Text to token ids and back: bytes, or byte pair encoding trained on the corpus.

Both are the same thing seen from outside: a table with the bytes of each token, so that decoding is a lookup, any
Unicode text survives the round trip, and ids cut at any point still decode. The last id ends a text; no text encodes
to it, whatever it contains. Byte b is id b in both.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from specjax.data.text import Document

# The library warns when a process that used its threads is forked and nobody has said whether threads are wanted.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
import tokenizers  # noqa: E402
from tokenizers import models, trainers  # noqa: E402

# Merges stay inside these pieces: a run of letters, of digits or of anything else, each with the space before it, or
# white space (whose last character, if it is a space, goes to the word that follows). Every character is in one piece.
_WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the code asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> Int[np.ndarray, "T"]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, "..."]]: ...

    def decode(self, tokens: Iterable) -> str: ...

    def decode_bytes(self, tokens: Iterable) -> bytes: ...

    @property
    def fingerprint(self) -> str: ...

    def save(self, path: str | os.PathLike) -> None: ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes: ids 0..255, and 256 ends a text."""

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def end_of_text(self) -> int:
        return 256

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what the tokenizer is saved as."""
        return _fingerprint(self.to_json())

    def encode(self, text: str) -> Int[np.ndarray, "T"]:
        """Ids of a text, int32, without an end of text. ValueError for text that has no UTF-8 form."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, "..."]]:
        """Ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Iterable) -> str:
        """Text of the ids; ends of text are left out, and bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def decode_bytes(self, tokens: Iterable) -> bytes:
        """Bytes of the ids, exactly; ends of text have none. ValueError for an id outside the vocabulary."""
        return _lookup([bytes([byte]) for byte in range(256)] + [b""], tokens)

    def to_json(self) -> str:
        return json.dumps({"kind": "byte"})

    def save(self, path: str | os.PathLike) -> None:
        pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class BPETokenizer:
    """Byte pair encoding (Sennrich et al. 2016, on bytes as in GPT-2).

    Attributes:
        definition: the model in the JSON of the `tokenizers` library, each byte written as the character of its number.
    """

    definition: str = dataclasses.field(repr=False)

    @classmethod
    def train(cls, documents: Iterable[Document], vocab_size: int, max_bytes: int = 4_000_000) -> "BPETokenizer":
        """Learns the merges; the same documents in the same order give the same tokenizer.

        Args:
            documents: training text. Where it is more than `max_bytes`, documents are taken in the order of their
                names' hashes until that much is reached.
            vocab_size: V, with the 256 bytes and the end of text; fewer when the text runs out of pairs.
            max_bytes: how much text to look at.

        Raises:
            ValueError: a vocabulary under 257, or no text.
        """
        if vocab_size < 257:
            raise ValueError(f"vocab_size must be at least 257 (the bytes and an end of text); got {vocab_size}")
        documents, seen, words = list(documents), 0, []
        for document in sorted(documents, key=lambda document: _fingerprint(document.name)):
            words += [_as_characters(word) for word in _WORDS.findall(document.text[: max_bytes - seen])]
            seen += len(_utf8(document.text))
            if seen >= max_bytes:
                break
        if not words:
            raise ValueError(f"no text to train a tokenizer on: {len(documents)} documents, max_bytes {max_bytes}")
        model = tokenizers.Tokenizer(models.BPE())
        alphabet = [chr(byte) for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        model.train_from_iterator(words, trainer)
        return cls(model.to_str())

    @functools.cached_property
    def _model(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.definition)

    @functools.cached_property
    def _table(self) -> list[bytes]:
        return [self._model.id_to_token(i).encode("latin-1") for i in range(self._model.get_vocab_size())] + [b""]

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @property
    def end_of_text(self) -> int:
        return len(self._table) - 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what the tokenizer is saved as."""
        return _fingerprint(self.to_json())

    def encode(self, text: str) -> Int[np.ndarray, "T"]:
        """Ids of a text, int32, without an end of text. ValueError for text that has no UTF-8 form."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, "..."]]:
        """Ids of each text. Each distinct word is encoded once, three times as fast as encoding the texts."""
        known: dict[str, list[int]] = {}
        encoded = []
        for text in texts:
            _utf8(text)  # for the error: it names the place in the text, not in a word
            words = _WORDS.findall(text)
            new = [word for word in dict.fromkeys(words) if word not in known]
            batch = self._model.encode_batch_fast([_as_characters(word) for word in new], add_special_tokens=False)
            known.update(zip(new, (encoding.ids for encoding in batch), strict=True))
            encoded.append(np.array([i for word in words for i in known[word]], np.int32))
        return encoded

    def decode(self, tokens: Iterable) -> str:
        """Text of the ids; ends of text are left out, and bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", "replace")

    def decode_bytes(self, tokens: Iterable) -> bytes:
        """Bytes of the ids, exactly; ends of text have none. ValueError for an id outside the vocabulary."""
        return _lookup(self._table, tokens)

    def to_json(self) -> str:
        return json.dumps({"kind": "bpe", "model": json.loads(self.definition)}, ensure_ascii=True)

    def save(self, path: str | os.PathLike) -> None:
        pathlib.Path(path).write_text(self.to_json(), encoding="utf-8")


def load_tokenizer(path: str | os.PathLike) -> ByteTokenizer | BPETokenizer:
    """Reads what `save` wrote. ValueError, naming the file, if it is missing or something else."""
    try:
        record = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if record["kind"] == "byte":
            return ByteTokenizer()
        if record["kind"] == "bpe":
            tokenizer = BPETokenizer(json.dumps(record["model"]))
            _ = tokenizer.vocab_size  # builds the model, so that a damaged file is noticed here
            return tokenizer
        raise ValueError(f"unknown kind {record['kind']!r}")
    except Exception as error:  # the library raises plain Exception for a damaged model
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a tokenizer saved by specjax ({type(error).__name__}: {reason})") from None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is half of a surrogate pair; UTF-8 has none") from None


def _as_characters(word: str) -> str:
    """The word's bytes, each as the character of that number: what the BPE model sees as its alphabet."""
    return _utf8(word).decode("latin-1")


def _lookup(table: list[bytes], tokens: Iterable) -> bytes:
    ids = np.asarray(tokens if hasattr(tokens, "__len__") else list(tokens)).reshape(-1)
    if ids.size and not (np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0 and ids.max() < len(table)):
        span = f"[{ids.min()}, {ids.max()}]"
        raise ValueError(f"token ids must be integers in [0, {len(table)}); got {ids.dtype} in {span}")
    return b"".join([table[i] for i in ids.tolist()])


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
