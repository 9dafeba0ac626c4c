"""echo-sim's commands on the models alone: hardware list, show and check, network."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import accelerator_names, load_accelerator
from echo_hooks.hardware.cluster import Cluster, cluster_names, describe_cluster, load_cluster
from echo_hooks.hardware.units import parse_quantity
from echo_hooks.report.activity import bus_factor
from echo_hooks.report.quantities import bytes_text, decimal_text, duration_text
from echo_hooks.report.text import heading, line

_P2P = ("send", "recv")


def list_hardware(arguments: argparse.Namespace) -> int:
    console = Console()
    heading(console, "accelerators (echo-sim hardware show NAME)")
    for name in accelerator_names():
        a = load_accelerator(name)
        line(console, f"  {name:<14} {a.product}, {bytes_text(a.memory_bytes)}")
    heading(console, "clusters (--cluster PRESET:NODESxGPUS)")
    for name in cluster_names():
        node = load_cluster(f"{name}:1x8")
        nic = decimal_text(8 * node.nic_bandwidth_bytes_per_s, "b/s")
        line(console, f"  {name:<14} node of 8: {node.scale_up}, {node.nics_per_node} x {nic} {node.transport}")
    return 0


def show_hardware(arguments: argparse.Namespace) -> int:
    described = _describe(arguments.name)
    sources, bands = described.pop("sources", {}), described.pop("bands", {})
    console = Console()
    for key, value in _flat(described):
        line(console, f"{key} = {value:.6g}" if isinstance(value, float) else f"{key} = {value}")
    heading(console, "sources, by key of the file")
    for key in sorted(sources):
        band = f" [{bands[key][0]:.6g} to {bands[key][1]:.6g}]" if key in bands else ""
        line(console, f"{key}: {sources[key]}{band}")
    return 0


def check_hardware(arguments: argparse.Namespace) -> int:
    path: Path = arguments.file
    if path.suffix != ".toml":
        raise UsageError(f"{path}: an accelerator or cluster file ends in .toml")
    described = _describe(str(path))
    assumed = sorted(k for k, source in described.get("sources", {}).items() if source.startswith("assumed"))
    kind = "cluster" if "nodes" in described else "accelerator"
    print(f"{path}: a valid {kind} file, {len(described.get('sources', {}))} numbers with a source")
    if assumed:
        print(f"assumed, not published: {', '.join(assumed)}")
    return 0


def network(arguments: argparse.Namespace) -> int:
    from echo_hooks.network.model import CommunicationModel

    cluster = load_cluster(arguments.cluster)
    ranks = parse_ranks(arguments.ranks, cluster.world_size)
    size = int(parse_quantity(arguments.bytes, "bytes"))
    model = CommunicationModel(cluster)
    if arguments.collective in _P2P:
        if len(ranks) != 2:
            raise UsageError(f"--ranks {arguments.ranks}: a {arguments.collective} has two ranks, not {len(ranks)}")
        cost = model.point_to_point(ranks[0], ranks[1], size, group_size=2)
    else:
        cost = model.collective(arguments.collective, ranks, size, arguments.dtype)
    answer = {
        "cluster": cluster.name,
        "collective": arguments.collective,
        "ranks": list(ranks),
        "bytes": size,
        "dtype": arguments.dtype,
        "duration_us": cost.duration_us,
        "latency_us": cost.latency_us,
        "algbw_bytes_per_s": _bandwidth(size, cost.duration_us, 1.0),
        "busbw_bytes_per_s": _bandwidth(size, cost.duration_us, bus_factor(arguments.collective, len(ranks))),
        "algorithm": cost.algorithm,
        "protocol": cost.protocol,
        "channels": cost.channels,
        "evidence": cost.evidence,
    }
    if arguments.json:
        print(json.dumps(answer, indent=1, allow_nan=False))
    else:
        _print_cost(answer, cluster, Console())
    return 0


def _bandwidth(size: int, duration_us: float, factor: float | None) -> float | None:
    return size * factor / (duration_us * 1e-6) if factor and duration_us > 0 else None


def _print_cost(answer: dict[str, Any], cluster: Cluster, console: Console) -> None:
    nodes = {rank // cluster.accelerators_per_node for rank in answer["ranks"]}
    line(console, f"{answer['collective']} of {bytes_text(answer['bytes'])} over {len(answer['ranks'])} ranks on")
    line(console, f"  {len(nodes)} node{'s' if len(nodes) > 1 else ''} of {answer['cluster']}")
    line(console, f"time      {duration_text(answer['duration_us'] / 1e3)}  ({answer['evidence']})")
    line(console, f"latency   {duration_text(answer['latency_us'] / 1e3)} of it")
    for name in ("algbw", "busbw"):
        value = answer[f"{name}_bytes_per_s"]
        line(console, f"{name}     {'-' if value is None else decimal_text(value, 'B/s')}")
    line(console, f"by        {answer['algorithm']}, {answer['protocol']}, {answer['channels']} channels")


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """ "0-2,5" gives (0, 1, 2, 5) and "0-88:8" every eighth; UsageError for what is no such list below world_size."""
    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?\s*", part, re.ASCII)
        if found is None:
            raise UsageError(f'--ranks {text}: {part!r} should be a rank, "FIRST-LAST" or "FIRST-LAST:STRIDE"')
        first, last, stride = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or stride < 1:
            raise UsageError(f"--ranks {text}: {part!r} is empty")
        if last >= world_size:
            raise UsageError(f"--ranks {text}: the cluster has ranks 0 to {world_size - 1}")
        ranks += range(first, last + 1, stride)
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"--ranks {text}: a rank is named twice")
    return tuple(ranks)


def _describe(name: str) -> dict[str, Any]:
    """An accelerator or a cluster as plain data, with sources and bands."""
    if _is_cluster(Path(name)) if name.endswith(".toml") else ":" in name:
        return describe_cluster(load_cluster(name))
    return dataclasses.asdict(load_accelerator(name))


def _is_cluster(path: Path) -> bool:
    """By its keys; a file that cannot be read is left to the reader of accelerators to refuse."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return bool(data.keys() & {"preset", "nodes", "node", "fabric", "accelerator"})


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, item in value.items() for pair in _flat(item, f"{prefix}.{key}" if prefix else str(key))]
