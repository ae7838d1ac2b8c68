"""What `generate` takes for a drafter: an object, one with its parameters, or the folder of a saved one."""

import dataclasses
import os
from typing import Any

from specjax.drafters import Empty
from specjax.models import LanguageModel
from specjax.protocol import Drafter
from specjax.training.saved_drafter import load_drafter
from specjax.weights.hub import local_path
from specjax.weights.speculators import load_speculator


def with_params(drafter: Any, target: LanguageModel) -> tuple[Drafter, Any]:
    """(drafter, parameters) of None, a drafter without parameters, such a pair, or a folder.

    Raises:
        ValueError: something else.
    """
    if drafter is None:
        return Empty(), None
    if isinstance(drafter, str | os.PathLike):
        return saved_drafter(drafter, target)
    if isinstance(drafter, tuple) and len(drafter) == 2 and isinstance(drafter[0], Drafter):
        return drafter
    if isinstance(drafter, Drafter):
        return drafter, None
    raise ValueError(
        "drafter must be None, a drafter such as NGram(8), a pair (drafter, parameters) or the folder of a saved one; "
        f"got {drafter!r}"
    )


def saved_drafter(
    path: str | os.PathLike, target: LanguageModel, draft_length: int | None = None
) -> tuple[Drafter, Any]:
    """A trained drafter from a folder that `training.saved_drafter.save_drafter` or vLLM's speculators format wrote.

    Args:
        path: the folder.
        target: the model it drafts for.
        draft_length: γ instead of the saved one, for families that draft any number of tokens.

    Raises:
        ValueError: no such folder, another target, or a draft length that the family cannot take.
    """
    path = local_path(path)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path} with a saved drafter")
    if (path / "config.json").is_file():
        drafter, params = load_speculator(path, target.config, target_params=target.params)
    else:
        drafter, params = load_drafter(path, target.config)
    if draft_length is not None and draft_length != drafter.draft_length:
        if "draft_length" not in {field.name for field in dataclasses.fields(drafter)}:
            raise ValueError(
                f"the {type(drafter).__name__} drafter in {path} always drafts {drafter.draft_length} deep; leave "
                "draft_length out"
            )
        drafter = dataclasses.replace(drafter, draft_length=draft_length)
        drafter.check_params(params)
    return drafter, params
