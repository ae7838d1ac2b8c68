"""What the tokens of a vocabulary stand for, in bytes, whichever of two ways it writes them in.

    byte level       every byte is a character of its own: Ġ is a space, Ċ a line feed, é the byte E9 (GPT-2's table)
    SentencePiece    ▁ is a space, <0x0A> is the byte 0A, anything else is its UTF-8
"""

import json
import re

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def _byte_of_character() -> dict[int, str]:
    """GPT-2's table (Radford et al. 2019): printable Latin-1 stands for itself, the rest follows 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {256 + i: chr(byte) for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def read_decoder(backend: tokenizers.Tokenizer) -> tuple[str, bool]:
    """("byte level" or "pieces", whether decoding takes away a space at the start).

    Raises:
        ValueError: a tokenizer that decodes in another way.
    """
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    by_type = {step["type"]: step for step in steps}
    if "ByteLevel" in by_type and by_type.keys() <= {"ByteLevel", "Fuse"}:
        return "byte level", False
    spaces = [step for step in steps if step["type"] == "Replace"]
    known = by_type.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not known or any((step["pattern"], step["content"]) != ({"String": _SPACE}, " ") for step in spaces):
        names = ", ".join(by_type)
        raise ValueError(f"its vocabulary is neither byte-level nor SentencePiece: it decodes by {names}")
    strips = by_type.get("Strip", {}).get("start", 0) > 0
    metaspace = by_type.get("Metaspace", {"prepend_scheme": "never"})
    return "pieces", strips or metaspace.get("prepend_scheme", "always") != "never"


def bytes_of_token(name: str, kind: str, added: bool) -> bytes:
    """The bytes that a token, as the vocabulary of that kind writes it, stands for.

    Args:
        name: the token.
        kind: "byte level" or "pieces".
        added: whether it was added to the vocabulary as it is, to be found before a text is cut into words.
    """
    if kind == "pieces":
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE, " ").encode()
    if added:
        return name.encode()
    try:
        return name.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()
