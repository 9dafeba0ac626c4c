"""Clusters: how many accelerators, how they are linked in a node, and how the nodes are, read from TOML."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from echo_hooks.errors import UsageError
from echo_hooks.hardware.accelerator import Accelerator, load_accelerator
from echo_hooks.hardware.fields import Fields, Provenance, read_toml

FORMAT = 1
SCALE_UP = ("switch", "mesh")
HOST_CPUS = ("intel", "amd", "arm")
TRANSPORTS = ("infiniband", "roce", "efa", "tcp")
DEFAULT_PRESET = "h100-sxm"
MAX_ACCELERATORS = 1 << 20

_SPEC = re.compile(r"([A-Za-z0-9._-]+):([0-9]{1,7})x([0-9]{1,7})", re.ASCII)
_FORM = 'PRESET:NODESxGPUS, such as "h100-sxm:4x8", or a .toml file'


@dataclass(frozen=True)
class Level:
    """One tier of switches between nodes: ``nodes`` of them share a switch (or a set of equal ones), whose uplinks
    carry 1 / ``oversubscription`` of what its nodes could send."""

    name: str
    nodes: int
    oversubscription: float


@dataclass(frozen=True)
class Cluster:
    """``nodes`` equal nodes. Global rank r is on node r // accelerators_per_node, in place r % accelerators_per_node.

    ``scale_up``: accelerators of a node are joined by a "switch" (any pair at full speed) or a "mesh" (a pair has
    1 / (accelerators_per_node - 1) of an accelerator's bandwidth). ``multicast``: that switch can reduce and replicate
    (NVLink SHARP). ``host_cpu``: vendor, which NCCL's choices depend on. ``host_memory_bytes``: of one
    node, None where the file does not say. ``nic_bandwidth_bytes_per_s``: one NIC, one
    way, line rate. ``rails``: NIC k of every node is on the k-th leaf switch, so that a leaf joins NICs, not nodes.
    ``levels``: from the node outwards; beyond the last one the network does not block.
    ``sources``, ``bands``: dotted key of the file -> where the number is from, and (low, high).
    """

    name: str
    accelerator: Accelerator
    nodes: int
    accelerators_per_node: int
    scale_up: str
    multicast: bool
    host_cpu: str
    nics_per_node: int
    nic_bandwidth_bytes_per_s: float
    transport: str
    rails: bool
    levels: tuple[Level, ...] = ()
    host_memory_bytes: int | None = None
    sources: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    bands: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        return self.nodes * self.accelerators_per_node


def cluster_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(entry.name.removesuffix(".toml") for entry in _presets().iterdir() if entry.name.endswith(".toml"))


def load_cluster(text: str) -> Cluster:
    """A cluster from "PRESET:NODESxGPUS" or from a TOML file (docs/network.md shows one).

    A preset describes a node of a certain size; with another number of GPUs per node it has NICs in proportion (at
    least one). Raises UsageError: no such preset or file, or file and key of what is missing, unknown or wrong.
    """
    if text.endswith(".toml"):
        path = Path(text)
        return _from_file(path, read_toml(path))
    return _from_preset(text)


def default_cluster(world_size: int, nproc_per_node: int) -> Cluster:
    """H100 nodes of ``nproc_per_node`` GPUs, as many as ``world_size`` ranks need."""
    if world_size < 1 or nproc_per_node < 1:
        raise UsageError(f"a world of {world_size} ranks, {nproc_per_node} per node: both should be at least 1")
    nodes = -(-world_size // nproc_per_node)
    return load_cluster(f"{DEFAULT_PRESET}:{nodes}x{min(nproc_per_node, world_size)}")


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """All of it as plain data, bandwidths in bytes/s one way, with the source of every number."""
    return {
        "name": cluster.name,
        "accelerator": cluster.accelerator.name,
        "world_size": cluster.world_size,
        "nodes": cluster.nodes,
        "accelerators_per_node": cluster.accelerators_per_node,
        "scale_up": {
            "kind": cluster.scale_up,
            "multicast": cluster.multicast,
            "bandwidth_bytes_per_s": cluster.accelerator.scaleup_bandwidth_bytes_per_s,
        },
        "host_cpu": cluster.host_cpu,
        "host_memory_bytes": cluster.host_memory_bytes,
        "nics_per_node": cluster.nics_per_node,
        "nic_bandwidth_bytes_per_s": cluster.nic_bandwidth_bytes_per_s,
        "transport": cluster.transport,
        "rails": cluster.rails,
        "levels": [
            {"name": level.name, "nodes": level.nodes, "oversubscription": level.oversubscription}
            for level in cluster.levels
        ],
        "sources": {**cluster.sources, **{f"accelerator.{k}": v for k, v in cluster.accelerator.sources.items()}},
        "bands": {**cluster.bands, **{f"accelerator.{k}": v for k, v in cluster.accelerator.bands.items()}},
    }


def _presets() -> Traversable:
    return files("echo_hooks.hardware.clusters")


def _from_preset(text: str) -> Cluster:
    name, nodes, per_node = _parse_spec(text, text)
    path = _presets() / f"{name}.toml"
    return _cluster(path, read_toml(path), text, nodes, per_node)


def _parse_spec(spec: str, where: str) -> tuple[str, int, int]:
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise UsageError(f"cluster {where!r} should be {_FORM}; presets: {', '.join(cluster_names())}")
    name, nodes, per_node = found[1], int(found[2]), int(found[3])
    if name not in cluster_names():
        near = difflib.get_close_matches(name.lower(), cluster_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"unknown cluster preset {name!r}; {hint}known: {', '.join(cluster_names())}, or a .toml file")
    if not 1 <= nodes * per_node <= MAX_ACCELERATORS:
        raise UsageError(f"cluster {where!r}: nodes x GPUs should be from 1 to {MAX_ACCELERATORS}")
    return name, nodes, per_node


def _from_file(path: Path, data: dict[str, Any]) -> Cluster:
    """A file of its own, or ``preset = "..."`` and only what differs from it."""
    if "preset" not in data:
        return _cluster(path, data, path.stem, None, None)
    if not isinstance(data["preset"], str):
        raise UsageError(f'{path}: preset: {data["preset"]!r} should be a text such as "h100-sxm:4x8"')
    try:
        name, nodes, per_node = _parse_spec(data["preset"], data["preset"])
    except UsageError as error:
        raise UsageError(f"{path}: preset: {error}") from None
    base = read_toml(_presets() / f"{name}.toml")
    changes = {key: value for key, value in data.items() if key != "preset"}
    return _cluster(path, _merged(base, changes), path.stem, nodes, per_node)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` over ``base``, table by table; a number with its source is replaced whole."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        tables = isinstance(old, dict) and isinstance(value, dict) and "value" not in old and "value" not in value
        result[key] = _merged(old, value) if tables else value  # type: ignore[arg-type]
    return result


def _cluster(
    path: Path | Traversable, data: dict[str, Any], name: str, nodes: int | None, per_node: int | None
) -> Cluster:
    provenance = Provenance()
    fields = Fields(path, data, provenance)
    fields.expect("format", FORMAT)
    accelerator = _accelerator(path, fields)
    if nodes is None or per_node is None:
        nodes, per_node = _whole(fields, "nodes"), _whole(fields, "accelerators_per_node")
        if nodes * per_node > MAX_ACCELERATORS:
            raise fields.error("nodes", f"nodes x accelerators_per_node should be at most {MAX_ACCELERATORS}")
    else:
        for key in ("nodes", "accelerators_per_node"):
            if key in fields:
                raise fields.error(key, "said twice; the preset's NODESxGPUS says it already")
    node = fields.table("node")
    designed_for = node.count("accelerators")
    nics = node.count("nics")
    nic_bandwidth = node.link("nic_bandwidth")
    scale_up = node.choice("scale_up", SCALE_UP)
    multicast = node.flag("multicast")
    if multicast and scale_up != "switch":
        raise node.error("multicast", 'only a "switch" can reduce and replicate; true should be false')
    host_cpu = node.choice("host_cpu", HOST_CPUS)
    host_memory_bytes = int(node.quantity("host_memory", "bytes")) if "host_memory" in node else None
    node.done()
    fabric = fields.table("fabric")
    transport = fabric.choice("transport", TRANSPORTS)
    rails = fabric.flag("rails")
    levels = _levels(fabric.table("levels")) if "levels" in fabric else ()
    fabric.done()
    fields.done(known=("nodes", "accelerators_per_node", "preset"))
    return Cluster(
        name=name,
        accelerator=accelerator,
        nodes=nodes,
        accelerators_per_node=per_node,
        scale_up=scale_up,
        multicast=multicast,
        host_cpu=host_cpu,
        nics_per_node=max(1, nics * per_node // designed_for),
        nic_bandwidth_bytes_per_s=nic_bandwidth,
        transport=transport,
        rails=rails,
        levels=levels,
        host_memory_bytes=host_memory_bytes,
        sources=provenance.sources,
        bands=provenance.bands,
    )


def _accelerator(path: Path | Traversable, fields: Fields) -> Accelerator:
    name = fields.text("accelerator")
    if name.endswith(".toml") and isinstance(path, Path):
        name = str(path.parent / name)  # a file is meant from where the cluster file is
    try:
        return load_accelerator(name)
    except UsageError as error:
        raise fields.error("accelerator", str(error)) from None


def _levels(table: Fields) -> tuple[Level, ...]:
    levels: list[Level] = []
    for name in table:
        entry = table.table(name)
        level = Level(name, entry.count("nodes"), entry.ratio("oversubscription"))
        if levels and level.nodes % levels[-1].nodes:
            raise entry.error(
                "nodes", f"{level.nodes} should be a multiple of the {levels[-1].nodes} of the level below"
            )
        entry.done()
        levels.append(level)
    return tuple(levels)


def _whole(fields: Fields, key: str) -> int:
    value = fields._get(key, "a whole number")
    if type(value) is not int or value < 1:
        raise fields.error(key, f"{value!r} should be a whole number from 1")
    return value
