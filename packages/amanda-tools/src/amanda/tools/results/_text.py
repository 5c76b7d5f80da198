"""A result as text: its title, notes and table, as wide as the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from amanda.errors import printable
from amanda.tools.results._layout import DEFAULT_VIEW, GAP, Rows, TableLayout, View, cells_of, groups_of

if TYPE_CHECKING:
    from rich.table import Table

    from amanda.tools.results._result import Result

_ANY = 100_000


def as_text(result: Result, view: View = DEFAULT_VIEW, width: int | None = None) -> str:
    """Return a result as text without colours, each row in one line.

    width: None for that of the terminal, or 80 without one; the variable COLUMNS sets another.
    """
    from rich.console import Console
    from rich.measure import Measurement

    # Sentences of a log are searched for, so they are folded for readers at a terminal alone.
    is_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    folds = width is not None or is_terminal or bool(os.environ.get("COLUMNS"))
    width = width or shutil.get_terminal_size().columns
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False, force_jupyter=False)
    for part in parts(result, None if view.whole else width, view):
        console.width = width
        if not isinstance(part, str):
            # Rich would fold a table that is wider than its console.
            natural_width = Measurement.get(console, console.options.update(width=_ANY), part).maximum
            console.width = max(width, natural_width)
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str) and not folds)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def parts(result: Result, width: int | None, view: View = DEFAULT_VIEW) -> Iterator[Table | str]:
    """Yield the title, the sentences that come first, the table, what it lacks, and the other notes."""
    result = result._printed(view)
    sentences = [printable(sentence) for sentence in (*result.notes(), *result.remarks)]
    if result.title:
        yield printable(result.title)
    yield from sentences[: result._leading]
    rows = result.rows()
    if rows:
        yield from _table_and_omissions(result, width, view)
    yield from sentences[result._leading :]


def _table_and_omissions(result: Result, width: int | None, view: View) -> Iterator[Table | str]:
    """Yield the table, and a sentence on what it lacks."""
    rows = result.rows()
    groups: Sequence[Rows] = [[row] for row in rows]
    if result._combines:
        groups = groups_of(result.columns, rows, view, result._order)
    shown = groups if view.whole or not result._combines else groups[: view.top]
    cells = [[printable(text, line=True) for text in cells_of(result.columns, group)] for group in shown]
    layout = TableLayout.fitting(result.columns, cells, result._totals(rows), width)
    yield _table(layout)
    omissions = list(_omissions(layout, groups, len(shown)))
    if omissions:
        yield " ".join(omissions)


def _omissions(layout: TableLayout, groups: Sequence[Rows], shown: int) -> Iterator[str]:
    """Yield sentences on rows and columns that a table leaves out, and on what its texts stand for."""
    is_combined = any(len(group) > 1 for group in groups)
    if shown < len(groups) or is_combined:
        number = f"{shown:,} of {len(groups):,}" if shown < len(groups) else f"{shown:,}"
        yield f"Showing {number} rows{' (repeated layers combined)' * is_combined}."
    if layout.prefix:
        yield f'"…" stands for "{layout.prefix}".'
    if layout.repeated:
        yield f"In every row: {', '.join(f'{name} {text}' for name, text in layout.repeated.items())}."
    if layout.hidden:
        yield f"Hidden columns: {', '.join(layout.hidden)}."
    if shown < len(groups) or is_combined or layout.hidden:
        yield "Show everything: --full (shell) or result.whole() (Python)."


def _table(layout: TableLayout) -> Table:
    """Return the table of rich for a layout."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = [layout.columns[i] for i in layout.positions]
    totals = [layout.totals[i] for i in layout.positions]
    if any(totals) and not totals[0]:
        totals[0] = "total"
    table = Table(
        box=box.SIMPLE_HEAD,
        show_footer=any(totals),
        show_edge=False,
        pad_edge=False,
        padding=(0, GAP - 1, 0, 0),
    )
    for column, total in zip(columns, totals, strict=True):
        is_number = column.total or column.number
        table.add_column(
            printable(column.name, line=True), total, justify="right" if is_number else "left",
            overflow="fold", no_wrap=True,
        )  # fmt: skip
    for row in layout.cells:
        table.add_row(*(Text(row[i]) for i in layout.positions))
    return table
