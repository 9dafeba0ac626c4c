"""DeepSpeed's launcher: its host file and the options that choose nodes and devices from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echo_hooks.errors import UsageError

MAX_BYTES = 16 << 20
"""Of a host file; a larger one is some other file."""
MAX_SLOTS = 1024
"""Of one host: more devices than any node has."""


@dataclass(frozen=True)
class Hosts:
    """``slots``: chosen devices by host, in the file's order. ``source``: the options they come from, for messages."""

    slots: Mapping[str, tuple[int, ...]]
    source: str

    @property
    def nodes(self) -> int:
        return len(self.slots)

    @property
    def per_node(self) -> int:
        """Devices of each node. UsageError where nodes differ, which no cluster of Echo's can have."""
        counts = {host: len(slots) for host, slots in self.slots.items()}
        most, least = max(counts, key=lambda h: counts[h]), min(counts, key=lambda h: counts[h])
        if counts[most] != counts[least]:
            raise UsageError(
                f"{self.source}: {most} has {counts[most]} slots and {least} has {counts[least]}; only equal nodes can "
                f"be simulated: leave hosts out with --exclude, or take {counts[least]} of each with --num_gpus"
            )
        return counts[most]


def choose_hosts(
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    num_nodes: int | None,
    num_gpus: int | None,
    local_devices: int,
) -> Hosts | None:
    """The devices that ``deepspeed`` would start ranks on; None when none of its options is given.

    ``include``, ``exclude``: "host-a@host-b:0,2". ``num_nodes``, ``num_gpus``: the first so many. ``local_devices``:
    how many this machine has, for a launch without a host file. Raises UsageError: one sentence that shows what is
    wrong.
    """
    given = {
        "--hostfile": hostfile,
        "--include": include,
        "--exclude": exclude,
        "--num_nodes": num_nodes,
        "--num_gpus": num_gpus,
    }
    options = [f"{name} {value}" for name, value in given.items() if value is not None]
    if not options:
        return None
    source = " ".join(options)
    filters = [name for name in ("--include", "--exclude") if given[name] is not None]
    if len(filters) == 2:
        raise UsageError("--include and --exclude exclude each other: give one of them")
    counts = [name for name in ("--num_nodes", "--num_gpus") if given[name] is not None]
    if filters and counts:
        raise UsageError(f"{counts[0]} and {filters[0]} exclude each other, as in DeepSpeed: give one of them")
    if hostfile is not None:
        available = read_hostfile(hostfile)
    else:
        if num_nodes is not None and num_nodes > 1:
            raise UsageError(f"--num_nodes {num_nodes} needs a --hostfile with so many hosts, as in DeepSpeed")
        available = {"localhost": max(_local_slots(filters, include, num_gpus, local_devices), num_gpus or 0)}
    chosen = {host: tuple(range(slots)) for host, slots in available.items()}
    if include is not None:
        chosen = _included(include, available, hostfile)
    if exclude is not None:
        chosen = _excluded(exclude, available, hostfile)
    if num_nodes is not None:
        if num_nodes > len(chosen):
            raise UsageError(f"--num_nodes {num_nodes}, but {hostfile or 'this machine'} has {len(chosen)} host(s)")
        chosen = dict(list(chosen.items())[:num_nodes])
    if num_gpus is not None:
        for host, slots in chosen.items():
            if num_gpus > len(slots):
                raise UsageError(f"--num_gpus {num_gpus}, but {host} has {len(slots)} slot(s) in {hostfile}")
        chosen = {host: slots[:num_gpus] for host, slots in chosen.items()}
    if not chosen:
        raise UsageError(f"{source} leaves no host")
    return Hosts(chosen, source)


def _local_slots(filters: list[str], include: str | None, num_gpus: int | None, local_devices: int) -> int:
    """Without a host file: this machine's devices, or as many as the options name (a simulation needs none)."""
    named = [slot for _, slots in _specs("--include", include) for slot in slots] if include is not None else []
    if named or num_gpus is not None:
        return max([*(slot + 1 for slot in named), local_devices, 1])
    if not local_devices:
        raise UsageError(f"{filters[0]} without slots needs a --hostfile here, as this machine has no accelerator")
    return local_devices


def read_hostfile(path: str) -> dict[str, int]:
    """Slots by host from lines "HOST slots=N"; comments (#) and blank lines are skipped.

    Raises UsageError with file, line number and text; a file that is not there is an error, never a smaller job.
    """
    try:
        size = Path(path).stat().st_size
        text = Path(path).read_text(encoding="utf-8-sig") if size <= MAX_BYTES else ""
    except UnicodeDecodeError:
        raise UsageError(f"--hostfile {path}: not a text file") from None
    except OSError as error:
        raise UsageError(f"--hostfile {path}: {error.strerror or error}") from None
    if size > MAX_BYTES:
        raise UsageError(f"--hostfile {path}: {size} bytes are more than a host file has")
    slots: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        where = f"{path}, line {number}: {raw.strip()[:80]!r}"
        found = re.fullmatch(r"(\S+)\s+slots=(\d{1,9})(?:\s+\w+=\S+)*", line, re.ASCII)
        if found is None:
            raise UsageError(f"{where} is not HOST slots=COUNT")
        host, count = found[1], int(found[2])
        if host in slots:
            raise UsageError(f"{where} repeats the host of line {lines[host]}")
        if not 1 <= count <= MAX_SLOTS:
            raise UsageError(f"{where}: slots is a count from 1 to {MAX_SLOTS}")
        slots[host], lines[host] = count, number
    if not slots:
        raise UsageError(f"--hostfile {path}: it names no host (a line is HOST slots=COUNT)")
    return slots


def _included(text: str, available: Mapping[str, int], hostfile: str | None) -> dict[str, tuple[int, ...]]:
    wanted: dict[str, set[int]] = {}
    for host, slots in _specs("--include", text):
        _known("--include", text, host, slots, available, hostfile)
        wanted.setdefault(host, set()).update(slots or range(available[host]))
    return {host: tuple(sorted(wanted[host])) for host in available if host in wanted}


def _excluded(text: str, available: Mapping[str, int], hostfile: str | None) -> dict[str, tuple[int, ...]]:
    left = {host: set(range(slots)) for host, slots in available.items()}
    for host, slots in _specs("--exclude", text):
        _known("--exclude", text, host, slots, available, hostfile)
        left[host] -= set(slots or range(available[host]))
    return {host: tuple(sorted(slots)) for host, slots in left.items() if slots}


def _specs(option: str, text: str) -> list[tuple[str, list[int]]]:
    specs = []
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        numbers = slots.split(",") if colon else []
        if not host or any(not (n.isascii() and n.isdigit() and len(n) < 10) for n in numbers):
            raise UsageError(f"{option} {text}: {part!r} is not HOST or HOST:SLOT,SLOT (several are joined by @)")
        specs.append((host, [int(n) for n in numbers]))
    return specs


def _known(
    option: str, text: str, host: str, slots: list[int], available: Mapping[str, int], hostfile: str | None
) -> None:
    where = hostfile or "this machine"
    if host not in available:
        raise UsageError(f"{option} {text}: {where} has no host {host!r}; it has {', '.join(list(available)[:8])}")
    beyond = [slot for slot in slots if slot >= available[host]]
    if beyond:
        raise UsageError(
            f"{option} {text}: {host} has slots={available[host]} in {where}, that is slots 0 to {available[host] - 1}"
            f"; slots is a count and must be at least {max(beyond) + 1} to use slot {max(beyond)}"
        )
