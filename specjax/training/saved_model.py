"""A trained model on disk: config and parameters, apart from any training run."""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import traverse_util

from specjax.models.config import LinearRotaryScaling, RotaryScaling, TransformerConfig
from specjax.models.transformer import LanguageModel
from specjax.training import manifest as manifests

CONFIGS = {cls.__name__: cls for cls in (TransformerConfig, RotaryScaling, LinearRotaryScaling)}


def save_model(path, model: LanguageModel) -> None:
    """Writes config and parameters to the folder `path`, replacing a model that is there."""
    save_tree(path, {"config": model.config}, model.params)


def load_model(path) -> LanguageModel:
    """What `save_model` wrote, checked bit for bit.

    Raises:
        ValueError: nothing there, damaged, or written for a config that this version does not know.
    """
    about, arrays = load_tree(path)
    try:
        config = manifests.rebuild(about["config"], CONFIGS)
    except ValueError as error:
        raise ValueError(f"model {path}: {error}") from None
    return LanguageModel(config=config, params=traverse_util.unflatten_dict(arrays, sep="."))


def save_tree(path, about: Any, tree: Any) -> None:
    """Writes a tree of arrays with its manifest to the folder `path`, replacing what is there only when complete."""
    path = Path(path).absolute()
    arrays = manifests.flatten(tree)
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifests.build(about, arrays))
    )
    fresh, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(fresh, args=items)
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def load_tree(path) -> tuple[Any, dict[str, jax.Array]]:
    """(description, arrays by dotted path) of what `save_tree` wrote, checked bit for bit.

    Raises:
        ValueError: nothing there, or damaged.
    """
    path = Path(path).absolute()
    where = f"model {path}"
    if not path.is_dir():
        raise ValueError(f"there is no saved model in {path}; give the folder that save_model wrote")
    if not (path / "manifest").exists() and not (path / "state").exists():
        held = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
        raise ValueError(f"there is no saved model in {path}, which holds {held}; give the folder that was saved")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        with manifests.reading(where):
            manifest = checkpointer.restore(path, args=ocp.args.Composite(manifest=ocp.args.JsonRestore())).manifest
        manifests.check_intact(manifest, where)
        template = {
            name: jax.ShapeDtypeStruct(tuple(entry["shape"]), entry["dtype"], sharding=_one_device())
            for name, entry in manifest["arrays"].items()
        }
        with manifests.reading(where):
            targets = ocp.args.Composite(state=ocp.args.StandardRestore(template))
            restored = checkpointer.restore(path, args=targets).state
    manifests.check_arrays(manifest, restored, where)
    return manifest["about"], restored


def _one_device():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])
