"""safetensors files, read and written one tensor at a time.

    8 bytes          JSON                                              bytes
    its length       name -> {dtype, shape, data_offsets}, padded      of the tensors, side by side

The package checks the header of a file. Tensors are read from the file itself: the package maps it into memory, where
its pages count beside the arrays made from them, and its numpy reader has no bfloat16.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEADS_OF_PICKLES = (b"PK\x03\x04", b"\x80")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is.

    Attributes:
        name, file: of the tensor, and of the file that holds it.
        kind: the format's word for its dtype.
        shape: of the tensor.
        start: the first of its bytes in the file.
    """

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> np.dtype:
        """Raises ValueError when it is none of `KINDS`."""
        if self.kind not in KINDS:
            raise ValueError(f"{self.file}: tensor {self.name} has dtype {self.kind}; known are {', '.join(KINDS)}")
        return jnp.dtype(KINDS[self.kind])

    def read(self) -> np.ndarray:
        """Its values; nothing else of the file is read."""
        return np.fromfile(self.file, self.dtype, math.prod(self.shape), offset=self.start).reshape(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """What a file holds, after a look at its header alone.

    Raises:
        ValueError: it is not there, not whole, or not a safetensors file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with path.open("rb") as file:
        head = file.read(8)
        if head.startswith(_HEADS_OF_PICKLES) and len(head) == 8 and int.from_bytes(head, "little") > 1 << 30:
            raise ValueError(f"{path} is a pickle of PyTorch, not a safetensors file; convert it in a sandbox")
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {' '.join(str(error).split())}") from None
        length = int.from_bytes(head, "little")
        header = json.loads(file.read(length))
    return {
        name: StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def same_values(a: StoredTensor, b: StoredTensor, chunk: int = 1 << 24) -> bool:
    """Whether two tensors agree bit for bit; no more than two chunks are in memory."""
    if (a.kind, a.shape) != (b.kind, b.shape):
        return False
    left = math.prod(a.shape) * a.dtype.itemsize
    with a.file.open("rb") as one, b.file.open("rb") as other:
        one.seek(a.start), other.seek(b.start)
        while left > 0:
            count = min(chunk, left)
            if one.read(count) != other.read(count):
                return False
            left -= count
    return True


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, values: Callable[[str], np.ndarray]
) -> None:
    """Writes a file, replacing one that is there only when complete.

    Args:
        path: of the file.
        shapes: of each tensor, in their order in the file.
        dtype: of all of them.
        values: gives a tensor by name; it is asked for when its turn comes.

    Raises:
        ValueError: a dtype that is none of `KINDS`.
    """
    kinds = {jnp.dtype(name): kind for kind, name in KINDS.items()}
    if dtype not in kinds:
        raise ValueError(f"parameters of dtype {dtype} cannot be written; known are {', '.join(KINDS.values())}")
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, shape in shapes.items():
                array = np.ascontiguousarray(values(name))
                if array.shape != shape or array.dtype != dtype:
                    raise ValueError(f"{name} must be {dtype}{list(shape)}; got {array.dtype}{list(array.shape)}")
                file.write(array.reshape(-1).view(np.uint8))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
