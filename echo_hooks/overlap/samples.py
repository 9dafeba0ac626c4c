"""Measured pairs of a kernel and a communication that ran together, as rows of a Parquet file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echo_hooks.errors import UsageError
from echo_hooks.graph.ops import OpSignature, TensorMeta

FORMAT = 1
MOST_ROWS = 5_000_000

SOURCES = ("pair", "stand-in", "loops", "trace")
"""Where a sample is from: a real collective on several devices, a stand-in kernel for it on one, means over two
loops that ran together (their kernel side alone), a profiled run."""


@dataclass(frozen=True)
class Launch:
    """Geometry of an op's longest kernel; 0 where it is not known.

    ``blocks``, ``threads`` (of a block), ``registers`` (of a thread), ``shared_bytes`` (of a block), ``kernels``: how
    many the op launched.
    """

    blocks: int = 0
    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0
    kernels: int = 0


UNKNOWN = Launch()


@dataclass(frozen=True)
class Sample:
    """One kernel beside one communication on one device; times in microseconds, NaN where not measured.

    ``kernel``: its name, the group for hold-outs. ``bytes``: as nccl-tests counts them. ``channels``, ``threads``:
    grid and block of the communication's kernel, 0 where not known. ``base_us``/``overlap_us``: the kernel alone, and
    while the communication moved data from its begin to its end; ``waiting_us``: while the communication was on the
    device and waited for a member. ``call_base_us``/``call_overlap_us``: the communication alone, and while kernels
    ran from its begin to its end.
    """

    kernel: str
    signature: OpSignature
    launch: Launch
    call: str
    bytes: int
    dtype: str
    ranks: int
    ranks_per_node: int
    rank: int
    repeat: int
    base_us: float
    overlap_us: float
    call_base_us: float
    call_overlap_us: float
    waiting_us: float = math.nan
    channels: int = 0
    threads: int = 0
    algorithm: str = ""
    protocol: str = ""
    accelerator: str = ""
    source: str = "pair"


def signature_json(op: OpSignature) -> str:
    """An op signature as text; ``signature_from_json`` reads it."""
    metas = [[[list(t.shape), t.dtype, t.contiguous] for t in side] for side in (op.inputs, op.outputs)]
    return json.dumps([op.name, *metas, op.flops, op.bytes_read, op.bytes_written, op.attrs])


def signature_from_json(text: str) -> OpSignature:
    """Inverse of ``signature_json``; ValueError or TypeError for anything else."""
    name, inputs, outputs, flops, read, written, attrs = json.loads(text)
    sides = [tuple(TensorMeta(tuple(map(int, s)), str(d), bool(c)) for s, d, c in side) for side in (inputs, outputs)]
    pairs = tuple((str(key), _hashable(value)) for key, value in attrs)
    return OpSignature(str(name), sides[0], sides[1], int(flops), int(read), int(written), pairs)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value


_PLAIN = [f for f in fields(Sample) if f.name not in ("signature", "launch")]
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}


def write_samples(path: Path, samples: Sequence[Sample], about: dict[str, Any]) -> None:
    """Write a Parquet file; ``about`` (plain data: machine, versions, command, what was dropped) goes with it."""
    columns: dict[str, pa.Array] = {
        f.name: pa.array([getattr(s, f.name) for s in samples], type=_TYPES[str(f.type)]) for f in _PLAIN
    }
    columns["signature"] = pa.array([signature_json(s.signature) for s in samples], type=pa.string())
    for name in Launch.__dataclass_fields__:
        columns[f"launch_{name}"] = pa.array([getattr(s.launch, name) for s in samples], type=pa.int64())
    meta = {"echo_overlap": json.dumps({"format": FORMAT, **about})}
    table = pa.table(columns).replace_schema_metadata(meta)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_samples(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """Samples and what was written with them; UsageError for a file that is no such table, naming what is wrong."""
    try:
        file = pq.ParquetFile(path)
        if file.metadata.num_rows > MOST_ROWS:
            raise UsageError(f"{path}: {file.metadata.num_rows} rows; at most {MOST_ROWS} are read")
        table = file.read()
        about = json.loads((table.schema.metadata or {})[b"echo_overlap"])
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if not isinstance(error, KeyError) else "it does not say that it is one"
        raise UsageError(f"{path}: no Parquet file of echo-sim overlap collect ({reason})") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UsageError(f"{path}: format {about.get('format') if isinstance(about, dict) else about!r}, should be 1")
    missing = ({f.name for f in _PLAIN} | {"signature"}) - set(table.column_names)
    if missing:
        raise UsageError(f"{path}: lacks the column {sorted(missing)[0]!r}")
    try:
        return [_sample(row) for row in table.to_pylist()], about
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: a row is damaged ({type(error).__name__}: {error})") from None


def _sample(row: dict[str, Any]) -> Sample:
    convert = {"str": str, "int": int, "float": float}
    plain = {f.name: convert[str(f.type)](row[f.name]) for f in _PLAIN}
    launch = Launch(**{name: int(row[f"launch_{name}"]) for name in Launch.__dataclass_fields__})
    return Sample(signature=signature_from_json(row["signature"]), launch=launch, **plain)


def medians(samples: Iterable[Sample]) -> list[Sample]:
    """One sample per kernel, communication and source: the median over ranks and repeats of each time."""
    groups: dict[tuple, list[Sample]] = {}
    for s in samples:
        key = (s.source, s.accelerator, s.kernel, s.call, s.bytes, s.ranks, s.channels, s.protocol)
        groups.setdefault(key, []).append(s)
    return [_median(group) for group in groups.values()]


_TIMES = ("base_us", "overlap_us", "call_base_us", "call_overlap_us", "waiting_us")


def _median(group: list[Sample]) -> Sample:
    values = {f.name: getattr(group[0], f.name) for f in fields(Sample)}
    for name in _TIMES:
        known = sorted(v for s in group if not math.isnan(v := getattr(s, name)))
        half = len(known) // 2
        values[name] = (known[half] + known[~half]) / 2 if known else math.nan
    return Sample(**values | {"rank": -1, "repeat": -1})


__all__ = ["Launch", "Sample", "asdict", "medians", "read_samples", "write_samples"]
