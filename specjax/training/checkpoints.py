"""Checkpoints of a training run: the latest ones, and the best by a held-out metric.

One checkpoint is one folder, named by its step and committed by a rename, so that a process killed in the middle of a
save leaves the checkpoints before it untouched:

    <directory>/<step>/state      params, optimizer state, step, key, moving average (Orbax)
                       data       position of the grain iterator
                       manifest   see manifest.py

Saves are synchronous: the training step donates its buffers, so they must be read before the next step is dispatched.
"""

import logging
import math
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from specjax.training import manifest as manifests
from specjax.training.state import TrainState

logging.getLogger("absl").addFilter(lambda record: record.levelno >= logging.WARNING or "orbax" not in record.pathname)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: where they live; made if it does not exist.
        pipeline: fingerprint of the corpus and the data pipeline; a changed one refuses to resume.
        best: name of the held-out metric whose best checkpoint is kept beside the latest ones; None keeps the latest.
        largest: whether a larger metric is better.
        keep: how many of the latest checkpoints are kept.
    """

    def __init__(self, directory, pipeline: str = "", best: str | None = None, largest: bool = True, keep: int = 2):
        self.directory = Path(directory).absolute()
        self._about = {"pipeline": pipeline}
        self.best, self.largest = best, largest
        policies = [preservation_policy.LatestN(n=keep)]
        if best:
            policies.append(
                preservation_policy.BestN(
                    get_metric_fn=lambda metrics: metrics[best],
                    reverse=not largest,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        try:
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
                    best_fn=(lambda metrics: metrics[best]) if best else None,
                    best_mode="max" if largest else "min",
                    enable_async_checkpointing=False,
                    cleanup_tmp_directories=True,
                ),
            )
        except OSError as error:
            raise ValueError(f"cannot write checkpoints to {self.directory}: {error}; choose another folder") from None

    def describe(self, **about: Any) -> None:
        """Adds to the description that a checkpoint must share with the run it is restored into.

        Values are what `manifest.describe` takes; `fit` gives its objective (which holds the architecture), optimizer,
        seed, a checksum of the frozen parameters and where sampled batches come from.
        """
        self._about.update(manifests.describe(about))

    def latest_step(self) -> int | None:
        """Step of the latest complete checkpoint, or None."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Step of the best checkpoint by the held-out metric, or None before any had one."""
        return self._manager.best_step() if self.best else None

    def best_value(self) -> float | None:
        """The held-out metric of the best checkpoint, or None."""
        step = self.best_step()
        return None if step is None else float(self._manager.metrics(step)[self.best])

    def improves(self, metrics: dict[str, float]) -> bool:
        """Whether these held-out metrics beat every checkpoint on disk."""
        value = metrics.get(self.best) if self.best else None
        if value is None or not math.isfinite(value):
            return False
        best = self.best_value()
        return best is None or (value > best if self.largest else value < best)

    def save(
        self,
        state: TrainState,
        iterator: Any = None,
        metrics: dict[str, float] | None = None,
        records: dict[str, list] | None = None,
    ) -> None:
        """Writes one checkpoint; returns when it is complete. A step that is already there is not written again.

        Args:
            state: whose step names the checkpoint.
            iterator: the data iterator, for its position.
            metrics: held-out metrics of this very state.
            records: the run's records until now, lists of dictionaries of numbers; in the checkpoint, so that they
                are always as old as its arrays.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        arrays = manifests.flatten(_storable(state))
        position = iterator.get_state() if iterator is not None else None
        items = {
            "state": ocp.args.StandardSave(arrays),
            "manifest": ocp.args.JsonSave(manifests.build(self._about, arrays, position, metrics, records)),
        }
        if iterator is not None:
            items["data"] = grain.checkpoint.CheckpointSave(iterator)
        ranked = metrics if self.best and math.isfinite((metrics or {}).get(self.best, math.nan)) else None
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=ranked, force=True)
        self._manager.wait_until_finished()

    def restore(self, template: TrainState, iterator: Any = None, step: int | None = None) -> TrainState:
        """The state saved at `step` (default: the latest), checked bit for bit.

        Args:
            template: a state of this run, for structure, dtypes and placement; its values are not used.
            iterator: the data iterator, to be moved to where it was; None leaves the data alone.
            step: which checkpoint.

        Raises:
            ValueError: no checkpoint; another architecture, optimizer, corpus or dtype; or a damaged one.
        """
        step = self.latest_step() if step is None else step
        if step is None or step not in self._manager.all_steps():
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise ValueError(f"{which} in {self.directory}; train first, or give the folder of another run")
        manifest, where = self._manifest(step)
        manifests.check_about(manifest, self._about, where)
        storable = _storable(template)
        arrays = manifests.flatten(storable)
        manifests.check_template(manifest, arrays, where)
        with manifests.reading(where):
            targets = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays))
            restored = self._manager.restore(step, args=ocp.args.Composite(state=targets)).state
        manifests.check_arrays(manifest, restored, where)
        if iterator is not None:
            with manifests.reading(where):
                self._manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator)))
            manifests.check_position(manifest, iterator.get_state(), where)
        state = manifests.unflatten(storable, restored)
        return state.replace(key=jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(template.key)))

    def metrics(self, step: int) -> dict[str, float]:
        """Held-out metrics saved with a checkpoint; empty when it had none."""
        return self._manifest(step)[0]["metrics"]

    def records(self, step: int) -> dict[str, list]:
        """The run's records as saved with a checkpoint; empty when it had none."""
        return self._manifest(step)[0].get("records", {})

    def _manifest(self, step):
        where = f"checkpoint {self.directory / str(step)}"
        with manifests.reading(where):
            manifest = self._manager.restore(step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore())).manifest
        manifests.check_intact(manifest, where)
        return manifest, where

    def close(self) -> None:
        """Waits for whatever is being written and ends Orbax's threads."""
        self._manager.close()


def _storable(state: TrainState) -> TrainState:
    return state.replace(key=jax.random.key_data(state.key))
