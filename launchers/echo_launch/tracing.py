"""Carries a schedule out: traces waves of ranks, keeps what is learnt, repeats a rank whose donor came later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from echo_hooks.compose.roles import RankFacts, rank_facts
from echo_hooks.errors import EchoError, ExecuteFailed, NothingSimulated, ScriptError
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.merge import match_groups, renumber_groups
from echo_hooks.graph.rundir import read_trace, write_trace
from echo_launch.child import log_path
from echo_launch.pool import Result
from echo_launch.schedule import Schedule, Wave

_LOG_LINES = 20


class Pool(Protocol):
    """Where ranks are traced: this machine's fork server, or a stand-in of the tests."""

    def submit(self, rank: int) -> None: ...
    def next_result(self) -> Result: ...


@dataclass
class Traced:
    """What tracing gave. ``facts`` use the numbers of ``groups``; ``reasons``: why each rank was traced; ``failure``:
    of the script as a rank whose calls before it are in the facts."""

    groups: GroupTable
    facts: dict[int, RankFacts]
    reasons: dict[int, str]
    unsettled: list[str]
    packages: dict[str, str] = field(default_factory=dict)
    retraced: list[int] = field(default_factory=list)
    peak_rss_bytes: int = 0
    failure: ScriptError | None = None


def trace_ranks(
    pool: Pool, schedule: Schedule, directory: Path, jobs: int, report: Callable[[Result, int, int], None]
) -> Traced:
    """Trace all ranks that ``schedule`` asks for, ``jobs`` at once, into ``directory``.

    ``report(result, traced, known)`` is called after each rank: ``known`` ranks are to be traced as far as is known.
    When the script fails as one of the ranks, no others are traced; how its calls fit to those of the ranks before may
    say why. Raises ScriptError when it fails as the first. Where neither the first nor the last rank makes a step, no
    others are traced unless they were asked for; the facts say so.
    """
    tracing = _Tracing(pool, directory, jobs, report)
    wave: Wave | None = schedule.first()
    while wave is not None:
        tracing.run(wave)
        groups, facts = tracing.merged()
        if tracing.failure is not None or tracing.all_idle(schedule):
            break  # no more ranks: how the calls of these fit together may say why
        wave = tracing.unless_idle(schedule) or tracing.second_pass(schedule.next(facts, groups))
    groups, facts = tracing.merged(on_disk=True)
    return Traced(
        groups,
        facts,
        tracing.reasons,
        schedule.unsettled(facts, groups),
        tracing.packages,
        sorted(tracing.repeated),
        tracing.peak_rss_bytes,
        tracing.failure,
    )


def _last(schedule: Schedule) -> int:
    return schedule.world_size - 1 if schedule.wanted is None else max(schedule.wanted)


