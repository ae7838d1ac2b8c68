"""SHA-256 of a model's files, as those who publish it list them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path


def sha256_of(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(model: Path, expected: Mapping[str, str]) -> None:
    """Digests by file name, of files in a folder or of the one file that a model is.

    Raises:
        ValueError: another digest, or no such file.
    """
    for name, digest in expected.items():
        file = model / name if model.is_dir() else model.parent / name
        if not file.is_file() or not model.is_dir() and name != model.name:
            raise ValueError(f"there is no file {name} in {model}, whose sha256 was given")
        found = sha256_of(file)
        if found != digest.lower():
            raise ValueError(f"{file} must have sha256 {digest}; got {found}: download it again")
