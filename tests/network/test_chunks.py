"""Chunk sizes, against the Echo paper's table and the defaults of NCCL's buffers."""

from __future__ import annotations

import pytest

from echo_hooks.network.nccl_chunks import chunk_bytes
from echo_hooks.network.nccl_graph import Communicator

MB = 1 << 20
H800 = Communicator(
    ranks=32, nodes=4, per_node=8, architecture="hopper", nvlink=164.8, pci=48.0, multicast=True, nics=8, nic=48.0,
    cpu="intel",
)  # fmt: skip


@pytest.mark.parametrize("channels", [16, 20, 24, 28])
def test_the_papers_chunks_on_32_h800(channels):
    """arXiv 2412.12487, Table 6: chunk sizes of 4 to 256 MB all-reduce, profiled there, follow from NCCL's rule."""
    sizes = [4, 8, 16, 32, 64, 128, 256]
    chunks = [chunk_bytes("all_reduce", "tree", "ll128", H800, size * MB, channels) for size in sizes]
    assert [chunk / 1000 for chunk in chunks] == [18, 36, 72, 72, 72, 144, 288]


@pytest.mark.parametrize("channels", [8, 12, 32])
def test_other_channel_counts_do_not_give_the_papers_chunks(channels):
    sizes = [4, 8, 16, 32, 64, 128, 256]
    chunks = [chunk_bytes("all_reduce", "tree", "ll128", H800, size * MB, channels) for size in sizes]
    assert [chunk / 1000 for chunk in chunks] != [18, 36, 72, 72, 72, 144, 288]


@pytest.mark.parametrize(
    ("function", "algorithm", "protocol", "expected"),
    [
        ("all_reduce", "ring", "simple", 2 << 20),
        ("broadcast", "ring", "simple", 512 << 10),
        ("all_reduce", "tree", "simple", 512 << 10),
        ("all_reduce", "ring", "ll", 32 << 10),
        ("all_reduce", "ring", "ll128", 576000),
        ("all_gather", "pat", "simple", 512 << 10),
    ],
)
def test_of_large_messages(function, algorithm, protocol, expected):
    assert chunk_bytes(function, algorithm, protocol, H800, 1 << 30, 16) == expected


def test_small_messages_have_small_chunks():
    assert chunk_bytes("all_gather", "pat", "simple", H800, 1 << 20, 16) == 64 << 10
    assert chunk_bytes("all_reduce", "nvls", "simple", H800, 1 << 20, 16) == 16 << 10
    assert chunk_bytes("all_reduce", "nvls", "simple", H800, 1 << 30, 16) == 128 << 10
    assert chunk_bytes("all_reduce", "nvls_tree", "simple", H800, 1 << 30, 16) == 64 << 10
