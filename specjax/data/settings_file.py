"""The small files beside a model's weights, read with errors of one line that name the file."""

import json
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """The text of a file. ValueError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8 (byte {error.start} is 0x{byte:02x}); save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file, or no object in it.

    Raises:
        ValueError: a file that cannot be read, or is no JSON.
    """
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({type(error).__name__}: {' '.join(str(error).split())})") from None
    return content if isinstance(content, dict) else {}
