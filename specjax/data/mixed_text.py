"""Text and special tokens in one: what is text stays text, also where it reads like a special token.

A tokenizer looks for special tokens in the whole of a text or nowhere. And a text cannot be cut at them and encoded
part by part: some tokenizers treat the beginning of a text, or the white space around a special token, in their own
way. So special tokens get second names here, which no text has, and these are looked for instead:

    parts           [1, "say ", 7, "<|end|>", 2]        ids are special tokens
    as one text     ⟨1⟩say ⟨7⟩<|end|>⟨2⟩                ⟨ and ⟩ are a character that is set apart by Unicode
"""

from collections.abc import Sequence

import tokenizers

_SIGN = "\ufdef"  # a noncharacter


class MixedText:
    """Encodes texts with special tokens in them.

    Args:
        backend: of which a copy is made.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        seconds = [
            tokenizers.AddedToken(_name(i), lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            for i, token in special.items()
        ]
        self._backend.add_tokens(seconds)
        self._first = {self._backend.token_to_id(_name(i)): i for i in special}

    def encode(self, parts: Sequence[str | int]) -> list[int] | None:
        """Ids of the parts as one text; None if a text of them holds the very character that the names are made of."""
        if any(isinstance(part, str) and _SIGN in part for part in parts):
            return None
        text = "".join(part if isinstance(part, str) else _name(part) for part in parts)
        return [self._first.get(i, i) for i in self._backend.encode(text, add_special_tokens=False).ids]


def _name(i: int) -> str:
    return f"{_SIGN}{i}{_SIGN}"
