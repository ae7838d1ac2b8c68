"""The walls of the house, read from the source: who may import whom, what files are called, what a config owes."""

import ast
import importlib.util
import re
from pathlib import Path

import ml_collections
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "specjax").rglob("*.py"))
CONFIGS = sorted(file for file in (ROOT / "configs").glob("*.py") if file.stem != "__init__")
EXPERIMENTS = sorted(file for file in (ROOT / "experiments").glob("*.py") if file.stem != "__init__")

# What a room may import of the others; any room may import from itself. Arrows run down only, and data,
# events and peak_flops stand beside: whoever trains or reports may use them, they know nothing of decoding.
LAWS = {"theory", "keys", "sampling", "topology", "penalties"}
JUDGED = LAWS | {"protocol", "models"}
MAY_IMPORT = {
    "theory": set(),
    "topology": set(),
    "keys": {"theory", "sampling"},
    "sampling": {"theory", "keys"},
    "penalties": {"theory", "keys", "sampling"},
    "protocol": LAWS,
    "models": LAWS,
    "drafters": JUDGED,
    "verifiers": LAWS | {"protocol"},  # a verifier never sees a model
    "decoding": JUDGED | {"drafters", "verifiers"},
    "data": set(),
    "weights": JUDGED | {"drafters", "data"},
    "pretrained": JUDGED | {"drafters", "verifiers", "decoding", "data", "weights", "training"},
    "events": set(),
    "peak_flops": set(),
    "training": JUDGED | {"drafters", "verifiers", "decoding", "data", "events", "peak_flops"},
    "report": JUDGED | {"drafters", "verifiers", "decoding", "data", "events", "peak_flops"},
    "command_line": set(),
    "install": set(),
}


def room(file: Path) -> str:
    return file.relative_to(ROOT / "specjax").parts[0].removesuffix(".py")


def imported_modules(source: str, package: str = "") -> set[str]:
    """Full names of all modules that a source imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def rooms_imported(file: Path) -> set[str]:
    package = ".".join(file.relative_to(ROOT).parent.parts)
    names = imported_modules(file.read_text(), package)
    return {name.split(".")[1] for name in names if name.startswith("specjax.")} & set(MAY_IMPORT)


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_the_sources_are_found():
    assert len(SOURCES) > 5


def test_imports_are_seen_in_every_form():
    source = "import a.b\ndef f():\n    from c import d\n    from . import e\n    from ..g import h"
    assert imported_modules(source, "x.y") == {"a.b", "c", "c.d", "x.y", "x.y.e", "x.g", "x.g.h"}


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_imports_run_downwards(file):
    if file == ROOT / "specjax" / "__init__.py":
        assert not rooms_imported(file), "specjax/__init__.py is imported by every room, so it imports none"
        return
    assert room(file) in MAY_IMPORT, f"{room(file)} is a new room: say here what it may import"
    forbidden = rooms_imported(file) - MAY_IMPORT[room(file)] - {room(file)}
    assert not forbidden, f"{relative(file)} imports {sorted(forbidden)}, which stand above it"


def test_the_rooms_have_one_direction():
    """Only keys and sampling share a level and may know each other."""
    for upper, below in MAY_IMPORT.items():
        for lower in below:
            assert upper not in MAY_IMPORT[lower] or {upper, lower} == {"keys", "sampling"}, (upper, lower)


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_the_library_knows_no_experiment_config_or_config_dict(file):
    tops = {name.split(".")[0] for name in imported_modules(file.read_text(), "specjax.x")}
    forbidden = {"experiments", "configs", "launch"}
    if room(file) != "command_line":
        forbidden |= {"ml_collections", "absl"}
    assert not tops & forbidden


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_a_file_is_named_by_what_it_is_and_says_so(file):
    for part in file.relative_to(ROOT).with_suffix("").parts:
        assert not re.fullmatch(r"_*(utils?|helpers?|common|base|misc)_*", part)
    text = file.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{relative(file)} has no docstring"
    assert len(text.splitlines()) <= 300


@pytest.mark.parametrize("file", EXPERIMENTS, ids=relative)
def test_an_experiment_runs_a_config_in_a_workdir(file):
    tree = ast.parse(file.read_text())
    runs = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    if not runs:  # code shared by experiments: no config may name it
        assert not any(config_experiment(config) == file.stem for config in CONFIGS)
        return
    assert [argument.arg for argument in runs[0].args.args][:2] == ["config", "workdir"]
    assert ast.get_docstring(tree)


def config_module(file: Path):
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_experiment(file: Path) -> str:
    return config_module(file).get_config().experiment


@pytest.mark.parametrize("file", CONFIGS, ids=relative)
def test_a_config_reads_the_argument_that_it_takes(file):
    tree = ast.parse(file.read_text())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_config")
    taken = {argument.arg for argument in (*function.args.posonlyargs, *function.args.args)}
    assert taken <= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("file", CONFIGS, ids=relative)
def test_a_config_locks_and_names_its_experiment_and_its_command(file):
    module = config_module(file)
    config = module.get_config()
    assert isinstance(config, ml_collections.ConfigDict)
    config.lock()
    with pytest.raises(AttributeError):
        config.no_such_field = 1
    source = ast.parse((ROOT / "experiments" / f"{config.experiment}.py").read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in source.body)
    assert f"python launch.py --config configs/{file.name}" in module.__doc__
