"""What communicators take of a device, against what was measured and sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.memory import HCCL_BUFFER_BYTES, LL128_BYTES, LL_BYTES
from echo_hooks.network.model import CommunicationModel

MIB = 1 << 20
EIGHT = tuple(range(8))


def taken(cluster: str, ranks, calls=(), pairs=(), **environment) -> float:
    """MiB. ``calls``: (name, bytes)."""
    model = CommunicationModel(load_cluster(cluster), environment=environment)
    sizes = {(name, "bfloat16"): np.array([float(size)]) for name, size in calls}
    return model.device_memory(tuple(ranks), sizes, set(pairs)) / MIB


def test_all_to_all_on_eight_h100_as_measured():
    """NVIDIA/nccl#1685: 4.34 - 1.06 GB; allocations of 10,485,760 and 2,097,152 bytes, 32 channels to each peer."""
    assert LL_BYTES + LL128_BYTES + 4 * MIB <= 10485760 < LL_BYTES + LL128_BYTES + 6 * MIB
    assert taken("h100-sxm:1x8", EIGHT, [("all_to_all", 1e6)], [(0, 0)]) * MIB == pytest.approx(3.28e9, rel=0.01)


def test_a_ring_takes_a_connection_on_every_channel():
    """24 channels of 14 MiB on two H200 (NCCL logs 24 channels there) and on eight H100."""
    assert taken("h200-sxm:1x2", (0, 1), [("reduce_scatter", 1 << 20)], NCCL_NVLS_ENABLE="0") == 24 * 14
    assert taken("h100-sxm:1x8", EIGHT, [("all_gather", 1 << 20)], NCCL_NVLS_ENABLE="0") == 24 * 14
    limited = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "8"}
    assert taken("h100-sxm:1x8", EIGHT, [("all_gather", 1 << 20)], **limited) == 8 * 14
    smaller = {"NCCL_NVLS_ENABLE": "0", "NCCL_BUFFSIZE": str(1 << 20)}
    assert taken("h100-sxm:1x8", EIGHT, [("all_gather", 1 << 20)], **smaller) == 24 * (8 + 4)


def test_sends_take_the_channels_of_a_peer():
    assert taken("h100-sxm:1x8", EIGHT, pairs=[(0, 1)]) == 32 * 14
    assert taken("h100-sxm:1x8", EIGHT, pairs=[(0, 1), (0, 7)]) == 2 * 32 * 14
    assert taken("h100-sxm:2x8", (0, 8), pairs=[(0, 8)]) < 200  # between nodes they share their buffers


def test_alone_or_on_ascend():
    assert taken("h100-sxm:1x8", (0,), [("all_reduce", 1e6)]) == 0
    assert taken("ascend-910b:1x8", EIGHT, [("all_reduce", 1e6)]) * MIB == 2 * HCCL_BUFFER_BYTES
