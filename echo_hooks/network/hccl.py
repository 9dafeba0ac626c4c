"""What HCCL runs on servers of Ascend 910B (Atlas A2) and 910C (A3), and the parts of its duration.

Algorithms, selection and planning constants after hcomm 8958adbf (src/legacy/ascend910: algorithm/impl/operator,
platform/common/device_capacity.cc) and the user guide of hicann/hccl 09300b70. In a server the accelerators are a full
mesh; between servers each has a NIC of its own. A collective is taken apart by level: reduce-scatter in the server,
the collective between servers on a server's share, all-gather in the server. On A3 a rank is one of a package's two
dies, and a unified bus, about as fast as in the server, joins the servers of a superpod; that the dies of a package
are nearer to each other is left out. No public sweep of HCCL was found, so
nothing here is calibrated: latencies are the middle of what HCCL plans with and what its profiling assumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.network.durations import Reach, make_parts
from echo_hooks.network.nccl_graph import Communicator
from echo_hooks.network.plan import Planned

SUPERPOD_HOP_US = 8.5  # assumed: a step over HCCS and 1 us; CloudMatrix384 adds less than that between servers
A3_LAUNCH_US = 15.0  # assumed: 10 to 20 us with the default engine of A3, its AI CPU
A3_SUPERPOD_NODES = 48
_A3_MESH_BYTES_PER_RANK = 512 << 10
_A3_NHR_BYTES_PER_LOCAL = 1 << 20
LAUNCH_US = 30.0  # assumed: 20 to 40 us with the default engine of A2, which the host drives
HOP_US = 7.5  # assumed: 5 to 10 us per step over HCCS
NET_HOP_US = 30.0  # assumed: 15 to 60 us per step over RoCE; HCCL plans with 60
_PLANNED_HOP_US = 60.0
_PLANNED_NET_BYTES_PER_US = 20e3
_PIPELINE_FROM_BYTES = 32 << 10
_PIPELINE_ALL_REDUCE_SHARE_BYTES = 1 << 20
_BETWEEN = {"ring": "ring", "nhr": "nhr", "h-d_r": "hd", "pipeline": "pipeline"}


@dataclass(frozen=True)
class HcclEnvironment:
    """``between``: algorithm between servers ("" if HCCL chooses). ``buffer_bytes``: larger calls run in loops.
    ``a3``: of servers with a switch (910C) rather than a mesh (910B)."""

    between: str = ""
    buffer_bytes: int = 200 << 20
    a3: bool = False

    @property
    def launch_us(self) -> float:
        return A3_LAUNCH_US if self.a3 else LAUNCH_US

    @property
    def net_hop_us(self) -> float:
        """A step between servers: over RoCE, on A3 over a superpod's unified bus."""
        return SUPERPOD_HOP_US if self.a3 else NET_HOP_US


def read_hccl_environment(variables: Mapping[str, str], *, a3: bool = False) -> HcclEnvironment:
    """HCCL_ALGO ("level0:NA;level1:ring") and HCCL_BUFFSIZE (MB); UsageError for a value HCCL would refuse."""
    between = ""
    for part in filter(None, variables.get("HCCL_ALGO", "").split(";")):
        level, _, name = part.strip().partition(":")
        if level == "level1":
            if name.lower() not in _BETWEEN:
                raise UsageError(f"HCCL_ALGO: level1 {name!r} should be one of ring, NHR, H-D_R, pipeline")
            between = _BETWEEN[name.lower()]
    size = variables.get("HCCL_BUFFSIZE", "").strip()
    if size and not (size.isascii() and size.isdigit() and 1 <= int(size) <= 1 << 20):
        raise UsageError(f"HCCL_BUFFSIZE={size!r} should be a whole number of MB from 1")
    return HcclEnvironment(between, (int(size) if size else 200) << 20, a3)


def plan_hccl(
    function: str, comm: Communicator, reach: Reach, environment: HcclEnvironment, sizes: np.ndarray
) -> list[Planned]:
    """all_reduce, all_gather, reduce_scatter, broadcast, reduce at each of ``sizes``."""
    names = _between_servers(function, comm, environment, sizes)
    planned = []
    for name in dict.fromkeys(names.tolist()):
        where = np.flatnonzero(names == name)
        planned.append(_planned(function, name, comm, reach, environment, sizes[where], where))
    return planned


def plan_hccl_send(comm: Communicator, reach: Reach, environment: HcclEnvironment, sizes: np.ndarray) -> list[Planned]:
    """A send of each of ``sizes``: one step over the link."""
    between = comm.nodes > 1
    transfer = sizes / (1e3 * (reach.node if between else reach.scale_up))
    hop, net_hop = (0.0, environment.net_hop_us) if between else (HOP_US, 0.0)
    return [_all_of("p2p", environment, sizes, hop, net_hop, transfer)]


