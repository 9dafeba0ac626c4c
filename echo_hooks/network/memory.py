"""Device memory that a communicator takes for its connections, in the order in which NCCL makes them.

A connection is a channel to one peer. NCCL makes those that an algorithm needs when a call first uses it
(NCCL_RUNTIME_CONNECT, since 2.22), a ring on every channel of the communicator and sends on all channels that a peer
may take. Sizes: NVIDIA/nccl src/include/device.h, src/transport/{p2p,net,nvls}.cc and src/proxy.cc (2.22 to 2.30).
"""

from __future__ import annotations

from echo_hooks.network.nccl_environment import Environment
from echo_hooks.network.nccl_graph import Communicator, ring_graph
from echo_hooks.network.nccl_tables import Tables
from echo_hooks.network.point_to_point import p2p_channels

GRANULE_BYTES = 2 << 20  # of the driver's memory handles, in which all of this is allocated
LL_BYTES = 512 * 8 * 8 * 16  # threads x lines of a thread x steps x bytes of a line
LL128_BYTES = 640 * 120 * 8 * 8  # threads x elements of a thread x steps x bytes of an element
RING_CONTROL_BYTES = GRANULE_BYTES
"""Heads and tails of a connection of a ring or tree: on two H200 a ring's first use takes 12 MiB on each of 24 channels
(bench/results/device_memory_h200.json: NCCL logs 10 and 2 MiB each)."""
CONTROL_BYTES = 2 * GRANULE_BYTES
"""Those of a connection for sends, a granule at either end. With them and the buffers a channel to a peer takes 14 MiB:
446 MiB for 32 channels to one peer on those H200; 32 channels to 7 peers 3.29 GB, where NVIDIA/nccl#1685 measured
4.34 - 1.06 GB on 8 H100, in allocations of 10 and 2 MiB."""
CHANNEL_ALLOCATIONS = 3
"""Small tables that a communicator allocates for each channel when it is made, one a granule (src/channel.cc)."""
NVLS_BYTES = (128 << 10) * 8 + (8 << 10)  # chunk x steps, and alignment (src/transport/nvls.cc)
SHARED_STEPS = 16  # NCCL_SHARED_STEPS: slots of the buffers that sends to other nodes share
NET_CHUNK_BYTES = 128 << 10  # NCCL_P2P_NET_CHUNKSIZE
HCCL_BUFFER_BYTES = 200 << 20  # HCCL_BUFFSIZE; a communicator has two, for input and output


def nccl_bytes(
    comm: Communicator,
    constants: Tables,
    environment: Environment,
    algorithms: set[str],
    peers: int,
    remote_peers: int,
) -> int:
    """What one rank gives a communicator that has used ``algorithms`` (NCCL's names, lower case) and sends or receives
    with ``peers`` ranks of its node and ``remote_peers`` of others. 0 for a group of one and for one never used."""
    if comm.ranks < 2 or not (algorithms or peers or remote_peers):
        return 0
    buffers = _whole(environment.buffer_bytes + LL_BYTES + LL128_BYTES)
    channels = ring_graph(comm, constants).launched
    if environment.max_channels:
        channels = min(channels, environment.max_channels)
    near, sends = buffers + RING_CONTROL_BYTES, buffers + CONTROL_BYTES
    far = 2 * buffers + CONTROL_BYTES  # the NIC reads from a buffer of the device and writes into another
    between = 1.0 if comm.per_node == 1 else 1.0 / comm.per_node if comm.nodes > 1 else 0.0
    connection = between * far + (1 - between) * near
    p2p = p2p_channels(comm, constants, environment)
    taken = float((CHANNEL_ALLOCATIONS * max(channels, p2p.total) + 1) * GRANULE_BYTES)
    if algorithms & {"ring", "tree", "pat"}:
        taken += channels * connection
    if algorithms & {"tree", "pat"} and comm.ranks > 2:
        taken += channels * connection  # neighbours that are none in the ring; of two ranks both are the same
    if any(name.startswith("nvls") for name in algorithms):
        taken += _whole((environment.nvls_channels or 16) * 2 * NVLS_BYTES * comm.per_node)
    taken += peers * p2p.per_peer * sends
    if remote_peers:
        taken += 2 * _whole(p2p.total * SHARED_STEPS * NET_CHUNK_BYTES) + remote_peers * p2p.per_peer * CONTROL_BYTES
    return int(taken)


def _whole(size: int) -> int:
    return -(-size // GRANULE_BYTES) * GRANULE_BYTES
