"""The run directory: one simulated job on disk, written whole and renamed, read with suspicion.

    manifest.json  groups.parquet  roles.json  ranks/NNNNN.{parquet,memory.parquet,ops.parquet}

File formats: docs/graph.md.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from echo_hooks.errors import UsageError
from echo_hooks.graph.files import read_json, write_json
from echo_hooks.graph.groups import Group, GroupTable
from echo_hooks.graph.memory import MEMORY_COLUMNS
from echo_hooks.graph.ops import OpSignature, TensorMeta
from echo_hooks.graph.program import COLUMNS, Kind, Program
from echo_hooks.graph.recorder import Assumption
from echo_hooks.graph.roles import MemorySummary, Role

FORMAT = 1
MAX_ROWS = 200_000_000
_GROUP_FIELDS = ("index", "name", "ranks", "backend", "site", "desc", "family", "member")
_STRING_COLUMNS = ("dtype", "module", "site")


@dataclass
class RankTrace:
    """Everything one traced rank gives: its program, ops, memory and what was assumed.

    ``program``: the measured steps, from a step_begin to a step_end mark; empty when the script made none.
    ``prologue``: all that came before (set-up and warm-up), on the same tables: it is not timed, but its
    communication must fit together too. On disk both are one program, cut at the first mark.
    ``steps``: how many optimizer steps ``program`` holds.
    ``memory_events``: numpy columns (MEMORY_COLUMNS) of the measured steps.
    ``tallies``: by name what the rank built, and how many the whole model was configured to have.
    ``tokens_per_step``: tokens this rank's embedding looked up in a step, 0 when unknown.
    ``created``: the groups that this rank made in calls which all ranks must make alike, in order.
    ``step_ends``: for every optimizer step, warm-up too, how many records of ``whole()`` had been made at its end.
    ``unanswered``: ranks that would have known a value which this one had to make up and which can steer a script.
    ``host_speed``: of the machine while the rank was traced, in microseconds by loop (capture.host_speed).
    ``profiled_step_ms``: how long a step took while its kernels were measured, the profiler's cost included; 0 where
    they were not.
    """

    rank: int
    program: Program
    prologue: Program
    ops: list[OpSignature]
    groups: GroupTable
    memory_events: dict[str, np.ndarray]
    memory: MemorySummary = field(default_factory=MemorySummary)
    assumptions: list[Assumption] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int = 1
    tokens_per_step: int = 0
    trace_seconds: float = 0.0
    tallies: dict[str, tuple[int, int]] = field(default_factory=dict)
    created: list[int] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)
    host_speed: dict[str, float] = field(default_factory=dict)
    profiled_step_ms: float = 0.0

    def whole(self) -> Program:
        """Prologue and measured steps as one program."""
        return self.prologue.joined(self.program)


@dataclass
class Run:
    """A run read back: manifest, groups, roles and the traced ranks."""

    path: Path
    manifest: dict[str, Any]
    groups: GroupTable
    roles: list[Role]
    traces: dict[int, RankTrace]

    @property
    def world_size(self) -> int:
        return int(self.manifest["world_size"])


# ---- writing ----


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file beside ``path`` and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_trace(directory: Path, trace: RankTrace) -> None:
    """Write ranks/NNNNN.*; the program itself last, so that its presence means the rank is complete."""
    stem = directory / "ranks" / f"{trace.rank:05d}"
    write_table(stem.with_suffix(".ops.parquet"), ops_table(trace.ops))
    write_table(stem.with_suffix(".memory.parquet"), pa.table({k: pa.array(v) for k, v in trace.memory_events.items()}))
    meta = {
        "rank": trace.rank,
        "streams": trace.program.streams,
        "memory": asdict(trace.memory),
        "assumptions": [asdict(a) for a in trace.assumptions],
        "notes": trace.notes,
        "steps": trace.steps,
        "tokens_per_step": trace.tokens_per_step,
        "trace_seconds": trace.trace_seconds,
        "tallies": {name: list(pair) for name, pair in trace.tallies.items()},
        "created": trace.created,
        "step_ends": trace.step_ends,
        "unanswered": trace.unanswered,
        "host_speed": trace.host_speed,
        "profiled_step_ms": trace.profiled_step_ms,
        "groups": [asdict(g) for g in trace.groups],
    }
    write_table(stem.with_suffix(".parquet"), _program_table(trace.whole(), meta))


def write_groups(directory: Path, groups: GroupTable) -> None:
    """Write groups.parquet."""
    fields = (*_GROUP_FIELDS, "local")
    write_table(directory / "groups.parquet", pa.table({f: [getattr(g, f) for g in groups] for f in fields}))


def write_roles(directory: Path, roles: list[Role]) -> None:
    """Write roles.json."""
    write_json(directory / "roles.json", {"format": FORMAT, "roles": [asdict(r) for r in roles]})


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Last of all files: a directory without a manifest is no run."""
    write_json(directory / "manifest.json", {"format": FORMAT, **manifest})


