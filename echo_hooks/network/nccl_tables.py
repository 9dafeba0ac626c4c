"""The constants with which NCCL decides what to run, by version.

Bandwidths in GB/s (1e9 bytes), times in microseconds. Source of all numbers: NVIDIA/nccl, src/graph/tuning.cc,
search.cc, topo.h and enqueue.cc at the tags named; where nothing is said, 2.30.7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from echo_hooks.errors import UsageError

ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
LINKS = ("nvlink", "pci", "net")
ARCHITECTURES = ("volta", "ampere", "hopper", "blackwell")

OLDEST, NEWEST = (2, 18), (2, 30)
DEFAULT_VERSION = "2.28.9"  # shipped with the CUDA 13 wheels of torch 2.11


@dataclass(frozen=True)
class Tables:
    """``base_us`` and ``hop_us[link]``: by algorithm, a value per protocol. ``*_gb_per_s``: by architecture, a value
    for one node, two, and more; ``ll_gb_per_s`` only for one node (between nodes it goes by the host's CPU)."""

    version: tuple[int, int, int]
    max_channels: int
    base_us: dict[str, tuple[float, float, float]]
    hop_us: dict[str, dict[str, tuple[float, float, float]]]
    ll_gb_per_s: dict[str, float]
    ring_ll128_gb_per_s: dict[str, tuple[float, float, float]]
    tree_ll128_gb_per_s: dict[str, tuple[float, float, float]]
    tree_gb_per_s: dict[str, tuple[float, float, float]]
    nvls_tree_gb_per_s: dict[str, tuple[float, float, float]] | None
    nvls_efficiency: dict[str, float] | None


@cache
def tables(version: str) -> Tables:
    """The tables of an NCCL version such as "2.28.9"; UsageError outside 2.18 to 2.30."""
    v = parse_version(version)
    net = {
        "tree": (5.0, 8.5, 14.0),
        "ring": (2.7, 4.0, 14.0),
        "collnet_direct": (0.0, 0.0, 31.0),
        "collnet_chain": (0.0, 0.0, 30.0),
        "nvls": (0.0, 0.0, 18.0),
        "nvls_tree": (0.0, 0.0, 20.9 if v >= (2, 28) else 14.0),
        "pat": (0.0, 0.0, 14.0),
    }
    nvls = 0.0 if v < (2, 19) else 23.0 if v < (2, 22) else 25.0
    nvlink = {
        "tree": (0.6, 1.25, 4.0),
        "ring": (0.6, 1.9, 3.4),
        "collnet_direct": (0.0, 0.0, 3.7),
        "collnet_chain": (0.0, 0.0, 2.8),
        "nvls": (0.0, 0.0, nvls),
        "nvls_tree": (0.0, 0.0, nvls),
        "pat": (0.0, 0.0, 4.0),
    }
    pci = nvlink | {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "nvls": (0.0,) * 3, "nvls_tree": (0.0,) * 3}
    if v == (2, 18, 1) or (2, 19, 1) <= v <= (2, 22, 3):
        for link in (nvlink, pci, net):
            link["tree"] = (*link["tree"][:2], 28.0)
    elif (2, 18, 3) <= v < (2, 19):
        pci["tree"] = (*pci["tree"][:2], 6.0)
    blackwell = _blackwell(v)
    return Tables(
        version=v,
        max_channels=64 if v >= (2, 25, 1) else 32,
        base_us={
            "tree": (6.8, 14.0, 8.4),
            "ring": (6.6, 14.0, 8.4),
            "collnet_direct": (0.0,) * 3,
            "collnet_chain": (0.0,) * 3,
            "nvls": (0.0,) * 3,
            "nvls_tree": (0.0,) * 3,
            "pat": (8.0,) * 3,
        },
        hop_us={"nvlink": nvlink, "pci": pci, "net": net},
        ll_gb_per_s={"volta": 39.0, "ampere": 87.7, "hopper": 141.0, "blackwell": 282.0},
        ring_ll128_gb_per_s={
            "volta": (20.0,) * 3,
            "ampere": (20.0,) * 3,
            "hopper": (36.7,) * 3,
            "blackwell": blackwell["ring_ll128"],
        },
        tree_ll128_gb_per_s={
            "volta": (20.0,) * 3,
            "ampere": (20.0,) * 3,
            "hopper": (36.7, 36.7, 29.0),
            "blackwell": blackwell["tree_ll128"],
        },
        tree_gb_per_s={
            "volta": (26.5, 18.5, 10.0),
            "ampere": (24.0, 23.6, 17.8),
            "hopper": (38.7, 41.4, 36.0),
            "blackwell": blackwell["tree"],
        },
        nvls_tree_gb_per_s={
            "volta": (26.5, 18.5, 10.0),
            "ampere": (24.0, 23.6, 17.8),
            "hopper": (0.0, 57.7, 45.5),
            "blackwell": (0.0, 96.0, 80.0 if v >= (2, 30) else 43.8),
        }
        if v >= (2, 28)
        else None,
        nvls_efficiency={"volta": 0.0, "ampere": 0.0, "hopper": 0.85, "blackwell": 0.74} if v >= (2, 28) else None,
    )


def _blackwell(v: tuple[int, int, int]) -> dict[str, tuple[float, float, float]]:
    if v < (2, 28):
        return {"ring_ll128": (73.4,) * 3, "tree_ll128": (73.4, 73.4, 58.0), "tree": (77.4, 82.8, 72.0)}
    ring = (73.4, 34.6, 73.4) if v < (2, 29) else (40.0,) * 3
    return {"ring_ll128": ring, "tree_ll128": (55.6, 31.67, 20.0), "tree": (70.0, 42.8, 24.0)}


def kernel_only(constants: Tables, gap_us: float) -> Tables:
    """The same without what NCCL's base latencies hold beside the kernel: they are of calls back to back, as
    nccl-tests times them, so the ``gap_us`` from one kernel to the next is in them."""
    base = {name: tuple(max(us - gap_us, 0.0) for us in values) for name, values in constants.base_us.items()}
    return replace(constants, base_us=base)  # type: ignore[arg-type]


def parse_version(version: str) -> tuple[int, int, int]:
    """(major, minor, patch); "2.23" means its last release. UsageError for one that is not known."""
    found = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})(?:\.([0-9]{1,3}))?(?:[-+.].*)?", version)
    if found is None:
        raise UsageError(f'NCCL version {version!r} should be written like "{DEFAULT_VERSION}"')
    v = int(found[1]), int(found[2]), int(found[3] or 99)  # "2.23" means its last release
    if not OLDEST <= v[:2] <= NEWEST:
        raise UsageError(f"NCCL {version} is not known; known are 2.{OLDEST[1]} to 2.{NEWEST[1]}")
    return v


