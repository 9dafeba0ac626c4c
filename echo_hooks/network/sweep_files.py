"""Reads a file of measured collectives: nccl-tests text or JSON, or CSV."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.network import perftest
from echo_hooks.network.sweep_logs import _from_code, read_text
from echo_hooks.network.sweeps import COLLECTIVES, Sweep, at_line, collective_name, dtype_name, one_world, tidy

MAX_FILE_BYTES = 64 << 20

_JSON_START = re.compile(r"\s*(\{|\[\s*[{\]])")

# CSV columns by what they hold, in order of preference.
_CSV = {
    "collective": ("collective", "name", "op"),
    "ranks": ("ranks", "gpus", "nranks", "world_size"),
    "nodes": ("nodes",),
    "bytes": ("bytes", "size_bytes", "size"),
    "dtype": ("dtype", "type"),
    "version": ("nccl_version",),
    "accelerator": ("gpu", "accelerator", "device"),
    "run": ("sweep_id", "tag", "run"),
    "environment": ("environment",),
}
_CSV_TIMES = ("time_us", "oop_time_us", "ip_time_us", "time")


def read_sweeps(
    path: str | Path, *, collective: str | None = None, ranks: int | None = None, nodes: int | None = None
) -> list[Sweep]:
    """Every sweep in a file. ``collective``, ``ranks``, ``nodes``: what the file itself does not say.

    CSV needs columns for the collective, the ranks, bytes and time ("kernel_us" is kernel time, the others are calls
    back to back). Raises UsageError with file and reason: unreadable, empty, nothing usable in it, or at odds with
    what was said.
    """
    path = Path(path)
    if collective is not None:
        known = collective_name(collective)
        if known is None:
            raise UsageError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")
        collective = known
    text = _text(path)
    source = path.name
    if why := perftest.refusal(text):
        raise UsageError(f"{source}: {why}")
    if _JSON_START.match(text):
        sweeps = list(_read_json(text, source, collective))
    elif _is_csv(text):
        sweeps = list(_read_csv(text, source, collective))
    else:
        sweeps = read_text(text.splitlines(), source, collective, ranks)
    done = [_complete(sweep, ranks, nodes) for sweep in sweeps]
    if not done:
        raise UsageError(f"{source}: no usable row in it")
    return done


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, so no log of collectives")
    if not data.strip():
        raise UsageError(f"{path}: empty")
    return data.decode("utf-8", "replace")


def _complete(sweep: Sweep, ranks: int | None, nodes: int | None) -> Sweep:
    count, on = one_world(sweep, ranks, nodes)
    if not count:
        raise UsageError(f"{sweep.where}: does not say how many ranks it ran on; say it")
    on = on or 1
    if count % on:
        raise UsageError(f"{sweep.where}: {count} ranks on {on} nodes: the nodes should hold equally many")
    if not sweep.points:
        raise UsageError(f"{sweep.where}: no usable row in it")
    return Sweep(**{**sweep.__dict__, "ranks": count, "nodes": on})


# ---- JSON ----


def _read_json(text: str, source: str, collective: str | None) -> Iterator[Sweep]:
    """nccl-tests' report (a list "results"), an object keyed by size, or one object per line and row (rccl-tests)."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 0
        yield from _from_rows(_json_lines(text, source, line), source, collective)
        return
    if isinstance(data, dict) and isinstance(data.get("results"), list):
        yield _from_report(data, source, collective)
    elif isinstance(data, dict) and any(key.isdigit() for key in data):
        yield _keyed_by_size(data, source, collective)
    elif isinstance(data, dict):
        yield from _from_rows([data], source, collective)
    elif isinstance(data, list):
        yield from _from_rows([row for row in data if isinstance(row, dict)], source, collective)


def _json_lines(text: str, source: str, bad_line: int) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        line = line.strip().rstrip(",")
        if not line.startswith("{"):
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a cut-off line
        if isinstance(row, dict):
            rows.append(row)
    if not rows:
        raise UsageError(f"{at_line(source, bad_line)}: neither valid JSON nor one JSON object per line")
    return rows


def _from_report(data: dict[str, Any], source: str, collective: str | None) -> Sweep:
    found = data.get("config")
    config: dict[str, Any] = found if isinstance(found, dict) else {}
    devices = [d for d in config.get("devices") or data.get("devices") or [] if isinstance(d, dict)]
    arguments = " ".join(str(a) for a in data.get("args") or [])
    name = collective or next((n for word in arguments.split() if (n := collective_name(Path(word).name))), None)
    points, rejected, dtype = [], 0, ""
    for row in data["results"]:
        row = row if isinstance(row, dict) else {}
        times = [_positive(row[p].get("time")) for p in ("out_of_place", "in_place") if isinstance(row.get(p), dict)]
        times = [t for t in times if t is not None]
        size = _whole(row.get("size"))
        if size is None or not times:
            rejected += 1
            continue
        points.append((size, min(t for t in times if t is not None)))
        dtype = str(row.get("type", dtype))
    version = data.get("nccl_version")
    return Sweep(
        collective=_known(name, source),
        ranks=len(devices),
        nodes=len({d.get("hostname") for d in devices}),
        points=tidy(points),
        dtype=dtype_name(dtype),
        gpus_per_thread=_whole(config.get("ngpus")) or 1,
        nccl_version=_from_code(version) if isinstance(version, int) and version > 20000 else "",
        accelerator=str(devices[0].get("device_info", "")) if devices else "",
        source=source,
        rejected=rejected,
    )


