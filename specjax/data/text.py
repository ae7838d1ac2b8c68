"""Where text comes from: a source yields named documents, which are split into training and held-out text.

A source is a frozen dataclass with one method, `documents()`. The split looks only at a document's name, so it is the
same on every machine, and a file stays on its side when others come or go. Names are relative to the source.
"""

import dataclasses
import fnmatch
import hashlib
import json
import os
import pathlib
import sysconfig
from typing import Protocol, runtime_checkable

# Tests, third-party packages and files specific to one installation.
_STDLIB_SKIPPED_FOLDERS = ("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests")
_STDLIB_SKIPPED_FILES = ("_sysconfigdata*", "config-*", "sitecustomize.py", "usercustomize.py")


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and the name that it is split and hashed by."""

    name: str
    text: str


@runtime_checkable
class TextSource(Protocol):
    """Anything with `documents()`: all documents in an order that depends on nothing but their names and contents."""

    def documents(self) -> list[Document]: ...


@dataclasses.dataclass(frozen=True)
class StandardLibrary:
    """The source files of the running Python's standard library, tests excluded: about 10 MB, no download.

    Attributes:
        skip: folder or file names to leave out besides (patterns). By default the two folders that hold generated
            files instead of code somebody wrote, character tables and a manual: a few of them would be most of the
            held-out text, and easy to predict.
    """

    skip: tuple[str, ...] = ("encodings", "pydoc_data")

    def documents(self) -> list[Document]:
        """Files that cannot be read or are not UTF-8 are left out: the library is not the user's to repair."""
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        skipped = _STDLIB_SKIPPED_FOLDERS + _STDLIB_SKIPPED_FILES + tuple(self.skip)
        documents = []
        for path in _walk(root, "*.py", skipped):
            try:
                text = path.read_bytes().decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            documents.append(Document(path.relative_to(root).as_posix(), text))
        return _not_empty(documents, f"no Python sources under {root}; name a folder of text instead")


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """A file of text, or every file under a folder whose name matches `pattern`. UTF-8; one document per file.

    Raises (from `documents`):
        ValueError: the path is missing, a file is not UTF-8, or there is no text.
    """

    path: str
    pattern: str = "*.txt"

    def documents(self) -> list[Document]:
        documents = [Document(name, _decode(path)) for name, path in matching_files(self.path, self.pattern)]
        return _not_empty(documents, f"{self.path} holds no text in files that match {self.pattern!r}")


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """JSON Lines, one document per line, its text under `field`: a file, or every file under a folder that matches.

    Blank lines are skipped. A document's name is its file's and the line number.

    Raises (from `documents`):
        ValueError: the path is missing, a file is not UTF-8, there is no text, or a line is broken (the message has
            file and line).
    """

    path: str
    field: str = "text"
    pattern: str = "*.jsonl"

    def documents(self) -> list[Document]:
        documents = []
        for name, path in matching_files(self.path, self.pattern):
            # Not splitlines(): that also breaks at U+2028 and the like, which JSON strings may hold unescaped.
            for number, line in enumerate(_decode(path).removeprefix("\ufeff").split("\n"), start=1):
                if line.strip():
                    documents.append(Document(f"{name}:{number}", self._text(line, f"{path}, line {number}")))
        return _not_empty(documents, f"{self.path} holds no text in files that match {self.pattern!r}")

    def _text(self, line: str, where: str) -> str:
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}); each line must be one JSON object") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a JSON {type(record).__name__}; each line must be one JSON object")
        if not isinstance(record.get(self.field), str):
            names = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"{where}: no text under {self.field!r}; the fields of this line: {names}")
        try:
            record[self.field].encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{where}: {self.field!r} holds half of a surrogate pair, which is not text") from None
        return record[self.field]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out documents, disjoint, and the SHA-256 (hex) of all names and contents and of the split."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    hash: str


def load_corpus(source: TextSource, held_out: float = 0.05) -> Corpus:
    """Reads a source and splits it.

    A document is held out when the hash of its name falls below the fraction; where that leaves a side empty, the one
    nearest to the threshold changes sides. A single document is cut into contiguous pieces first. Of documents with
    equal text only the first is kept: a copy on the other side would make the held-out text known.

    Args:
        source: where the documents come from.
        held_out: expected share of documents that is held out, in (0, 1).

    Raises:
        ValueError: the fraction is outside (0, 1), or the text is too short to be split; and what the source raises.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is the share of documents kept from training, in (0, 1); got {held_out}")
    first: dict[str, Document] = {}
    for document in source.documents():
        first.setdefault(document.text, document)
    documents = tuple(first.values())
    if len(documents) == 1:
        documents = _pieces(documents[0])
    if len(documents) < 2:
        raise ValueError("a corpus of one character cannot be split into training and held-out text; add text")
    by_hash = sorted(documents, key=lambda document: unit_interval(document.name))
    count = sum(unit_interval(document.name) < held_out for document in by_hash)
    names = {document.name for document in by_hash[: min(max(count, 1), len(documents) - 1)]}
    digest = hashlib.sha256()
    for document in documents:
        side = "held_out" if document.name in names else "train"
        for part in (side, document.name, document.text):
            encoded = part.encode("utf-8", "surrogateescape")  # names of files may be any bytes
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return Corpus(
        train=tuple(document for document in documents if document.name not in names),
        held_out=tuple(document for document in documents if document.name in names),
        hash=digest.hexdigest(),
    )


def unit_interval(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


def _pieces(document: Document, count: int = 100, shortest: int = 1000) -> tuple[Document, ...]:
    """About `count` contiguous pieces, which joined give the document; cut at the ends of lines where there are any."""
    text = document.text
    size = max(len(text) // count, min(shortest, len(text) // 2), 1)
    cuts = [0]
    while cuts[-1] < len(text):
        cut = cuts[-1] + size
        line_end = text.find("\n", cut - 1, cut - 1 + size)
        cuts.append(min(cut if line_end < 0 else line_end + 1, len(text)))
    spans = zip(cuts, cuts[1:], strict=False)
    return tuple(Document(f"{document.name}#{number}", text[start:stop]) for number, (start, stop) in enumerate(spans))


def _walk(root: pathlib.Path, pattern: str, skipped: tuple[str, ...] = ()) -> list[pathlib.Path]:
    """Files under `root` whose name matches, sorted by relative path; hidden files and folders are left out."""

    def kept(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch.fnmatchcase(name, skip) for skip in skipped)

    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = filter(kept, folders)
        paths += [pathlib.Path(folder, name) for name in files if kept(name) and fnmatch.fnmatchcase(name, pattern)]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def matching_files(path: str, pattern: str) -> list[tuple[str, pathlib.Path]]:
    """(name, path) of the file itself, or of the files under the folder that match."""
    root = pathlib.Path(path).expanduser()
    if root.is_dir():
        return [(found.relative_to(root).as_posix(), found) for found in _walk(root, pattern)]
    if not root.exists():
        raise ValueError(f"no file or folder {str(path)!r} (from {os.getcwd()}); give a path that exists")
    return [(root.name, root)]


def _decode(path: pathlib.Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); convert it or narrow the pattern") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _not_empty(documents: list[Document], message: str) -> list[Document]:
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise ValueError(message)
    return documents
