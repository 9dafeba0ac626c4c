"""The files a simulation leaves: all there, the same bytes each time, removed when they no longer hold."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from echo_hooks.compose.result import Composition
from echo_hooks.errors import UsageError
from echo_hooks.graph.problems import Problem
from echo_hooks.report.files import write_files
from echo_hooks.report.report import build_report

NAMES = ["timeline.parquet", "timeline.perfetto.json.gz", "report.html", "report.json"]


@pytest.fixture
def report(run, composition, cluster):
    return build_report(run, composition, cluster, timings={"report": 0.0})


def test_all_files_twice_the_same(run, composition, report, tmp_path):
    first, second = (write_files(tmp_path / name, run, composition, report) for name in ("a", "b"))
    assert [path.name for path in first] == NAMES
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second))


def test_a_hang_removes_the_old_timeline(run, composition, report, cluster, tmp_path):
    write_files(tmp_path, run, composition, report)
    hang = Composition(float("nan"), problems=[Problem("hang", "stuck", (0, 1))])
    write_files(tmp_path, run, hang, build_report(run, hang, cluster, timings={}))
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["report.html", "report.json"]


def test_timeline_table(run, composition, report, tmp_path):
    write_files(tmp_path, run, composition, report)
    table = pq.read_table(tmp_path / "timeline.parquet").to_pydict()
    assert table["class"] == [0] * 8 + [1] * 8
    assert table["record"] == [*range(8), *range(8)]
    assert table["role"][0] == "stage 0" and table["rank"][8] == 1
    assert np.array_equal(table["start_us"][8:], composition.timelines[1].start_us, equal_nan=True)


def test_the_page_is_whole_and_needs_no_network(run, composition, report, tmp_path):
    report.problems[0]["message"] = "<script>alert(1)</script>"
    run.traces[0].program.strings[2] = "</script><b>"
    write_files(tmp_path, run, composition, report)
    page = (tmp_path / "report.html").read_text()
    assert page.rstrip().endswith("</html>")
    assert "<script>alert(1)" not in page and "</script><b>" not in page
    assert 'src="http' not in page and "<link" not in page
    assert page.count('class="plotly-graph-div"') == 5
    for words in ("460 us", "all_reduce", "Where one step goes", "capacity 0.1 GiB", "item of unknown float"):
        assert words in page


def test_a_directory_that_is_a_file(run, composition, report, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="cannot write the report"):
        write_files(tmp_path / "run", run, composition, report)
