"""What is said while ranks are traced: lines without a terminal, a bar with one, an estimate in both."""

from __future__ import annotations

import io

from rich.console import Console

from echo_launch.pool import Result
from echo_launch.progress import TracingProgress, duration


def say(terminal: bool, quiet: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with TracingProgress(2, quiet, console) as progress:
        progress.say("simulating")
        progress.traced(Result(0, "ok", seconds=10.0), 1, 1)
        progress.traced(Result(8, "ok", seconds=20.0), 2, 12)
        progress.traced(Result(95, "ok", seconds=30.0), 12, 12)
    return file.getvalue()


def test_lines():
    # Mean 15 s, ten ranks left, two at once: 75 s.
    assert say(False).splitlines() == [
        "simulating",
        "traced rank 0 in 10.0 s (1 of 1)",
        "traced rank 8 in 20.0 s (2 of 12, about 75 s left)",
        "traced rank 95 in 30.0 s (12 of 12)",
    ]


def test_bar():
    text = say(True)
    assert "traced 12 of 12 ranks" in text and "traced rank" not in text


def test_quiet():
    assert say(False, quiet=True) == ""


def test_durations():
    assert [duration(s) for s in (0.4, 119, 300)] == ["0 s", "119 s", "5 min"]
