"""Measured times of one collective over sizes, whatever tool wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echo_hooks.errors import UsageError

# As tools and users write them -> as this project does.
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "bcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "exchange",
    "exchange": "exchange",
    "send": "send",
}
COLLECTIVES = tuple(dict.fromkeys(_NAMES.values()))
_DTYPES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


@dataclass(frozen=True)
class Sweep:
    """``points``: (bytes, us), sizes ascending and once each; bytes as nccl-tests counts them (``exchange``: each
    rank sends and receives that much; ``send``: one way).

    ``clock``: "stream" for calls back to back, whose time holds the gap between two kernels, "kernel" for the kernel
    alone. ``gpus_per_thread``: accelerators that one host thread launches on, one after the other. ``line``: of the
    file, where it starts (0: no text). ``rejected``: rows of the file that could not be used; ``first_rejected``: line
    of the first. ``environment``: NCCL_* variables it was run with. ``nccl_version``, ``accelerator``, ``dtype``: ""
    where the file does not say.
    """

    collective: str
    ranks: int
    nodes: int
    points: tuple[tuple[int, float], ...]
    dtype: str = ""
    clock: str = "stream"
    gpus_per_thread: int = 1
    nccl_version: str = ""
    accelerator: str = ""
    source: str = ""
    line: int = 0
    rejected: int = 0
    first_rejected: int = 0
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.collective} on {self.ranks} ranks in {self.nodes} node{'s' * (self.nodes > 1)}"

    @property
    def where(self) -> str:
        """File and line, for messages."""
        return at_line(self.source, self.line)


def at_line(source: str, line: int) -> str:
    return f"{source}, line {line}" if line else source


def collective_name(text: str) -> str | None:
    """The collective that ``text`` names ("AllReduce", "all_reduce_perf", "alltoall"), None if none."""
    plain = "".join(c for c in text.lower().removesuffix("_perf").removesuffix("_bench") if c.isalnum())
    return _NAMES.get(plain)


def dtype_name(text: str) -> str:
    """torch's name of a dtype as nccl-tests prints it."""
    return _DTYPES.get(text, text)


def tidy(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Ascending, the smaller time where a size comes twice."""
    best: dict[int, float] = {}
    for size, time in points:
        best[size] = min(time, best.get(size, time))
    return tuple(sorted(best.items()))


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, whatever ran (NVIDIA/nccl-tests doc/PERFORMANCE.md)."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


def one_world(sweep: Sweep, ranks: int | None, nodes: int | None) -> tuple[int, int]:
    """Ranks and nodes of a sweep, what the caller says having to agree with what the file says (0: it does not)."""
    for said, found, what in ((ranks, sweep.ranks, "ranks"), (nodes, sweep.nodes, "nodes")):
        if said is not None and found and said != found:
            raise UsageError(f"{sweep.where}: was run on {found} {what}, not on {said}")
    return ranks or sweep.ranks, nodes or sweep.nodes
