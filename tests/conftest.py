"""How the tests run: on the CPU, compiled fast rather than to fast code, with every signature of specjax checked."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jaxtyping

from tests import signatures

# Must come before the first import of specjax.
jaxtyping.install_import_hook("specjax", f"{signatures.__name__}.{signatures.check.__name__}")

# The same examples in every run, so that a failure is a failure for everybody; no deadline, as JAX compiles.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
