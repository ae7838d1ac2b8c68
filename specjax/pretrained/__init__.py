"""Pretrained models that turn text into text: load, generate, stream, chat."""

from specjax.pretrained.chat import Chat
from specjax.pretrained.drafters import saved_drafter
from specjax.pretrained.loading import independent_drafter, load
from specjax.pretrained.model import Pretrained
from specjax.pretrained.text_run import TextGeneration, TextRun, TextStream, text_seeds
from specjax.pretrained.visible_text import TextPiece, VisibleText

__all__ = [
    "Chat",
    "Pretrained",
    "TextGeneration",
    "TextPiece",
    "TextRun",
    "TextStream",
    "VisibleText",
    "independent_drafter",
    "load",
    "saved_drafter",
    "text_seeds",
]
