"""What it costs to load a pretrained model: seconds to the first token and peak memory, each in a process of its own.

A fresh process has compiled nothing and holds nothing, so both figures are those of a first use. The compiled programs
come from a cache folder on disk, which one untimed process fills.
"""

import gc
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPT = "def fibonacci(n):\n    "


def first_token(path: str, dtype: str) -> dict:
    """In a fresh process: wall-clock times at which the model was loaded and the first piece of text was there."""
    from specjax.pretrained import load
    from specjax.sampling import Sampling

    model = load(path, dtype or None)
    loaded = time.time()
    next(iter(model.stream(PROMPT, max_new_tokens=128, sampling=Sampling.of(0.0))))
    return {"loaded": loaded, "first_token": time.time()}


def peak_memory(path: str, dtype: str) -> dict:
    """In a fresh process: bytes before loading, with everything imported, the peak while loading, and the weights."""
    import jax
    import jax.numpy as jnp

    from specjax.weights import load_weights

    jnp.zeros(8).block_until_ready()
    gc.collect()
    before = resident_bytes()
    params = jax.block_until_ready(load_weights(path, dtype or None).params)
    return {"before": before, "peak": peak_bytes(), "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}


def resident_bytes() -> int:
    """Memory that the process holds now; its peak so far where the system does not say."""
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """The most memory that the process has held, files mapped into it included.

    From /proc where there is one: `ru_maxrss` begins with the size of the process that started this one.
    """
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


TASKS = {"first_token": first_token, "peak_memory": peak_memory}


def in_fresh_process(task: str, path: str | os.PathLike, dtype: str, cache: pathlib.Path) -> dict:
    """What a task of TASKS returns in a process of its own, and "began", when that process was started.

    Raises:
        RuntimeError: the process failed; its last lines.
    """
    path = os.path.abspath(path) if os.path.exists(path) else path
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache.resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, "-m", "experiments.loading_cost", task, str(path), dtype]
    began = time.time()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{task} of {path} failed in a fresh process: " + "\n".join(done.stderr.splitlines()[-8:]))
    return {"began": began, **json.loads(done.stdout.splitlines()[-1])}


def measure_first_token(path: str | os.PathLike, dtype: str, cache: pathlib.Path, repeats: int) -> list[dict]:
    """Per repeat, seconds to the loaded model and to the first token, from the start of a process, cache warm."""
    runs = [in_fresh_process("first_token", path, dtype, cache) for _ in range(repeats + 1)]
    return [
        {"load_seconds": run["loaded"] - run["began"], "first_token_seconds": run["first_token"] - run["began"]}
        for run in runs[1:]
    ]


def measure_peak_memory(path: str | os.PathLike, dtype: str, cache: pathlib.Path) -> dict:
    """Bytes of the weights, and how much more the process held at most while it loaded them than before; cache warm."""
    run = [in_fresh_process("peak_memory", path, dtype, cache) for _ in range(2)][-1]
    added = run["peak"] - run["before"]
    return {"weights_bytes": run["weights"], "added_bytes": added, "peak_over_weights": added / run["weights"]}


if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](sys.argv[2], sys.argv[3])))
