"""Reads the text that nccl-tests and rccl-tests print, in all their layouts.

Columns are found by the header, not by position; debug lines may lie between rows, launchers' prefixes before them;
a file may hold several tables, and its last row may be cut off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo_hooks.errors import UsageError
from echo_hooks.network.sweeps import Sweep, at_line, bus_factor, collective_name, dtype_name, tidy

_PREFIX = re.compile(r"^\s*(?:\[[0-9]+(?:,[0-9]+)?\]\s*(?:<std(?:out|err)>)?:|[A-Za-z0-9._-]+:\s(?=\s*[#0-9]))")
_OPTIONS = re.compile(r"#\s*nThread\s+([0-9]+)\s+nGpus\s+([0-9]+)")
_DEVICE = re.compile(
    r"#\s*Rank\s+([0-9]+)\s+(?:Group\s+[0-9]+\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device\s+[0-9]+\s+\[\S*\]\s*(.*)"
)
_VERSION = re.compile(r"NCCL version ([0-9]+\.[0-9]+(?:\.[0-9]+)?)")
_LIBRARY = re.compile(r"nccl-library=([0-9]+)")
_PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_MOST_BYTES = 1 << 50


@dataclass
class _Table:
    """What has been read of one run of a test."""

    program: str = ""
    threads: int = 1
    gpus: int = 1
    hosts: dict[int, str] = field(default_factory=dict)
    device: str = ""
    version: str = ""
    columns: list[str] = field(default_factory=list)
    times: list[tuple[int, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    redop: str = ""
    root: str = ""
    dtype: str = ""
    line: int = 0
    rejected: int = 0
    first_rejected: int = 0


def read_text(
    lines: Iterable[str], source: str, collective: str | None = None, ranks: int | None = None
) -> list[Sweep]:
    """Every table in ``lines``. ``collective``, ``ranks``: what the file does not say (old layouts name neither the
    test nor, without its device list, the ranks). Raises UsageError if there is no table, or one that cannot be told.
    """
    tables: list[_Table] = []
    table = _Table(program=_program(source))
    number = 0
    for number, raw in enumerate(lines, 1):
        line = _PREFIX.sub("", raw.rstrip("\n"), count=1)
        if found := _VERSION.search(line):
            table.version = found[1]
        if found := _LIBRARY.search(line):
            table.version = _from_code(int(found[1]))
        if "Collective test starting" in line or (line.lstrip()[:1] != "#" and "_perf" in line):
            if table.times:
                tables, table = _closed(tables, table, source)
            table.program = _program(line) or table.program
        elif found := _OPTIONS.search(line):
            if table.times:
                tables, table = _closed(tables, table, source)
            table.threads, table.gpus = int(found[1]), int(found[2])
            table.hosts = {}
        elif found := _DEVICE.search(line):
            table.hosts[int(found[1])] = found[2]
            table.device = found[3].strip()
        elif columns := _columns(line):
            if table.times:
                tables, table = _closed(tables, table, source)
            table.columns, table.line = columns, number
        elif table.columns and line.lstrip()[:1].isdigit():
            bad = table.rejected
            _row(table, line.split())
            if table.rejected > bad and not table.first_rejected:
                table.first_rejected = number
    rejected = table.rejected
    tables, _ = _closed(tables, table, source)
    if not tables and rejected:
        where = at_line(source, table.first_rejected)
        raise UsageError(f"{where}: the first of {rejected} rows, none of which holds size, time and bandwidth")
    if not tables:
        raise UsageError(
            f"{source}: no table of nccl-tests in its {number} line{'s' * (number != 1)} (a header with size, count, "
            "time, algbw and busbw, then rows)"
        )
    return [_sweep(t, source, collective, ranks) for t in tables]


def _closed(tables: list[_Table], table: _Table, source: str) -> tuple[list[_Table], _Table]:
    if table.times:
        tables = [*tables, table]
    following = _Table(
        program=table.program,
        threads=table.threads,
        gpus=table.gpus,
        hosts=dict(table.hosts),
        device=table.device,
        version=table.version,
        columns=table.columns,
    )
    return tables, following


def _program(text: str) -> str:
    for found in _PROGRAM.finditer(text):
        if name := collective_name(found[1]):
            return name
    return ""


def _from_code(code: int) -> str:
    """22304 -> "2.23.4", as NCCL_VERSION_CODE counts since 2.9."""
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _columns(line: str) -> list[str]:
    words = line.lstrip("# \t").split()
    return words if {"size", "count", "time", "algbw", "busbw"} <= set(words) else []


def _row(table: _Table, words: list[str]) -> None:
    """Columns before the first "time" describe, the rest comes once out of place and once in place."""
    columns = table.columns
    if len(words) < len(columns):
        table.rejected += 1
        return
    named = dict(zip(columns[: columns.index("time")], words))
    size = int(named["size"]) if named["size"].isdigit() else -1
    times, ratio = [], None
    for i, column in enumerate(columns):
        if column != "time":
            continue
        time = _number(words[i])
        bandwidth, bus = (_number(w) for w in words[i + 1 : i + 3])
        if time is None or bandwidth is None or bus is None:
            continue
        if time <= 0 or not _agree(size, time, bandwidth):
            table.rejected += 1
            return
        times.append(time)
        if bandwidth >= 1:
            ratio = bus / bandwidth
    if not times or not 0 <= size <= _MOST_BYTES:
        table.rejected += 1
        return
    table.times.append((size, min(times)))
    if ratio is not None:
        table.ratios.append(ratio)
    table.redop, table.root = named.get("redop", table.redop), named.get("root", table.root)
    table.dtype = dtype_name(named.get("type", table.dtype))


def _number(word: str) -> float | None:
    return float(word) if _NUMBER.fullmatch(word) else None


def _agree(size: int, time: float, bandwidth: float) -> bool:
    """Whether bytes over time is the bandwidth printed, as closely as its two decimals say."""
    return abs(size / time / 1e3 - bandwidth) <= 0.02 * bandwidth + 0.0051


def _sweep(table: _Table, source: str, collective: str | None, ranks: int | None) -> Sweep:
    found_ranks = len(table.hosts) or ranks or 0
    where = at_line(source, table.line)
    name = table.program or _guess(table, found_ranks)
    if collective and name and table.program and collective != name:
        raise UsageError(f"{where}: is a log of {name}, not of {collective}")
    name = collective or name
    if not name:
        raise UsageError(f"{where}: does not say which collective it measured; name it")
    if not found_ranks:
        raise UsageError(f"{where}: has no list of devices; say how many ranks it ran on")
    if ranks and ranks != found_ranks:
        raise UsageError(f"{where}: was run on {found_ranks} ranks, not on {ranks}")
    if table.ratios and found_ranks > 1:
        expected, seen = bus_factor(name, found_ranks), sorted(table.ratios)[len(table.ratios) // 2]
        if abs(seen / expected - 1) > 0.05:
            raise UsageError(
                f"{where}: bus bandwidth is {seen:.3g} of algorithm bandwidth, which is not {name} on "
                f"{found_ranks} ranks ({expected:.3g})"
            )
    return Sweep(
        collective=name,
        ranks=found_ranks,
        nodes=len(set(table.hosts.values())) or 1,
        points=tidy(table.times),
        dtype=table.dtype,
        gpus_per_thread=table.gpus,
        nccl_version=table.version,
        accelerator=table.device,
        source=source,
        line=table.line,
        rejected=table.rejected,
        first_rejected=table.first_rejected,
    )


def _guess(table: _Table, ranks: int) -> str:
    """Which test an old layout is of, by what it reduces, its root, and bus over algorithm bandwidth; "" if open."""
    rooted = table.root not in ("", "-1")
    reduces = table.redop not in ("", "none")
    if reduces and not rooted and ranks <= 1:
        return "all_reduce"
    if not table.ratios:
        return ""
    ratio = sorted(table.ratios)[len(table.ratios) // 2]
    if abs(ratio - 1) < 0.02 and rooted:
        return "reduce" if reduces else "broadcast"
    if reduces and ranks and abs(ratio - bus_factor("all_reduce", ranks)) < 0.03:
        return "all_reduce"
    if reduces and ranks and abs(ratio - bus_factor("reduce_scatter", ranks)) < 0.03:
        return "reduce_scatter"
    return ""  # all_gather and all_to_all print the same ratio
