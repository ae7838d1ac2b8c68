"""Small tokenizers of the kinds that pretrained models have, as tokenizer.json and as GGUF metadata."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "def accept(p, q, u):\n    return u < p / q  # strict, ünïcode 数学 don't we'll I'VE\n\n\nclass Rule:\n\tpass\r\n"
    "In 2024 there were 1234567 rounds; 3.14 of them, for x in range(10): 🙂 <|end|> the end of the text. " * 3
)
SPECIAL = ("<|start|>", "<|end|>", "<|turn|>")

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _split(expression):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated", False), _BYTES])


# How the tokenizer.json of GPT-2, SmolLM2, Llama 3 and Qwen2.5 cut text into words.
CUTS = {
    "gpt-2": lambda: _GPT2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}


def byte_level(pre: str) -> Tokenizer:
    """A byte-level BPE with three special tokens before the bytes and one added token behind them."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = CUTS[pre](), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    return tokenizer


def gguf_of(tokenizer: Tokenizer, pre: str) -> dict:
    """The metadata that a converter writes for a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    names = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    kinds = [3 if name in SPECIAL else 4 if name == "<tool é>" else 1 for name in names]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*names, "[PAD1]", "[PAD2]"],
        "tokenizer.ggml.token_type": [*kinds, 5, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
    }


def sentencepiece(add_space_prefix: bool, seed_text: str = TEXT, size: int = 60) -> dict:
    """The metadata of a SentencePiece BPE, whose pieces are the commonest strings of the text, longer ones last."""
    text = seed_text.replace(" ", "▁")
    counts = {}
    for length in range(1, 6):
        for start in range(len(text) - length + 1):
            piece = text[start : start + length]
            if "\n" not in piece and "▁" not in piece[1:] and piece.isprintable() and piece.isascii() | (length == 1):
                counts[piece] = counts.get(piece, 0) + 1
    characters = sorted(piece for piece in counts if len(piece) == 1 and piece not in "数🙂")
    longer = sorted((piece for piece in counts if len(piece) > 1), key=lambda piece: (-counts[piece], piece))[:size]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *longer, *characters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(longer), *[1] * len(characters)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, "<code>"],
        "tokenizer.ggml.token_type": [*kinds, 4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(longer) + len(characters))] + [0.0],
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def folder_of(path, backend, **configs):
    """A model's folder with a tokenizer, and configs by the names of their files; returns its path."""
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, content in configs.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path
