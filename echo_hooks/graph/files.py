"""Files written whole and read with suspicion; nothing here is worth an import that costs time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError

MAX_JSON_BYTES = 256 << 20


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as a whole file; ValueError for a number that JSON lacks (NaN, infinity)."""
    atomic_write(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most MAX_JSON_BYTES."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UsageError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: not valid JSON (truncated?)") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: a JSON object was expected")
    return value
