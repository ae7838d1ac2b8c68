"""Where a model is: on this machine, or on the Hugging Face hub."""

import os
import re
from pathlib import Path

# owner/name, as the hub allows them; anything else is a path.
_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
# Not every *.safetensors: beside the model itself there may be the same weights once more, as consolidated.safetensors.
_FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


def local_path(path: str | os.PathLike) -> Path:
    """The path, whatever there is, with ~ and ~user as the folders that they stand for.

    Raises:
        ValueError: a user that does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{path} begins with a user that this machine does not have; write the whole path") from None


def locate(path_or_id: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder or file of a model.

    Args:
        path_or_id: a path, which is taken if there is something; otherwise `owner/name` on the hub, whose files are
            downloaded into the cache of huggingface_hub, or found there when there is no network.
        revision: branch, tag or commit on the hub.

    Raises:
        ValueError: neither a path nor an id; or an id that the hub does not have or give, or that cannot be asked for.
    """
    path, name = local_path(path_or_id), str(path_or_id)
    try:
        if path.exists():
            return path
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(f"{name} cannot be looked for ({error.strerror}); give another path") from None
    if not _ID.fullmatch(name):
        raise ValueError(f"there is no {name}, and it is not an id of the Hugging Face hub (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except GatedRepoError:
        reason = "the hub gives it only to accounts that accepted its licence; log in with `hf auth login`"
    except RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private"
    except Exception as error:  # no network and nothing in the cache, a full disk: of many libraries' classes
        reason = _one_line(error)
    raise ValueError(f"there is no path {name}, and it cannot be had from the Hugging Face hub: {reason}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
