"""Everything a finished simulation leaves in its run directory beside the traces."""

from __future__ import annotations

from pathlib import Path

from echo_hooks.compose.result import Composition
from echo_hooks.errors import UsageError
from echo_hooks.graph.files import atomic_write
from echo_hooks.graph.rundir import Run
from echo_hooks.report.html import write_html
from echo_hooks.report.perfetto import write_perfetto
from echo_hooks.report.report import PAGE_FILE, PERFETTO_FILE, REPORT_FILE, TIMELINE_FILE, Report
from echo_hooks.report.timeline_table import write_timeline


def write_files(directory: Path, run: Run, composition: Composition, report: Report) -> list[Path]:
    """Write timeline.parquet and timeline.perfetto.json.gz (when there is a timeline), report.html and report.json.

    Returns the paths; report.json comes last, so that its presence means the rest is complete. Files of an earlier
    composition that has no place in this one are removed. UsageError when the directory cannot be written.
    """
    table, trace = directory / TIMELINE_FILE, directory / PERFETTO_FILE
    page, numbers = directory / PAGE_FILE, directory / REPORT_FILE
    try:
        numbers.unlink(missing_ok=True)
        written = [page, numbers]
        if composition.timelines:
            write_timeline(table, composition)
            write_perfetto(trace, run, composition)
            written = [table, trace, *written]
        else:
            table.unlink(missing_ok=True)
            trace.unlink(missing_ok=True)
        write_html(page, run, composition, report)
        atomic_write(numbers, report.to_json().encode())
    except OSError as error:
        raise UsageError(f"{error.filename or directory}: cannot write the report ({error.strerror})") from None
    return written
