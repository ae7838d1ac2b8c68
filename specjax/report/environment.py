"""Where a figure was measured: versions, device, cores, memory, commit."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment(matmul_flops_per_second: float | None = None) -> dict[str, Any]:
    """The `environment` of a report.

    Args:
        matmul_flops_per_second: the machine's matmul peak of the same minute, if it was measured
            (`specjax.peak_flops.measure_peak_flops`).
    """
    device = jax.devices()[0]
    commit, clean = git_state()
    return {
        "python": platform.python_version(),
        **{package.replace("-", "_"): _version(package) for package in PACKAGES},
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "devices": jax.device_count(),
        "cores": cores(),
        "memory_bytes": _memory_bytes(),
        "matmul_flops_per_second": matmul_flops_per_second,
        "git_commit": commit,
        "git_clean": clean,
    }


def cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_state(root: pathlib.Path | None = None) -> tuple[str | None, bool | None]:
    """(commit, whether the tree was clean) of the repository that this code lies in; None where there is none.

    Untracked files that git does not ignore make the tree unclean: the code may import them.
    """
    root = (root or pathlib.Path(__file__).resolve().parents[2]).resolve()
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or pathlib.Path(top).resolve() != root:  # installed somewhere inside another repository
        return None, None
    status = _git(root, "status", "--porcelain")
    return _git(root, "rev-parse", "--verify", "HEAD"), None if status is None else not status


def _git(root, *arguments):
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_bytes():
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _processor():
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
