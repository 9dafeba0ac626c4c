"""Where the ranks of a group lie: nodes, places in them, NICs near them, switches between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from echo_hooks.errors import UsageError
from echo_hooks.hardware.cluster import Cluster


@dataclass(frozen=True)
class Layout:
    """What durations depend on of how a group lies, or would.

    ``members``: the nodes, ascending. ``per_node``: ranks on the fullest, ``nics``: near them. ``shared``, ``least``:
    ranks near one NIC, at most and at least. ``crosses``: per level of the fabric, whether the group goes over its
    uplinks. ``alike``: the same places on all nodes.
    """

    ranks: int
    members: tuple[int, ...]
    nodes: int
    per_node: int
    nics: int
    shared: int
    least: int
    crosses: tuple[bool, ...]
    alike: bool

    @property
    def nics_per_rank(self) -> float:
        return self.nics / self.per_node


@dataclass(frozen=True)
class Placement:
    """A group on a cluster.

    ``nodes``: numbers of the nodes it spans, ascending, with ``per_node`` ranks on the fullest. ``places``: per node
    (in that order) the places of its ranks. ``nics``: per node the NICs nearest to its ranks; NCCL uses no others.
    ``stride``: difference of successive ranks if it is constant, else 0. ``spans``: per level of the fabric, how many
    switches (sets of nodes) the group touches. ``whole_nodes``: it fills every node it touches.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    nics: tuple[tuple[int, ...], ...]
    per_node: int
    stride: int
    spans: tuple[int, ...]
    whole_nodes: bool

    @property
    def kind(self) -> str:
        """ "single", "intra" (one node), "strided" (one rank per node), "block" (whole nodes), "partial" (some of each
        node) or "irregular" (nodes unequally filled)."""
        if len(self.ranks) == 1:
            return "single"
        if len(self.nodes) == 1:
            return "intra"
        counts = {len(places) for places in self.places}
        if len(counts) > 1:
            return "irregular"
        if self.per_node == 1:
            return "strided"
        return "block" if self.whole_nodes else "partial"

    @property
    def nics_per_node(self) -> int:
        """NICs on the node that has the fewest of them near its ranks."""
        return min(len(nics) for nics in self.nics)

    def layout(self, cluster: Cluster) -> Layout:
        alike = len(set(self.places)) == 1
        return self._layout(
            len(self.ranks), len(self.nodes), max(self.places, key=len), self.nics_per_node, alike, cluster
        )

    def with_ranks(self, nodes: int, per_node: int, cluster: Cluster) -> Layout:
        """The same group on its first ``nodes`` nodes (or as many more as that is), with ``per_node`` ranks on each:
        in its places if it has so many, else in the first ones."""
        if per_node == self.per_node:
            places, nics = max(self.places, key=len), self.nics_per_node
        else:
            places = tuple(range(per_node))
            nics = len({nic_of(place, cluster) for place in places})
        return self._layout(nodes * per_node, nodes, places, nics, True, cluster)

    def _layout(
        self, ranks: int, nodes: int, places: tuple[int, ...], nics: int, alike: bool, cluster: Cluster
    ) -> Layout:
        members = self.nodes[:nodes]
        near = Counter(nic_of(place, cluster) for place in places).values()
        return Layout(
            ranks=ranks,
            members=members,
            nodes=nodes,
            per_node=len(places),
            nics=nics,
            shared=max(near),
            least=min(near),
            crosses=tuple(members[0] // level.nodes != members[-1] // level.nodes for level in cluster.levels),
            alike=alike,
        )


def place(ranks: tuple[int, ...], cluster: Cluster) -> Placement:
    """Raises UsageError for an empty group, a rank twice, and a rank outside the cluster."""
    if not ranks:
        raise UsageError("a group without ranks; it should have at least one")
    per_node = cluster.accelerators_per_node
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        if not 0 <= rank < cluster.world_size:
            raise UsageError(f"rank {rank} is outside the cluster's {cluster.world_size} accelerators")
        by_node.setdefault(rank // per_node, []).append(rank % per_node)
    if len(set(ranks)) != len(ranks):
        twice = next(r for i, r in enumerate(ranks) if r in ranks[:i])
        raise UsageError(f"rank {twice} is in the group twice")
    nodes = tuple(sorted(by_node))
    places = tuple(tuple(sorted(by_node[node])) for node in nodes)
    strides = {b - a for a, b in pairwise(ranks)}
    return Placement(
        ranks=ranks,
        nodes=nodes,
        places=places,
        nics=tuple(tuple(sorted({nic_of(place, cluster) for place in here})) for here in places),
        per_node=max(map(len, places)),
        stride=strides.pop() if len(strides) == 1 else 0,
        spans=tuple(len({node // level.nodes for node in nodes}) for level in cluster.levels),
        whole_nodes=all(len(here) == per_node for here in places),
    )


def nic_of(place: int, cluster: Cluster) -> int:
    """The NIC nearest to a place: places and NICs lie in the same order along the node."""
    return place * cluster.nics_per_node // cluster.accelerators_per_node