def _program_table(program: Program, meta: dict[str, Any]) -> pa.Table:
    arrays = {}
    for name in COLUMNS:
        column = program.columns[name]
        if name in _STRING_COLUMNS:
            dictionary = pa.array(program.strings, type=pa.string())
            arrays[name] = pa.DictionaryArray.from_arrays(pa.array(column.astype(np.int32)), dictionary)
        else:
            arrays[name] = pa.array(column)
    return pa.table(arrays).replace_schema_metadata({"echo": json.dumps(meta)})


def ops_table(ops: list[OpSignature]) -> pa.Table:
    """Op signatures as columns."""
    return pa.table(
        {
            "name": pa.array([o.name for o in ops], type=pa.string()),
            "inputs": pa.array([_metas_json(o.inputs) for o in ops], type=pa.string()),
            "outputs": pa.array([_metas_json(o.outputs) for o in ops], type=pa.string()),
            "flops": pa.array([o.flops for o in ops], type=pa.int64()),
            "bytes_read": pa.array([o.bytes_read for o in ops], type=pa.int64()),
            "bytes_written": pa.array([o.bytes_written for o in ops], type=pa.int64()),
            "attrs": pa.array([json.dumps(o.attrs) for o in ops], type=pa.string()),
            "call": pa.array([o.call for o in ops], type=pa.string()),
        }
    )


def _metas_json(metas: tuple[TensorMeta, ...]) -> str:
    return json.dumps([[list(m.shape), m.dtype, m.contiguous] for m in metas])


# ---- reading ----


