"""Hand-built plans for the composer's tests: a few lines per rank, a network of constant cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.ops import OpSignature, OpTable
from echo_hooks.graph.program import HOST_STREAM, Evidence, Kind, ProgramBuilder
from echo_hooks.graph.roles import Role
from echo_hooks.graph.rundir import RankTrace


@dataclass(frozen=True)
class FakeCost:
    duration_us: float
    latency_us: float = 0.0
    loads: tuple[tuple[int, float], ...] = ()
    evidence: str = "modelled"


@dataclass
class FakeNetwork:
    """``us(name, ranks, bytes)`` gives the duration; left out, one microsecond per byte."""

    us: Callable[[str, tuple[int, ...], int], float] = lambda name, ranks, bytes: float(bytes)
    asked: list = field(default_factory=list)

    def collective(self, name, ranks, bytes, dtype, *, root=-1, count=1, splits=None):
        self.asked.append((name, ranks, bytes, dtype, root, count, splits))
        return FakeCost(self.us(name, ranks, bytes))

    def point_to_point(self, source, destination, bytes, *, group_size):
        self.asked.append(("p2p", (source, destination), bytes))
        return FakeCost(self.us("p2p", (source, destination), bytes))


class Rank:
    """One rank's program by plain calls; ``host`` microseconds before each record default to 0."""

    def __init__(self, groups: GroupTable):
        self.groups = groups
        self.ops = OpTable()
        self.builder = ProgramBuilder()
        self.streams = {"default": 0, "host": HOST_STREAM}
        self.events = 0
        self.batch = -1
        self.batches = 0
        self.seq: dict[int, int] = {}
        self.prologue = 0

    def stream(self, name: str) -> int:
        if name not in self.streams:
            self.streams[name] = self.builder.new_stream(name)
        return self.streams[name]

    def run(
        self,
        us: float,
        stream: str = "default",
        host: float = 0.0,
        thread: int = 0,
        kind: Kind = Kind.COMPUTE,
        name: str = "aten.mm.default",
    ):
        op = self.ops.add(OpSignature(name))
        self.builder.append(
            kind,
            op=op,
            duration_us=us,
            stream=self.stream(stream),
            host_us=host,
            thread=thread,
            evidence=Evidence.MODELLED,
        )

    def host(self, us: float, thread: int = 0):
        self.builder.append(Kind.HOST, host_us=us, thread=thread)

    def record(self, stream: str = "default", host: float = 0.0) -> int:
        self.events += 1
        self.builder.append(Kind.RECORD_EVENT, event=self.events, stream=self.stream(stream), host_us=host)
        return self.events

    def wait(self, event: int, stream: str = "default", host: float = 0.0):
        self.builder.append(Kind.WAIT_EVENT, event=event, stream=self.stream(stream), host_us=host)

    def sync(self, event: int = -1, stream: str | None = None, host: float = 0.0):
        number = -1 if stream is None else self.stream(stream)
        self.builder.append(Kind.SYNC, event=event, stream=number, host_us=host)

    def _call(self, kind, name, group, bytes, stream, host, site, peer=-1, dtype="bfloat16", attrs=(), thread=0):
        seq = -1
        if kind == Kind.COLLECTIVE:
            seq = self.seq.get(group, 0)
            self.seq[group] = seq + 1
        self.builder.append(
            kind,
            op=self.ops.add(OpSignature(name, attrs=tuple(attrs))),
            group=group,
            seq=seq,
            bytes=bytes,
            dtype=self.builder.string(dtype),
            peer=peer,
            batch=self.batch,
            stream=self.stream(stream),
            host_us=host,
            thread=thread,
            site=self.builder.string(site),
        )

    def collective(
        self, bytes, group=0, name="all_reduce", stream="default", host=0.0, site="train.py:1", root=-1, **other
    ):
        self._call(Kind.COLLECTIVE, name, group, bytes, stream, host, site, peer=root, **other)

    def send(self, peer, bytes, group=0, stream="default", host=0.0, site="train.py:2", **other):
        self._call(Kind.SEND, "send", group, bytes, stream, host, site, peer=peer, **other)

    def recv(self, peer, bytes, group=0, stream="default", host=0.0, site="train.py:3", **other):
        self._call(Kind.RECV, "recv", group, bytes, stream, host, site, peer=peer, **other)

    def open_batch(self):
        self.batch, self.batches = self.batches, self.batches + 1

    def close_batch(self):
        self.batch = -1

    def asynchronous(self, bytes, group, stream, site="train.py:4", **other) -> int:
        """As torch issues an asynchronous collective; returns the event of its end."""
        self.wait(self.record(), stream)
        self.collective(bytes, group, stream=stream, site=site, **other)
        return self.record(stream)

    def trace(self, rank: int, steps: int = 1) -> RankTrace:
        """What came before the ``steps()`` call is the prologue."""
        program = self.builder.program()
        before, after = program.slice(0, self.prologue), program.slice(self.prologue, len(program))
        return RankTrace(rank, after, before, self.ops.signatures, self.groups, {}, steps=steps)

    def steps(self):
        self.prologue = len(self.builder)


class Plan:
    """A world in the making: ``groups`` to add to, ``rank(r)`` to write r's program, ``compose`` to run it."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.groups = GroupTable()
        self.groups.add(tuple(range(world_size)), name="world", site="init")
        self.members: dict[int, tuple[Rank, tuple[int, ...]]] = {}

    def group(self, *ranks: int, name: str = "", site: str = "groups") -> int:
        return self.groups.add(tuple(ranks), name=name, site=site, desc=name).index

    def rank(self, rank: int, others: tuple[int, ...] = ()) -> Rank:
        """The program of ``rank``, and of ``others`` in its role."""
        made = Rank(self.groups)
        self.members[rank] = (made, (rank, *others))
        return made

    def compose(self, network=None, accelerators_per_node: int = 8, **options):
        from echo_hooks.compose import compose

        roles = [Role(f"role{r}", r, ranks, ranks) for r, (_, ranks) in sorted(self.members.items())]
        traces = {r: made.trace(r) for r, (made, _) in self.members.items()}
        return compose(
            self.world_size,
            self.groups,
            roles,
            traces,
            network or FakeNetwork(),
            accelerators_per_node=accelerators_per_node,
            **options,
        )
