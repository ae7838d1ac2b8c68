"""What a checkpoint is about and what is in it, written beside the arrays and checked before they are used.

A manifest is a JSON tree:

    about     what the run was built from: architecture, optimizer, fingerprint of the corpus and pipeline, ...
    arrays    name -> shape, dtype and SHA-256 of the bytes
    position  SHA-256 of the data iterator's state (None when no iterator was saved)
    metrics   held-out metrics at the time of saving
    records   what the run had logged and measured until then
    digest    SHA-256 of all of the above

Corpus, bits and dtypes can change without any error from the storage layer; this is what notices.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, e.g. "params.block_0.attention.query.kernel"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(template: Any, arrays: dict[str, Any]) -> Any:
    """The inverse of `flatten`, with the structure of `template`."""
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in flatten(template)])


def describe(value: Any) -> Any:
    """Frozen dataclasses, dtypes, tuples and numbers as plain JSON.

    What holds arrays or functions says itself what tells it apart, in a method `description`.
    """
    if hasattr(value, "description") and not isinstance(value, type):
        return describe(value.description())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return jnp.dtype(value).name
    except TypeError:
        raise ValueError(f"{value!r} cannot be written into a checkpoint's manifest; use numbers and strings") from None


def rebuild(described: Any, classes: Mapping[str, type]) -> Any:
    """The inverse of `describe` for the named dataclasses; lists come back as tuples.

    Raises:
        ValueError: a class or field that this version does not know.
    """
    if isinstance(described, list):
        return tuple(rebuild(item, classes) for item in described)
    if not isinstance(described, dict):
        return described
    fields = {name: rebuild(item, classes) for name, item in described.items() if name != "type"}
    if "type" not in described:
        return fields
    try:
        return classes[described["type"]](**fields)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{described['type']} was written by another version ({error}); retrain it") from None


def identify(function: Any) -> Any:
    """What `describe` can take of a function: its own `description()`, which is left to it, or else its name."""
    if function is None or hasattr(function, "description"):
        return function
    return getattr(function, "__qualname__", type(function).__name__)


def build(
    about: Any,
    arrays: dict[str, Any],
    position: Any = None,
    metrics: dict[str, float] | None = None,
    records: dict[str, list] | None = None,
) -> dict:
    """The manifest of a checkpoint that is about to be written."""
    manifest = {
        "about": describe(about),
        "arrays": {name: _entry(array) for name, array in arrays.items()},
        "position": None if position is None else _sha256(_canonical(position)),
        "metrics": dict(metrics or {}),
        "records": dict(records or {}),
    }
    return manifest | {"digest": _sha256(_canonical(manifest))}


def check_intact(manifest: Any, where: str) -> None:
    """Raises ValueError when the manifest is not what was written."""
    body = {key: value for key, value in manifest.items() if key != "digest"} if isinstance(manifest, dict) else None
    if body is None or manifest.get("digest") != _sha256(_canonical(body)):
        raise damaged(where, "its manifest is not what was written")


def check_about(manifest: dict, about: Any, where: str) -> None:
    """Raises ValueError, naming the first difference, when the run is not the one that was saved."""
    difference = _difference(manifest["about"], describe(about), "")
    if difference:
        name, saved, now = difference
        raise ValueError(
            f"{where} does not fit this run: {name} was {saved!r} when it was saved and is {now!r} now; "
            "restore the old value, or start in another folder"
        )


def check_template(manifest: dict, template: dict[str, Any], where: str) -> None:
    """Raises ValueError when names, shapes or dtypes of the arrays differ from those of this run."""
    saved = manifest["arrays"]
    for name in sorted(saved.keys() ^ template.keys()):
        state = "is missing from it" if name in template else "is in it but not in this run"
        raise ValueError(f"{where} does not fit this run: array {name} {state}; restore the old settings")
    for name, array in template.items():
        for field, now in (("shape", list(array.shape)), ("dtype", str(array.dtype))):
            if saved[name][field] != now:
                raise ValueError(
                    f"{where} does not fit this run: {field} of {name} was {saved[name][field]} when it was saved and "
                    f"is {now} now; restore the old settings, or start in another folder"
                )


def check_arrays(manifest: dict, arrays: dict[str, Any], where: str) -> None:
    """Raises ValueError when any array is not, bit for bit, what was written."""
    for name, array in arrays.items():
        if manifest["arrays"].get(name) != _entry(array):
            raise damaged(where, f"array {name} is not what was written")


def check_position(manifest: dict, position: Any, where: str) -> None:
    """Raises ValueError when the data iterator did not come back to where it was."""
    if manifest["position"] != (None if position is None else _sha256(_canonical(position))):
        raise damaged(where, "the position in the data is not what was written")


def checksum(tree: Any) -> str:
    """SHA-256 of all names, shapes, dtypes and bytes of a tree of arrays."""
    return _sha256(_canonical({name: _entry(array) for name, array in flatten(tree).items()}))


def damaged(where: str, what: str) -> ValueError:
    """The error for a checkpoint that storage has changed."""
    return ValueError(f"{where} is damaged: {what}; delete that folder to go back to the checkpoint before it")


@contextlib.contextmanager
def reading(where: str):
    """Whatever the storage layer raises about files that do not parse ends in one line."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise damaged(where, f"it cannot be read ({reason})") from error


def _entry(array) -> dict:
    array = np.asarray(array)
    digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()
    return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest}


def _canonical(tree) -> bytes:
    tree = tree.decode() if isinstance(tree, bytes) else tree
    return json.dumps(tree, sort_keys=True).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _difference(saved, now, path):
    """(dotted path, saved, now) of the first difference, or None."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in sorted(saved.keys() | now.keys()):
            found = _difference(saved.get(key), now.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    return None if saved == now else (path, saved, now)
