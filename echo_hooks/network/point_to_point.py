"""Sends, receives and what is made of them: all-to-all, gather, scatter.

Channels and protocol after NVIDIA/nccl src/graph/paths.cc (ncclTopoComputeP2pChannels) and src/enqueue.cc
(calcP2pChannelCount, addP2pToPlan). NCCL has no expectation of their time: hops are Ring's of the same protocol, and
the base is that of Ring with LL whatever the protocol, because those are the two kernels that NCCL compiles for what
they run; a collective in another protocol is called through a table from the kernel of LL (src/device/generate.py,
best_kernel), and its base has the price of that call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from echo_hooks.network.durations import WIRE, Parts, Reach, make_parts
from echo_hooks.network.nccl_environment import Environment
from echo_hooks.network.nccl_graph import Communicator, ring_graph
from echo_hooks.network.nccl_tables import NVLINK_GB_PER_S, PROTOCOLS, Tables

NET_CHANNEL_GB_PER_S = 14.0  # what NCCL counts on from one network channel (paths.cc, 2.29)
_WORKS_PER_CHANNEL = 8
# What a channel copies of a message beyond the first _STARTS_WITH_BYTES, where that and not the links is the limit:
# all-to-all on GB200 moves 20.8 GB/s per channel on 16 channels and 20.3 on 24 (ai-dynamo/aiconfigurator, NCCL
# 2.29.2). On older links the channels that NCCL takes outrun the links.
_COPY_GB_PER_S = {"blackwell": 20.5}
_STARTS_WITH_BYTES = 64 << 10


@dataclass(frozen=True)
class P2pChannels:
    """``per_peer``: most channels that one send may take; ``total``: of the communicator."""

    per_peer: int
    total: int


def p2p_channels(comm: Communicator, constants: Tables, environment: Environment) -> P2pChannels:
    """How many channels a communicator has for sends, and how many of them one peer may take."""
    launched = ring_graph(comm, constants).launched
    total = _power_of_two(launched)
    if environment.min_p2p_channels:
        total = max(total, environment.min_p2p_channels)
    if environment.max_p2p_channels:
        total = min(total, environment.max_p2p_channels)
    if comm.per_node > 1:
        link = NVLINK_GB_PER_S[comm.architecture]
        per_peer = 2 * round(comm.nvlink / link) if comm.nvlink else 2
    else:
        per_peer = total
    if comm.nodes > 1:
        per_peer = min(per_peer, _per_net_peer(comm, constants, environment, total))
    return P2pChannels(min(_power_of_two(max(1, per_peer)), total), total)


def _per_net_peer(comm: Communicator, constants: Tables, environment: Environment, total: int) -> int:
    if environment.channels_per_net_peer:
        return environment.channels_per_net_peer
    if constants.version < (2, 29):
        return 2 if comm.ranks <= 2 * total else 1
    count = _power_of_two(max(1, math.ceil(comm.nic / NET_CHANNEL_GB_PER_S)))
    while count > 1 and count * math.ceil(comm.ranks / 8) > total:
        count //= 2
    return count


def _power_of_two(count: int) -> int:
    return 1 << (max(1, count) - 1).bit_length()


def send_channels(comm: Communicator, p2p: P2pChannels, bytes: np.ndarray) -> np.ndarray:
    """Channels of one send of each of ``bytes``."""
    least = p2p.per_peer
    while least > 1 and least * comm.ranks > p2p.total:
        least //= 2
    if comm.nodes == 1:
        smallest, largest = (512 << 10) / 8, 32 * float(512 << 10)
    else:
        smallest, largest = (128 << 10) / 2, float(128 << 10)
    count = np.clip(np.ceil(bytes / smallest), 1, least)
    for _ in range(int(math.log2(p2p.per_peer)) + 1):
        count = np.where((bytes / count > largest) & (2 * count <= p2p.per_peer), 2 * count, count)
    return count.astype(np.int64)


def sends_as_ll(between_nodes: bool, environment: Environment, bytes: np.ndarray, channels: np.ndarray) -> np.ndarray:
    """Where NCCL sends with LL, else Simple. LL needs buffers that NCCL only makes for connections inside a node."""
    return (bytes <= channels * environment.p2p_ll_threshold_bytes) & (not between_nodes)


def send_parts(
    protocol: str,
    comm: Communicator,
    reach: Reach,
    between_nodes: bool,
    constants: Tables,
    bytes: np.ndarray,
    channels: np.ndarray,
    counted: np.ndarray,
) -> Parts:
    """One send of each of ``bytes`` over ``channels``: base, one hop of Ring, and the channels' or the link's speed.

    ``counted``: channels it would take with the usual links (``durations.UsualChannels``).
    """
    base, hop, net_hop = _latency(protocol, comm, between_nodes, constants)
    transfer = WIRE[protocol] * _one_us(comm, reach, between_nodes, bytes, channels)
    return make_parts(base, hop, net_hop, counted, transfer, np.zeros(bytes.shape))


def exchange_parts(
    protocol: str,
    comm: Communicator,
    reach: Reach,
    constants: Tables,
    p2p: P2pChannels,
    bytes: np.ndarray,
    channels: np.ndarray,
    counted: np.ndarray,
    busiest_us_per_byte: float,
) -> Parts:
    """Every rank sends ``bytes`` / ranks to every other (or all to one, or one to all), each over ``channels``.

    ``busiest_us_per_byte``: time of the fullest link per byte of ``bytes``. ``copy`` is a rank's part for itself.
    """
    between = comm.nodes > 1
    part = bytes / comm.ranks
    base, hop, net_hop = _latency(protocol, comm, between, constants)
    waves = np.maximum(1, np.ceil(comm.ranks * channels / (_WORKS_PER_CHANNEL * p2p.total)))
    one = _one_us(comm, reach, between, part, channels)
    transfer = WIRE[protocol] * np.maximum(one, bytes * busiest_us_per_byte)
    scale_up = reach.scale_up if comm.per_node > 1 else reach.node
    copy = WIRE[protocol] * part / (1e3 * scale_up)
    return make_parts(base, hop + (waves - 1) * hop, net_hop + (waves - 1) * net_hop, counted, transfer, copy)


def _latency(protocol: str, comm: Communicator, between: bool, constants: Tables) -> tuple[float, float, float]:
    p = PROTOCOLS.index(protocol)
    base = constants.base_us["ring"][PROTOCOLS.index("ll")]
    if between:
        return base, 0.0, constants.hop_us["net"]["ring"][p]
    return base, constants.hop_us["nvlink" if comm.nvlink else "pci"]["ring"][p], 0.0


def _one_us(comm: Communicator, reach: Reach, between: bool, bytes: np.ndarray, channels: np.ndarray) -> np.ndarray:
    """Time of one message by its channels or its link, whichever is slower."""
    rate = _channel_rate(comm, between)
    time = bytes / (1e3 * np.minimum(channels * rate, _link(reach, between)))
    copy = _COPY_GB_PER_S.get(comm.architecture)
    if between or not comm.nvlink or copy is None:
        return time
    each = bytes / channels
    first = np.minimum(each, _STARTS_WITH_BYTES)
    return np.maximum(time, first / (1e3 * rate) + (each - first) / (1e3 * copy))


def _link(reach: Reach, between: bool) -> float:
    return reach.node if between else reach.scale_up


def _channel_rate(comm: Communicator, between: bool) -> float:
    """GB/s of one channel. Over NVLink that of two links: 47 GB/s were measured on H200 for the 64 KiB that a channel
    starts with."""
    if between:
        return NET_CHANNEL_GB_PER_S
    return 2 * NVLINK_GB_PER_S[comm.architecture] if comm.nvlink else comm.pci
