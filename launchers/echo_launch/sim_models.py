"""echo-sim's commands on hardware files: list, show and check."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import accelerator_names, load_accelerator
from echo_hooks.hardware.cluster import cluster_names, describe_cluster, load_cluster
from echo_hooks.report.quantities import bytes_text, decimal_text
from echo_hooks.report.text import heading, line


def list_hardware(arguments: argparse.Namespace) -> int:
    """`echo-sim hardware list`."""
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
    """`echo-sim hardware show NAME`."""
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
    """`echo-sim hardware check FILE`; UsageError says what is wrong with it."""
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
