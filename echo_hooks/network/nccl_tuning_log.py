"""Reads the table of expected latencies and bandwidths that NCCL itself prints, to decide as that library would.

``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,TUNING`` prints it for every communicator at its initialisation, rank 0 only:
one line per function, "latency/bandwidth" for every algorithm and protocol, in one block (up to 2.18) or in blocks of
three algorithms. A plugin's changes are in it, so it also serves clusters whose tuner is closed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from echo_hooks.errors import UsageError
from echo_hooks.network.nccl_tables import ALGORITHMS, PROTOCOLS

_FUNCTIONS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
FUNCTIONS = tuple(_FUNCTIONS.values())
_COMM = re.compile(r"nRanks (\d{1,7}) nNodes (\d{1,6})")
_ALGORITHMS = re.compile(r"Algorithm\s*\|(.*)")
_ROW = re.compile(r"\b(" + "|".join(_FUNCTIONS) + r") \|((?:\s*\d+\.\d+/\s*\d+\.\d+ \|)+)")
_CELL = re.compile(r"(\d+\.\d+)/\s*(\d+\.\d+)")
_BY_NAME = {name.replace("_", ""): name for name in ALGORITHMS}


@dataclass(frozen=True)
class TuningTable:
    """Of a communicator of ``ranks`` in ``nodes``. ``rows``: (function, algorithm, protocol) -> (us, GB/s); what NCCL
    will not run has 0 GB/s."""

    ranks: int
    nodes: int
    rows: Mapping[tuple[str, str, str], tuple[float, float]]


def read_tuning(lines: Iterable[str], source: str, ranks: int = 0, nodes: int = 0) -> list[TuningTable]:
    """Every table in a log. ``ranks``, ``nodes``: for tables before which the log names no communicator (it does with
    the subsystem INIT). Raises UsageError where there is none, or none that can be told apart."""
    size = ranks, nodes
    found: dict[tuple[int, int], dict[tuple[str, str, str], tuple[float, float]]] = {}
    algorithms: list[str] = []
    for line in lines:
        if comm := _COMM.search(line):
            size = int(comm[1]), int(comm[2])
        elif header := _ALGORITHMS.search(line):
            names = [word.lower() for word in re.findall(r"[A-Za-z]+", header[1])]
            algorithms = [_BY_NAME.get(name, "") for name in names]
        elif algorithms and (row := _ROW.search(line)):
            cells = _CELL.findall(row[2])
            if len(cells) != len(PROTOCOLS) * len(algorithms):
                continue  # cut off
            if not all(size):
                raise UsageError(f"{source}: a tuning table of no known communicator; say its ranks and nodes")
            table = found.setdefault(size, {})
            for i, (latency, bandwidth) in enumerate(cells):
                algorithm = algorithms[i // len(PROTOCOLS)]
                if algorithm:
                    key = (_FUNCTIONS[row[1]], algorithm, PROTOCOLS[i % len(PROTOCOLS)])
                    table[key] = (float(latency), float(bandwidth))
    if not found:
        raise UsageError(
            f"{source}: no tuning table in it; NCCL prints one with NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=TUNING"
        )
    return [TuningTable(*size, rows) for size, rows in found.items()]


def has_tuning(line: str) -> bool:
    """Whether a line heads a table."""
    return _ALGORITHMS.search(line) is not None
