"""Lines and tables on a console, safe for any text and readable at 80 columns."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text


def line(console: Console, text: str = "", style: str = "") -> None:
    """One line, never wrapped and never read as markup: paths and source lines stay whole for copy and grep."""
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def heading(console: Console, text: str) -> None:
    """An empty line and a bold one."""
    line(console)
    line(console, text, "bold")


def table(*columns: str, left: int = 1) -> Table:
    """A table without lines; the first ``left`` columns hold text (folded when long), the others numbers."""
    cells = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, name in enumerate(columns):
        if i < left:
            cells.add_column(Text(name), overflow="fold")
        else:
            cells.add_column(Text(name), justify="right", no_wrap=True)
    return cells


def row(cells: Table, *values: str, style: str = "") -> None:
    """Add a row of plain text: nothing in it is markup."""
    cells.add_row(*(Text(value) for value in values), style=style)


def show(console: Console, cells: Table) -> None:
    """Print a table as it is, without highlighting."""
    console.print(cells, highlight=False)
