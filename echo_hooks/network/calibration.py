"""How far real durations are from NCCL's own numbers: a few multipliers per algorithm and protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


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
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Calibration:
    """``scalings``: (scope, algorithm, protocol, collective) -> multipliers. Scope is "node" or "network"; collective
    is "" for those that are not there by name. What is in it neither way stays at NCCL's own numbers."""

    name: str = "stock"
    scalings: Mapping[Key, Scaling] = field(default_factory=dict)

    def scaling(self, nodes: int, algorithm: str, protocol: str, collective: str) -> Scaling:
        scope = scope_of(nodes)
        for key in ((scope, algorithm, protocol, collective), (scope, algorithm, protocol, "")):
            if key in self.scalings:
                return self.scalings[key]
        return self._from_the_node(algorithm, protocol) if scope == "network" else STOCK

    def _from_the_node(self, algorithm: str, protocol: str) -> Scaling:
        """Without data from between nodes: links and hops there at NCCL's numbers, the rest as in the node."""
        node = self.scalings.get(("node", algorithm, protocol, ""))
        if node is not None:
            return replace(node, net_hop=1.0, transfer=1.0)
        sends = algorithm == "p2p"
        alike = (s for (scope, a, *_), s in self.scalings.items() if scope == "node" and (a == "p2p") == sends)
        channel_us = next((scaling.channel_us for scaling in alike), 0.0)
        return Scaling(channel_us=channel_us)


def scope_of(nodes: int) -> str:
    return "node" if nodes == 1 else "network"
