"""Reading a profiler's Chrome trace event by event: memory does not grow with the file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError

_CHUNK = 1 << 20  # characters read at once
MAX_EVENT_CHARACTERS = 64 << 20
"""An event, or what stands before the list of events, is no longer than this."""


def chrome_events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of ``traceEvents`` in file order; ``path`` is .json or .json.gz.

    Raises UsageError for a file that is missing, truncated, damaged, or no trace.
    """
    decoder = json.JSONDecoder()
    try:
        with _opened(path) as file:
            text = _to_first_event(path, file)
            at = 0
            while True:
                at = _skip(text, at)
                if at < len(text) and text[at] == "]":
                    return
                try:
                    event, end = decoder.raw_decode(text, at)
                except json.JSONDecodeError:
                    more = file.read(_CHUNK)
                    if not more:
                        raise UsageError(f"{path}: truncated, the list of events has no end") from None
                    if len(text) - at > MAX_EVENT_CHARACTERS:
                        raise UsageError(f"{path}: damaged, an event does not end") from None
                    text, at = text[at:] + more, 0
                    continue
                at = end
                if isinstance(event, dict):
                    yield event
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as a trace ({error})") from None


def _opened(path: Path):
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _to_first_event(path: Path, file) -> str:
    """Text from just behind ``"traceEvents": [`` on."""
    text = ""
    while True:
        more = file.read(_CHUNK)
        text += more
        at = text.find('"traceEvents"')
        opening = text.find("[", at) if at >= 0 else -1
        if opening >= 0:
            return text[opening + 1 :]
        if not more or len(text) > MAX_EVENT_CHARACTERS:
            raise UsageError(f'{path}: no "traceEvents" in it: a trace of torch.profiler (Chrome format) is needed')


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at