# Between nodes LL goes by the CPU's vendor: two nodes, and more.
LL_NET_GB_PER_S = {"intel": (39.0, 20.4), "arm": (39.0, 20.4), "amd": (22.5, 19.0)}
# What posting one step to the network costs the proxy thread.
NET_OVERHEAD_US = {"intel": 1.0, "amd": 2.0, "arm": 1.0}

# Multiplies the bandwidth of Tree, by log2(bytes / 64) from 64 B; "Trees are not perfectly sticking to the model".
TREE_CORRECTION = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
        0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9,
    ),
}  # fmt: skip

# Speeds per channel that the search for rings and trees tries, in a node and between nodes.
SPEEDS = {
    "volta": (
        (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
        (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    ),
    "hopper": (
        (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
        (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    ),
    "blackwell": (
        (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
        (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    ),
}
SPEEDS["ampere"] = SPEEDS["volta"]

# NVLink per link, one way: the raw rate, and what NCCL counts on.
NVLINK_RAW_GB_PER_S = {"volta": 25.0, "ampere": 25.0, "hopper": 25.0, "blackwell": 50.0}
NVLINK_GB_PER_S = {"volta": 20.0, "ampere": 20.0, "hopper": 20.6, "blackwell": 40.1}
# The links these architectures are usually sold with: NVLinks per accelerator, and GB/s of a NIC.
USUAL_LINKS = {"volta": (6, 12.0), "ampere": (12, 24.0), "hopper": (18, 48.0), "blackwell": (18, 48.0)}
# Share of a PCIe slot's raw rate that NCCL counts on (x16: 12, 24, 48, 96 of 16, 32, 64, 128 GB/s).
PCI_SHARE = 0.75

NVLS_CHANNELS = {"hopper": (16, 16), "blackwell": (24, 32)}  # one node, several

# Threads per channel, and bytes per thread below which channels are dropped (Ring LL: times the ranks).
THREADS = {"ll": 512, "ll128": 640, "simple": 512}
THREAD_THRESHOLD_BYTES = {"ll": 8, "ll128": 8, "simple": 64}
