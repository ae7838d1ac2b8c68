"""The decoding loop: one round, `generate`, `stream`, and a `Run` in progress."""

from specjax.decoding.generate import generate
from specjax.decoding.generation import Generation
from specjax.decoding.request import Request
from specjax.decoding.run import Run
from specjax.decoding.state import Counts, Decoder, Finish, Origin
from specjax.decoding.stop_strings import StopStrings
from specjax.decoding.stream import stream, stream_run

__all__ = [
    "Counts",
    "Decoder",
    "Finish",
    "Generation",
    "Origin",
    "Request",
    "Run",
    "StopStrings",
    "generate",
    "stream",
    "stream_run",
]
