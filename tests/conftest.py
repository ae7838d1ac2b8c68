"""How the tests run: on the CPU, compiled fast rather than to fast code, with every signature of specjax checked."""

import itertools
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "agg")

# Compiling is most of the time of a run, so a later run takes what an earlier one compiled; deleting it is always safe.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path("~/.cache/specjax/tests").expanduser()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import jaxtyping
import pytest

from tests import signatures

# Must come before the first import of specjax.
jaxtyping.install_import_hook("specjax", f"{signatures.__name__}.{signatures.check.__name__}")

# The same examples in every run, so that a failure is a failure for everybody; no deadline, as JAX compiles.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Every compiled program takes maps of memory, of which Linux grants a process 65,530: let go of them in time."""
    yield
    maps = Path("/proc/self/maps")
    if next(_tests_run) % 8 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
