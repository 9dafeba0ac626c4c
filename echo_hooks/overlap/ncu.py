"""Kernels and their metrics from a CSV of Nsight Compute (``ncu --csv``), in either layout.

``--page raw`` is wide: a column per metric, a row of units under the header. ``--page details`` is long: a row per
metric, with name, unit and value. Before the header come warnings, "==PROF==" lines and the program's own output.
Times taken this way are not those of a running job: ncu flushes caches and locks the clock unless told otherwise, so
they are marked and never mixed with others.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from echo_hooks.errors import UsageError
from echo_hooks.overlap.samples import Launch

CONDITIONS = "ncu: cold cache, locked clock"
MAX_BYTES = 1 << 30
MAX_ROWS = 5_000_000

_TIMES = {"s": 1e6, "second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "usecond": 1.0, "ns": 1e-3, "nsecond": 1e-3}
_BYTES = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
_DURATION = ("gpu__time_duration.sum", "gpu__time_duration.avg", "Duration")
_REGISTERS = ("launch__registers_per_thread", "Registers Per Thread")
_SHARED = (
    ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic"),
    ("Static Shared Memory Per Block", "Dynamic Shared Memory Per Block"),
)
_IDENTITY = {"ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream",
             "Block Size", "Grid Size", "Device", "CC", "Section Name", "Rule Name", "Rule Type", "Rule Description",
             "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"}  # fmt: skip


@dataclass
class NcuKernel:
    """One profiled launch. ``duration_us``: NaN where it was not among the metrics. ``metrics``: by name; times in
    microseconds, sizes in bytes, rates in their unit per second, others as they are. ``conditions``: how the time came
    about."""

    name: str
    launch: Launch
    duration_us: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    conditions: str = CONDITIONS


def read_ncu(path: Path, *, decimal: str = "") -> list[NcuKernel]:
    """Kernels in file order; several passes over one launch (one ID) are one kernel.

    ``decimal``: "." or "," where the file was written under a locale; left out, commas are taken to part thousands and
    a number that only a comma-decimal locale writes is refused.

    Raises UsageError: no such file, no header of ncu, a number or unit that cannot be read, with its line.
    """
    if decimal not in ("", ".", ","):
        raise UsageError(f"decimal separator {decimal!r}: should be . or ,")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES} bytes; export fewer kernels")
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return _read(path, _rows(file), decimal)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except csv.Error as error:
        raise UsageError(f"{path}: no CSV ({error})") from None


def _rows(file) -> Iterator[tuple[int, list[str]]]:
    lines = (line.replace("\0", "") for line in file if not line.startswith("=="))
    reader = csv.reader(lines)
    for row in reader:
        yield reader.line_num, row


def _read(path: Path, rows: Iterator[tuple[int, list[str]]], decimal: str) -> list[NcuKernel]:
    for _, row in rows:
        if "Kernel Name" in row and ("ID" in row or "Metric Name" in row):
            header = [name.strip() for name in row]
            break
    else:
        raise UsageError(f"{path}: no header of Nsight Compute in it (a line with ID and Kernel Name): use ncu --csv")
    read = _long if "Metric Name" in header else _wide
    kernels = list(read(path, header, rows, decimal).values())
    for kernel in kernels:
        _finish(kernel)
    return kernels


def _wide(path, header, rows, decimal) -> dict[tuple, NcuKernel]:
    units = [""] * len(header)
    metrics = []
    for i, name in enumerate(header):
        if name in _IDENTITY:
            continue
        plain, unit = _name_and_unit(name)
        units[i] = unit
        metrics.append((i, plain))
    name_at = header.index("Kernel Name")
    found: dict[tuple, NcuKernel] = {}
    for number, (line, row) in enumerate(rows):
        if number > MAX_ROWS:
            raise UsageError(f"{path}: more than {MAX_ROWS} rows")
        if len(row) != len(header):
            continue  # the program's own output, or a line cut short
        if number == 0 and not row[name_at].strip():  # the row of units: empty where a column has none
            units = [unit.strip() or units[i] for i, unit in enumerate(row)]
            continue
        kernel = _kernel(found, header, row)
        for i, name in metrics:
            _add(kernel, name, row[i], units[i], decimal, f"{path}, line {line}")
    return found


def _long(path, header, rows, decimal) -> dict[tuple, NcuKernel]:
    at = {name: header.index(name) for name in ("Metric Name", "Metric Value")}
    unit_at = header.index("Metric Unit") if "Metric Unit" in header else -1
    found: dict[tuple, NcuKernel] = {}
    for number, (line, row) in enumerate(rows):
        if number > MAX_ROWS:
            raise UsageError(f"{path}: more than {MAX_ROWS} rows")
        if len(row) != len(header):
            continue
        kernel = _kernel(found, header, row)
        name = row[at["Metric Name"]].strip()
        if name:  # rows of rules have none
            unit = row[unit_at] if unit_at >= 0 else ""
            _add(kernel, name, row[at["Metric Value"]], unit.strip(), decimal, f"{path}, line {line}")
    return found


def _kernel(found: dict[tuple, NcuKernel], header: list[str], row: list[str]) -> NcuKernel:
    cells = dict(zip(header, row))
    key = (cells.get("ID", ""), cells.get("Process ID", ""), cells.get("Device", ""), cells["Kernel Name"])
    if key not in found:
        blocks = _extents(cells.get("Grid Size") or cells.get("launch__grid_size") or "")
        threads = _extents(cells.get("Block Size") or cells.get("launch__block_size") or "")
        found[key] = NcuKernel(cells["Kernel Name"].strip(), Launch(blocks, threads, kernels=1))
    return found[key]


def _extents(text: str) -> int:
    """Product of "(132, 1, 1)", "132x1x1" or "132"."""
    numbers = [int(n) for n in re.findall(r"\d+", text.replace(" ", "") if "(" in text or "x" in text else text)]
    return math.prod(numbers) if numbers else 0


def _name_and_unit(column: str) -> tuple[str, str]:
    """ "gpu__time_duration.sum [us]" is a name and a unit."""
    match = re.fullmatch(r"(.*\S)\s*[\[(]([A-Za-z%/]+)[\])]", column)
    return (match[1], match[2]) if match else (column, "")


def _add(kernel: NcuKernel, name: str, text: str, unit: str, decimal: str, where: str) -> None:
    value = number(text, decimal, where)
    if value is not None and name not in kernel.metrics:  # a pass more over the same launch says nothing new
        kernel.metrics[name] = value * _scale(unit)


def number(text: str, decimal: str = "", where: str = "") -> float | None:
    """A number of ncu: "1,234" is 1234, "12 (+3%)" is 12; None for what is no number (n/a, names, empty).

    Raises UsageError for one that only a comma-decimal locale writes, unless ``decimal`` says which it is.
    """
    plain = re.sub(r"\s*\([+-]?[\d.,]+\s*%\)\s*$", "", text.strip()).replace("\u00a0", "").replace(" ", "")
    if not re.fullmatch(r"[+-]?[\d.,]*\d[\d.,]*([eE][+-]?\d+)?%?", plain):
        return None
    plain = plain.rstrip("%")
    if decimal == ",":
        plain = plain.replace(".", "").replace(",", ".")
    elif decimal == ".":
        plain = plain.replace(",", "")
    elif "," in plain:
        whole = plain.split(".")[0].lstrip("+-")
        if not re.fullmatch(r"\d{1,3}(,\d{3})+", whole) or "," in plain[len(plain.split(".")[0]) :]:
            raise UsageError(
                f"{where}: {text.strip()!r} may be of a locale with decimal commas; say which separator it is"
            )
        plain = plain.replace(",", "")
    try:
        return float(plain)
    except ValueError:
        return None


def _scale(unit: str) -> float:
    """To microseconds, bytes, or bytes and others per second."""
    over, _, under = unit.strip().partition("/")
    factor = _TIMES.get(over.lower(), _BYTES.get(over.lower(), 1.0))
    if under and under.lower() in _TIMES:
        factor /= _TIMES[under.lower()] / 1e6
    return factor


def _finish(kernel: NcuKernel) -> None:
    metrics = kernel.metrics
    kernel.duration_us = next((metrics[name] for name in _DURATION if name in metrics), math.nan)
    registers = next((metrics[name] for name in _REGISTERS if name in metrics), 0.0)
    shared = next((metrics.get(a, 0.0) + metrics.get(b, 0.0) for a, b in _SHARED if a in metrics or b in metrics), 0.0)
    launch = kernel.launch
    kernel.launch = Launch(launch.blocks, launch.threads, int(registers), int(shared), 1)
