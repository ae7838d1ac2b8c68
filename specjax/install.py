"""Makes the virtual environment .venv beside this package, or reuses it, and installs what specjax needs:

    python3 -m specjax.install [arguments of pip install]

Arguments are handed to pip beside the requirements, such as "jax[cuda13]" for a GPU or -e ".[test]" for the tests.
Written for any Python 3 without packages, so that an unsuitable one gets an answer instead of a traceback.
"""

import importlib.util
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST = (3, 11)
DEBIAN = "on Debian or Ubuntu: apt install python3 python3-venv"


def problem(version, modules):
    """One sentence that says why this Python will not do and what to install, or None.

    Args:
        version: (major, minor) of the Python.
        modules: names of the standard modules it has.
    """
    if tuple(version) < OLDEST:
        found = ".".join(map(str, version))
        return (
            f"specjax needs Python 3.11 or newer, this is {found}: install one ({DEBIAN}), put it in place of python3"
        )
    missing = sorted({"venv", "ensurepip"} - set(modules))
    if missing:
        return f"this Python cannot make virtual environments, it lacks {' and '.join(missing)}: install it ({DEBIAN})"
    return None


def environment_python(folder):
    """The interpreter of the virtual environment in a folder."""
    return os.path.join(folder, "Scripts", "python.exe") if os.name == "nt" else os.path.join(folder, "bin", "python")


def usable(folder):
    """Whether a virtual environment of a new enough Python, with pip, is there already."""
    check = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    try:
        return subprocess.run([environment_python(folder), "-c", check], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def request(arguments):
    """All that decides what pip is to install: the same text again means that nothing is left to do."""
    text = repr(arguments)
    for name in ("requirements.txt", "pyproject.toml"):
        with open(os.path.join(ROOT, name)) as file:
            text += "\n\n" + file.read()
    return text


def main(arguments):
    has = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name)]
    folder = os.path.join(ROOT, ".venv")
    if not usable(folder):
        complaint = problem(sys.version_info[:2], has)
        if complaint:
            sys.exit(complaint)
        print("making the virtual environment .venv", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", "--clear", folder]).returncode:
            sys.exit(f"python -m venv failed, see above ({DEBIAN})")
    wanted, done = request(arguments), os.path.join(folder, "installed.txt")
    if os.path.exists(done):
        with open(done) as file:
            if file.read() == wanted:
                return
    print("installing the requirements into .venv", flush=True)
    command = [environment_python(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run(command + ["-r", "requirements.txt"] + arguments, cwd=ROOT).returncode:
        sys.exit("pip could not install the requirements, see above; the command can be repeated")
    with open(done, "w") as file:
        file.write(wanted)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("interrupted; the command can be repeated")
