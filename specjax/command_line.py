"""The command line: flags in, a locked config out, and one line on stderr for whatever a user can get wrong.

Nothing here imports JAX before the arguments are known to be good, so a typing error is answered at once.
"""

import contextlib
import difflib
import errno
import importlib
import importlib.util
import inspect
import os
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict, config_flags

ROOT = Path(__file__).resolve().parent.parent
USER_ERROR, INTERRUPTED, CLOSED_PIPE = 2, 130, 141  # exit statuses
# What a disk or its owner refuses, and what the user can do about it.
REMEDIES = {
    errno.ENOSPC: "make room, and give the same command again: finished stages are kept",
    errno.EDQUOT: "make room, and give the same command again: finished stages are kept",
    errno.EROFS: "give another --workdir",
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}

flags.DEFINE_bool("traceback", False, "show the traceback of errors that normally end in one line")


class UserError(Exception):
    """A mistake on the command line; the message is the one line that the user sees."""


def define_config(name: str, help_string: str) -> flags.FlagHolder:
    """A flag `--name FILE.py[:ARG]` with a locked config behind it; `--name.field=value` overrides a field of it."""
    holder = config_flags.DEFINE_config_file(name, None, help_string, lock_config=True)
    flags.FLAGS[name].parser = _ConfigParser(name)
    return holder


def run(main: Callable[[list[str]], None], config: str = "config") -> None:
    """Parses the flags, calls `main`, and exits.

    The exit status is 0, 2 after a user's mistake (a UserError, or a ValueError raised by this repository's own code,
    whose messages are written for users) or a file that could not be read or written (REMEDIES), 130 after Ctrl-C,
    141 when nobody reads the output any more. Any other exception keeps its traceback.
    """
    try:
        app.run(main, flags_parser=lambda argv: _parse(argv, config))
    except KeyboardInterrupt:
        _finish(INTERRUPTED, "interrupted")
    except (UserError, ValueError) as error:
        if flags.FLAGS["traceback"].value or not (isinstance(error, UserError) or _raised_here(error)):
            raise
        _finish(USER_ERROR, str(error))
    except BrokenPipeError:  # the reader, such as head, has gone
        discard(sys.stdout)
        sys.exit(CLOSED_PIPE)
    except OSError as error:
        if flags.FLAGS["traceback"].value or error.errno not in REMEDIES:
            raise
        place = f" ({os.fspath(error.filename)})" if isinstance(error.filename, str | os.PathLike) else ""
        _finish(USER_ERROR, f"{error.strerror}{place}: {REMEDIES[error.errno]}")


def check_seed(config: ConfigDict) -> None:
    """Raises UserError for a negative one, which no generator of random numbers takes."""
    if config.get("seed", 0) < 0:
        raise UserError(f"seed must be at least 0; got {config.seed}")


def load_experiment(config: ConfigDict, folder: Path = ROOT / "experiments") -> types.ModuleType:
    """The module of the experiment that `config.experiment` names.

    Raises:
        UserError: the config names none, or one that does not exist or has no function `run`.
    """
    defines_run = re.compile(r"^def run\(", re.MULTILINE)  # the others are parts that experiments share
    names = [path.stem for path in folder.glob("*.py") if defines_run.search(path.read_text(encoding="utf-8"))]
    name = config.get("experiment")
    if name is None:
        raise UserError(f"the config has no field experiment: one of {', '.join(sorted(names))}")
    if name not in names:
        raise UserError(f"there is no experiment {name!r}" + _did_you_mean(name, names))
    return importlib.import_module(f"experiments.{name}")


def make_workdir(workdir: str | None, config_name: str) -> Path:
    """The folder that the run writes to, made if needed; by default runs/<config>, or runs/<config>-<argument>.

    Raises:
        UserError: it cannot be made or written to.
    """
    if not workdir:
        path, _, argument = config_name.partition(":")
        stem = "-".join(filter(None, (Path(path).stem, re.sub(r"[^\w.=]+", "-", argument))))
        workdir = os.path.join("runs", stem)
    try:
        return _writable(Path(workdir))
    except OSError as error:
        raise UserError(f"cannot write to --workdir {workdir}: {error.strerror}") from error


