"""What the user sees while ranks are traced: a bar on a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from echo_launch.pool import Result


class TracingProgress:
    """Writes to stderr. The bar appears only after the first rank, whose own output goes to the same terminal."""

    def __init__(self, jobs: int, quiet: bool, console: Console | None = None):
        self.jobs = jobs
        self.quiet = quiet
        self.console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._seconds: list[float] = []
        self._began = time.monotonic()

    def __enter__(self) -> TracingProgress:
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, sentence: str) -> None:
        if not self.quiet:
            self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def traced(self, result: Result, traced: int, known: int) -> None:
        """Rank ``result.rank`` is done, ``traced`` of ``known``."""
        if self.quiet:
            return
        self._seconds.append(result.seconds)
        left_seconds = self._left(known - traced)
        if not self.console.is_terminal:
            left = f", about {duration(left_seconds)} left" if known > traced else ""
            self.say(f"traced rank {result.rank} in {result.seconds:.1f} s ({traced} of {known}{left})")
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
            self._bar.add_task("", total=known, left="")
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0],
            description=f"traced {traced} of {known} ranks",
            completed=traced,
            total=known,
            left=f"about {duration(left_seconds)} left" if known > traced else "",
        )

    def _left(self, ranks: int) -> float:
        mean = sum(self._seconds) / len(self._seconds)
        return mean * ranks / min(self.jobs, max(ranks, 1))


def duration(seconds: float) -> str:
    """Seconds as people read them: "45 s", "3 min"."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
