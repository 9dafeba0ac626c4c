"""How many channels NCCL finds in a node and between nodes, and at which speed, in closed form.

NCCL searches paths over the topology (NVIDIA/nccl src/graph/search.cc, ncclTopoCompute). For nodes whose accelerators
hang on one switch the result follows from a few products, which is what is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echo_hooks.network.nccl_tables import NVLINK_GB_PER_S, SPEEDS, USUAL_LINKS, Tables


@dataclass(frozen=True)
class Communicator:
    """What NCCL's choices depend on. ``per_node``: ranks on the fullest node. ``nvlink``: GB/s one way that the ranks
    of a node can use per accelerator, 0 if they are linked through the host only; ``nics``: those nearest to the
    node's ranks; ``nic``: GB/s of one, after PCIe."""

    ranks: int
    nodes: int
    per_node: int
    architecture: str
    nvlink: float
    pci: float
    multicast: bool
    nics: int
    nic: float
    cpu: str

    @property
    def scope(self) -> int:
        """Column of NCCL's tables: 0 for one node, 1 for two, 2 for more."""
        return min(self.nodes, 3) - 1


@dataclass(frozen=True)
class Graph:
    """``channels`` of ``intra`` and ``inter`` GB/s each; ``launched``: channels (CTAs) of a kernel that uses it."""

    channels: int
    intra: float
    inter: float
    launched: int


def usual(comm: Communicator) -> Communicator:
    """The same group with the links its architecture is usually sold with."""
    links, nic = USUAL_LINKS[comm.architecture]
    nvlink = links * NVLINK_GB_PER_S[comm.architecture] if comm.nvlink else 0.0
    return replace(comm, nvlink=nvlink, nic=nic)


def ring_graph(comm: Communicator, constants: Tables) -> Graph:
    """Rings and trees: most channels x speed within the NVLink of an accelerator and the NICs of a node."""
    intra_speeds, inter_speeds = SPEEDS[comm.architecture]
    limit = constants.max_channels // 2
    link = comm.nvlink or comm.pci
    best, best_speed = 1, 0.0
    for speed in intra_speeds if comm.nodes == 1 else inter_speeds:
        if best_speed and speed <= 0.49 * best_speed:
            break
        channels = int(link / speed + 1e-9) if comm.per_node > 1 else limit
        if comm.nodes > 1:
            channels = min(channels, comm.nics * int(comm.nic / speed + 1e-9))
        channels = min(channels, limit)
        if channels * speed > best * best_speed:
            best, best_speed = channels, float(speed)
    if not best_speed:  # slower than the slowest speed in the list
        best_speed = min(link, comm.nic) if comm.nodes > 1 else link
    hopper = comm.architecture in ("hopper", "blackwell")
    if best_speed >= 25 and not (hopper and best_speed < 50 and best > 4) and 2 * best <= limit:
        best, best_speed = 2 * best, best_speed / 2
    launched = min(2 * best, constants.max_channels)
    if hopper and comm.nodes > 1 and best_speed > 45 and launched < 16:
        launched = min(2 * launched, constants.max_channels)
    return Graph(best, best_speed, best_speed, launched)


def nvls_graph(comm: Communicator, channels: int) -> Graph | None:
    """A channel per local accelerator, (n + 1) of them within its NVLink; None where no such graph exists."""
    intra_speeds, inter_speeds = SPEEDS[comm.architecture]
    n = comm.per_node
    intra = next((float(s) for s in intra_speeds if (n + 1) * s <= comm.nvlink + 1e-9), None)
    if intra is None or n < 2:
        return None
    if comm.nodes == 1:
        inter = next(float(s) for s in intra_speeds if s < 2 * intra)
    else:
        reach = min(2 * intra, comm.nic * comm.nics / n)
        inter = next((float(s) for s in inter_speeds if s <= reach), reach)
    return Graph(n, intra, inter, channels)
