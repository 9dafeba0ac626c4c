"""Several communicators in flight on one accelerator at once: legal, and yet a known way to hang.

NCCL promises progress of kernels of different communicators that run at the same time only where all of them fit on the
device together and start in one order everywhere (NCCL user guide, "Using multiple NCCL communicators concurrently").
The composer cannot see what the device makes of it, so it says where it happens and calls nothing wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echo_hooks.compose.result import Timeline
from echo_hooks.graph.groups import GroupTable
from echo_hooks.graph.program import HOST_STREAM, Kind


def communicators_at_once(timelines: Sequence[Timeline], groups: GroupTable) -> str:
    """One sentence on the largest number of groups whose kernels are on one rank's device at once; "" for one."""
    most: tuple[int, Timeline, list[int]] | None = None
    for timeline in {t.role: t for t in reversed(timelines)}.values():  # one of each program says enough
        records = _most_at_once(timeline)
        if len(records) > 1 and (most is None or len(records) > most[0]):
            most = (len(records), timeline, records)
    if most is None:
        return ""
    count, timeline, records = most
    program = timeline.program
    names = ", ".join(groups[int(program.group[i])].name for i in records)
    sites = "; ".join(dict.fromkeys(site for i in records if (site := program.strings[int(program.site[i])])))
    where = f"rank {timeline.representative}" + (f", {sites}" if sites else "")
    return (
        f"up to {count} communicators have kernels on one accelerator at once ({names}; {where}): NCCL promises no"
        " progress then unless all fit on the device together"
    )


def _most_at_once(timeline: Timeline) -> list[int]:
    """Records of the moment with most groups in flight, one per group in order of their start."""
    program = timeline.program
    communication = np.isin(program.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)) & (program.stream != HOST_STREAM)
    records = np.flatnonzero(communication & (timeline.end_us > timeline.start_us))
    if not len(records):
        return []
    times = np.concatenate([timeline.end_us[records], timeline.start_us[records]])
    order = np.argsort(times, kind="stable")  # at equal times what ends goes first
    open_records: dict[int, list[int]] = {}
    found: list[int] = []
    for i in order.tolist():
        record = int(records[i % len(records)])
        group = int(program.group[record])
        if i >= len(records):
            open_records.setdefault(group, []).append(record)
            if len(open_records) > len(found):
                found = [members[0] for members in open_records.values()]
        else:
            open_records[group].remove(record)
            if not open_records[group]:
                del open_records[group]
    return found
