"""Arguments of a call that can be wrong in kind, checked before they are used."""

import operator
from typing import Any

import numpy as np


def as_integer(name: str, value: Any) -> int:
    """The integer that an argument gives; ValueError for anything else, truth values and whole floats too."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer; got {repr(value)[:80]}") from None


def as_stop_strings(stop: Any) -> tuple[str, ...]:
    """The strings of `stop`, one string or several; ValueError for anything else, and for empty ones."""
    try:
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        raise ValueError(f"stop must be a string or a list of strings, () for none; got {repr(stop)[:80]}") from None
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"a stop string must be a string of at least one character; got {repr(string)[:80]}")
    return strings
