"""The tokenizer that a GGUF file describes in its metadata, rebuilt with the tokenizers library.

    tokenizer.ggml.model    "gpt2": byte-level BPE with a list of merges, cut into words by the expression that
                            tokenizer.ggml.pre names; "llama": SentencePiece BPE, where the piece of the highest score
                            is merged first and characters without a piece fall back to bytes
    .tokens, .token_type    the vocabulary, and of which type each token is
"""

import math
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_SPACE = "▁"  # how SentencePiece writes a space


class TokenType(IntEnum):
    """What a token is for; only normal ones, bytes and user-defined ones stand for text."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# Kind -> the expressions that cut text into words, one after the other.
_CUTS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_SAME_CUTS = {
    **dict.fromkeys(("phi-2", "mpt", "olmo"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "smaug-bpe"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
}


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer. Tokens that stand for no text are special ones, user-defined ones are always recognised.

    Raises:
        ValueError: a kind that is not supported, or lists that are missing or do not fit.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; known are gpt2, llama")
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, len(tokens)) if "tokenizer.ggml.token_type" in metadata else None
    types = types or [TokenType.NORMAL] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ValueError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    build = _byte_level if kind == "gpt2" else _sentencepiece
    tokenizer = build(metadata, vocab, types)
    for special in (True, False):
        chosen = [token for token, type_ in zip(tokens, types, strict=True) if _added(type_, special)]
        added = [AddedToken(token, special=special, normalized=False) for token in chosen if token]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether texts begin with the token for that; files that do not say follow their kind."""
    usual = metadata.get("tokenizer.ggml.model") == "llama" or _pre(metadata) == "llama-bpe"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def _added(type_: int, special: bool) -> bool:
    kinds = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED) if special else (TokenType.USER_DEFINED,)
    return type_ in kinds


def _pre(metadata: dict) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    return _SAME_CUTS.get(name, name)


def _byte_level(metadata: dict, vocab: dict[str, int], types: list[int]) -> Tokenizer:
    pre = _pre(metadata)
    if pre not in _CUTS:
        known = ", ".join(sorted((*_CUTS, *_SAME_CUTS)))
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; known are {known}")
    merges = []
    for merge in _list(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(f"tokenizer.ggml.merges holds {merge!r}, whose parts or result are no tokens")
        merges.append((left, right))
    # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict, vocab: dict[str, int], types: list[int]) -> Tokenizer:
    scores = _list(metadata, "scores", float, len(vocab))
    if not all(map(math.isfinite, scores)):
        raise ValueError("tokenizer.ggml.scores holds values that are not finite")
    unknown = next((token for token, type_ in zip(vocab, types, strict=True) if type_ == TokenType.UNKNOWN), None)
    model = models.BPE(
        vocab=vocab, merges=_merges(vocab, types, scores), byte_fallback=True, unk_token=unknown, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    normal = [normalizers.Replace(" ", _SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normal.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocab: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two others, the piece of the highest score first."""
    normal = {token for token, type_ in zip(vocab, types, strict=True) if type_ == TokenType.NORMAL}
    ways = []
    for token in normal:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ways.append((-scores[vocab[token]], vocab[token], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ways)]


def _list(metadata: dict, name: str, kind: type, length: int | None = None) -> list:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"the metadata has no tokenizer.ggml.{name}, a list of {kind.__name__}")
    if length is not None and len(values) != length:
        raise ValueError(f"tokenizer.ggml.{name} has {len(values)} entries for {length} tokens")
    return values
