"""Which tokens begin and end texts: what the files of a model say, and well-known names where they say nothing."""

from collections.abc import Mapping
from typing import Any

import tokenizers

_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>")
_MESSAGE_END = "<|eom_id|>"  # Llama 3: before the answer of a tool


def named_token(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], name: str) -> int | None:
    """The id of a token that tokenizer_config.json names, made a special one; ValueError if it is no token."""
    written = settings.get(name)
    text = written.get("content") if isinstance(written, dict) else written
    if text is None:
        return None
    found = backend.token_to_id(text)
    if found is None:
        raise ValueError(f"{name} {text!r} of tokenizer_config.json is no token")
    known = backend.get_added_tokens_decoder().get(found)
    if known is None or not known.special:
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    return found


def added_beginning(backend: tokenizers.Tokenizer) -> int | None:
    """The token that the tokenizer itself puts before a text, if any."""
    backend.no_truncation()
    backend.no_padding()
    encoded = backend.encode("a")
    added = encoded.special_tokens_mask  # 0 for the text's own tokens; without one, a sole token may be the end
    return encoded.ids[0] if 0 in added and added[0] else None


def known_id(backend: tokenizers.Tokenizer, value: Any) -> int | None:
    """What a config gives as an id, if it is that of a token."""
    return value if _is_id(value) and backend.id_to_token(value) is not None else None


def ends_in(configs: Mapping[str, Any]) -> list[int]:
    """The ids that a config.json or generation_config.json names as ends: none, one or several."""
    value = configs.get("eos_token_id")
    return [i for i in (value if isinstance(value, list) else [value]) if _is_id(i)]


def ends_by_name(backend: tokenizers.Tokenizer) -> list[int]:
    """Special tokens whose names say that a text or a turn of a chat ends there. What is written so as text is none."""
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return [special[name] for name in (*_TEXT_ENDS, *_TURN_ENDS, _MESSAGE_END) if name in special]


def ends_a_turn(backend: tokenizers.Tokenizer, i: int) -> bool:
    """Whether a token is the end of a turn by name."""
    return backend.id_to_token(i) in _TURN_ENDS


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
