"""Reading a profiler's Chrome trace event by event: memory does not grow with the file.

Profilers write what is no JSON: bare ``inf`` and ``N/A``, raw control characters, backslashes of Windows paths, files
without an end. A reader that passes a ``Repairs`` gets all whole events, and a count of what was mended or left out.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError

_CHUNK = 1 << 18  # bytes read at once, compressed ones where the file is
MAX_EVENT_CHARACTERS = 64 << 20
"""An event, or what stands before the list of events, is no longer than this."""


@dataclass
class Repairs:
    """``header``: the text before the list of events. ``mended``, ``dropped``: events. ``sentences``: what the reader
    should be told besides."""

    header: str = ""
    mended: int = 0
    dropped: int = 0
    sentences: list[str] = field(default_factory=list)

    def told(self, path: Path) -> list[str]:
        """One sentence for each kind of fault."""
        found = list(self.sentences)
        if self.mended:
            found.append(f"{path}: {self.mended} events were no valid JSON and were mended")
        if self.dropped:
            found.append(f"{path}: {self.dropped} events without a usable time were left out")
        return found


def chrome_events(path: Path, repairs: Repairs | None = None) -> Iterator[dict[str, Any]]:
    """The objects of ``traceEvents`` in file order; ``path`` is .json or .json.gz. A file that is one list is taken
    for the list of events.

    Raises UsageError for a file that is missing, damaged, or no trace; without ``repairs`` also for one that is
    truncated or holds invalid JSON.
    """
    strict = repairs is None
    repairs = repairs or Repairs()
    try:
        with path.open("rb") as file:
            yield from _events(path, _Text(file, path.name.endswith(".gz")), repairs, strict)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as a trace ({error})") from None


class _Text:
    """A file's text with a window that moves over it. A compressed stream that breaks off ends there, with all that
    came before; ``broken`` says how."""

    def __init__(self, file, zipped: bool) -> None:
        self.file = file
        self.text, self.at, self.passed = "", 0, 0
        self.broken = ""
        self._inflate = zlib.decompressobj(31) if zipped else None
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def more(self) -> bool:
        """Read on; False at the end."""
        data = self._read()
        while data == b"" and not self._ended:
            data = self._read()
        self.passed += self.at
        self.text, self.at = self.text[self.at :] + self._decode(data), 0
        return bool(data)

    _ended = False

    def _read(self) -> bytes:
        raw = self.file.read(_CHUNK)
        if self._inflate is None:
            self._ended = not raw
            return raw
        if not raw or self.broken:
            self._ended = True
            if not self._inflate.eof and not self.broken:
                self.broken = "(the compressed data breaks off)"
            return b""
        data = b""
        try:
            data = self._inflate.decompress(raw)
            while self._inflate.eof and self._inflate.unused_data:  # files of several gzip members
                rest = self._inflate.unused_data
                self._inflate = zlib.decompressobj(31)
                data += self._inflate.decompress(rest)
        except zlib.error as error:
            self.broken = f"({error})"
        return data


def _events(path: Path, text: _Text, repairs: Repairs, strict: bool) -> Iterator[dict[str, Any]]:
    _to_first_event(path, text, repairs)
    decoder = json.JSONDecoder(strict=strict)
    while True:
        _skip(text)
        if text.at < len(text.text) and text.text[text.at] == "]":
            return
        try:
            event, text.at = decoder.raw_decode(text.text, text.at)
        except json.JSONDecodeError:
            end = _end(text.text, text.at)
            if end < 0:
                if len(text.text) - text.at > MAX_EVENT_CHARACTERS:
                    raise UsageError(f"{path}: damaged, an event does not end") from None
                if text.more():
                    continue
                if strict:
                    raise UsageError(
                        f"{path}: truncated, the list of events has no end {text.broken}".rstrip()
                    ) from None
                repairs.sentences.append(
                    f"{path}: truncated at character {text.passed + len(text.text)}; the whole events before are used"
                )
                return
            if strict:
                raise UsageError(f"{path}: not valid JSON at character {text.passed + text.at}") from None
            event = _mended(text.text[text.at : end])
            text.at = end
            if event is None:
                repairs.dropped += 1
            else:
                repairs.mended += 1
        if isinstance(event, dict):
            yield event


def _to_first_event(path: Path, text: _Text, repairs: Repairs) -> None:
    """Move to just behind ``"traceEvents": [``, or behind the first bracket of a bare list."""
    while True:
        more = text.more()
        if text.text.lstrip()[:1] == "[":
            text.at = text.text.index("[") + 1
            return
        at = text.text.find('"traceEvents"')
        opening = text.text.find("[", at) if at >= 0 else -1
        if opening >= 0:
            repairs.header, text.at = text.text[:at], opening + 1
            return
        if not more or len(text.text) > MAX_EVENT_CHARACTERS:
            why = f'no "traceEvents" in it: a trace of torch.profiler (Chrome format) is needed {text.broken}'
            raise UsageError(f"{path}: {why.rstrip()}")


def _skip(text: _Text) -> None:
    while text.at < len(text.text) and text.text[text.at] in " \t\r\n,":
        text.at += 1


# ---- events that are no JSON ----

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_BARE = re.compile(
    r'("(?:[^"\\]|\\.)*")|(?<=[:\[,\s])[-+]?(?:inf|infinity|nan|n/a)(?=[,\s}\]])', re.DOTALL | re.IGNORECASE
)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\', re.DOTALL)


def _end(text: str, at: int) -> int:
    """Where the object or other value that begins at ``at`` ends, by its brackets; -1 when the text ends before."""
    if text[at : at + 1] not in ("{", "["):
        comma = min((i for i in (text.find(",", at), text.find("]", at)) if i >= 0), default=-1)
        return comma
    depth = 0
    for token in _TOKEN.finditer(text, at):
        if token[0] in "{[":
            depth += 1
        elif token[0] in "}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1


def _mended(text: str) -> Any:
    """The event with bare numbers as null and lone backslashes doubled; None when that is not enough."""
    text = _BARE.sub(lambda found: found[1] or "null", text)
    text = _ESCAPE.sub(lambda found: found[0] if len(found[0]) > 1 else "\\\\", text)
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
