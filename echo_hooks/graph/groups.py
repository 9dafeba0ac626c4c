"""Process groups, and the families they form (all TP groups of a job are one family)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """One process group.

    ``index``: order of creation, equal on all ranks that make the same calls; 0 is the default group.
    ``name``: what reports call it ("world", "tp", "pp", ...); all groups of a family have the same name.
    ``ranks``: global ranks in group order. ``site``: "file:line" that created it. ``backend``: as the script asked.
    ``family``/``member``: the family's number and this group's place in it. Within one family each rank is in at
    most one group.
    ``desc``: the group_desc given by the script or framework ("" when none).
    ``local``: made by a call that not all ranks make (local synchronisation, a split of another group).
    """

    index: int
    name: str
    ranks: tuple[int, ...]
    backend: str = "nccl"
    site: str = ""
    desc: str = ""
    family: int = 0
    member: int = 0
    local: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    def position(self, rank: int) -> int:
        """Rank's place in the group; ValueError when it is no member."""
        return self.ranks.index(rank)


@dataclass
class GroupTable:
    """All groups a rank has seen created, in order. One table serves all ranks (every rank creates every group)."""

    groups: list[Group] = field(default_factory=list)
    _open: dict[tuple[str, str, str], tuple[int, set[int]]] = field(default_factory=dict, repr=False)
    _families: list[list[int]] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Group:
        return self.groups[index]

    def __iter__(self):
        return iter(self.groups)

    def add(
        self,
        ranks: tuple[int, ...],
        *,
        name: str = "",
        backend: str = "nccl",
        site: str = "",
        desc: str = "",
        local: bool = False,
    ) -> Group:
        """Register the next group.

        Groups made at one place with one backend and description form a family for as long as no rank occurs twice;
        the first repetition opens a new family.
        """
        key = (site, desc, backend)
        family, seen = self._open.get(key, (-1, set()))
        if family < 0 or not seen.isdisjoint(ranks):
            family, seen = len(self._families), set()
            self._families.append([])
            self._open[key] = (family, seen)
        seen.update(ranks)
        index = len(self.groups)
        members = self._families[family]
        members.append(index)
        label = name or (self.groups[members[0]].name if len(members) > 1 else desc or f"group{index}")
        group = Group(index, label, tuple(ranks), backend, site, desc, family, len(members) - 1, local)
        self.groups.append(group)
        return group

    def restore(self, groups: list[Group]) -> None:
        """Fill an empty table with groups read from a file."""
        self.groups = list(groups)
        self._families = [[] for _ in range(1 + max((g.family for g in groups), default=-1))]
        for group in groups:
            self._families[group.family].append(group.index)

    def family(self, family: int) -> list[Group]:
        return [self.groups[i] for i in self._families[family]]

    def families(self) -> list[list[Group]]:
        return [self.family(i) for i in range(len(self._families))]

    def of_rank(self, family: int, rank: int) -> Group | None:
        """The one group of ``family`` that has ``rank`` as a member, or None."""
        for index in self._families[family]:
            if rank in self.groups[index].ranks:
                return self.groups[index]
        return None
