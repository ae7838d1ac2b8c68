"""What a GGUF file says about itself, and the reader that its tensors come from: that of the gguf package."""

import functools
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType


class _Reader(gguf.GGUFReader):
    """gguf's reader; lists are taken in one go, as a vocabulary read element by element takes seconds."""

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        if kind == GGUFValueType.ARRAY or count == 0:
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        start, types = orig_offs + 12, [GGUFValueType.ARRAY, GGUFValueType(kind)]
        if kind != GGUFValueType.STRING:
            values = self._get(start, self.gguf_scalar_to_np[types[1]], count)
            if len(values) < count:
                raise ValueError(f"it ends within a list of {count} values")
            return 12 + values.nbytes, [*head, values], [2], types
        buffer, length_at, end, strings = memoryview(self.data), struct.Struct("<Q").unpack_from, start, []
        for _ in range(count):
            (length,) = length_at(buffer, end)
            strings.append(np.frombuffer(buffer, np.uint8, length, end + 8))
            end += 8 + length
        return end - orig_offs, [*head, *strings], list(range(2, 2 + count)), types


def open_gguf(path: str | os.PathLike) -> gguf.GGUFReader:
    """The reader of a file, its metadata parsed and its tensors mapped, not read.

    Raises:
        ValueError: nothing there, truncated, one part of several, or no GGUF file; one line that names it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give the path of a .gguf file")
    try:
        reader = _Reader(path)
    except Exception as error:  # the reader has no error of its own: it runs into whatever a wrong byte leads to
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is truncated, or no GGUF file ({type(error).__name__}: {reason})") from None
    if reader.byte_order != "I":
        raise ValueError(f"{path} is of the other byte order; convert it with gguf-convert-endian")
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise ValueError(f"{path} is one of {parts.contents()} parts; join them with llama-gguf-split --merge")
    return reader


def metadata_of(reader: gguf.GGUFReader, path: str | os.PathLike, without: str = "") -> dict[str, Any]:
    """Keys and values of an open file, but for keys that begin with `without`, as plain Python values.

    Raises:
        ValueError: text that is no UTF-8, or a value that is cut off.
    """
    values = {}
    for key, field in reader.fields.items():
        if without and key.startswith(without):
            continue
        try:
            values[key] = field.contents()
        except Exception as error:
            raise ValueError(f"{path}: the value of {key} cannot be read ({type(error).__name__}: {error})") from None
    return values


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """Keys and values of a GGUF file, as plain Python values; see `open_gguf` for errors."""
    path = Path(path).absolute()
    if not path.is_file():
        open_gguf(path)  # for its error
    about = path.stat()
    return dict(_read_once(path, about.st_mtime_ns, about.st_size))


@functools.lru_cache(maxsize=1)  # tokenizer and chat template read the same file, whose vocabulary takes its time
def _read_once(path: Path, changed: int, size: int) -> dict[str, Any]:
    return metadata_of(open_gguf(path), path)
