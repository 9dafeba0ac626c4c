"""What NCCL runs for a collective: algorithm, protocol, channels; and the time NCCL itself expects.

After NVIDIA/nccl src/graph/tuning.cc (ncclTopoTuneModel, ncclTopoGetAlgoTime) and src/enqueue.cc (topoGetAlgoInfo).
NCCL's expectations decide; they are not this project's durations (``durations.py``), and often wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from echo_hooks.errors import UsageError
from echo_hooks.network.nccl_environment import Environment
from echo_hooks.network.nccl_graph import Communicator, Graph, nvls_graph, ring_graph
from echo_hooks.network.nccl_tables import (
    LL_NET_GB_PER_S,
    NET_OVERHEAD_US,
    NVLS_CHANNELS,
    PROTOCOLS,
    THREAD_THRESHOLD_BYTES,
    TREE_CORRECTION,
    Tables,
)

_BY_FUNCTION = {
    "all_reduce": ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree"),
    "all_gather": ("ring", "collnet_direct", "nvls", "pat"),
    "reduce_scatter": ("ring", "collnet_direct", "nvls", "pat"),
    "broadcast": ("ring",),
    "reduce": ("ring",),
}
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_NVLS_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint32", "uint64", "float64")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Candidate:
    """One row of NCCL's table: what it may run, and ``latency_us`` and ``gb_per_s`` (of the larger of a rank's two
    buffers) it expects."""

    algorithm: str
    protocol: str
    graph: Graph
    latency_us: float
    gb_per_s: float


def steps(function: str, ranks: int) -> int:
    """Steps of a ring, each of which moves 1 / ``ranks`` of the buffer."""
    if function == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if function in ("all_gather", "reduce_scatter") else ranks


def candidates(function: str, comm: Communicator, constants: Tables, environment: Environment) -> list[Candidate]:
    """What NCCL may run for ``function``, in NCCL's order (on a tie the first wins).

    Raises UsageError if the environment forbids everything, as NCCL refuses then.
    """
    result = []
    rings = ring_graph(comm, constants)
    nvls = _nvls(comm, constants, environment)
    for algorithm in _BY_FUNCTION[function]:
        if algorithm not in environment.algorithms[function] or not _may_run(algorithm, comm, environment):
            continue
        graph = nvls if algorithm in ("nvls", "nvls_tree") else rings
        if graph is None:
            continue
        for protocol in PROTOCOLS:
            if protocol not in environment.protocols[function] or not _protocol_may_run(
                algorithm, protocol, function, comm, environment
            ):
                continue
            bandwidth = _bandwidth(function, algorithm, protocol, comm, graph, constants)
            if bandwidth > 0:
                latency = _latency(function, algorithm, protocol, comm, constants, environment)
                result.append(Candidate(algorithm, protocol, graph, latency, bandwidth))
    if not result:
        raise UsageError(
            f"NCCL_ALGO and NCCL_PROTO leave nothing that can run {function} on {comm.ranks} ranks in {comm.nodes} "
            "nodes; NCCL would refuse it too"
        )
    return result


def expected_us(
    row: Candidate, function: str, comm: Communicator, bytes: np.ndarray, *, launched: int, operations: int = 1
) -> np.ndarray:
    """What NCCL expects of ``row`` for ``bytes`` (float64 array): its own estimate, in us.

    ``launched``: channels of the communicator. ``operations``: collectives fused into one call (grouped).
    """
    bandwidth: float | np.ndarray = row.gb_per_s
    if function == "all_reduce" and row.algorithm == "tree":
        bandwidth = bandwidth * tree_correction(row.protocol, bytes, 23)
    blackwell = comm.architecture == "blackwell" and comm.cpu != "arm"
    if function == "all_reduce" and row.algorithm == "nvls_tree" and blackwell:
        bandwidth = bandwidth * tree_correction(row.protocol, bytes, 24)
    latency: float | np.ndarray = row.latency_us
    if function == "all_reduce" and (row.algorithm, row.protocol) == ("ring", "simple") and comm.nodes > 1:
        plateau = bytes // (launched * comm.ranks) >= 64
        latency = np.where(plateau, latency * (1.9 if comm.architecture == "volta" else 1.4), latency)
    count = operations if row.algorithm == "ring" else -(-operations // 9)
    return latency * count + bytes / (1e3 * bandwidth)


def choose(
    rows: list[Candidate], function: str, comm: Communicator, dtype: str, bytes: np.ndarray, *, operations: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Index into ``rows`` of NCCL's choice, and the time NCCL expects of it, for each of ``bytes``."""
    launched = next((r.graph.launched for r in rows if r.algorithm == "ring"), rows[0].graph.launched)
    bytes = np.asarray(bytes, np.float64)
    times = np.stack(
        [expected_us(row, function, comm, bytes, launched=launched, operations=operations) for row in rows]
    )
    for i, row in enumerate(rows):
        if dtype in _FLOAT8 and function in _REDUCING and row.algorithm == "ring" and comm.ranks > 8:
            times[i] *= 1024  # keeps long chains of rounding errors to the last (enqueue.cc)
        if row.algorithm in ("nvls", "nvls_tree") and function in _REDUCING and dtype not in _NVLS_DTYPES:
            times[i] = np.inf  # the switch cannot reduce it
    best = np.argmin(times, axis=0)
    return best, np.take_along_axis(times, best[None], 0)[0]


