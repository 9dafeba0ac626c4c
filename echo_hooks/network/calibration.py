"""How far real durations are from NCCL's own numbers: a few multipliers per algorithm and protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scaling:
    """Multiplies the parts of a duration (``durations.Parts``); ``channel_us`` is us per channel. The defaults are
    NCCL's own numbers."""

    base: float = 1.0
    hop: float = 1.0
    net_hop: float = 1.0
    channel_us: float = 0.0
    transfer: float = 1.0
    copy: float = 0.0
    ramp: float = 0.0


STOCK = Scaling()


@dataclass(frozen=True)
class Calibration:
    """``scalings``: (scope, algorithm, protocol) -> multipliers; scope is "node" or "network". What is not in it stays
    at NCCL's own numbers."""

    name: str = "stock"
    scalings: Mapping[tuple[str, str, str], Scaling] = field(default_factory=dict)

    def scaling(self, nodes: int, algorithm: str, protocol: str) -> Scaling:
        return self.scalings.get((scope_of(nodes), algorithm, protocol), STOCK)


def scope_of(nodes: int) -> str:
    return "node" if nodes == 1 else "network"
