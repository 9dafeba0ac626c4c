"""How long a collective's kernel takes once NCCL has decided what to run.

The parts are those of NCCL's own model (base + hops + bytes / bandwidth; src/graph/tuning.cc) with the bandwidth of
the links as they are, not of the step in NCCL's list of speeds, and two parts that NCCL leaves out: a rank's copy of
its own share, and the ramp of a pipeline that is too short to fill. Each part has a multiplier (``Scaling``) that
calibration sets. Bytes are those of the larger of a rank's two buffers; a GB/s is 1e9 bytes per s, so
bytes / (1e3 * GB/s) are us.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from echo_hooks.network.calibration import Scaling
from echo_hooks.network.nccl_graph import Communicator
from echo_hooks.network.nccl_selection import Candidate, steps
from echo_hooks.network.nccl_tables import (
    LL_NET_GB_PER_S,
    NET_OVERHEAD_US,
    PROTOCOLS,
    TREE_CORRECTION,
    Tables,
)

# Bytes on the wire per byte of payload: LL carries a flag with every 4 bytes, LL128 8 bytes of flags in 128.
WIRE = {"ll": 2.0, "ll128": 128 / 120, "simple": 1.0}
# Algorithm bandwidth of NVLS over NVLink, nearly the same for 4 to 8 GPUs (measured on H100: NVIDIA/nccl#1455).
_NVLS_RATE = 0.73
# A channel that runs alone moves this many times its share of what all of them move together: between 2 and 3 in
# fits to the small sizes of public sweeps (A100, H100, H200, B200), whose times stay level while channels are added.
_LONE_CHANNEL = 3.0
# What a rank of a Simple chain passes on at once: at least 1/32 of a step of 512 KiB (NVIDIA/nccl src/device/
# prims_simple.h, genericOp).
_SLICE_BYTES = 16 << 10


@dataclass(frozen=True)
class Reach:
    """GB/s, one way: ``scale_up`` of one rank to others of its node; ``node`` out of a node on the group's NICs and
    the uplinks behind them, infinite for a group in one node."""

    scale_up: float
    node: float


@dataclass(frozen=True)
class UsualChannels:
    """Channels that would be taken (per size), of those launched at most, with the links that the architecture is
    usually sold with. What a channel costs and moves is counted by these: slower links have fewer channels, and must
    not look cheaper for it."""

    channels: np.ndarray
    launched: int


@dataclass(frozen=True)
class Parts:
    """A duration taken apart, in us at NCCL's own numbers; each an array over the sizes asked for.

    ``base``: start and end of the kernel. ``hop``, ``net_hop``: steps in a node and between nodes on the critical
    path. ``channel``: channels taken (``UsualChannels``). ``transfer``: bytes over bandwidth. ``copy``: a rank's own
    share, one step more than the links see; NCCL's rings pass it through the same loop. ``ramp``: 2 sqrt((base +
    hops) transfer), what a pipeline with a fixed cost per chunk loses at its best chunk size.
    """

    base: np.ndarray
    hop: np.ndarray
    net_hop: np.ndarray
    channel: np.ndarray
    transfer: np.ndarray
    copy: np.ndarray
    ramp: np.ndarray

    def latency_us(self, scaling: Scaling) -> np.ndarray:
        """What does not depend on the links' speed."""
        return (
            scaling.base * self.base
            + scaling.hop * self.hop
            + scaling.net_hop * self.net_hop
            + scaling.channel_us * self.channel
        )

    def transfer_us(self, scaling: Scaling) -> np.ndarray:
        return scaling.transfer * self.transfer + scaling.copy * self.copy + scaling.ramp * self.ramp


PART_NAMES = tuple(field.name for field in fields(Parts))