def use_compilation_cache(choice: str | None) -> None:
    """Keeps compiled programs on disk, so that a second run starts faster. To be called before anything is compiled.

    Args:
        choice: a folder, "off", or None for JAX_COMPILATION_CACHE_DIR if set, else specjax/jax in the user's cache
            folder. A folder that cannot be written to is reported in one line, and the run goes on without.
    """
    import jax

    if choice == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    try:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax" / "jax"
        folder = _writable(Path(choice or os.environ.get("JAX_COMPILATION_CACHE_DIR") or default).expanduser())
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        _say(f"going on without a compilation cache: {error}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class _ConfigParser(flags.ArgumentParser):
    """Reads a config file and checks the names of the overridden fields, before ml_collections sets them."""

    def __init__(self, name: str):
        self.name = name

    def parse(self, argument: str) -> ConfigDict:
        path, colon, parameter = argument.partition(":")
        if not os.path.isfile(path):
            known = [os.path.relpath(file) for file in (ROOT / "configs").glob("*.py") if file.stem != "__init__"]
            raise UserError(f"there is no config file {path}" + _did_you_mean(path, known))
        try:
            config = _load(path, [parameter] if colon else [])
        except (TypeError, ValueError) as error:  # absl would turn both into a flag error and lose the traceback
            if isinstance(error, ValueError) and _raised_here(error, Path(path).resolve()):
                raise UserError(str(error)) from error
            raise RuntimeError(f"{path} failed while it was read") from error
        for field in _overridden(self.name, sys.argv[1:]):
            _check_field(self.name, field, config)
        return config.lock()

    def flag_type(self) -> str:
        return "config"


def _load(path, parameters):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None:
        raise UserError(f"a config file's name ends in .py; got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise UserError(f"{path} has no function get_config")
    try:
        inspect.signature(module.get_config).bind(*parameters)
    except TypeError as error:
        what = f"takes no argument; got {parameters[0]!r}" if parameters else "needs an argument: FILE.py:ARGUMENT"
        raise UserError(f"{path} {what}") from error
    config = module.get_config(*parameters)
    if not isinstance(config, ConfigDict):
        raise UserError(f"get_config of {path} must return a ConfigDict; it returned {type(config).__name__}")
    return config


def _overridden(name, argv) -> list[str]:
    matches = [re.match(rf"--?(?:no)?{name}\.([^=]+)", argument) for argument in argv]
    return [match.group(1) for match in matches if match]


def _check_field(name, field, config):
    known = _field_names(config)
    plain = re.sub(r"\[[^\]]*\]", "", field)  # an index into a sequence, layers[0], is ml_collections' to check
    if plain not in known:
        raise UserError(f"the config has no field --{name}.{field}" + _did_you_mean(plain, known, prefix=f"--{name}."))


def _field_names(config, prefix="") -> list[str]:
    names = []
    for key in config:
        names.append(prefix + key)
        if isinstance(config[key], ConfigDict):
            names += _field_names(config[key], f"{prefix}{key}.")
    return names


def _parse(argv, config):
    values = flags.FLAGS
    try:
        stray = values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        if error.flagname.startswith(f"{config}.") and values[config].value is None:
            raise _missing(config) from error
        raise UserError(str(error)) from error
    except flags.IllegalFlagValueError as error:
        match = re.match(r"flag --([\w.\[\]]+)=(.*?): ", str(error), re.DOTALL)
        if match is None or match.group(1) not in values:
            raise UserError(str(error)) from error
        kind = values[match.group(1)].flag_type().replace("string", "dict")  # a string field refuses nothing
        raise UserError(f"--{match.group(1)} takes a value of type {kind}; got {match.group(2)!r}") from error
    except config_flags.config_flags.UnsupportedOperationError as error:
        raise UserError("a field that is a list or None cannot be set on the command line, only in the file") from error
    except (flags.Error, TypeError, ValueError, IndexError) as error:  # such as an index that a field does not have
        raise UserError(f"cannot read the command line: {error}") from error
    if values[config].value is None:
        raise _missing(config)
    if stray:
        raise UserError(f"stray argument {stray[0]!r}; every option is written --name=value")
    for field in _overridden(config, argv):
        _check_elements(values[f"{config}.{field}"])
    if values["verbosity"].using_default_value:
        values.verbosity = -2  # absl's ERROR: checkpointing libraries chat on the levels below
    return argv[:1]


def _check_elements(flag):
    """ml_collections checks that a tuple stays a tuple, not what is in it."""
    kinds = {type(element) for element in flag.default} if isinstance(flag.default, tuple | list) else set()
    if kinds and not all(type(element) in kinds | ({int} if float in kinds else set()) for element in flag.value):
        kind = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"--{flag.name} takes a tuple of type {kind}; got {flag.value}")


def _missing(config):
    known = sorted(file.stem for file in (ROOT / "configs").glob("*.py") if file.stem != "__init__")
    return UserError(f"--{config} is missing: --{config} configs/NAME.py, with NAME one of {', '.join(known)}")


def _did_you_mean(name, known: Iterable[str], prefix="") -> str:
    """The nearest of the known names, as the end of a sentence; all of them when none is near."""
    last = lambda text: re.split(r"[./]", text.removesuffix(".py"))[-1]  # noqa: E731
    ratio = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()  # noqa: E731
    likeness = {other: max(ratio(str(name), other), ratio(last(str(name)), last(other))) for other in sorted(known)}
    nearest = max(likeness, key=likeness.get, default=None)
    if nearest and likeness[nearest] >= 0.6:
        return f"; did you mean {prefix}{nearest}?"
    return f"; known: {', '.join(prefix + other for other in likeness)}" if likeness else ""


def _raised_here(error, place: Path = ROOT) -> bool:
    """Whether a `raise` in this repository (or in one file) made the error, and not a library that was called wrongly.

    The text of the line tells the two apart, because C code and JAX leave no frames of their own in a traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not re.search(r"\braise\b", frames[-1].line or ""):
        return False
    file = Path(frames[-1].filename).resolve()
    return file.is_relative_to(place) and "site-packages" not in file.parts


def discard(stream) -> None:
    """What is still to be written to the stream goes nowhere: also what Python flushes when the program ends."""
    with contextlib.suppress(OSError, ValueError):  # not a file of the system, so nothing is flushed to one
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), stream.fileno())


def _writable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def _say(message):
    print("launch:", " ".join(message.split()), file=sys.stderr)


def _finish(status, message):
    _say(message)
    sys.exit(status)
