"""Why nothing can go on: the calls that wait for each other, or for a call that nobody makes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from echo_hooks.compose.agreement import (
    call_text,
    group_text,
    last_calls,
    rank_text,
    running_number,
    site_of_call,
    where_of_call,
)
from echo_hooks.compose.folding import Partition
from echo_hooks.compose.programs import HOST_CALL, PART, SYNC, WAIT
from echo_hooks.compose.state import ON_CALL, State
from echo_hooks.compose.tables import Tables
from echo_hooks.compose.world import World
from echo_hooks.graph.problems import Problem
from echo_hooks.graph.program import Kind


@dataclass(frozen=True)
class Blocked:
    """A kernel of calls in which a class of ranks is stuck: instance ``copy``, ``record``; ``part``: the unserved call
    (index into the role's calls)."""

    class_: int
    copy: int
    record: int
    part: int


@dataclass
class _Scene:
    """The engine's state where it stopped, and what it was made from."""

    world: World
    partition: Partition
    tables: Tables
    state: State

    def role(self, c: int) -> int:
        return int(self.world.role_of[self.partition.representative[c]])

    def program(self, c: int):
        return self.world.programs[self.role(c)]

    def channel(self, c: int, port: int) -> int:
        return int(self.tables.classes.channel[self.tables.classes.port0[c] + port])

    def agent(self, c: int, stream: int) -> int:
        return int(self.tables.classes.agent0[c] + self.tables.classes.threads[c] + stream)


def diagnose(world: World, partition: Partition, tables: Tables, state: State) -> Problem:
    """The hang as one Problem: a call that some rank never makes if there is one, else the smallest circular wait."""
    scene = _Scene(world, partition, tables, state)
    stuck = _stuck(scene)
    edges = {node: _waits_for(scene, node) for node in stuck}
    missing = [(node, c, port) for node in stuck for c, port, how in edges[node] if how is None]
    lonely = [node for node in stuck if scene.tables.missing[_channel_of(scene, node)] and not edges[node]]
    if lonely or missing:
        node = min(lonely + [m[0] for m in missing], key=lambda b: _issue_us(scene, b))
        return _missing(scene, node, stuck)
    cycle = _shortest_cycle(stuck, edges)
    if not cycle:
        where = ", ".join(_blocked_text(scene, node) for node in stuck[:4])
        return Problem("hang", f"nothing can go on: {where}", tuple(range(world.world_size)))
    return _circular(scene, cycle, edges, stuck)


def unreceived(world: World, partition: Partition, tables: Tables, state: State, repeat: int) -> Problem | None:
    """The first send that no rank ever receives, after a run in which sends were buffered and all came to their end."""
    scene = _Scene(world, partition, tables, state)
    for channel, ends in enumerate(tables.ends):
        count = int(tables.channels.calls[channel])
        if state.served[channel] == count * repeat:
            continue
        copy, number = divmod(int(state.served[channel]), count)
        for c, port in ends:
            program = scene.program(c)
            of_port = np.flatnonzero(program.call_port == port)
            if program.ports[port].kind == Kind.SEND and number < len(of_port):
                part = int(of_port[number])
                return _missing(scene, Blocked(c, copy, _kernel_of(program, part), part), [])
    return None


def _stuck(scene: _Scene) -> list[Blocked]:
    """Every unserved call in which a stream or host thread stands, by class."""
    tables, state = scene.tables, scene.state
    found = []
    for c in range(len(tables.classes.role)):
        program = scene.program(c)
        first = int(tables.classes.agent0[c])
        for thread in range(program.threads):
            if state.held[first + thread] == ON_CALL and state.at[first + thread] >= 0:
                copy, record = divmod(int(state.at[first + thread]), program.n)
                found += _unserved(scene, c, copy, record)
        for stream in range(len(program.stream_start) - 1):
            agent = scene.agent(c, stream)
            if state.held[agent] == ON_CALL:
                begin, end = program.stream_start[stream : stream + 2]
                copy, place = divmod(int(state.at[agent]), int(end - begin))
                found += _unserved(scene, c, copy, int(program.stream_records[begin + place]))
    return found


def _unserved(scene: _Scene, c: int, copy: int, record: int) -> list[Blocked]:
    program = scene.program(c)
    parts = program.parts[program.part_start[record] : program.part_start[record + 1]].tolist()
    unserved = []
    for part in parts:
        channel = scene.channel(c, int(program.call_port[part]))
        number = copy * int(scene.tables.channels.calls[channel]) + int(program.call_number[part])
        if number >= scene.state.served[channel]:
            unserved.append(Blocked(c, copy, record, part))
    return unserved


def _channel_of(scene: _Scene, node: Blocked) -> int:
    return scene.channel(node.class_, int(scene.program(node.class_).call_port[node.part]))


def _issue_us(scene: _Scene, node: Blocked) -> float:
    n = scene.program(node.class_).n
    return float(scene.state.issue[scene.tables.classes.instance0[node.class_] + node.copy * n + node.record])


def _waits_for(scene: _Scene, node: Blocked) -> list[tuple[int, int, tuple[list[str], list[Blocked]] | None]]:
    """(class, port, how) of each end of the call's channel that has not come to its first unserved call. ``how``: what
    that class stands behind, as words and the calls it is stuck in; None when it never makes the call."""
    channel = _channel_of(scene, node)
    count = int(scene.tables.channels.calls[channel])
    copy, number = divmod(int(scene.state.served[channel]), count)
    late: list[tuple[int, int, tuple[list[str], list[Blocked]] | None]] = []
    for c, port in scene.tables.ends[channel]:
        program = scene.program(c)
        of_port = np.flatnonzero(program.call_port == port)
        if number >= len(of_port):
            late.append((c, port, None))
            continue
        kernel = _kernel_of(program, int(of_port[number]))
        if not _arrived(scene, c, copy, kernel):
            late.append((c, port, _behind(scene, c, copy, kernel)))
    return late


def _kernel_of(program, call: int) -> int:
    """The record that issues the kernel of a call (the last one of its batch)."""
    if program.action[program.call_record[call]] != PART:
        return int(program.call_record[call])
    at = int(np.flatnonzero(program.parts == call)[0])
    return int(np.searchsorted(program.part_start, at, side="right")) - 1


def _arrived(scene: _Scene, c: int, copy: int, kernel: int) -> bool:
    program, state = scene.program(c), scene.state
    if state.issued[c] <= copy * program.n + kernel:
        return False
    if program.action[kernel] == HOST_CALL:
        return True
    stream = int(program.program.stream[kernel])
    agent = scene.agent(c, stream)
    length = int(program.stream_start[stream + 1] - program.stream_start[stream])
    place = copy * length + int(program.place[kernel])
    return bool(state.at[agent] > place or (state.at[agent] == place and state.held[agent] == ON_CALL))


def _behind(scene: _Scene, c: int, copy: int, kernel: int) -> tuple[list[str], list[Blocked]]:
    """What keeps a class from starting a kernel: host waits on the way, as words, and the calls at the end of it."""
    program, state = scene.program(c), scene.state
    words: list[str] = []
    calls: list[Blocked] = []
    seen = set()
    todo = [(copy, kernel)]
    while todo:
        copy, record = todo.pop()
        if (copy, record) in seen:
            continue
        seen.add((copy, record))
        if state.issued[c] <= copy * program.n + record:
            todo += _host_waits(scene, c, words, calls)
            continue
        stream = int(program.program.stream[record])
        agent = scene.agent(c, stream)
        begin, end = program.stream_start[stream : stream + 2]
        at_copy, place = divmod(int(state.at[agent]), int(end - begin))
        front = int(program.stream_records[begin + place])
        if state.held[agent] == ON_CALL:
            calls += _unserved(scene, c, at_copy, front)
        elif state.issued[c] <= at_copy * program.n + front:
            todo += _host_waits(scene, c, words, calls)
        elif program.action[front] == WAIT:
            todo += _targets(program, at_copy, front)
    return words, list(dict.fromkeys(calls))


def _host_waits(scene: _Scene, c: int, words: list[str], calls: list[Blocked]) -> list[tuple[int, int]]:
    """Unended records that a host thread waits for; a call it stands in goes to ``calls``."""
    program, state = scene.program(c), scene.state
    waits: list[tuple[int, int]] = []
    for thread in range(program.threads):
        agent = int(scene.tables.classes.agent0[c]) + thread
        if state.at[agent] < 0:
            continue
        copy, record = divmod(int(state.at[agent]), program.n)
        if program.action[record] == SYNC:
            event, stream = program.program.event[record] >= 0, program.program.stream[record] >= 0
            what = "an event" if event else "a stream" if stream else "a device"
            words.append(f"whose host waits at {what} synchronisation {_nearby(program, record)}")
            waits += _targets(program, copy, record)
        else:
            calls += _unserved(scene, c, copy, record)
    if not waits and not calls:
        words.append("whose launch queue is full")
        copy, record = divmod(int(state.issued[c]), program.n)
        stream = int(program.program.stream[record])
        if stream >= 0:
            begin, end = program.stream_start[stream : stream + 2]
            at_copy, place = divmod(int(state.at[scene.agent(c, stream)]), int(end - begin))
            waits.append((at_copy, int(program.stream_records[begin + place])))
    return waits


def _targets(program, copy: int, record: int) -> list[tuple[int, int]]:
    targets = program.waits[program.wait_start[record] : program.wait_start[record + 1]].tolist()
    return [(copy, t) if t >= 0 else (copy - 1, -1 - t) for t in targets if t >= 0 or copy > 0]


def _nearby(program, record: int) -> str:
    """A SYNC has no source line of its own: the communication around it places it."""
    own = program.site(record)
    if own:
        return f"at {own}"
    at = int(np.searchsorted(program.call_record, record))
    before = program.site(int(program.call_record[at - 1])) if at else ""
    after = program.site(int(program.call_record[at])) if at < len(program.call_record) else ""
    words = [f"after {before}"] * bool(before) + [f"before {after}"] * bool(after)
    return " and ".join(words) or "in the step"


def _shortest_cycle(stuck: list[Blocked], edges: dict) -> list[Blocked]:
    best: list[Blocked] = []
    for start in stuck[:512]:
        parent: dict[Blocked, Blocked | None] = {start: None}
        queue = deque([start])
        closed = False
        while queue and not closed:
            node = queue.popleft()
            for _, _, how in edges[node]:
                for following in how[1]:
                    if following == start:
                        path = [node]
                        while (up := parent[path[-1]]) is not None:
                            path.append(up)
                        if not best or len(path) < len(best):
                            best = path[::-1]
                        closed = True
                    elif following not in parent and following in edges:
                        parent[following] = node
                        queue.append(following)
            if best and closed:
                break
        if len(best) == 1:
            break
    return best


# ---- from classes to ranks, and to words ----


def _partners(scene: _Scene, rank: int, node: Blocked) -> list[tuple[int, int]]:
    """(rank, its own port) of those that ``rank`` meets in the call."""
    port = int(scene.program(node.class_).call_port[node.part])
    if scene.program(node.class_).ports[port].kind == Kind.COLLECTIVE:
        group = scene.world.group_of(rank, port)
        of_place = zip(scene.world.members[group].tolist(), scene.world.member_port[group].tolist())
        return [(r, scene.world.role_and_port(p)[1] if p >= 0 else -1) for r, p in of_place]
    partner = scene.world.partner_of(rank, port)
    return [(scene.world.peer_of(rank, port), scene.world.role_and_port(partner)[1] if partner >= 0 else -1)]


def _circular(scene: _Scene, cycle: list[Blocked], edges: dict, stuck: list[Blocked]) -> Problem:
    """Follow the cycle of classes from rank to rank until a rank comes round again."""
    walk: list[tuple[int, Blocked]] = [(int(scene.partition.representative[cycle[0].class_]), cycle[0])]
    i = 0
    while len(walk) <= scene.world.world_size * len(cycle):
        rank, node = walk[-1]
        i = (i + 1) % len(cycle)
        following = cycle[i]
        ports = {p for c, p, how in edges[node] if c == following.class_ and how and following in how[1]}
        nexts = [
            r for r, p in _partners(scene, rank, node) if scene.partition.class_of[r] == following.class_ and p in ports
        ]
        step = (min(nexts), following)
        if step in walk:
            walk = walk[walk.index(step) :]
            break
        walk.append(step)
    ranks = sorted({r for r, _ in walk})
    sentences, sites = [], []
    for j, (rank, node) in enumerate(walk[:8]):
        other, following = walk[(j + 1) % len(walk)]
        how = next(h for c, _, h in edges[node] if c == following.class_ and h and following in h[1])
        sentence = f"rank {rank} waits in {_blocked_text(scene, node, rank)} for rank {other}"
        sentence += "".join(f", {words}" for words in how[0])
        sentences.append(sentence)
        sites.append(scene.program(node.class_).site(int(scene.program(node.class_).call_record[node.part])))
    if len(walk) > 8:
        sentences.append(f"and so on through {len(ranks)} ranks")
    text = f"{rank_text(ranks)} wait for each other in a circle: {'; '.join(sentences)}"
    text += _others(scene, set(ranks), stuck)
    return Problem("hang", text, tuple(ranks), "; ".join(dict.fromkeys(s for s in sites if s)))


def _missing(scene: _Scene, node: Blocked, stuck: list[Blocked]) -> Problem:
    """Some rank never makes the first unserved call of the channel that ``node`` stands at."""
    world, program = scene.world, scene.program(node.class_)
    rank = int(scene.partition.representative[node.class_])
    port = int(program.call_port[node.part])
    own = int(world.port_base[scene.role(node.class_)]) + port
    channel = _channel_of(scene, node)
    number = int(scene.state.served[channel]) % int(scene.tables.channels.calls[channel])
    site = program.site(int(program.call_record[node.part]))
    waiting, absent, facts = [], [], []
    for r, p in _partners(scene, rank, node):
        count = int(world.programs[world.role_of[r]].port_count[p]) if p >= 0 else 0
        if count <= number:
            absent.append(r)
            if count:
                last = last_calls(world, int(world.port_base[world.role_of[r]]) + p, count)
                span = "" if world.programs[world.role_of[r]].step_ends is not None else " in a step"
                facts.append(f"rank {r} makes {count} calls there{span}, the last ones {last}")
        else:
            waiting.append(r)
    ranks = sorted({rank, *waiting, *absent})
    verb = "never makes" if len(absent) == 1 else "never make"
    if program.ports[port].kind == Kind.COLLECTIVE:
        text = (
            f"{rank_text(absent)} {verb} {running_number(world, own, number)} on"
            f" {group_text(world, world.group_of(rank, port))}, {call_text(world, program.calls[_kind(program, node)])}"
            f" at {where_of_call(world, own, number)}, in which {rank_text(waiting or [rank])}"
            f" {'waits' if len(waiting) < 2 else 'wait'}"
        )
    else:
        verb = "receives" if program.ports[port].kind == Kind.SEND else "sends"
        text = f"rank {rank}'s {_blocked_text(scene, node, rank)} has no partner: rank {absent[0]} never {verb} it"
        text += _elsewhere(world, rank, absent[0], program.ports[port].kind)
    if facts:
        text += f"; {facts[0]}"
    calls = _any_calls(world, absent[0])
    if calls and not facts:
        text += f"; the last calls of rank {absent[0]} are {calls}"
    return Problem("hang", text + _others(scene, set(ranks), stuck), tuple(ranks), site)


def _kind(program, node: Blocked) -> int:
    return int(program.call_kind[node.part])


def _elsewhere(world: World, rank: int, peer: int, kind: int) -> str:
    """The peer may answer on another group."""
    program = world.programs[world.role_of[peer]]
    wanted = Kind.RECV if kind == Kind.SEND else Kind.SEND
    for j, port in enumerate(program.ports):
        if port.kind == wanted and world.peer_of(peer, j) == rank and world.partner_of(peer, j) < 0:
            base = int(world.port_base[world.role_of[peer]])
            verb = "receives" if wanted == Kind.RECV else "sends"
            group = group_text(world, world.group_of(peer, j))
            return f", it {verb} on {group} at {site_of_call(world, base + j, 0)} instead"
    return ""


def _any_calls(world: World, rank: int, count: int = 3) -> str:
    program = world.programs[world.role_of[rank]]
    texts = []
    for call in range(max(0, len(program.call_record) - count), len(program.call_record)):
        where = program.where(int(program.call_record[call]))
        texts.append(f"{call_text(world, program.calls[int(program.call_kind[call])])} at {where}")
    return ", ".join(texts)


def _blocked_text(scene: _Scene, node: Blocked, rank: int | None = None) -> str:
    world, program = scene.world, scene.program(node.class_)
    rank = int(scene.partition.representative[node.class_]) if rank is None else rank
    port = int(program.call_port[node.part])
    call = program.calls[_kind(program, node)]
    where = program.where(int(program.call_record[node.part]))
    group = group_text(world, world.group_of(rank, port))
    if program.ports[port].kind == Kind.COLLECTIVE:
        own = int(world.port_base[scene.role(node.class_)]) + port
        number = running_number(world, own, int(program.call_number[node.part]))
        return f"{call_text(world, call)}, {number} on {group} at {where}"
    direction = "to" if program.ports[port].kind == Kind.SEND else "from"
    return (
        f"{call_text(world, call)} {direction} rank {world.peer_of(rank, port)}"
        f" (#{int(program.call_number[node.part])} in this direction) on {group} at {where}"
    )


def _others(scene: _Scene, named: set[int], stuck: list[Blocked]) -> str:
    """What the remaining ranks are doing, the largest crowds first."""
    doing: dict[str, list[int]] = {}
    ranks_of = scene.partition.ranks()
    idle = set(range(scene.world.world_size)) - named
    for node in stuck:
        program = scene.program(node.class_)
        call = program.calls[_kind(program, node)]
        port = program.ports[int(program.call_port[node.part])]
        site = program.site(int(program.call_record[node.part])) or "unknown line"
        text = f"in {call.name} on {scene.world.groups[port.group].name} at {site}"
        free = [r for r in ranks_of[node.class_].tolist() if r in idle]
        if free:
            doing.setdefault(text, []).extend(free)
    if not doing:
        return ""
    crowds = sorted(doing.items(), key=lambda item: (-len(item[1]), item[0]))[:3]
    return ". The others: " + "; ".join(
        f"{rank_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {text}" for text, ranks in crowds
    )