def collective_parts(
    function: str,
    row: Candidate,
    comm: Communicator,
    reach: Reach,
    constants: Tables,
    bytes: np.ndarray,
    channels: np.ndarray,
    usual: UsualChannels,
    *,
    operations: int = 1,
) -> Parts:
    """The parts of ``function`` run as ``row``, for each of ``bytes`` (float64) with as many ``channels``.

    ``operations``: rounds of collectives that one grouped call runs one after the other on a channel.
    """
    base, hops, net_hops = _latency(function, row, comm, constants)
    rate = _rate(function, row, comm, reach, constants, bytes)
    transfer = bytes / (1e3 * rate)
    if row.algorithm in ("ring", "tree", "pat"):
        transfer = transfer * np.maximum(usual.launched / (_LONE_CHANNEL * usual.channels), 1.0)
    if function in ("broadcast", "reduce") and row.protocol == "simple":
        transfer = transfer + _pipeline_fill(comm, rate / row.graph.launched, bytes / channels)
    count = operations if row.algorithm == "ring" else -(-operations // 9)
    own = row.algorithm == "ring" and function in ("all_reduce", "all_gather", "reduce_scatter")
    return make_parts(
        base * count,
        hops * count,
        net_hops * count,
        usual.channels,
        transfer,
        transfer / steps(function, comm.ranks) if own else np.zeros(bytes.shape),
    )


def make_parts(
    base: float | np.ndarray,
    hop: float | np.ndarray,
    net_hop: float | np.ndarray,
    channels: np.ndarray,
    transfer: np.ndarray,
    copy: np.ndarray,
) -> Parts:
    zero = np.zeros(transfer.shape)
    ramp = 2 * np.sqrt((base + hop + net_hop) * transfer)
    return Parts(base + zero, hop + zero, net_hop + zero, channels + zero, transfer, copy, ramp)


def _latency(function: str, row: Candidate, comm: Communicator, constants: Tables) -> tuple[float, float, float]:
    """Base, hops in a node, hops between nodes: us of NCCL's model, taken apart."""
    p = PROTOCOLS.index(row.protocol)
    algorithm = row.algorithm
    base = constants.base_us[algorithm][p]
    link = "nvlink" if comm.nvlink else "pci"
    intra = constants.hop_us[link][algorithm][p]
    one_per_node = comm.ranks == comm.nodes
    inter = constants.hop_us["net"]["tree" if one_per_node else algorithm][p]
    local, log_nodes = comm.per_node, math.log2(comm.nodes)
    between = 0.0 if comm.nodes == 1 else 1.0
    if algorithm == "ring":
        if between:
            intra = max(intra, NET_OVERHEAD_US[comm.cpu] * (3 if row.protocol == "simple" else 1))
        # A broadcast goes down the whole chain once, though NCCL expects of it one hop.
        passes = 2 if function == "all_reduce" else 1
        net = passes * (comm.nodes - 1)
        return base, (passes * (comm.ranks - 1) - net) * intra, net * inter
    if algorithm == "tree":
        return base, 2 * (local - 1) * intra, 2 * log_nodes * inter
    if algorithm == "nvls":
        return base, intra, between * inter
    if algorithm == "nvls_tree":
        return base, intra, 2 * log_nodes * inter
    if algorithm == "pat":
        return base, 0.0, log_nodes * inter / 3.5 + 2.8 * comm.ranks
    if algorithm == "collnet_direct":
        return base, 2 * (min(1, local - 1) * intra + 0.4 * (local - 1)), inter
    return base, 2 * (local - 1) * intra, inter  # collnet_chain


def _rate(
    function: str, row: Candidate, comm: Communicator, reach: Reach, constants: Tables, bytes: np.ndarray
) -> np.ndarray:
    """GB/s of the largest buffer."""
    arch, scope, algorithm, protocol = comm.architecture, comm.scope, row.algorithm, row.protocol
    scale_up = reach.scale_up if comm.per_node > 1 else math.inf
    bus = min(scale_up, reach.node)
    count = row.graph.channels
    ll = constants.ll_gb_per_s[arch] if comm.nodes == 1 else LL_NET_GB_PER_S[comm.cpu][scope - 1]
    passes = steps(function, comm.ranks) / comm.ranks
    one = np.ones(bytes.shape)
    if algorithm == "ring":
        if protocol == "ll":
            bus = min(ll, bus * 0.5)
        elif protocol == "ll128":
            bus = min(bus * 0.92, count * constants.ring_ll128_gb_per_s[arch][scope])
        return one * bus / passes
    if algorithm == "tree":
        bus = min(bus * 0.92, count * constants.tree_gb_per_s[arch][scope])
        if protocol == "ll":
            bus = min(bus / 3.8, ll)
        elif protocol == "ll128":
            share = 7 / 9 if comm.nodes == 1 else 120 / 128
            bus = min(bus * share, count * constants.tree_ll128_gb_per_s[arch][scope])
        return bus * 0.5 * _smooth_correction(protocol, bytes)
    if algorithm == "nvls" and comm.nodes == 1:
        own = 1.0 if function == "all_reduce" else (comm.per_node - 1) / comm.per_node
        return one * _NVLS_RATE * scale_up / own
    if algorithm in ("nvls", "nvls_tree"):
        bus = 2 * _NVLS_RATE * scale_up
        cap = constants.nvls_tree_gb_per_s
        if cap is not None and algorithm == "nvls_tree":
            bus = min(bus, count * cap[arch][scope])
        # Every byte goes up a tree of nodes and down again, over the NICs of a node between two others: no share less,
        # as in a ring, for what starts there. Of two nodes each is the other's root for half of them.
        node = reach.node * (2 if comm.nodes == 2 and algorithm == "nvls_tree" else 1)
        return one * min(bus / passes, node / max(passes, 2 if function == "all_reduce" else 0))
    if algorithm == "pat":
        return one * bus * 0.75
    return one * bus * (0.5 if function == "all_reduce" else 1.0)  # SHARP


def _smooth_correction(protocol: str, bytes: np.ndarray) -> np.ndarray:
    """NCCL's correction of Tree: its value at each power of two, a straight line between them instead of a step."""
    table = np.array((*TREE_CORRECTION[protocol][:23], 1.0), np.float64)
    return np.interp(np.log2(np.maximum(bytes, 64) / 64), np.arange(24), table)


def _pipeline_fill(comm: Communicator, channel_rate: np.ndarray, channel_bytes: np.ndarray) -> np.ndarray:
    """The last rank of a chain starts when a slice has come down it (LL and LL128 pass on every line at once)."""
    return max(0, comm.ranks - 2) * np.minimum(_SLICE_BYTES, channel_bytes) / (1e3 * channel_rate)
