"""report.html: one self-contained page of charts (plotly), for a browser without network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from echo_hooks.compose.result import Composition, Timeline
from echo_hooks.graph.files import atomic_write
from echo_hooks.graph.problems import rank_ranges
from echo_hooks.graph.program import Kind
from echo_hooks.graph.rundir import Run
from echo_hooks.report.activity import (
    COMMUNICATION,
    COMPUTE,
    ComputeRow,
    compute_by_class,
    compute_by_module,
    operation_name,
)
from echo_hooks.report.quantities import bytes_text, decimal_text, duration_text, percent_text
from echo_hooks.report.report import Report
from echo_hooks.report.terminal import headline, select_roles

MAX_CLASSES_DRAWN = 8
MAX_ROLES_DRAWN = 24
MAX_SLICES_A_CLASS = 1500
MAX_ROWS = 15
GIB = 1 << 30

# Okabe and Ito's palette: told apart by colour-blind readers too.
_COLOURS = {"compute": "#0072B2", "bubble": "#E69F00", "waiting": "#F0E442", "host": "#999999", "copy": "#56B4E9"}
_COMMUNICATION_COLOURS = ("#D55E00", "#CC79A7", "#009E73", "#8C564B", "#9467BD", "#BCBD22", "#17BECF")


def write_html(path: Path, run: Run, composition: Composition, report: Report) -> None:
    """Write the page whole and then renamed; OSError when it cannot be written."""
    figures = [_memory(report)]
    if composition.timelines:
        figures = [_breakdown(report), *_where(run, composition), _timeline(run, composition), *figures]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("echo_hooks.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "bytes_text": bytes_text,
        "duration_text": duration_text,
        "percent_text": percent_text,
        "rank_ranges": rank_ranges,
        "decimal_text": decimal_text,
    }
    page = environment.get_template("page.html").render(
        title=str(run.manifest.get("script") or run.path.name),
        report=report,
        headline=headline(report),
        figures=[_div(figure, f"figure-{i}") for i, figure in enumerate(figures)],
        plotly=get_plotlyjs(),
    )
    atomic_write(path, page.encode("utf-8", "replace"))  # file names may hold lone surrogates


def _div(figure: go.Figure, name: str) -> str:
    """The figure as a div; plotly escapes what could end the script element."""
    return plotly.io.to_html(
        figure, full_html=False, include_plotlyjs=False, div_id=name, config={"displaylogo": False, "responsive": True}
    )


def _figure(bars: list[go.Bar], title: str, axis: str, rows: int, **layout: Any) -> go.Figure:
    figure = go.Figure(bars)
    figure.update_layout(
        title=title,
        template="plotly_white",
        height=160 + 34 * max(rows, 2),
        margin={"l": 10, "r": 20, "t": 60, "b": 50},
        legend={"traceorder": "normal"},
        **layout,
    )
    figure.update_xaxes(title=axis)
    figure.update_yaxes(automargin=True, autorange="reversed")
    return figure


# ---- charts ----


def _breakdown(report: Report) -> go.Figure:
    roles = select_roles([role for role in report.roles if role.breakdown], MAX_ROLES_DRAWN)
    labels = [f"{role.name} (rank {role.busiest_rank}{', critical' if role.critical else ''})" for role in roles]
    parts = [role.breakdown or {} for role in roles]
    groups = sorted({name for part in parts for name in part["exposed_communication"]})
    series = [("compute", _COLOURS["compute"], [part["compute"] for part in parts])]
    for i, group in enumerate(groups):
        values = [part["exposed_communication"].get(group, 0.0) for part in parts]
        series.append((f"exposed communication: {group}", _communication_colour(i), values))
    series += [(name, _COLOURS[name], [part[name] for part in parts]) for name in ("bubble", "waiting", "host")]
    bars = [
        go.Bar(name=name, y=labels, x=values, orientation="h", marker_color=colour) for name, colour, values in series
    ]
    return _figure(bars, "Where one step goes, by role", "ms", len(roles), barmode="stack")


def _where(run: Run, composition: Composition) -> list[go.Figure]:
    timeline = composition.timelines[composition.critical]
    trace = run.traces[_traced(run)[timeline.role]]
    by_class = compute_by_class(timeline, trace.ops, trace.steps)
    by_module = compute_by_module(timeline, trace.steps)
    title = f"of rank {timeline.representative} (kernel time, overlapping kernels each counted)"
    return [
        _rows_figure(by_class, f"Compute by class of operation {title}"),
        _rows_figure(by_module, f"Compute by module {title}"),
    ]


def _rows_figure(rows: list[ComputeRow], title: str) -> go.Figure:
    shown = rows[:MAX_ROWS]
    if len(rows) > MAX_ROWS:
        rest = rows[MAX_ROWS:]
        shown = [*shown, ComputeRow(f"{len(rest)} more", sum(r.calls for r in rest), sum(r.time_ms for r in rest))]
    bar = go.Bar(
        y=[row.name for row in shown],
        x=[row.time_ms for row in shown],
        text=[f"{duration_text(row.time_ms)}, {row.calls:g} calls" for row in shown],
        orientation="h",
        marker_color=_COLOURS["compute"],
    )
    return _figure([bar], title, "ms", len(shown))


def _memory(report: Report) -> go.Figure:
    roles = select_roles(report.roles, MAX_ROLES_DRAWN)
    labels = [role.name for role in roles]
    holders = list(dict.fromkeys(name for role in roles for name in role.held_at_peak))
    series: list[tuple[str, list[int]]] = [(n, [role.held_at_peak.get(n, 0) for role in roles]) for n in holders]
    held = [sum(role.held_at_peak.values()) for role in roles]
    series.append(("reserved, not held", [max(0, role.peak_reserved_bytes - h) for role, h in zip(roles, held)]))
    extras = list(dict.fromkeys(name for role in roles for name in role.extra_bytes))
    series += [(f"extra: {name}", [role.extra_bytes.get(name, 0) for role in roles]) for name in extras]
    bars = [
        go.Bar(name=name, y=labels, x=[size / GIB for size in sizes], orientation="h")
        for name, sizes in series
        if any(sizes)
    ]
    figure = _figure(bars, "Peak memory per rank, by role", "GiB", len(roles), barmode="stack")
    capacity = report.cluster["memory_bytes"] / GIB
    figure.add_vline(x=capacity, line_dash="dash", annotation_text=f"capacity {capacity:.1f} GiB")
    return figure


def _timeline(run: Run, composition: Composition) -> go.Figure:
    """The longest slices of the critical class and of others on one clock, a lane per stream."""
    timelines = composition.timelines
    others = [i for i in range(len(timelines)) if i != composition.critical]
    chosen = [timelines[i] for i in sorted([composition.critical, *others[: MAX_CLASSES_DRAWN - 1]])]
    origin_us = min(timeline.offset_us for timeline in chosen)
    traced = _traced(run)
    slices: dict[str, list[tuple[str, float, float, str]]] = {}  # by series: lane, begin ms, length ms, text
    lanes: dict[str, None] = {}
    dropped = 0
    for timeline in chosen:
        shift_us = timeline.offset_us - origin_us
        records, left = _longest(timeline)
        dropped += left
        for record in records.tolist():
            lane = f"rank {timeline.representative}, {_stream(timeline, record)}"
            lanes[lane] = None
            start, ready, end = (
                (float(times[record]) + shift_us) / 1e3
                for times in (timeline.start_us, timeline.ready_us, timeline.end_us)
            )
            text = operation_name(timeline, record, run.traces[traced[timeline.role]].ops)
            series = _series(run, timeline, record)
            if start < ready <= end:  # False where there is no ready time
                slices.setdefault("waiting", []).append((lane, start, ready - start, f"{text} waits"))
                start = ready
            slices.setdefault(series, []).append((lane, start, end - start, text))
    names = sorted(slices)
    bars = [_slice_bars(name, slices[name], _series_colour(name, names)) for name in names]
    title = "Timeline"
    if dropped or len(chosen) < len(timelines):
        title += f" ({dropped} short slices and {len(timelines) - len(chosen)} classes of ranks left out: see Perfetto)"
    figure = _figure(bars, title, "ms", len(lanes), barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=list(lanes))
    return figure


def _slice_bars(name: str, slices: list[tuple[str, float, float, str]], colour: str) -> go.Bar:
    lanes, begins, lengths, texts = zip(*slices)
    return go.Bar(
        name=name,
        y=lanes,
        x=lengths,
        base=begins,
        hovertext=[f"{text}, {duration_text(length)}" for text, length in zip(texts, lengths)],
        hoverinfo="text",
        orientation="h",
        marker={"color": colour, "line": {"width": 0}},
    )


def _longest(timeline: Timeline) -> tuple[np.ndarray, int]:
    """The MAX_SLICES_A_CLASS longest records in order of start, and how many were left out."""
    duration = timeline.end_us - timeline.start_us
    ran = np.flatnonzero(np.isin(timeline.program.kind, (*COMPUTE, *COMMUNICATION)) & np.isfinite(duration))
    kept = ran[np.argsort(-duration[ran], kind="stable")[:MAX_SLICES_A_CLASS]]
    order = np.lexsort((timeline.start_us[kept], timeline.program.stream[kept]))
    return kept[order], len(ran) - len(kept)


def _stream(timeline: Timeline, record: int) -> str:
    stream = int(timeline.program.stream[record])
    return timeline.program.streams[stream] if stream >= 0 else "host"


def _series(run: Run, timeline: Timeline, record: int) -> str:
    group = int(timeline.program.group[record])
    if group >= 0:
        return run.groups[group].name
    return "copy" if timeline.program.kind[record] == Kind.COPY else "compute"


def _series_colour(name: str, names: list[str]) -> str:
    groups = [other for other in names if other not in _COLOURS]
    return _COLOURS.get(name) or _communication_colour(groups.index(name))


def _communication_colour(index: int) -> str:
    return _COMMUNICATION_COLOURS[index % len(_COMMUNICATION_COLOURS)]


def _traced(run: Run) -> dict[str, int]:
    return {role.name: role.traced_rank for role in run.roles}
