"""Runs the experiment that a config names:

    python launch.py --config configs/quickstart.py --workdir runs/quickstart

Any field of the config can be set on the command line (--config.seed=1), and a config whose get_config takes an
argument gets it after a colon (--config FILE.py:ARGUMENT). A config's docstring says what it costs and what to expect
of it.
"""

import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an old Python gets an answer, not a traceback)
    sys.exit(f"launch: specjax needs Python 3.11 or newer; this is Python {sys.version.split()[0]}")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's and TensorFlow's C++ logs: errors only

try:
    from absl import flags

    from specjax import command_line
except ModuleNotFoundError as error:
    if error.name.startswith("specjax"):
        raise
    sys.exit(
        f"launch: no package {error.name} here: run python3 -m specjax.install, then .venv/bin/python launch.py ..."
    )

CONFIG = command_line.define_config("config", "config file, FILE.py or FILE.py:ARGUMENT")
WORKDIR = flags.DEFINE_string("workdir", None, "folder for all that the run writes (default: runs/<config>)")
COMPILATION_CACHE = flags.DEFINE_string(
    "compilation_cache", None, "folder for compiled programs, or 'off' (default: specjax/jax in your cache folder)"
)
flags.adopt_module_key_flags(command_line)


def main(argv):
    del argv
    config = CONFIG.value
    command_line.check_seed(config)
    workdir = command_line.make_workdir(WORKDIR.value, flags.FLAGS["config"].config_filename)
    command_line.use_compilation_cache(COMPILATION_CACHE.value)
    command_line.load_experiment(config).run(config, workdir)


if __name__ == "__main__":
    command_line.run(main)
