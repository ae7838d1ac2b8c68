"""The decoding loop: one round, `generate` and `stream`."""

from specjax.decoding.generate import Generation, generate
from specjax.decoding.state import Counts, Decoder, Finish, Origin
from specjax.decoding.stream import stream

__all__ = ["Counts", "Decoder", "Finish", "Generation", "Origin", "generate", "stream"]
