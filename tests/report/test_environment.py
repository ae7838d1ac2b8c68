"""The environment is honest about what it cannot know."""

import json
import subprocess

import jax
import pytest

from specjax.report.environment import cores, environment, git_state


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_environment_is_json_and_names_the_versions():
    found = json.loads(json.dumps(environment(matmul_flops_per_second=1e11)))
    assert found["jax"] == jax.__version__ and found["platform"] == jax.default_backend()
    assert found["matmul_flops_per_second"] == 1e11
    assert found["cores"] == cores() >= 1
    assert {"python", "jaxlib", "flax", "optax", "orbax_checkpoint", "numpy", "device", "memory_bytes"} <= set(found)


def test_no_repository(tmp_path):
    assert git_state(tmp_path) == (None, None)


def test_clean_and_changed_trees(tmp_path):
    try:
        git(tmp_path, "init")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    assert git_state(tmp_path) == (None, True)  # no commit yet
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit, clean = git_state(tmp_path)
    assert len(commit) == 40 and clean is True
    (tmp_path / "new.py").write_text("2")
    assert git_state(tmp_path) == (commit, False)


def test_a_folder_inside_another_repository_is_not_that_repository(tmp_path):
    try:
        git(tmp_path, "init")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (tmp_path / "site-packages").mkdir()
    assert git_state(tmp_path / "site-packages") == (None, None)


def test_git_that_is_missing_or_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == (None, None)
