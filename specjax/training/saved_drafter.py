"""A trained drafter on disk: its static description, feature layers and target included, and its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from specjax.drafters import DRAFTERS
from specjax.models.config import TransformerConfig
from specjax.models.eagle_layer import EagleConfig
from specjax.protocol import Drafter
from specjax.topology import DynamicTopology, Topology
from specjax.training import manifest as manifests
from specjax.training.saved_model import CONFIGS, load_tree, save_tree

DTYPES = ("dtype", "param_dtype")
CLASSES = CONFIGS | {cls.__name__: cls for cls in (Topology, DynamicTopology, EagleConfig, *DRAFTERS.values())}


def save_drafter(path, drafter: Drafter, params: Any) -> None:
    """Writes a drafter and its parameters (None for a family without) to the folder `path`.

    Raises:
        ValueError: parameters that do not fit the drafter, or a family that is not in DRAFTERS.
    """
    if type(drafter).__name__ not in CLASSES:
        raise ValueError(f"{type(drafter).__name__} is not listed in specjax.drafters.DRAFTERS; add it there")
    drafter.check_params(params)
    none = {"none": np.zeros(1, np.float32)}  # a tree without arrays cannot be written
    save_tree(path, {"drafter": drafter, "has_params": params is not None}, none if params is None else params)


def load_drafter(path, target: TransformerConfig | None = None) -> tuple[Drafter, Any]:
    """What `save_drafter` wrote, checked bit for bit: (drafter, parameters).

    Args:
        path: the folder.
        target: config of the model it is going to draft for; None leaves that check to `generate`. Where that differs
            from the one it was trained for in nothing but its dtypes, a drafter that borrows from its target is cast.

    Raises:
        ValueError: nothing there, damaged, written by another version, or trained for another target (other layers, so
            other features).
    """
    about, arrays = load_tree(path)
    try:
        drafter = manifests.rebuild(about["drafter"], CLASSES)
    except ValueError as error:
        raise ValueError(f"drafter {path}: {error}") from None
    params = traverse_util.unflatten_dict(arrays, sep=".") if about["has_params"] else None
    drafter.check_params(params)
    if target is None or drafter.target in (None, target):
        return drafter, params
    differing = [name for name in drafter.target.differing_fields(target) if name not in DTYPES]
    if differing:
        raise ValueError(
            f"drafter {path} was trained on the features of another target (its {', '.join(differing)} differ); "
            "train it for this one"
        )
    return _cast(drafter, params, target)


def _cast(drafter: Drafter, params: Any, target: TransformerConfig) -> tuple[Drafter, Any]:
    """The drafter with all its configs, and its parameters, in the dtypes of a target."""
    dtypes = {name: getattr(target, name).name for name in DTYPES}

    def change(described):
        if isinstance(described, list):
            return [change(item) for item in described]
        if not isinstance(described, dict):
            return described
        changed = {name: change(item) for name, item in described.items()}
        return changed | dtypes if described.get("type") == TransformerConfig.__name__ else changed

    drafter = manifests.rebuild(change(manifests.describe(drafter)), CLASSES)
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return drafter, jax.tree.map(lambda x: x.astype(target.param_dtype) if floating(x) else x, params)
