"""A pretrained target with one way of drafting for it."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from experiments.generation_settings import DRAFTER_KINDS, FROM_A_FOLDER
from specjax.pretrained import Pretrained
from specjax.pretrained.drafters import with_params
from specjax.protocol import Drafter
from specjax.sampling import Sampling
from specjax.weights import locate

BASELINE = "none"


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """One way of decoding: a drafter, empty for the target alone, and its rule."""

    drafter: Drafter
    params: Any
    verifier: str

    @classmethod
    def of(cls, drafter: Any, target: Pretrained, temperature: float, verifier: str = "") -> "Setting":
        """Of whatever `Pretrained.generate` takes for a drafter; without a rule's name, the cheapest rule that fits."""
        drafter, params = with_params(drafter, target.model)
        fitting = "greedy" if temperature == 0 else "token" if drafter.topology.is_chain else "multi_round"
        return cls(drafter, params, verifier or fitting)

    def arguments(self, temperature: float) -> dict[str, Any]:
        """For `generate`."""
        return {
            "drafter": self.drafter,
            "drafter_params": self.params,
            "verifier": self.verifier,
            "sampling": Sampling.of(temperature),
        }


def check_drafters(config: ConfigDict) -> None:
    """Raises ValueError for a drafter that the config does not describe, or describes by half."""
    for name in config.drafters:
        if name == BASELINE or name not in config.drafter_settings:
            known = ", ".join(name for name in config.drafter_settings if name != BASELINE)
            raise ValueError(f"drafters must be some of {known}; got {name!r}")
        kind, path = config.drafter_settings[name].kind, config.drafter_settings[name].path
        if kind not in DRAFTER_KINDS:
            raise ValueError(f"drafter_settings.{name}.kind must be one of {', '.join(DRAFTER_KINDS)}; got {kind!r}")
        if kind in FROM_A_FOLDER and not path:
            raise ValueError(f"drafter {name} is read from a folder: --config.drafter_settings.{name}.path=PATH")


def identity(path: str | os.PathLike) -> list:
    """What tells a model on disk from another, for the inputs of a stage: names, sizes and times of its files."""
    found = locate(path)
    files = [found] if found.is_file() else sorted(file for file in found.rglob("*") if file.is_file())
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def conversation_ids(target: Pretrained, messages: Sequence[dict]) -> list[int]:
    """Ids of the conversation; for a model without a chat template, of its texts one below the other."""
    if target.chat_template is not None:
        return target.prompt_ids(messages)
    return target.prompt_ids("\n\n".join(message["content"] for message in messages))
