"""The installer says in one sentence what a Python lacks, and does nothing when nothing is left to do."""

import ast
import subprocess
import sys

import pytest

from specjax import install

COMPLETE = ("venv", "ensurepip")


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13), (4, 0)])
def test_a_complete_python_has_no_problem(version):
    assert install.problem(version, COMPLETE) is None


@pytest.mark.parametrize("version", [(3, 6), (3, 9), (3, 10)])
def test_an_old_python_is_told_what_to_install(version):
    sentence = install.problem(version, COMPLETE)
    assert "3.11" in sentence and f"{version[0]}.{version[1]}" in sentence and "python3-venv" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("missing", COMPLETE)
def test_a_missing_module_is_named_with_its_remedy(missing):
    sentence = install.problem((3, 11), set(COMPLETE) - {missing})
    assert missing in sentence.replace("python3-venv", "") and "python3-venv" in sentence and "\n" not in sentence


def test_the_sentence_is_all_that_a_python_without_venv_prints(tmp_path):
    """Runs the real module with venv and ensurepip hidden, in a copy, so that it finds no environment to reuse."""
    (tmp_path / "specjax").mkdir()
    (tmp_path / "specjax" / "install.py").write_text(open(install.__file__).read())
    hide = "import importlib.util, runpy; importlib.util.find_spec = lambda name: None"
    run = f"runpy.run_path({str(tmp_path / 'specjax' / 'install.py')!r}, run_name='__main__')"
    command = [sys.executable, "-c", f"{hide}; {run}"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.strip() == install.problem(sys.version_info[:2], ())
    assert not (tmp_path / ".venv").exists()


def test_an_environment_without_pip_is_not_reused(tmp_path):
    assert not install.usable(str(tmp_path))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    assert not install.usable(str(tmp_path / "bare"))


def test_old_pythons_can_read_the_installer():
    for file in (install.__file__, install.ROOT + "/specjax/__init__.py", install.ROOT + "/launch.py"):
        ast.parse(open(file).read(), feature_version=(3, 6))
