"""Tokenizers of pretrained models: from tokenizer.json, or rebuilt from a GGUF file.

Whatever the kind, decoding is a table with the bytes of each id, so that text can be cut at any token and stop strings
can be followed byte by byte. Two kinds of vocabulary have such a table: byte-level ones (GPT-2, Llama 3, Qwen, SmolLM),
which write each byte as a character of its own, and SentencePiece ones (Llama 2, Gemma), which write a space as ▁ and a
byte as <0x0A>.
"""

import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int

from specjax.data.gguf_tokenizer import adds_bos, build_tokenizer
from specjax.data.mixed_text import MixedText
from specjax.data.settings_file import read_settings
from specjax.data.text_boundaries import added_beginning, ends_a_turn, ends_by_name, ends_in, known_id, named_token
from specjax.data.tokenizer import ByteTokenizer
from specjax.data.vocabulary_bytes import bytes_of_token, read_decoder

_SAVED = '{"kind": "pretrained"'  # how the files of `save` begin
_PADDING = re.compile(r"\[PAD\d+\]")  # what GGUF files fill their vocabularies up with


class PretrainedTokenizer:
    """A tokenizer with the `Tokenizer` protocol of specjax.

    Attributes:
        token_bytes: what each id stands for; b"" for special tokens.
        special_ids: the tokens that stand for no text: ends, beginnings, turns of a chat.
        special_texts: how each of them is written, by id.
        added_ids: tokens that were added to the vocabulary as they are, the special ones among them. A model may have
            no weights for those at its end.
        bos_id: the token that begins a text, or None.
        eos_ids: the tokens that end one; the first is the usual one.
        add_bos: whether the model expects texts to begin with `bos_id`.
        strips_space: whether `encode` puts a space before a text, which `decode` takes away again (Llama 2, which also
            puts one behind every added token; that one stays).
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_id: int | None, eos_ids: Sequence[int], add_bos: bool):
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._lock = backend, threading.Lock()
        self.bos_id, self.eos_ids, self.add_bos = bos_id, tuple(eos_ids), add_bos and bos_id is not None
        added = backend.get_added_tokens_decoder()
        self.special_texts = {i: token.content for i, token in added.items() if token.special}
        self.special_ids, self.added_ids = frozenset(self.special_texts), frozenset(added)
        self._names = {i: name for name, i in backend.get_vocab(with_added_tokens=True).items()}
        kind, self.strips_space = read_decoder(backend)
        table = [b""] * (max(self._names, default=-1) + 1)
        for i, name in self._names.items():
            if i not in self.special_ids:
                table[i] = bytes_of_token(name, kind, i in added)
        self.token_bytes = tuple(table)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike,
        tokenizer_config: dict | None = None,
        generation_config: dict | None = None,
        model_config: dict | None = None,
    ) -> "PretrainedTokenizer":
        """The tokenizer of a tokenizer.json.

        The ends are all that the three configs name, and nothing more: a model's own word counts, also where its
        vocabulary has further ends by name. Only where none of them names an end are these taken.

        Args:
            path: the file.
            tokenizer_config: what tokenizer_config.json says: bos_token, eos_token, add_bos_token.
            generation_config, model_config: what generation_config.json and config.json say: eos_token_id may name
                further ends; bos_token_id counts where neither tokenizer_config nor the tokenizer itself tells.

        Raises:
            ValueError: nothing there, damaged, or a vocabulary of another kind; one line that names it.
        """
        try:
            backend = tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
            settings, configs = tokenizer_config or {}, (generation_config or {}, model_config or {})
            bos, eos = (named_token(backend, settings, name) for name in ("bos_token", "eos_token"))
            added = added_beginning(backend)
            candidates = (bos, added, *(known_id(backend, config.get("bos_token_id")) for config in configs))
            bos = next((i for i in candidates if i is not None), None)
            ends = [*([] if eos is None else [eos]), *ends_in(configs[0]), *ends_in(configs[1])]
            add_bos = settings.get("add_bos_token")
            if add_bos is None:
                add_bos = bos is not None and added == bos
            return cls(backend, bos, list(dict.fromkeys(ends or ends_by_name(backend))), bool(add_bos))
        except Exception as error:  # the library raises plain Exception for a damaged file
            raise _unreadable(path, error) from None

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> "PretrainedTokenizer":
        """The tokenizer that the metadata of a GGUF file describes.

        Many files of chat models name the end of a text alone and not that of a turn. So where neither an eot_token_id
        nor the name of the end says what ends a turn, all special tokens that are ends by name end a text, as in
        llama.cpp. A base model's text stays the same, unless it has such a token in it.

        Raises:
            ValueError: a kind of tokenizer that is not supported, or metadata that lacks something.
        """
        special = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        ends = [special[name] for name in ("eos", "eot", "eom") if special[name] is not None]
        backend = build_tokenizer(metadata)
        if special["eot"] is None and not any(ends_a_turn(backend, i) for i in ends):
            ends += ends_by_name(backend)
        return cls(backend, special["bos"], list(dict.fromkeys(ends)), adds_bos(metadata))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self.token_bytes)

    @property
    def end_of_text(self) -> int:
        """The usual end; `vocab_size`, which is no token, if none is known."""
        return self.eos_ids[0] if self.eos_ids else self.vocab_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what every id means: equal for tokenizer.json and the GGUF file of the same model."""
        digest = hashlib.sha256()
        for i in range(self.vocab_size):
            meaning = self.meaning(i)
            if meaning is not None:
                text = meaning.encode() if isinstance(meaning, str) else meaning
                digest.update(b"%d %d " % (i, len(text)) + text)
        return digest.hexdigest()

    def meaning(self, i: int) -> bytes | str | None:
        """What an id stands for: bytes of text, a special token as it is written, None for padding and no token."""
        if i not in self._names or _PADDING.fullmatch(self._names[i]):
            return None
        return self.special_texts[i] if i in self.special_ids else self.token_bytes[i]

    def encode(self, text: str, parse_special: bool = False) -> Int[np.ndarray, "T"]:
        """Ids of a text, int32, without a beginning or an end.

        Args:
            text: any text. Special tokens written in it are text like any other.
            parse_special: whether they become the special tokens instead, as in the output of a chat template.

        Raises:
            ValueError: text that has no UTF-8 form.
        """
        ByteTokenizer().encode(text)  # for the error of a text that has no UTF-8 form
        ids = self._encode([text], parse_special)[0]
        return np.array(ids, np.int32) if parse_special else self._as_text(ids, text)

    def encode_batch(self, texts: Sequence[str]) -> list[Int[np.ndarray, "..."]]:
        """Ids of each text, special tokens taken as text."""
        for text in texts:
            ByteTokenizer().encode(text)
        return [self._as_text(ids, text) for ids, text in zip(self._encode(texts), texts, strict=True)]

    def encode_mixed(self, parts: Sequence[str | int]) -> Int[np.ndarray, "T"]:
        """Ids of a text that is given in parts: texts, which stay text, and ids of special tokens between them.

        As if all were encoded in one go: but the first part, none is the beginning of a text.

        Raises:
            ValueError: text that has no UTF-8 form.
        """
        for part in parts:
            if isinstance(part, str):
                ByteTokenizer().encode(part)
        ids, never_text = self._mixed_text.encode(parts), self._never_text
        if ids is not None and [i for i in ids if i in never_text] == [i for i in parts if i in never_text]:
            return np.array(ids, np.int32)
        split = [self.encode(part) if isinstance(part, str) else np.array([part], np.int32) for part in parts]
        return np.concatenate([np.zeros(0, np.int32), *split])

    def decode(self, tokens: Iterable, continues: bool = False) -> str:
        """Text of the ids; special tokens are left out, and bytes that are no UTF-8 become U+FFFD.

        Args:
            tokens: ids; those past the vocabulary (padded embeddings) decode to nothing.
            continues: whether they continue a text, so that a space before the first word belongs to it.
        """
        return self.decode_bytes(tokens, continues).decode("utf-8", "replace")

    def decode_bytes(self, tokens: Iterable, continues: bool = False) -> bytes:
        """Bytes of the ids, exactly; see `decode`. ValueError for what is no id: negative, or no integer."""
        ids = np.asarray(tokens if hasattr(tokens, "__len__") else list(tokens)).reshape(-1)
        if ids.size and not (np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0):
            raise ValueError(f"token ids must be integers of at least 0; got {ids.dtype}, least {ids.min()}")
        table = self.token_bytes
        text = b"".join([table[i] for i in ids.tolist() if i < len(table)])
        return text[1:] if self.strips_space and not continues and text[:1] == b" " else text

    def to_json(self) -> str:
        about = {"kind": "pretrained", "bos_id": self.bos_id, "eos_ids": self.eos_ids, "add_bos": self.add_bos}
        return json.dumps({**about, "tokenizer": json.loads(self._backend.to_str())})

    def save(self, path: str | os.PathLike) -> None:
        """Writes one file that `load_pretrained_tokenizer` reads."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def _encode(self, texts: Sequence[str], parse_special: bool = False) -> list[list[int]]:
        with self._lock:  # the backend can be told to look for special tokens, but not in the call itself
            self._backend.encode_special_tokens = not parse_special
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def _as_text(self, ids: list[int], text: str) -> Int[np.ndarray, "T"]:
        """The ids of a text, without special tokens: a unigram model takes </s> for a word, unless it is cut."""
        if not self._never_text.isdisjoint(ids):
            cuts = [match.start() + 1 for match in self.special_pattern.finditer(text)]
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            ids = [i for part in self._encode(parts) for i in part]
        return np.array(ids, np.int32)

    @functools.cached_property
    def _mixed_text(self) -> MixedText:
        return MixedText(self._backend)

    @functools.cached_property
    def special_pattern(self) -> re.Pattern:
        """Matches any special token as it is written."""
        longest_first = sorted(self.special_texts.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @functools.cached_property
    def _never_text(self) -> frozenset[int]:
        """Special tokens but that for unknown characters."""
        unknown = getattr(self._backend.model, "unk_token", None)
        return frozenset(i for i, text in self.special_texts.items() if text != unknown)


def load_pretrained_tokenizer(path: str | os.PathLike) -> PretrainedTokenizer:
    """The tokenizer of a model folder, a tokenizer.json, a .gguf file, or what `save` wrote.

    Raises:
        ValueError: nothing there, damaged, or of a kind that is not supported; one line that names it.
    """
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        from specjax.data.gguf_metadata import read_metadata  # the gguf package is needed for these files alone

        metadata = read_metadata(path)
        try:
            return PretrainedTokenizer.from_gguf(metadata)
        except Exception as error:
            raise _unreadable(path, error) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no tokenizer in {path}: give a folder with tokenizer.json, or a .gguf file")
    with open(file, "rb") as opened:
        saved_by_specjax = opened.read(len(_SAVED)) == _SAVED.encode()
    if saved_by_specjax:
        saved = read_settings(file)
        try:
            backend = tokenizers.Tokenizer.from_str(json.dumps(saved["tokenizer"]))
            return PretrainedTokenizer(backend, saved["bos_id"], saved["eos_ids"], saved["add_bos"])
        except Exception as error:
            raise _unreadable(file, error) from None
    beside = (file.with_name(name) for name in ("tokenizer_config.json", "generation_config.json", "config.json"))
    return PretrainedTokenizer.from_file(file, *map(read_settings, beside))


def _unreadable(path, error: Exception) -> ValueError:
    return ValueError(f"{path} gives no tokenizer ({type(error).__name__}: {' '.join(str(error).split())})")
