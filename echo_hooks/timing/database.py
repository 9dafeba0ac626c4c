"""The profile database: how long each operation took, measured alone on a real device; one Parquet file.

    one row = one operation on one device with one set of libraries under one condition

An operation is found by its key (`key_of`): name, shapes, dtypes, layout and the arguments that choose the kernel.
File format: docs/timing.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite, prod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.rundir import OPS_FIELDS, ops_table, signatures_of, write_table
from echo_hooks.timing.classes import op_class

FORMAT = 1
MAX_FILE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 4 << 30
MAX_ROWS = 5_000_000

CONDITIONS = ("cold", "warm", "loaded")
"""Operands out of the last cache on a rested device; left in the cache by the call before; out of the cache on a device
kept busy with matrix products, at the clock that its power limit leaves it."""


@dataclass(frozen=True)
class Measurement:
    """``median_us``, ``p10_us``, ``p90_us``: from the start of a call's first kernel to the end of its last, queued
    ahead so that no launch shows. ``busy_us``: median without the gaps between kernels. ``kernels``: launched per
    call, memsets and copies included; ``kernel_names``: (name, how many)."""

    signature: OpSignature
    device: str
    torch: str
    cuda: str
    cudnn: str
    condition: str
    samples: int
    median_us: float
    p10_us: float
    p90_us: float
    busy_us: float
    kernels: int
    kernel_names: tuple[tuple[str, int], ...] = ()

    @property
    def versions(self) -> tuple[str, str, str]:
        """(torch, CUDA, cuDNN)."""
        return self.torch, self.cuda, self.cudnn


@dataclass
class Database:
    """``recordings``: one dict per recording (device, versions, host_speed, machine).

    ``unmeasured``: (op name, why, digest of its key) of what could not be measured.
    """

    rows: list[Measurement] = field(default_factory=list)
    recordings: list[dict[str, Any]] = field(default_factory=list)
    unmeasured: list[tuple[str, str, str]] = field(default_factory=list)


# ---- keys ----


def key_of(signature: OpSignature) -> tuple:
    """What two calls must share to run the same kernels: name, operands, layout, arguments, attributes.

    A pointwise operation on dense operands of one shape sees their elements, not their dimensions.
    """
    inputs, outputs = signature.inputs, signature.outputs
    if _sees_elements(signature):
        inputs, outputs = _flattened(inputs), _flattened(outputs)
    return signature.name, inputs, outputs, signature.call, signature.attrs


def digest_of(signature: OpSignature) -> str:
    """A short name of the key."""
    return blake2b(repr(key_of(signature)).encode(), digest_size=8).hexdigest()


def _sees_elements(signature: OpSignature) -> bool:
    opclass = op_class(signature.name)
    if opclass is None or opclass.name not in ("elementwise", "activation") or not signature.inputs:
        return False
    tensors = (*signature.inputs, *signature.outputs)
    dense = all(t.contiguous for t in tensors) and len({t.shape for t in tensors}) == 1
    return dense and '"L"' not in signature.call  # repeat, roll, flip: their lists speak of dimensions


def _flattened(metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta((prod(m.shape),), m.dtype) for m in metas)


# ---- files ----

_NUMBERS = ("samples", "median_us", "p10_us", "p90_us", "busy_us", "kernels")
_TEXTS = ("device", "torch", "cuda", "cudnn", "condition", "kernel_names")


def write_database(path: Path, database: Database) -> None:
    """Write the whole file and rename it."""
    rows = database.rows
    table = ops_table([row.signature for row in rows])
    for name in _TEXTS[:-1]:
        table = table.append_column(name, pa.array([getattr(r, name) for r in rows], pa.string()))
    table = table.append_column("kernel_names", pa.array([json.dumps(r.kernel_names) for r in rows], pa.string()))
    for name in _NUMBERS:
        kind = pa.int32() if name in ("samples", "kernels") else pa.float32()
        table = table.append_column(name, pa.array([getattr(r, name) for r in rows], kind))
    meta = {"format": FORMAT, "recordings": database.recordings, "unmeasured": database.unmeasured}
    write_table(path, table.replace_schema_metadata({"echo": json.dumps(meta)}))


def read_database(path: Path) -> Database:
    """A database file; UsageError says what is missing, damaged, too large or of another format."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        file = pq.ParquetFile(path)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        if file.metadata.num_rows > MAX_ROWS or sum(g.total_byte_size for g in groups) > MAX_UNPACKED_BYTES:
            raise UsageError(f"{path}: more than {MAX_ROWS} rows or {MAX_UNPACKED_BYTES} bytes unpacked")
        missing = {*OPS_FIELDS, "call", *_TEXTS, *_NUMBERS} - set(file.schema_arrow.names)
        if missing:
            raise UsageError(f"{path}: no profile database; it lacks {', '.join(sorted(missing))}")
        table = file.read(columns=[*OPS_FIELDS, "call", *_TEXTS, *_NUMBERS])
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None
    try:
        meta = json.loads((table.schema.metadata or {}).get(b"echo", b"{}"))
        if meta.get("format") != FORMAT:
            raise UsageError(f"{path}: profile format {meta.get('format')!r}, this Echo reads {FORMAT}")
        return Database(
            list(_measurements(path, table)),
            [dict(r) for r in meta["recordings"]],
            [(str(name), str(why), str(key)) for name, why, key in meta["unmeasured"]],
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: not a profile database ({error!r})") from None


def _measurements(path: Path, table: pa.Table) -> Iterator[Measurement]:
    columns = {name: table[name].to_pylist() for name in (*_TEXTS, *_NUMBERS)}
    kernels = {text: _kernel_names(text) for text in set(columns["kernel_names"])}
    for i, signature in enumerate(signatures_of(table)):
        values: dict[str, Any] = {name: column[i] for name, column in columns.items()}
        row = Measurement(signature, **{**values, "kernel_names": kernels[values["kernel_names"]]})
        times = (row.p10_us, row.median_us, row.p90_us, row.busy_us)
        if not all(isfinite(t) and t >= 0 for t in times) or not row.p10_us <= row.median_us <= row.p90_us:
            raise UsageError(f"{path}: row {i} ({signature.name}): its times are no times {times}")
        if row.condition not in CONDITIONS or row.samples < 1 or row.kernels < 0:
            raise UsageError(f"{path}: row {i} ({signature.name}): condition, samples or kernels make no sense")
        yield row


def _kernel_names(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), int(count)) for name, count in json.loads(text))


def merge(databases: Iterable[Database]) -> Database:
    """One database of several: of equal keys, devices, versions and conditions the one with most samples stays, the
    later of equals."""
    best: dict[tuple, Measurement] = {}
    recordings: list[dict[str, Any]] = []
    unmeasured: dict[tuple[str, str, str], None] = {}
    for database in databases:
        recordings += [r for r in database.recordings if r not in recordings]
        unmeasured.update(dict.fromkeys(database.unmeasured))
        for row in database.rows:
            key = (key_of(row.signature), row.device, row.versions, row.condition)
            if key not in best or row.samples >= best[key].samples:
                best[key] = row
    return Database(list(best.values()), recordings, list(unmeasured))
