"""Sends, receives and what is made of them: all-to-all, gather, scatter.

Channels and protocol after NVIDIA/nccl src/graph/paths.cc (ncclTopoComputeP2pChannels) and src/enqueue.cc
(calcP2pChannelCount, addP2pToPlan). NCCL has no expectation of their time; the latencies are Ring's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from echo_hooks.network.calibration import Scaling
from echo_hooks.network.durations import Reach
from echo_hooks.network.nccl_environment import Environment
from echo_hooks.network.nccl_graph import Communicator, ring_graph
from echo_hooks.network.nccl_tables import NVLINK_GB_PER_S, PROTOCOLS, Tables

NET_CHANNEL_GB_PER_S = 14.0  # what NCCL counts on from one network channel (paths.cc, 2.29)
_WORKS_PER_CHANNEL = 8


@dataclass(frozen=True)
class P2pChannels:
    """``per_peer``: most channels that one send may take; ``total``: of the communicator."""

    per_peer: int
    total: int


def p2p_channels(comm: Communicator, constants: Tables, environment: Environment) -> P2pChannels:
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


def send_duration(
    comm: Communicator,
    reach: Reach,
    between_nodes: bool,
    constants: Tables,
    scalings: dict[str, Scaling],
    environment: Environment,
    bytes: np.ndarray,
    channels: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(latency, transfer, whether LL) of one send of each of ``bytes`` with ``channels``; us."""
    latency, rate = {}, {}
    for name in ("ll", "simple"):
        p = PROTOCOLS.index(name)
        hop = constants.hop_us["net" if between_nodes else "nvlink" if comm.nvlink else "pci"]["ring"][p]
        scaling = scalings[name]
        hop *= scaling.net_hop if between_nodes else scaling.hop
        latency[name] = scaling.base * constants.base_us["ring"][p] + hop
        rate[name] = scaling.rate * (0.5 if name == "ll" else 1.0)
    # LL needs buffers that NCCL only makes for connections inside a node.
    small = (bytes <= channels * environment.p2p_ll_threshold_bytes) & (not between_nodes)
    link = reach.node if between_nodes else reach.scale_up
    per_channel = NET_CHANNEL_GB_PER_S if between_nodes else _channel_rate(comm, constants)
    speed = np.minimum(channels * per_channel, link)
    transfer = bytes / (1e3 * speed * np.where(small, rate["ll"], rate["simple"]))
    return np.where(small, latency["ll"], latency["simple"]), transfer, small


def _channel_rate(comm: Communicator, constants: Tables) -> float:
    """GB/s that one channel moves over NVLink: what NCCL's rings get from each of theirs."""
    graph = ring_graph(comm, constants)
    return max(graph.channels * graph.intra / graph.launched, 1e-3)


def rounds(comm: Communicator, p2p: P2pChannels, channels: np.ndarray) -> np.ndarray:
    """How often a rank's channels are filled when it sends to every other."""
    return np.maximum(1, np.ceil(comm.ranks * channels / (_WORKS_PER_CHANNEL * p2p.total)))
