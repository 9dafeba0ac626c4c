"""Everything that files of measurements hold: sweeps, and the tuning tables that NCCL printed beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echo_hooks.errors import UsageError
from echo_hooks.network.nccl_tuning_log import TuningTable, has_tuning, read_tuning
from echo_hooks.network.sweep_files import read_sweeps
from echo_hooks.network.sweeps import Sweep


def read_measurements(
    paths: Sequence[str | Path], *, collective: str | None = None, ranks: int | None = None, nodes: int | None = None
) -> tuple[list[Sweep], list[TuningTable]]:
    """Sweeps and tuning tables of all files. ``collective``, ``ranks``, ``nodes``: what the files do not say.

    A log may hold either or both (nccl-tests run with NCCL_DEBUG=INFO). Raises UsageError with file, line and reason
    for a file that has neither, and where two tables for one size of communicator contradict each other.
    """
    sweeps: list[Sweep] = []
    tables: dict[tuple[int, int], tuple[TuningTable, str]] = {}
    for path in map(Path, paths):
        lines = _lines_with_tuning(path)
        try:
            here = read_sweeps(path, collective=collective, ranks=ranks, nodes=nodes)
        except UsageError:
            if not lines:
                raise
            here = []
        sweeps += here
        if lines:
            size = {(sweep.ranks, sweep.nodes) for sweep in here}
            known = next(iter(size)) if len(size) == 1 else (ranks or 0, nodes or 0)
            for table in read_tuning(lines, path.name, *known):
                other = tables.setdefault((table.ranks, table.nodes), (table, path.name))
                if dict(other[0].rows) != dict(table.rows):
                    raise UsageError(
                        f"{path.name} and {other[1]}: the tuning tables for {table.ranks} ranks on {table.nodes} "
                        f"node{'s' * (table.nodes != 1)} differ: they are of different clusters or versions of NCCL"
                    )
    return sweeps, [table for table, _ in tables.values()]


def _lines_with_tuning(path: Path) -> list[str]:
    """Of a file with a tuning table, [] of any other. What is wrong with the file is for the readers to say."""
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            if not any(has_tuning(line) for line in file):
                return []
            file.seek(0)
            return [line for line in file if len(line) < 4096]
    except OSError:
        return []
