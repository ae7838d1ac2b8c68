"""Writes a trained drafter in vLLM's layout, and reads it back to see that nothing was lost."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from specjax.drafters.eagle_pairs import EagleDrafter
from specjax.protocol import Drafter
from specjax.report.environment import environment
from specjax.report.results import check
from specjax.report.tables import text_table
from specjax.report.writer import write_report
from specjax.training.saved_drafter import load_drafter
from specjax.weights import load_weights
from specjax.weights.speculators import load_speculator, save_speculator

FOLDER = "speculator"


def run(config: ConfigDict, workdir: pathlib.Path) -> dict:
    """Writes `workdir`/speculator and the report."""
    for field, example in (("model", "PATH"), ("drafter", "runs/smollm2/stages/drafter_eagle3/drafter"),
                           ("target_name", "HuggingFaceTB/SmolLM2-135M-Instruct")):  # fmt: skip
        if not config[field]:
            raise ValueError(f"{field} is empty; give --config.{field}={example}")
    target = load_weights(config.model)
    drafter, params = load_drafter(os.path.expanduser(config.drafter), target.config)
    folder = workdir / FOLDER
    save_speculator(
        folder, drafter, params, config.target_name, target_params=target.params, mask_token_id=config.mask_token_id
    )
    found, back = load_speculator(folder, target.config, target_params=target.params)
    drafter, params = without_scale(drafter, params)
    same = lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()  # noqa: E731
    size = sum(file.stat().st_size for file in folder.iterdir())
    results = {
        "family": type(drafter).__name__,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "bytes": size,
        "checks": [
            check("the drafter that is read back", found == drafter, found == drafter, "equal"),
            check("its parameters", *2 * [jax.tree.all(jax.tree.map(same, dict(params), dict(back)))], "bit for bit"),
        ],
    }
    report = write_report(
        workdir, experiment=config.experiment, config=config.to_dict(), environment=environment(), results=results
    )
    print(text_table(results["checks"]))
    print(f"\n{folder}: {results['family']}, {results['parameters']:,} parameters, {size:,} bytes")
    return report


def without_scale(drafter: Drafter, params: Any) -> tuple[Drafter, Any]:
    """The same EAGLE-3 drafter with its feature scale inside the fusion's kernel, as the layout has it; others as they
    are."""
    if not isinstance(drafter, EagleDrafter):
        return drafter, params
    model, params = drafter.model.without_scale(params)
    return dataclasses.replace(drafter, model=model), params