def read_run(path: str | os.PathLike) -> Run:
    """Read a run directory; UsageError says which file is missing, damaged or of another format."""
    directory = Path(path)
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such run directory")
    if not (directory / "manifest.json").exists():
        raise UsageError(f"{directory}: no manifest.json; the run was not finished, or this is no run directory")
    manifest = read_json(directory / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise UsageError(f"{directory}/manifest.json: format {manifest.get('format')!r}, this Echo reads {FORMAT}")
    world_size = manifest.get("world_size")
    if not isinstance(world_size, int) or world_size < 1:
        raise UsageError(f"{directory}/manifest.json: world_size is {world_size!r}, should be a whole number from 1")
    groups = read_groups(directory)
    roles = read_roles(directory)
    traces = {role.traced_rank: read_trace(directory, role.traced_rank) for role in roles}
    return Run(directory, manifest, groups, roles, traces)


def read_table(path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = ()) -> pa.Table:
    """``columns`` of a Parquet file of at most MAX_ROWS rows; UsageError says what is missing or damaged.

    ``optional`` columns come too where the file has them.
    """
    try:
        file = pq.ParquetFile(path)
        if file.metadata.num_rows > MAX_ROWS:
            raise UsageError(f"{path}: {file.metadata.num_rows} rows, more than {MAX_ROWS}")
        missing = set(columns) - set(file.schema_arrow.names)
        if missing:
            raise UsageError(f"{path}: lacks the column(s) {', '.join(sorted(missing))}")
        return file.read(columns=[*columns, *(name for name in optional if name in file.schema_arrow.names)])
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def read_groups(directory: Path) -> GroupTable:
    """The group table of a run directory; UsageError when it is missing or damaged."""
    rows = read_table(directory / "groups.parquet", _GROUP_FIELDS).to_pylist()
    table = GroupTable()
    table.restore([Group(**{**row, "ranks": tuple(row["ranks"])}) for row in rows])
    return table


def read_roles(directory: Path) -> list[Role]:
    """The roles of a run directory; UsageError when they are missing or damaged."""
    path = directory / "roles.json"
    try:
        return [
            Role(
                name=str(row["name"]),
                traced_rank=int(row["traced_rank"]),
                ranks=tuple(int(r) for r in row["ranks"]),
                proven=tuple(int(r) for r in row["proven"]),
                why=str(row["why"]),
                memory=MemorySummary(**row["memory"]),
            )
            for row in read_json(path)["roles"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a list of roles ({error!r})") from None


def read_trace(directory: Path, rank: int) -> RankTrace:
    """One traced rank of a run directory; UsageError when a file is missing, damaged, or its indices lead nowhere."""
    stem = directory / "ranks" / f"{rank:05d}"
    path = stem.with_suffix(".parquet")
    table = read_table(path, tuple(COLUMNS))
    try:
        meta = json.loads((table.schema.metadata or {})[b"echo"])
        program = _read_program(table, meta)
        ops = read_ops(stem.with_suffix(".ops.parquet"))
        memory = read_table(stem.with_suffix(".memory.parquet"), tuple(MEMORY_COLUMNS))
        groups = GroupTable()
        groups.restore([Group(**{**row, "ranks": tuple(row["ranks"])}) for row in meta["groups"]])
        begin = _first_mark(program)
        trace = RankTrace(
            rank=int(meta["rank"]),
            program=program.slice(begin, len(program)),
            prologue=program.slice(0, begin),
            ops=ops,
            groups=groups,
            memory_events={name: memory[name].to_numpy() for name in MEMORY_COLUMNS},
            memory=MemorySummary(**meta["memory"]),
            assumptions=[Assumption(**a) for a in meta["assumptions"]],
            notes=[str(n) for n in meta["notes"]],
            steps=int(meta["steps"]),
            tokens_per_step=int(meta["tokens_per_step"]),
            trace_seconds=float(meta["trace_seconds"]),
            tallies={str(n): (int(built), int(of)) for n, (built, of) in meta.get("tallies", {}).items()},
            created=[int(g) for g in meta.get("created", [])],
            step_ends=[int(n) for n in meta.get("step_ends", [])],
            unanswered=[int(r) for r in meta.get("unanswered", [])],
            host_speed={str(name): _duration(us) for name, us in meta.get("host_speed", {}).items()},
            profiled_step_ms=_duration(meta.get("profiled_step_ms", 0.0)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a rank program ({error!r})") from None
    _check_indices(path, trace)
    return trace


def _duration(value: Any) -> float:
    """ValueError for what no clock shows, which would scale a whole run."""
    duration = float(value)
    if not (math.isfinite(duration) and duration >= 0.0):
        raise ValueError(f"{value} is no duration")
    return duration


def _first_mark(program: Program) -> int:
    marks = np.flatnonzero(program.kind == Kind.MARK)
    return int(marks[0]) if len(marks) else len(program)


OPS_FIELDS = ("name", "inputs", "outputs", "flops", "bytes_read", "bytes_written", "attrs")


def _read_program(table: pa.Table, meta: dict[str, Any]) -> Program:
    strings: list[str] = [""]
    index = {"": 0}
    columns: dict[str, np.ndarray] = {}
    for name, dtype in COLUMNS.items():
        if name in _STRING_COLUMNS:
            column = table[name].combine_chunks()
            if not isinstance(column, pa.DictionaryArray):
                column = column.dictionary_encode()
            mapping = []
            for text in column.dictionary.to_pylist():
                if text not in index:
                    index[text] = len(strings)
                    strings.append(text)
                mapping.append(index[text])
            codes = column.indices.to_numpy(zero_copy_only=False)
            columns[name] = np.asarray(mapping or [0])[codes].astype(dtype)
        else:
            columns[name] = table[name].to_numpy().astype(dtype)
    return Program(columns, strings, [str(s) for s in meta["streams"]])


def read_ops(path: Path) -> list[OpSignature]:
    """The op signatures of a rank; UsageError when the file is missing or damaged."""
    try:
        return signatures_of(read_table(path, OPS_FIELDS, ("call",)))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a table of operations ({error!r})") from None


def signatures_of(table: pa.Table) -> list[OpSignature]:
    """Op signatures of a table with the columns of ``ops_table``; KeyError, TypeError, ValueError for what is none."""

    @cache  # a table repeats many of them
    def metas(text: str) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(tuple(shape), dtype, bool(dense)) for shape, dtype, dense in json.loads(text))

    return [
        OpSignature(
            name=row["name"],
            inputs=metas(row["inputs"]),
            outputs=metas(row["outputs"]),
            flops=row["flops"],
            bytes_read=row["bytes_read"],
            bytes_written=row["bytes_written"],
            attrs=tuple((key, _hashable(value)) for key, value in json.loads(row["attrs"])),
            call=row.get("call") or "",  # runs of an earlier Echo have none
        )
        for row in table.to_pylist()
    ]


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value


def _check_indices(path: Path, trace: RankTrace) -> None:
    """A damaged file must not become a wild index later on."""
    program = trace.program
    limits = {
        "kind": (0, max(Kind)),
        "op": (-1, len(trace.ops) - 1),
        "group": (-1, len(trace.groups) - 1),
        "stream": (-1, len(program.streams) - 1),
    }
    for name, (low, high) in limits.items():
        column = trace.whole().columns[name]
        if len(column) and (column.min() < low or column.max() > high):
            raise UsageError(f"{path}: column {name!r} has values outside {low}..{high}")
    if any(not 0 <= g < len(trace.groups) for g in trace.created):
        raise UsageError(f"{path}: names created groups outside 0..{len(trace.groups) - 1}")
