"""Bytes that NCCL moves at once on a channel, by its own rules.

After NVIDIA/nccl 2.30.7 src/enqueue.cc (calcCollChunking). No duration is built on them; they are what a profile of
the real library would show, and the table of chunk sizes in the Echo paper (arXiv 2412.12487) follows from them.
"""

from __future__ import annotations

import math

from echo_hooks.network.nccl_graph import Communicator

_STEPS = 8  # slots of a buffer
_LL_BUFFER_BYTES = 512 << 10  # on the wire, half of it data
_LL128_BUFFER_BYTES = 640 * 120 * 8 * _STEPS  # threads x elements per thread x bytes
_LL128_DATA = 15 / 16  # elements of a line that are data
_NVLS_BYTES = 128 << 10
_NVLS_TREE_BYTES = {"hopper": 64 << 10}  # for 4 nodes or more


def chunk_bytes(
    function: str,
    algorithm: str,
    protocol: str,
    comm: Communicator,
    bytes: int,
    channels: int,
    *,
    buffer_bytes: int = 4 << 20,
) -> int:
    """Chunk of a collective of ``bytes`` on ``channels``; ``buffer_bytes``: NCCL_BUFFSIZE."""
    if algorithm in ("nvls", "nvls_tree"):
        return _nvls_chunk(algorithm, comm, bytes, channels)
    if protocol == "ll":
        chunk = _LL_BUFFER_BYTES // _STEPS // 2
    elif protocol == "ll128":
        chunk = int(_LL128_BUFFER_BYTES // _STEPS * _LL128_DATA)
    else:
        steps = 4 if algorithm == "ring" and function in ("all_reduce", "all_gather", "reduce_scatter") else 1
        chunk = buffer_bytes // _STEPS * steps
    if (algorithm, protocol) == ("tree", "ll128"):
        per_node = comm.ranks / comm.nodes
        depth = 1 + int(math.log2(comm.nodes)) + 0.1 * per_node
        chunk = _halved(chunk, 128 << 10, bytes, channels, depth * 64 / per_node)
        chunk = _halved(chunk, 32 << 10, bytes, channels, depth * 16 / per_node)
    elif algorithm == "pat":
        chunk = _halved(chunk, 64 << 10, bytes, channels, 32 if function == "all_gather" else 16)
    return chunk


def _halved(chunk: int, least: int, bytes: int, channels: int, fewest: float) -> int:
    """Halved until there are ``fewest`` chunks per channel, or it is no more than ``least``."""
    while chunk > least and bytes // (channels * chunk) < fewest:
        chunk //= 2
    return chunk


def _nvls_chunk(algorithm: str, comm: Communicator, bytes: int, channels: int) -> int:
    at_once = channels * comm.per_node
    chunk = _NVLS_BYTES
    if algorithm == "nvls_tree":
        if comm.nodes >= 4:
            chunk = min(chunk, _NVLS_TREE_BYTES.get(comm.architecture, chunk))
        limits = ((16, 128 << 10), (4, 64 << 10), (1, 32 << 10))
    else:
        limits = ((64, 64 << 10), (8, 32 << 10), (2, 16 << 10))
    for rounds, smaller in limits:
        if bytes < rounds * at_once * chunk:
            chunk = min(chunk, smaller)
    return chunk
