"""What communicators take of a device, against what was measured and sums by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from echo_hooks.hardware.cluster import load_cluster
from echo_hooks.network.memory import HCCL_BUFFER_BYTES, LL128_BYTES, LL_BYTES
from echo_hooks.network.model import CommunicationModel

MIB = 1 << 20
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
EIGHT = tuple(range(8))


def taken(cluster: str, ranks, calls=(), pairs=(), **environment) -> float:
    """MiB. ``calls``: (name, bytes)."""
    model = CommunicationModel(load_cluster(cluster), environment=environment)
    sizes = {(name, "bfloat16"): np.array([float(size)]) for name, size in calls}
    return model.device_memory(tuple(ranks), sizes, set(pairs)) / MIB


OWN = (3 * 32 + 1) * 2  # of a communicator with 32 channels for sends


def test_all_to_all_on_eight_h100_as_measured():
    """NVIDIA/nccl#1685: 4.34 - 1.06 GB; allocations of 10,485,760 and 2,097,152 bytes, 32 channels to each peer."""
    assert LL_BYTES + LL128_BYTES + 4 * MIB <= 10485760 < LL_BYTES + LL128_BYTES + 6 * MIB
    sends = taken("h100-sxm:1x8", EIGHT, [("all_to_all", 1e6)], [(0, 0)]) - OWN  # that is of the 1.06 GB
    assert sends * MIB == pytest.approx(3.28e9, rel=0.01)


def test_two_h200_as_measured():
    """bench/results/device_memory_h200.json: each step of it, but what NCCL's kernels take once."""
    measured = json.loads((RESULTS / "device_memory_h200.json").read_text())["outside_allocator_mib"]
    another = measured["another group's all-reduce"] - measured["send and recv"]
    off = {"NCCL_NVLS_ENABLE": "0"}
    assert taken("h200-sxm:1x2", (0, 1), [("all_reduce", 1 << 30)], **off) == pytest.approx(another, rel=0.01)
    peer = measured["all-to-all"] - measured["1 GiB all-reduce"]
    assert taken("h200-sxm:1x2", (0, 1), [("all_to_all", 1 << 30)], [(0, 0)]) - OWN == pytest.approx(peer, rel=0.01)


def test_a_ring_takes_a_connection_on_every_channel():
    """24 channels of 12 MiB on two H200 (NCCL logs 24 channels there) and on eight H100."""
    assert taken("h200-sxm:1x2", (0, 1), [("reduce_scatter", 1 << 20)], NCCL_NVLS_ENABLE="0") == OWN + 24 * 12
    assert taken("h100-sxm:1x8", EIGHT, [("all_gather", 1 << 20)], NCCL_NVLS_ENABLE="0") == OWN + 24 * 12
    limited = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "8"}
    assert taken("h100-sxm:1x8", EIGHT, [("all_gather", 1 << 20)], **limited) == OWN + 8 * 12
    smaller = {"NCCL_NVLS_ENABLE": "0", "NCCL_BUFFSIZE": str(1 << 20)}
    assert taken("h100-sxm:1x8", EIGHT, [("all_gather", 1 << 20)], **smaller) == OWN + 24 * (8 + 2)


def test_sends_take_the_channels_of_a_peer():
    assert taken("h100-sxm:1x8", EIGHT, pairs=[(0, 1)]) == OWN + 32 * 14
    assert taken("h100-sxm:1x8", EIGHT, pairs=[(0, 1), (0, 7)]) == OWN + 2 * 32 * 14
    assert taken("h100-sxm:2x8", (0, 8), pairs=[(0, 8)]) < OWN + 200  # between nodes they share their buffers


def test_alone_or_on_ascend():
    assert taken("h100-sxm:1x8", (0,), [("all_reduce", 1e6)]) == 0
    assert taken("ascend-910b:1x8", EIGHT, [("all_reduce", 1e6)]) * MIB == 2 * HCCL_BUFFER_BYTES
