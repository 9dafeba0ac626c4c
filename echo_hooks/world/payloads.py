"""Small payloads of ranks traced before, replayed to later ranks: flags, sizes, seeds, plain objects, store keys.

Only what can steer control flow is kept, never bulk data, and only as plain JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echo_hooks import host_tensors
from echo_hooks.errors import UsageError

PAYLOAD_MAX_BYTES = 4096
"""Larger payloads are data, not control, and are not kept."""

_FILE_MAX_BYTES = 64 << 20
_FORMAT = 1

Raw = bytes


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@dataclass(frozen=True)
class Payload:
    """What one rank put into one call.

    ``kind``: collective name, "send", "store". ``bytes``, ``dtype``: of the call, to be compared by the reader.
    ``data``: the tensor's bytes (None: not known or too large). ``object``: a JSON-plain object (ABSENT: none).
    """

    kind: str
    bytes: int
    dtype: str
    data: Raw | None = None
    object: Any = ABSENT


class PayloadStore:
    """Payloads by (rank, key); one JSON file per rank in ``directory`` (None: in memory only)."""

    def __init__(self, directory: Path | None = None):
        self.directory = None if directory is None else Path(directory)
        self._payloads: dict[int, dict[str, Payload]] = {}
        self._written: set[int] = set()
        if self.directory is not None and self.directory.is_dir():
            for path in sorted(self.directory.glob("*.json")):
                if path.stem.isdigit():
                    self._payloads[int(path.stem)] = _read(path)

    def ranks(self) -> list[int]:
        """Ranks that have left payloads, in order."""
        return sorted(self._payloads)

    def get(self, rank: int, key: str) -> Payload | None:
        return self._payloads.get(rank, {}).get(key)

    def put(self, rank: int, key: str, payload: Payload) -> None:
        """Keep a payload; data above PAYLOAD_MAX_BYTES and objects that are no plain JSON are dropped from it."""
        if payload.data is not None and len(payload.data) > PAYLOAD_MAX_BYTES:
            payload = Payload(payload.kind, payload.bytes, payload.dtype)
        if payload.object is not ABSENT and not json_plain(payload.object):
            payload = Payload(payload.kind, payload.bytes, payload.dtype, payload.data)
        self._payloads.setdefault(rank, {})[key] = payload
        self._written.add(rank)

    def begin(self, rank: int) -> None:
        """Forget what an earlier trace of ``rank`` left: it is being traced again."""
        self._payloads[rank] = {}
        self._written.add(rank)

    def save(self) -> None:
        """Write the ranks filled in this process; each file appears whole."""
        if self.directory is None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for rank in sorted(self._written):
            entries = {key: _encode(p) for key, p in self._payloads[rank].items()}
            path = self.directory / f"{rank:05d}.json"
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"format": _FORMAT, "rank": rank, "payloads": entries}, allow_nan=False))
            os.replace(temporary, path)
        self._written.clear()


def json_plain(value: Any) -> bool:
    """True when JSON gives back an equal object of the same types, within PAYLOAD_MAX_BYTES."""
    try:
        return _plain(value, 0) and len(json.dumps(value)) <= PAYLOAD_MAX_BYTES
    except (ValueError, RecursionError):
        return False


def _plain(value: Any, depth: int) -> bool:
    if depth > 32:
        return False
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if value is None or kind in (bool, int, str):
        return True
    if kind is list:
        return all(_plain(v, depth + 1) for v in value)
    if kind is dict:
        return all(type(k) is str and _plain(v, depth + 1) for k, v in value.items())
    return False


def tensor_bytes(t: torch.Tensor) -> bytes:
    """The elements of a real tensor, row-major, in this machine's (little-endian) byte order."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bytes_tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The reverse of ``tensor_bytes``, as a flat tensor."""
    return host_tensors.from_bytes(data, dtype)


def _encode(payload: Payload) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": payload.kind, "bytes": payload.bytes, "dtype": payload.dtype}
    if payload.data is not None:
        entry["data"] = base64.b64encode(payload.data).decode("ascii")
    if payload.object is not ABSENT:
        entry["object"] = payload.object
    return entry


def _decode(entry: Any) -> Payload:
    kind, size, dtype = entry["kind"], entry["bytes"], entry["dtype"]
    if not (isinstance(kind, str) and type(size) is int and size >= 0 and isinstance(dtype, str)):
        raise ValueError("a payload needs kind, bytes and dtype")
    data = base64.b64decode(entry["data"], validate=True) if "data" in entry else None
    if data is not None and len(data) > PAYLOAD_MAX_BYTES:
        raise ValueError(f"a payload has {len(data)} bytes")
    return Payload(kind, size, dtype, data, entry.get("object", ABSENT))


def _read(path: Path) -> dict[str, Payload]:
    remedy = "delete it and trace that rank again"
    try:
        if path.stat().st_size > _FILE_MAX_BYTES:
            raise UsageError(f"{path}: payload file above {_FILE_MAX_BYTES >> 20} MiB; {remedy}.")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["rank"] != int(path.stem):
            raise ValueError("wrong format or rank")
        return {key: _decode(entry) for key, entry in content["payloads"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise UsageError(f"{path}: not a payload file of format {_FORMAT} ({error}); {remedy}.") from None
