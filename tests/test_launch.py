"""launch.py as a user meets it: bad input ends in one line and an exit status, good input runs the experiment."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specjax import command_line

ROOT = Path(__file__).resolve().parent.parent

CONFIG = """
from ml_collections import ConfigDict, config_dict

def get_config(size="small"):
    if size not in ("small", "big"):
        raise ValueError(f"size must be small or big; got {size!r}")
    config = ConfigDict(dict(experiment="demo", seed=0, rate=0.5, widths=(1, 2), does="print", file=None))
    config.limit = config_dict.placeholder(int)
    config.target = ConfigDict(dict(num_layers={"small": 1, "big": 2}[size], bias=False))
    return config
"""

EXPERIMENT = """
import sys, time

def run(config, workdir):
    if config.does == "print":
        print("jax was ready" if "jax" in sys.modules else "no jax", workdir, config.target.num_layers, config.widths)
        print(config.seed, config.rate, config.limit, config.target.bias)
    if config.does == "misspell":
        config.sede = 1
    if config.does == "refuse":
        raise ValueError("draft_length must be at least 0;\\\\n got -1")
    if config.does == "crash in numpy":
        import numpy
        numpy.zeros(6).reshape(4)
    if config.does == "crash":
        {}["key"]
    if config.does == "compile":
        import jax
        jax.jit(lambda x: 3 * x + 1)(2.0).block_until_ready()
    if config.does == "fill the disk":
        with open("/dev/full", "w") as file:
            file.write("x")
    if config.does == "a path too long":
        open("x" * 5000)
    if config.does == "talk":
        for number in range(100_000):
            print(number)
    if config.does == "wait":
        print("waiting", flush=True)
        time.sleep(60)
""".replace("\\\\n", "\\n")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the entry with one config and one experiment of its own."""
    root = tmp_path_factory.mktemp("project")
    for folder in ("specjax", "configs", "experiments"):
        (root / folder).mkdir()
    for file in ("launch.py", "specjax/__init__.py", "specjax/command_line.py"):
        shutil.copy(ROOT / file, root / file)
    (root / "configs/demo.py").write_text(CONFIG)
    (root / "configs/no_experiment.py").write_text(
        "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict()\n"
    )
    (root / "configs/broken.py").write_text("def get_config():\n    return int('one')\n")
    (root / "configs/empty.py").write_text("")
    (root / "experiments/demo.py").write_text(EXPERIMENT)
    (root / "experiments/shared_part.py").write_text("class Part:\n    def run(self):\n        pass\n")
    return root


def launch(project, *arguments, **environment):
    environment = {"XDG_CACHE_HOME": str(project / "cache"), **environment}
    return subprocess.run(
        [sys.executable, "launch.py", *arguments],
        cwd=project,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


DEMO = ("--config", "configs/demo.py")


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ((), ("--config is missing", "configs/NAME.py", "demo")),
        (("--config.seed=1",), ("--config is missing",)),
        (("--config",), ("--config",)),
        (("--config", "configs/dmo.py"), ("configs/dmo.py", "did you mean configs/demo.py?")),
        (("--config", "demo"), ("did you mean configs/demo.py?",)),
        (("--config", "configs/demo.py:huge"), ("small or big", "'huge'")),
        (("--config", "configs/no_experiment.py:x"), ("takes no argument", "'x'")),
        (("--config", "configs/no_experiment.py"), ("experiment", "demo")),
        (("--config", "configs/empty.py"), ("configs/empty.py", "get_config")),
        ((*DEMO, "--config.sede=1"), ("--config.sede", "did you mean --config.seed?")),
        ((*DEMO, "--config.target.num_layer=1"), ("did you mean --config.target.num_layers?",)),
        ((*DEMO, "--config.num_layers=1"), ("did you mean --config.target.num_layers?",)),
        ((*DEMO, "--config.seed.x=1"), ("--config.seed.x", "did you mean --config.seed?")),
        ((*DEMO, "--config.seed=one"), ("--config.seed", "int", "'one'")),
        ((*DEMO, "--config.seed=-1"), ("seed must be at least 0; got -1",)),
        ((*DEMO, "--config.rate=fast"), ("--config.rate", "float", "'fast'")),
        ((*DEMO, "--config.target.bias=7"), ("--config.target.bias", "bool", "'7'")),
        ((*DEMO, "--config.limit=x"), ("--config.limit", "int", "'x'")),
        ((*DEMO, "--config.widths=wide"), ("--config.widths", "int", "wide")),
        ((*DEMO, "--config.target=1"), ("--config.target", "dict", "'1'")),
        ((*DEMO, "--config.file=x"), ("cannot be set on the command line",)),
        ((*DEMO, "--config.experiment=dmeo"), ("'dmeo'", "did you mean demo?")),
        ((*DEMO, "--config.experiment=shared_part"), ("no experiment 'shared_part'", "known: demo\n")),
        ((*DEMO, "--workdri=x"), ("workdri", "workdir")),
        ((*DEMO, "runs/x"), ("stray argument 'runs/x'",)),
        ((*DEMO, "--workdir", "launch.py/x"), ("--workdir launch.py/x",)),
        ((*DEMO, "--compilation_cache=off", "--config.does=refuse"), ("draft_length must be at least 0; got -1",)),
    ],
)
def test_a_mistake_ends_in_one_line_that_helps(project, arguments, parts):
    result = launch(project, *arguments)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("launch: ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "does, parts",
    [
        ("fill the disk", ("No space left on device", "make room, and give the same command again")),
        ("a path too long", ("File name too long (xxx", "give a shorter path")),
    ],
)
def test_what_the_disk_refuses_ends_in_one_line_that_helps(project, does, parts):
    run = launch(project, *DEMO, f"--config.does={does}")
    assert run.returncode == 2 and run.stderr.startswith("launch: ") and run.stderr.count("\n") == 1
    assert all(part in run.stderr for part in parts)
    assert "Traceback" in launch(project, *DEMO, f"--config.does={does}", "--traceback").stderr


