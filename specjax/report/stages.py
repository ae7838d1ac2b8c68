"""An experiment as named stages: what is finished is not done twice, what was interrupted goes on.

    workdir/stages/target/stage.json     the inputs it was started with, and their hash
                          result.json    what it returned; written last, so it exists only when the stage is finished
                          ...            whatever the stage keeps: checkpoints, a saved model

A stage is identified by its inputs, not by the code: after a change of code, remove its folder.
"""

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

from specjax.report.environment import git_state
from specjax.report.writer import jsonable

KEYS = {"hash", "result", "seconds", "finished_at", "git_commit"}


class Stages:
    """The stages of one run of an experiment.

    Args:
        workdir: where the stages are.
        echo: says what happens.
        borrow: workdirs of other runs: a stage that was finished there with the same inputs is reused where it lies.

    Attributes:
        records: one flat record per stage so far, for the report: "stage", "seconds" (of the attempt that finished it),
            "reused", "finished_at" (UTC) and "git_commit" of that attempt.
    """

    def __init__(
        self, workdir: str | os.PathLike, echo: Callable[[str], Any] = print, borrow: Sequence[str | os.PathLike] = ()
    ):
        self.folder = pathlib.Path(workdir) / "stages"
        self.lenders = [pathlib.Path(other) / "stages" for other in borrow]
        self.echo = echo
        self.records: list[dict[str, Any]] = []
        self._hashes: dict[str, str] = {}

    def run(
        self,
        name: str,
        inputs: Any,
        function: Callable[[pathlib.Path], Any],
        load: Callable[[pathlib.Path, Any], Any] | None = None,
    ) -> Any:
        """What the stage returned, now or in an earlier run with the same inputs.

        Args:
            name: a plain word, unique in this run.
            inputs: all that decides the result: mappings, dataclasses, numbers, and `hash_of` every stage it builds on.
            function: called with the stage's folder, which is empty unless an attempt with the same inputs was
                interrupted there; returns what JSON can hold.
            load: turns (folder, result) into what `run` returns, e.g. reads a model that `function` saved; None returns
                the result itself. A ValueError or OSError in it for a finished stage means a damaged folder.

        Returns:
            The same whether the stage ran or was reused: results come back as read from result.json.

        Raises:
            ValueError: a name that is no plain word, or used twice.
        """
        if name in self._hashes or not name or name.startswith(".") or pathlib.PurePath(name).name != name:
            raise ValueError(f"a stage needs a plain name of its own; got {name!r}")
        load = load or (lambda _, result: result)
        folder, inputs = self.folder / name, jsonable(inputs)
        digest = _hash(inputs)

        started, finished = _read(folder / "stage.json"), _finished(folder, digest)
        same = started is not None and started.get("hash") == digest
        damaged = "its result is damaged" if (folder / "result.json").exists() else None
        if same and finished is not None:
            try:
                value = load(folder, finished["result"])
            except (ValueError, OSError) as error:
                damaged = f"what it left is damaged ({' '.join(str(error).split())})"
            else:
                self.echo(f"{name}: finished earlier, reused")
                return self._done(name, finished, value, reused=True)
        for lender in self.lenders:
            finished = _finished(lender / name, digest)
            if finished is not None and lender != self.folder:
                with contextlib.suppress(ValueError, OSError):  # damaged there: run it here
                    value = load(lender / name, finished["result"])
                    self.echo(f"{name}: finished in {lender.parent}, reused")
                    return self._done(name, finished, value, reused=True)

        if same and not damaged:
            self.echo(f"{name}: interrupted earlier, going on")
        else:
            if folder.exists():
                self.echo(f"{name}: {damaged if same else _difference(started, inputs)}, running again")
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            _write(folder / "stage.json", {"hash": digest, "inputs": inputs})
        start = time.perf_counter()
        result = function(folder)
        finished = {
            "hash": digest,
            "seconds": time.perf_counter() - start,
            "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
            "git_commit": git_state()[0],
            "result": jsonable(result),
        }
        _write(folder / "result.json", finished)
        finished = json.loads(json.dumps(finished))  # the same types as when it is reused
        return self._done(name, finished, load(folder, finished["result"]), reused=False)

    def hash_of(self, name: str) -> str:
        """Identifies this very run of a stage; among the inputs of a later stage it makes that one run again whenever
        this one did."""
        return self._hashes[name]

    def _done(self, name, finished, value, reused):
        self._hashes[name] = _hash(finished)
        kept = {key: finished[key] for key in ("seconds", "finished_at", "git_commit")}
        self.records.append({"stage": name, "reused": reused, **kept})
        return value


def _finished(folder, digest):
    """What a stage with these inputs returned in this folder, or None."""
    finished = _read(folder / "result.json")
    whole = finished is not None and finished.keys() >= KEYS and finished["hash"] == digest
    return finished if whole else None


def _hash(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _difference(started, inputs):
    """Which inputs changed, as far as can be told."""
    before = (started or {}).get("inputs")
    if not isinstance(before, dict) or not isinstance(inputs, dict):
        return "its inputs have changed" if before is not None else "its folder is damaged"
    changed = sorted(key for key in before.keys() | inputs.keys() if before.get(key) != inputs.get(key))
    return f"{', '.join(changed) or 'input'} changed"


def _read(path):
    """The JSON object in a file, or None."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write(path, value):
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)
