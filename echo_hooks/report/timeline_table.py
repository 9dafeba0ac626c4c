"""timeline.parquet: when each record of each class of ranks was issued and ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from echo_hooks.compose.result import Composition
from echo_hooks.graph.rundir import write_table

_TIMES = ("issue_us", "start_us", "ready_us", "end_us", "slowdown", "slack_us")


def write_timeline(path: Path, composition: Composition) -> None:
    """One row per record: ``class`` (index of the timeline), ``rank`` (its representative), ``role``, ``record`` (row
    of the step's program), times in microseconds on the representative's clock, ``slowdown``, ``slack_us``. NaN: it
    never ran, or the slack was not worked out."""
    timelines = composition.timelines
    lengths = [len(t.program) for t in timelines]
    classes = np.repeat(np.arange(len(timelines), dtype=np.int32), lengths)
    roles = pa.DictionaryArray.from_arrays(pa.array(classes), pa.array([t.role for t in timelines], type=pa.string()))
    columns = {
        "class": pa.array(classes),
        "rank": pa.array(np.repeat(np.array([t.representative for t in timelines], dtype=np.int32), lengths)),
        "role": roles,
        "record": pa.array(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths] or [np.zeros(0, np.int64)])),
    }
    for name in _TIMES:
        parts = [_column(getattr(t, name), len(t.program)) for t in timelines]
        columns[name] = pa.array(np.concatenate(parts or [np.zeros(0)]))
    write_table(path, pa.table(columns))


def _column(values: np.ndarray | None, records: int) -> np.ndarray:
    return np.full(records, np.nan) if values is None else np.asarray(values, dtype=np.float64)