def plan_hccl_exchange(
    comm: Communicator, reach: Reach, environment: HcclEnvironment, sizes: np.ndarray, busiest_us_per_byte: float
) -> list[Planned]:
    """all_to_all and its rooted kin: one step in the server, then a step per other server (pairwise); on A3 all at
    once."""
    steps = min(1, comm.nodes - 1) if environment.a3 else comm.nodes - 1
    name = "direct" if environment.a3 else "pairwise"
    net_hop = steps * environment.net_hop_us
    return [_all_of(name, environment, sizes, HOP_US, net_hop, sizes * busiest_us_per_byte)]


def _all_of(
    algorithm: str, environment: HcclEnvironment, sizes: np.ndarray, hop: float, net_hop: float, transfer: np.ndarray
) -> Planned:
    one = np.ones(len(sizes), np.int64)
    parts = make_parts(environment.launch_us, hop, net_hop, one, transfer, np.zeros(len(sizes)))
    return Planned(algorithm, "simple", np.arange(len(sizes)), one, parts)


def _between_servers(function: str, comm: Communicator, environment: HcclEnvironment, sizes: np.ndarray) -> np.ndarray:
    """Algorithm between servers for each size: pipelined with the server's from a size on (A3: NHR up to a size), else
    the cheapest by HCCL's own planning (on a tie Ring before NHR before HD); in one server "mesh", on A3 from a size on
    "double ring"."""
    if comm.nodes == 1:
        small = sizes <= _A3_MESH_BYTES_PER_RANK * comm.ranks
        return np.where(small | (not environment.a3), "mesh", "double ring")
    if environment.between:
        return np.full(len(sizes), environment.between, dtype="<U8")
    passes = 2 if function == "all_reduce" else 1
    share = np.minimum(sizes, environment.buffer_bytes) / comm.per_node
    costs = []
    for name in ("ring", "nhr", "hd"):
        hops, volume = _level1(name, passes, comm.nodes)
        costs.append(hops * _PLANNED_HOP_US + volume * share / _PLANNED_NET_BYTES_PER_US)
    names = np.array(["ring", "nhr", "hd"], dtype="<U8")[np.argmin(np.stack(costs), axis=0)]
    if environment.a3:
        names[sizes <= _A3_NHR_BYTES_PER_LOCAL * comm.per_node] = "nhr"
        return names
    if function in ("all_gather", "reduce_scatter") and comm.per_node > 1:
        names[sizes >= _PIPELINE_FROM_BYTES] = "pipeline"
    if function == "all_reduce" and comm.per_node > 1:
        names[sizes / comm.ranks >= _PIPELINE_ALL_REDUCE_SHARE_BYTES] = "pipeline"
    return names


def _level1(name: str, passes: int, servers: int) -> tuple[float, float]:
    """(steps, bytes a NIC sends per byte of a server's share) of ``passes`` of the algorithm between servers."""
    even = passes * (servers - 1) / servers
    if name == "ring":
        return passes * (servers - 1), even
    if name == "nhr":
        return passes * math.ceil(math.log2(servers)), even
    whole = 1 << int(math.log2(servers))
    if whole == servers:
        return passes * math.log2(servers), even
    return passes * (math.log2(whole) + 1), passes * ((whole - 1) / whole + 1)


def _planned(
    function: str,
    name: str,
    comm: Communicator,
    reach: Reach,
    environment: HcclEnvironment,
    sizes: np.ndarray,
    where: np.ndarray,
) -> Planned:
    servers, local = comm.nodes, comm.per_node
    # A broadcast is a scatter and an all-gather, a reduce the reverse: on the wire an all-reduce without the sum.
    passes = 1 if function in ("all_gather", "reduce_scatter") else 2
    loops = np.maximum(1, np.ceil(sizes / environment.buffer_bytes))
    inside = passes * (local - 1) / local * sizes / (1e3 * reach.scale_up) if local > 1 else np.zeros(len(sizes))
    # A ring takes a step per neighbour; in a mesh, and for small sizes on A3, all are reached at once.
    in_ring = environment.a3 & (sizes > _A3_MESH_BYTES_PER_RANK * comm.ranks)
    hops = passes * HOP_US * np.where(in_ring, local - 1, min(1, local - 1)) * loops
    net_hop = environment.net_hop_us
    if name in ("mesh", "double ring"):
        net_hops, transfer = np.zeros(len(sizes)), inside
    else:
        per_nic = sizes / local / (1e3 * reach.node / local)
        if name == "pipeline":  # both levels at once, a server's share at a time
            net_hops = passes * (servers - 1) * net_hop * loops
            transfer = np.maximum(inside, passes * (servers - 1) / servers * per_nic) + inside / servers
        else:
            steps, volume = _level1(name, passes, servers)
            net_hops = steps * net_hop * loops
            transfer = inside + volume * per_nic
    one = np.ones(len(sizes), np.int64)
    level0 = "switch" if environment.a3 else "mesh"
    algorithm = name if name in ("mesh", "double ring", "pipeline") or local == 1 else f"{level0}+{name}"
    return Planned(
        algorithm, "simple", where, one, make_parts(environment.launch_us, hops, net_hops, one, transfer, 0 * sizes)
    )