def _keyed_by_size(data: dict[str, Any], source: str, collective: str | None) -> Sweep:
    points, rejected, dtype, name = [], 0, "", collective
    ranks = 0
    for key, row in data.items():
        if not key.isdigit() or not isinstance(row, dict):
            continue
        times = [_positive(row.get(k)) for k in ("oop_time", "ip_time", "oop_time_us", "ip_time_us", "time")]
        known = [t for t in times if t is not None]
        if not known:
            rejected += 1
            continue
        points.append((int(key), min(known)))
        dtype, ranks = str(row.get("type", dtype)), _whole(row.get("ranks")) or ranks
        name = name or collective_name(str(row.get("name", row.get("collective", ""))))
    name = name or collective_name(str(data.get("collective", data.get("name", ""))))
    ranks = ranks or _whole(data.get("ranks")) or 0
    return Sweep(_known(name, source), ranks, 0, tidy(points), dtype_name(dtype), source=source, rejected=rejected)


def _from_rows(rows: Iterable[dict[str, Any]], source: str, collective: str | None) -> Iterator[Sweep]:
    groups: dict[tuple, list[tuple[int, float]]] = {}
    rejected = 0
    for row in rows:
        size, time = _whole(row.get("size")), _positive(row.get("time"))
        name = collective or collective_name(str(row.get("name", row.get("collective", ""))))
        if size is None or time is None or name is None:
            rejected += 1
            continue
        key = (name, _whole(row.get("ranks")) or 0, _whole(row.get("nodes")) or 0, str(row.get("type", "")))
        groups.setdefault(key, []).append((size, time))
    if not groups:
        raise UsageError(f"{source}: {rejected} rows of JSON, none with size, time and the collective's name")
    for (name, ranks, nodes, dtype), points in groups.items():
        yield Sweep(name, ranks, nodes, tidy(points), dtype_name(dtype), source=source, rejected=rejected)


# ---- CSV ----


def _is_csv(text: str) -> bool:
    header = text.lstrip().split("\n", 1)[0]
    return "," in header and not header.startswith("#") and bool({"bytes", "size_bytes", "size"} & set(_cells(header)))


def _cells(line: str) -> list[str]:
    return [cell.strip().strip('"').lower() for cell in line.split(",")]


def _read_csv(text: str, source: str, collective: str | None) -> Iterator[Sweep]:
    reader = csv.DictReader(text.lstrip().splitlines())
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
    at = {what: next((c for c in columns if c in reader.fieldnames), None) for what, columns in _CSV.items()}
    kernel = "kernel_us" in reader.fieldnames
    times = ("kernel_us",) if kernel else tuple(c for c in _CSV_TIMES if c in reader.fieldnames)
    if not times:
        raise UsageError(f"{source}: no column of times; one of kernel_us, {', '.join(_CSV_TIMES)} was expected")
    if at["collective"] is None and collective is None:
        raise UsageError(f"{source}: no column that names the collective; one of {', '.join(_CSV['collective'])}")
    groups: dict[tuple, list[tuple[int, float]]] = {}
    lines: dict[tuple, int] = {}
    rejected = first_rejected = 0
    before = text[: len(text) - len(text.lstrip())].count("\n")  # lines left out above
    try:
        for row in reader:
            cell = {what: (row.get(column) or "").strip() if column else "" for what, column in at.items()}
            name = collective or collective_name(cell["collective"])
            known = [t for c in times if (t := _positive(row.get(c))) is not None]
            size = _whole(cell["bytes"])
            if name is None or size is None or not known:
                rejected += 1
                first_rejected = first_rejected or before + reader.line_num
                continue
            key = (
                cell["run"], name, _whole(cell["ranks"]) or 0, _whole(cell["nodes"]) or 0,
                dtype_name(cell["dtype"]), cell["version"], cell["accelerator"], cell["environment"],
            )  # fmt: skip
            groups.setdefault(key, []).append((size, min(known)))
            lines.setdefault(key, before + reader.line_num)
    except csv.Error as error:
        raise UsageError(f"{at_line(source, before + reader.line_num)}: not valid CSV ({error})") from None
    if not groups and rejected:
        where = at_line(source, first_rejected)
        raise UsageError(f"{where}: the first of {rejected} rows, none of which names a collective, its bytes and time")
    for key, points in groups.items():
        run, name, ranks, nodes, dtype, version, accelerator, environment = key
        yield Sweep(
            name, ranks, nodes, tidy(points), dtype, "kernel" if kernel else "stream",
            nccl_version=version if version[:1].isdigit() else "", accelerator=accelerator,
            source=f"{source} ({run})" if run else source, line=lines[key], rejected=rejected,
            first_rejected=first_rejected, environment=_variables(environment),
        )  # fmt: skip


def _variables(text: str) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE;NAME=VALUE, as bench/gpu/nccl_sweep.py writes them."""
    pairs = (part.split("=", 1) for part in text.split(";") if "=" in part)
    return tuple(sorted((name.strip(), value.strip()) for name, value in pairs))


# ---- cells ----


def _known(name: str | None, source: str) -> str:
    if name is None:
        raise UsageError(f"{source}: does not say which collective it measured; name it")
    return name


def _positive(value: Any) -> float | None:
    """A time in us; None for "N/A", nothing, zero, and what is no number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number > 0 else None


def _whole(value: Any) -> int | None:
    number = _positive(value)
    return int(number) if number is not None and number == int(number) and number < 2**50 else None