def channels(
    row: Candidate, comm: Communicator, bytes: np.ndarray, environment: Environment, launched: int | None = None
) -> np.ndarray:
    """Channels (CTAs) NCCL launches for each of ``bytes``, of ``launched`` (left out: those of the row's graph)."""
    most = row.graph.launched if launched is None else launched
    if row.algorithm not in ("nvls", "nvls_tree"):
        most = clamp_channels(most, environment)
    if row.algorithm in ("nvls", "nvls_tree", "collnet_direct", "collnet_chain"):
        return np.full(np.shape(bytes), most)
    threshold = environment.threads[row.protocol] * THREAD_THRESHOLD_BYTES[row.protocol]
    if (row.algorithm, row.protocol) == ("ring", "ll"):
        threshold *= comm.ranks
    return np.clip(np.asarray(bytes) // threshold, 1, most).astype(np.int64)


def clamp_channels(count: int, environment: Environment) -> int:
    """Within NCCL_MIN_CTAS and NCCL_MAX_CTAS (or their older names)."""
    if environment.max_channels is not None:
        count = min(count, environment.max_channels)
    return max(count, environment.min_channels or 1)


def tree_correction(protocol: str, bytes: np.ndarray, entries: int) -> np.ndarray:
    """NCCL's factor on Tree's bandwidth at each size; 1 beyond the table's first ``entries``."""
    return _tree_correction(protocol, bytes.tobytes(), bytes.dtype.char, entries)


@lru_cache(maxsize=64)  # plans ask for the same sizes over and over
def _tree_correction(protocol: str, data: bytes, kind: str, entries: int) -> np.ndarray:
    bytes = np.frombuffer(data, kind)
    index = np.floor(np.log2(np.maximum(bytes, 1) / 64)).astype(np.int64)
    table = np.array(TREE_CORRECTION[protocol], np.float64)
    return np.where((index >= 0) & (index < entries), table[np.clip(index, 0, 23)], 1.0)


def _nvls(comm: Communicator, constants: Tables, environment: Environment) -> Graph | None:
    if environment.nvls is False or not comm.multicast or comm.per_node <= 2 or not environment.peer_to_peer:
        return None
    if comm.architecture not in NVLS_CHANNELS:
        return None
    count = environment.nvls_channels or NVLS_CHANNELS[comm.architecture][comm.nodes > 1]
    return nvls_graph(comm, count)


def _may_run(algorithm: str, comm: Communicator, environment: Environment) -> bool:
    if algorithm in ("collnet_direct", "collnet_chain"):
        return environment.collnet and comm.nodes > 1 and comm.per_node <= 8
    if algorithm == "nvls":
        return comm.nodes == 1 or environment.collnet
    if algorithm == "nvls_tree":
        return comm.nodes > 1
    if algorithm == "pat":
        return comm.nodes == comm.ranks if environment.pat is None else environment.pat
    return True


def _protocol_may_run(algorithm: str, protocol: str, function: str, comm: Communicator, env: Environment) -> bool:
    if protocol != "simple" and algorithm not in ("ring", "tree"):
        return False
    if protocol == "ll128" and "ll128" not in env.forced_protocols[function]:
        return comm.nvlink > 0 or comm.per_node == 1
    return True


def _bandwidth(
    function: str, algorithm: str, protocol: str, comm: Communicator, graph: Graph, constants: Tables
) -> float:
    """GB/s of the largest buffer; 0 where the algorithm cannot run."""
    arch, scope = comm.architecture, comm.scope
    ppn = comm.ranks / comm.nodes
    collnet = algorithm.startswith("collnet")
    speed = graph.intra if comm.nodes <= 2 or collnet else graph.inter
    if algorithm in ("nvls", "nvls_tree"):
        if graph.channels < 2:
            return 0.0
        speed = _nvls_speed(function, algorithm, comm, graph, constants)
    bus = graph.channels * speed
    ll = constants.ll_gb_per_s[arch] if comm.nodes == 1 else LL_NET_GB_PER_S[comm.cpu][scope - 1]
    if algorithm == "ring" and protocol == "ll":
        bus = min(ll, bus * 0.5)
    if algorithm == "ring" and protocol == "ll128":
        bus = min(bus * 0.92, graph.channels * constants.ring_ll128_gb_per_s[arch][scope])
    if algorithm == "tree":
        bus = min(bus * 0.92, graph.channels * constants.tree_gb_per_s[arch][scope])
        if protocol == "ll":
            bus = min(bus / 3.8, ll)
        elif protocol == "ll128":
            share = 7 / 9 if comm.nodes == 1 else 120 / 128
            bus = min(bus * share, graph.channels * constants.tree_ll128_gb_per_s[arch][scope])
    if algorithm == "pat":
        bus *= 0.75
    if algorithm == "collnet_direct":
        if function != "all_reduce":
            bus = ppn * min(graph.intra, 0.9 * graph.inter)
        else:
            ratio = ppn / graph.channels
            bus = bus / (ratio - (ratio - 1) / 2) * (0.85 if arch in ("hopper", "blackwell") else 1.0)
    if algorithm != "ring" and function != "all_reduce":
        return bus
    if algorithm in ("nvls", "nvls_tree") and constants.nvls_efficiency is None:  # up to 2.27
        if algorithm == "nvls_tree" and constants.version < (2, 19):
            return bus * 0.7 * comm.nodes / (2 * (comm.nodes - 1))
        return bus * 5 / 6
    if algorithm in ("ring", "nvls", "nvls_tree"):
        return bus * comm.ranks / steps(function, comm.ranks)
    return bus * 0.5


def _nvls_speed(function: str, algorithm: str, comm: Communicator, graph: Graph, constants: Tables) -> float:
    ppn = comm.ranks / comm.nodes
    if constants.nvls_efficiency is None:  # up to 2.27
        if algorithm == "nvls_tree":
            return min(graph.intra, graph.inter if comm.nodes <= 2 else graph.inter / 2)
        return min(graph.intra, graph.inter)
    intra = graph.intra * constants.nvls_efficiency[comm.architecture] * (graph.channels - 1) / graph.channels
    intra *= 2 if function == "all_reduce" else (ppn - 1) / ppn
    inter = graph.inter * (2 if comm.nodes <= 2 and algorithm == "nvls_tree" else 1)
    if algorithm == "nvls_tree" and constants.nvls_tree_gb_per_s is not None:
        return min(intra, inter, constants.nvls_tree_gb_per_s[comm.architecture][comm.scope])
    return min(intra, inter)


def _latency(
    function: str, algorithm: str, protocol: str, comm: Communicator, constants: Tables, environment: Environment
) -> float:
    p = PROTOCOLS.index(protocol)
    link = "nvlink" if comm.nvlink else "pci"
    base = constants.base_us[algorithm][p]
    intra = constants.hop_us[link][algorithm][p]
    ppn = comm.ranks / comm.nodes
    inter = constants.hop_us["net"]["tree" if ppn == 1 else algorithm][p]
    local = comm.ranks // comm.nodes
    log_nodes = int(math.log2(comm.nodes))
    if algorithm == "ring":
        return base + _ring_latency(function, comm, constants, environment, p, intra, inter, link)
    if algorithm == "tree":
        return base + 2 * ((local - 1) * intra + log_nodes * inter)
    if algorithm == "nvls":
        return intra + (inter if comm.nodes > 1 else 0.0)
    if algorithm == "nvls_tree":
        return base + intra + 2 * log_nodes * inter
    if algorithm == "pat":
        return base + log_nodes * inter / 3.5 + 2.8 * comm.ranks
    if algorithm == "collnet_direct":
        return base + 2 * (min(1, local - 1) * intra + 0.4 * (local - 1)) + inter
    return base + 2 * (local - 1) * intra + inter  # collnet_chain


def _ring_latency(
    function: str,
    comm: Communicator,
    constants: Tables,
    environment: Environment,
    p: int,
    intra: float,
    inter: float,
    link: str,
) -> float:
    if function in ("broadcast", "reduce"):
        hop_link = link if comm.nodes == 1 else "net"
        return constants.hop_us[hop_link]["ring"][p]  # all channels of a switched node share one order
    if comm.nodes > 1:
        overhead = environment.net_overhead_us
        overhead = NET_OVERHEAD_US[comm.cpu] if overhead is None else overhead
        intra = max(intra, overhead * (3 if PROTOCOLS[p] == "simple" else 1))
    passes = 2 if function == "all_reduce" else 1
    between = 0 if comm.nodes == 1 else passes * (comm.nodes - 1)
    return (passes * (comm.ranks - 1) - between) * intra + between * inter
