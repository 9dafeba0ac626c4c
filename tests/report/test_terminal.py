"""The report as text."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from echo_hooks.compose.result import Composition
from echo_hooks.graph.problems import Problem
from echo_hooks.report.report import build_report
from echo_hooks.report.terminal import MAX_ROLES, print_report, select_roles


def printed(report, width=80, **kwargs) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=width), **kwargs)
    return out.getvalue()


@pytest.fixture
def report(run, composition, cluster):
    return build_report(run, composition, cluster, timings={})


def test_it_holds_every_part(report, tmp_path):
    text = printed(report, directory=tmp_path)
    assert text.startswith("OUT_OF_MEMORY: stage 1 (rank 1) needs 150 MiB of 128 MiB")
    for words in (
        "step time   460 us  (simulated; no band is computed)",
        "cluster     tiny:1x2  (1 x 2 Tiny 1, 128 MiB each)",
        "ranks       2 in 2 roles; traced 0-1",
        "MFU 1.3 %",
        "evidence    measured 10.0 %, modelled 90.0 % of the critical path",
        "3 x item of unknown float = 1.0  at train.py:50",
        f"run:   {tmp_path}",
    ):
        assert words in text


def rows(text: str) -> dict[str, list[str]]:
    """First word(s) of each table line and its numbers."""
    found = {}
    for text_line in text.splitlines():
        cells = text_line.split()
        numbers = [c for c in cells if c.replace(".", "").isdigit()]
        if numbers:
            found.setdefault(" ".join(cells[: len(cells) - len(numbers)]), numbers)
    return found


def test_breakdown_table(report):
    found = rows(printed(report))
    assert found["compute"] == ["0.350", "76.1", "0.160", "34.8"]
    assert found["exposed dp"] == ["0.090", "19.6", "0.140", "30.4"]
    assert found["bubble"] == ["0.000", "0.0", "0.115", "25.0"]
    assert found["step"] == ["0.460", "100.0", "0.460", "100.0"]


def test_nothing_but_free_text_is_wider_than_80(report):
    report.roles = [replace(role, name=f"pipeline stage {i} of a long name") for i, role in enumerate(report.roles * 3)]
    report.roles[0].ranks = [*range(0, 4096, 2), 4095]
    text = printed(report)
    tables = text[text.index("Where one step goes") : text.index("at the peak of")]
    lines = [t for t in tables.splitlines() if not t.startswith(("*:", "waits", "ms:", "member;", "capacity"))]
    assert max(len(t.rstrip()) for t in lines) <= 80
    assert "..." not in tables.replace("of a long name", "")


def test_it_is_plain_text_when_the_output_is_no_terminal(report):
    assert "\x1b" not in printed(report) and "\x1b" not in str(report)


def test_a_terminal_gets_styles(report):
    out = io.StringIO()
    print_report(report, Console(file=out, width=80, force_terminal=True, color_system="standard"))
    assert "\x1b[" in out.getvalue()


def test_markup_in_names_is_only_text(report):
    report.assumptions.insert(0, {"kind": "[bold]x[/bold]", "value": "[/]", "site": "[red]", "count": 1})
    assert "1 x [bold]x[/bold] = [/]  at [red]" in printed(report)


def test_long_lists_are_cut_and_say_so(report):
    report.assumptions = [{"kind": "k", "value": str(i), "site": "s:1", "count": 1} for i in range(14)]
    assert "4 more in report.json" in printed(report)


def test_a_hang_comes_first(run, cluster):
    hang = Problem("hang", "rank 0 waits for rank 1", (0, 1), "train.py:42")
    text = printed(build_report(run, Composition(float("nan"), problems=[hang]), cluster, timings={}))
    assert text.startswith("HANG: rank 0 waits for rank 1 [train.py:42]")
    assert "step time   none: the plan does not get through a step" in text
    assert "Where one step goes" not in text


def test_select_roles_keeps_first_last_and_critical(report):
    many = [replace(report.roles[0], name=str(i), critical=i == 17) for i in range(40)]
    names = [role.name for role in select_roles(many)]
    assert len(names) == MAX_ROLES
    assert {"0", "17", "39"} <= set(names)
    assert names == sorted(names, key=int)