def test_a_reader_that_goes_away_is_no_error(project):
    process = subprocess.Popen(
        [sys.executable, "launch.py", *DEMO, "--config.does=talk"], cwd=project, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((*DEMO, "--config.does=crash"), "KeyError: 'key'"),
        ((*DEMO, "--config.does=crash in numpy"), "ValueError: cannot reshape"),
        ((*DEMO, "--config.does=misspell"), "AttributeError"),
        (("--config", "configs/broken.py"), "ValueError: invalid literal"),
        ((*DEMO, "--config.does=refuse", "--traceback"), "ValueError: draft_length"),
    ],
)
def test_an_unexpected_error_keeps_its_traceback(project, arguments, error):
    result = launch(project, *arguments, "--compilation_cache=off")
    assert result.returncode == 1
    assert "Traceback" in result.stderr and error in result.stderr


def test_config_argument_overrides_and_workdir_reach_the_experiment(project):
    overrides = ("--config.seed=3", "--config.rate=2", "--config.limit=4", "--config.target.bias", "--config.widths=5")
    result = launch(project, "--config", "configs/demo.py:big", *overrides, "--workdir", "out/a")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "jax was ready out/a 2 (5,)\n3 2.0 4 True\n"
    assert result.stderr == ""
    assert (project / "out/a").is_dir()


def test_the_default_workdir_is_named_after_the_config_and_its_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line.make_workdir(None, "configs/demo.py") == Path("runs/demo")
    assert command_line.make_workdir("", "configs/demo.py:big/er") == Path("runs/demo-big-er")
    assert (tmp_path / "runs/demo-big-er").is_dir()


def test_compiled_programs_are_kept_in_the_users_cache_folder_unless_moved_or_off(project, tmp_path):
    compile_ = (*DEMO, "--config.does=compile")
    home = {"XDG_CACHE_HOME": "", "HOME": str(tmp_path / "home"), "JAX_COMPILATION_CACHE_DIR": ""}
    default = tmp_path / "home/.cache/specjax/jax"
    assert launch(project, *compile_, "--compilation_cache=off", **home).returncode == 0
    assert not default.exists()
    assert launch(project, *compile_, f"--compilation_cache={tmp_path / 'moved'}", **home).returncode == 0
    assert not default.exists() and list((tmp_path / "moved").iterdir())
    assert launch(project, *compile_, **home).returncode == 0
    assert list(default.iterdir())


def test_an_unusable_cache_folder_is_reported_and_the_run_goes_on(project):
    result = launch(project, *DEMO, "--config.does=compile", "--compilation_cache=launch.py/x")
    assert result.returncode == 0
    assert result.stderr.count("\n") == 1 and "going on without a compilation cache" in result.stderr


def test_ctrl_c_ends_with_one_line(project):
    command = [sys.executable, "launch.py", *DEMO, "--config.does=wait", "--compilation_cache=off"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=project, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "launch: interrupted\n"


def test_help_names_the_flags_and_the_command(project):
    result = launch(project, "--help")
    assert "python launch.py --config configs/quickstart.py" in result.stdout
    for flag in ("--config:", "--workdir:", "--compilation_cache:", "--[no]traceback:"):
        assert flag in result.stdout


def test_without_the_packages_it_says_how_to_install_them(project):
    isolated = [sys.executable, "-S", "launch.py", *DEMO]
    result = subprocess.run(isolated, cwd=project, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "python3 -m specjax.install" in result.stderr


def test_the_entry_stays_under_60_lines():
    assert len((ROOT / "launch.py").read_text().splitlines()) < 60
