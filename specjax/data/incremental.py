"""Text of tokens while they come: only whole characters, and nothing lost."""

import codecs
from collections.abc import Iterable

import numpy as np

from specjax.data.pretrained_tokenizer import PretrainedTokenizer
from specjax.data.tokenizer import Tokenizer


class IncrementalText:
    """Gives the text of tokens piece by piece; the pieces joined equal `tokenizer.decode` of all tokens.

    A character whose bytes lie in several tokens is given with the last of them. Bytes that are no UTF-8 become U+FFFD
    as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False):
        """`continues`: whether the tokens continue a text; see `PretrainedTokenizer.decode`."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = isinstance(tokenizer, PretrainedTokenizer) and tokenizer.strips_space and not continues

    def push(self, ids: int | np.integer | Iterable) -> str:
        """What these tokens add."""
        ids = [ids] if isinstance(ids, int | np.integer) else ids
        if not isinstance(self._tokenizer, PretrainedTokenizer):
            return self._decoder.decode(self._tokenizer.decode_bytes(ids))
        text = self._tokenizer.decode_bytes(ids, continues=True)
        if text and self._strips:
            text, self._strips = text.removeprefix(b" "), False
        return self._decoder.decode(text)

    def finish(self) -> str:
        """What is left: U+FFFD if the tokens end within a character, else nothing."""
        return self._decoder.decode(b"", final=True)
