"""How many ranks, on which nodes: from flags, environment and cluster, which must not contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from echo_hooks.devices.nvidia_smi import query_gpus
from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import DEFAULT_PRESET
from echo_launch.hostfile import Hosts

DEFAULT_PER_NODE = 8
MAX_RANKS = 1_000_000
"""More ranks than any job has: beyond it a number is a typing error, and tables of all ranks would fill the memory."""
MAX_DIGITS = 18
"""Digits of a whole number on the command line: what fits in 64 bits."""


@dataclass(frozen=True)
class World:
    """``cluster``: text for load_cluster. ``note``: what Echo chose by itself, for the report ("" when nothing)."""

    world_size: int
    nproc_per_node: int
    cluster: str
    note: str = ""


def resolve_world(
    *,
    world_size: int | None,
    nnodes: str | None,
    nproc_per_node: str | None,
    cluster: str | None,
    environment: Mapping[str, str],
    hosts: Hosts | None = None,
) -> World:
    """The one world that all sources agree on. UsageError shows two that do not, or asks for the missing size.

    ``hosts``: what DeepSpeed's options choose.

    ``environment``: WORLD_SIZE and LOCAL_WORLD_SIZE must agree where set; PET_NNODES and PET_NPROC_PER_NODE stand for
    the flags, as in torchrun.
    """
    nnodes_name, nnodes = _flag_or_variable("--nnodes", nnodes, environment)
    per_node_name, nproc_per_node = _flag_or_variable("--nproc-per-node", nproc_per_node, environment)
    nodes = _nodes(nnodes_name, nnodes)
    described = _Described(cluster) if cluster is not None else None
    per_node = _per_node(per_node_name, nproc_per_node, described, environment)
    sizes: list[tuple[str, int]] = []
    if world_size is not None:
        sizes.append((f"--world-size {world_size}", world_size))
    known_per_node = per_node or (described.per_node if described else None)
    if nodes is not None and known_per_node is not None:
        source = f"{nnodes_name} {nodes}" + (f" with {per_node_name} {per_node}" if per_node else "")
        sizes.append((source, nodes * known_per_node))
    elif nodes is not None and world_size is None:
        sizes.append((f"{nnodes_name} {nodes} with one rank a node", nodes))
    elif per_node is not None and nodes is None and not sizes and described is None:
        sizes.append((f"{per_node_name} {per_node} on one node", per_node))
    if hosts is not None:
        sizes.append((hosts.source, hosts.nodes * hosts.per_node))
    if described is not None:
        sizes.append((f"--cluster {cluster}", described.world_size))
    if "WORLD_SIZE" in environment:
        sizes.append(("WORLD_SIZE in the environment", _number("WORLD_SIZE", environment["WORLD_SIZE"])))
    visible = visible_devices(environment)
    note = ""
    if not sizes and visible is not None:
        sizes.append((f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']}", visible))
        note = f"{visible} rank(s) on one node, as CUDA_VISIBLE_DEVICES lists so many devices; "
    if not sizes:
        raise UsageError("how many ranks? give --world-size N, or --nnodes and --nproc-per-node, or --cluster")
    size = _agreed("ranks", sizes)
    if size > MAX_RANKS:
        raise UsageError(f"{sizes[0][0]} means {size} ranks: at most {MAX_RANKS} are simulated")
    local = [(f"{per_node_name} {per_node}", per_node)] if per_node is not None else []
    if hosts is not None:
        local.append((hosts.source, hosts.per_node))
    if described is not None:
        local.append((f"--cluster {cluster}", described.per_node))
    if nodes is not None and not local:
        if size % nodes:
            raise UsageError(f"{sizes[0][0]} cannot be spread evenly over {nnodes_name} {nodes}")
        local.append((f"{nnodes_name} {nodes}", size // nodes))
    if "LOCAL_WORLD_SIZE" in environment:
        value = _number("LOCAL_WORLD_SIZE", environment["LOCAL_WORLD_SIZE"])
        local.append(("LOCAL_WORLD_SIZE in the environment", value))
    ranks_a_node = _agreed("ranks a node", local) if local else min(size, DEFAULT_PER_NODE)
    if size % ranks_a_node:
        raise UsageError(
            f"{sizes[0][0]} does not fill nodes of {ranks_a_node}: give a --nproc-per-node that divides {size}"
        )
    if cluster is not None:
        return World(size, ranks_a_node, cluster, note.removesuffix("; "))
    default = _default(size, ranks_a_node)
    return replace(default, note=note + default.note)


def _agreed(what: str, sources: list[tuple[str, int]]) -> int:
    first = sources[0]
    for other in sources[1:]:
        if other[1] != first[1]:
            raise UsageError(
                f"{first[0]} means {first[1]} {what}, but {other[0]} means {other[1]} {what}: change or leave out one"
            )
    return first[1]


def _flag_or_variable(flag: str, value: str | None, environment: Mapping[str, str]) -> tuple[str, str | None]:
    variable = "PET_" + flag.removeprefix("--").replace("-", "_").upper()
    if value is None and variable in environment:
        return variable, environment[variable]
    return flag, value


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and int(text) >= 1):
        raise UsageError(f"{name} is {text!r}: a whole number from 1 is needed")
    return int(text)


def _nodes(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    low, _, high = text.partition(":")
    if high and high != low:
        raise UsageError(f"{name} {text}: an elastic job has no one size; give the number of nodes to simulate")
    return _number(name, low)


def _per_node(name: str, text: str | None, described: _Described | None, environment: Mapping[str, str]) -> int | None:
    """gpu and auto mean all accelerators of a node: the cluster's node where one is given, else this machine's, of
    which CUDA_VISIBLE_DEVICES may list some."""
    if text is None:
        return None
    if text in ("gpu", "auto"):
        if described is not None:
            return described.per_node
        visible = visible_devices(environment)
        count = len(local_accelerators()) if visible is None else visible
        if not count:
            raise UsageError(f"{name} {text}: this machine has no accelerator to count; give a number or --cluster")
        return count
    return _number(name, text)


def visible_devices(environment: Mapping[str, str]) -> int | None:
    """How many devices CUDA_VISIBLE_DEVICES lists; None where it is not set, or hides all (as on a machine without)."""
    listed = [part for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return len(listed) if listed and listed[0].strip() != "-1" else None


class _Described:
    def __init__(self, text: str):
        from echo_hooks.hardware.cluster import load_cluster

        cluster = load_cluster(text)
        self.world_size: int = cluster.world_size
        self.per_node: int = cluster.accelerators_per_node


def _default(world_size: int, per_node: int) -> World:
    """Nodes of the local accelerator's kind where Echo knows it, else of H100s."""
    name, why = DEFAULT_PRESET, "the default, as no --cluster was given"
    local = local_accelerators()
    if local and (known := _known_accelerator(local[0])):
        name, why = known, f"as this machine has {local[0]} and no --cluster was given"
    text = f"{name}:{world_size // per_node}x{per_node}"
    return World(world_size, per_node, text, f"cluster {text}: {why}")


def _known_accelerator(product: str) -> str | None:
    from echo_hooks.hardware.accelerator import accelerator_names, load_accelerator
    from echo_hooks.hardware.cluster import load_cluster

    for name in accelerator_names():
        if load_accelerator(name).product == product:
            try:
                load_cluster(f"{name}:1x1")
            except UsageError:  # an accelerator without a preset of its nodes
                return None
            return name
    return None


def local_accelerators() -> list[str]:
    """Product names of this machine's NVIDIA GPUs, as the driver's own tool prints them; [] without one."""
    return [row[0] for row in query_gpus("name") if row[0]]