class _Tracing:
    def __init__(self, pool: Pool, directory: Path, jobs: int, report: Callable[[Result, int, int], None]):
        self.pool = pool
        self.directory = directory
        self.jobs = jobs
        self.report = report
        self.facts: dict[int, RankFacts] = {}
        self.tables: dict[int, GroupTable] = {}
        self.reasons: dict[int, str] = {}
        self.repeated: set[int] = set()
        self.packages: dict[str, str] = {}
        self.peak_rss_bytes = 0
        self.failure: ScriptError | None = None
        self._clock = 0  # counts starts and ends of ranks
        self._started: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def run(self, wave: Wave) -> None:
        waiting = list(wave.ranks)
        running = 0
        most = 1 if wave.in_order else self.jobs
        while waiting or running:
            while waiting and running < most:
                rank, why = waiting.pop(0)
                self.reasons.setdefault(rank, why)
                self._started[rank] = self._tick()
                self.pool.submit(rank)
                running += 1
            result = self.pool.next_result()
            running -= 1
            self._ended[result.rank] = self._tick()
            if self._failed(result) and result.rank not in self.repeated and self._was_early(result.rank):
                # A rank that the failed one hears from was still running: alone and in order it may well succeed.
                self.repeated.add(result.rank)
                waiting.insert(0, (result.rank, ""))
                most = 1
                continue
            self._keep(result)
            if self.failure is not None:
                waiting.clear()
            self.report(result, len(self.facts), len(self.facts) + running + len(waiting))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _was_early(self, rank: int) -> bool:
        started = self._started[rank]
        return any(
            other != rank
            and self._ended.get(other, self._clock + 1) > started
            and self._started[other] < self._ended[rank]
            for other in self._started
        )

    @staticmethod
    def _failed(result: Result) -> bool:
        return result.outcome not in ("ok", "nothing")

    def _keep(self, result: Result) -> None:
        self.peak_rss_bytes = max(self.peak_rss_bytes, result.peak_rss_bytes)
        self.packages.update(result.packages)
        if self._failed(result):
            error = _error(result, self.directory)
            if not (result.traced and self.facts and isinstance(error, ScriptError)):
                for path in (self.directory / "ranks").glob(f"{result.rank:05d}.*"):
                    path.unlink()
                raise error
            self.failure = self.failure or error
        if result.outcome == "nothing" and not result.traced:
            raise NothingSimulated(result.message, result.rank)
        trace = read_trace(self.directory, result.rank)
        fact = rank_facts(trace, "" if result.outcome == "ok" else result.message)
        known = next((t for t in self.tables.values() if t.groups == trace.groups.groups), trace.groups)
        self.facts[result.rank], self.tables[result.rank] = fact, known

    def unless_idle(self, schedule: Schedule) -> Wave | None:
        """Where no rank made a step yet, one more opinion: the last rank's."""
        if _last(schedule) in self.facts or not all(fact.nothing for fact in self.facts.values()):
            return None
        return Wave(((_last(schedule), f"rank {min(self.facts)} made no step"),))

    def all_idle(self, schedule: Schedule) -> bool:
        """No rank made a step, the last one included, and no others were asked for."""
        return (
            schedule.wanted is None
            and _last(schedule) in self.facts
            and all(fact.nothing for fact in self.facts.values())
        )

    def second_pass(self, wave: Wave | None) -> Wave | None:
        """``wave``, or, when nothing new is left, the ranks whose donors were traced after them; each rank once."""
        if wave is not None:
            return wave
        late = [
            rank
            for rank, fact in self.facts.items()
            if rank not in self.repeated
            and any(self._ended.get(donor, 0) > self._started[rank] for donor in fact.unanswered)
        ]
        self.repeated.update(late)
        # Backwards: what is still unanswered comes from later ranks, as gradients' shapes come down a pipeline.
        return Wave(tuple((rank, "") for rank in sorted(late, reverse=True)), in_order=True) if late else None

    def merged(self, on_disk: bool = False) -> tuple[GroupTable, dict[int, RankFacts]]:
        """The table of all groups and the facts in its numbers; ``on_disk`` renumbers the written traces too."""
        groups, mappings = match_groups(self.tables)
        facts = {}
        for rank, fact in self.facts.items():
            mapping = mappings[rank]
            facts[rank] = replace(
                fact,
                point_to_point=frozenset(int(mapping[i]) for i in fact.point_to_point),
                roots=frozenset((int(mapping[i]), root) for i, root in fact.roots),
            )
            if on_disk and self.tables[rank].groups != groups.groups:
                trace = read_trace(self.directory, rank)
                renumber_groups(trace, groups, mapping)
                write_trace(self.directory, trace)
        return groups, facts


def _error(result: Result, directory: Path) -> EchoError:
    if result.outcome == "echo_error":
        error = EchoError(result.message)
        error.exit_status = result.status
        return error
    if result.outcome == "execute_failed":
        return ExecuteFailed(result.message)
    message = result.message
    if result.outcome == "crashed" and (tail := _log_tail(log_path(directory, result.rank))):
        message += f"; the end of its output:\n{tail}"
    return ScriptError(message, result.rank, result.traceback)


def _log_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_LOG_LINES:])
    except OSError:
        return ""
