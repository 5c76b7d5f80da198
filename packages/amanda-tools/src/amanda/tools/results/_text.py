"""A result as text: its title, notes and table, as wide as the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from amanda.errors import printable
from amanda.tools.results._layout import GAP, Rows, TableLayout, View, cells_of, groups_of

if TYPE_CHECKING:
    from amanda.tools.results._result import Result


def as_text(result: Result, view: View, width: int | None = None) -> str:
    """Return a result as text: title, the sentences that come first, the table, and the other sentences.

    width: None for that of the terminal, or 80 without one; the variable COLUMNS sets another.
    """
    # Sentences of a log are searched for, so they are folded for readers at a terminal alone.
    is_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    folds = width is not None or is_terminal or bool(os.environ.get("COLUMNS"))
    width = width or shutil.get_terminal_size().columns
    result = result._printed(view)
    sentences = [printable(sentence) for sentence in (result.title, *result.notes(), *result.remarks)]
    first = 1 + result._leading
    table, omissions = _table_and_omissions(result, None if view.whole else width, view)
    above, below = (
        "\n".join(filter(None, part)) for part in (sentences[:first], [omissions, *sentences[first:]])
    )
    if folds:
        above, below = (
            "\n".join(
                fill(line, width, break_long_words=False, break_on_hyphens=False) for line in part.split("\n")
            )
            for part in (above, below)
        )
    return "\n".join([*filter(None, [above]), *table, *filter(None, [below])])


def _table_and_omissions(result: Result, width: int | None, view: View) -> tuple[list[str], str]:
    """Return the lines of the table, none without rows, and sentences on what it lacks."""
    if not result._shows_table:
        return [], ""
    rows = result.rows()
    groups: Sequence[Rows] = [[row] for row in rows]
    if result._combines:
        groups = groups_of(result.columns, rows, view, result._order)
    shown = groups if view.whole or not result._combines else groups[: view.top]
    cells = [[printable(text, line=True) for text in cells_of(result.columns, group)] for group in shown]
    layout = TableLayout.fitting(result.columns, cells, result._totals(rows), width)
    return list(_lines(layout)), " ".join(_omissions(layout, groups, len(shown)))


def _lines(layout: TableLayout) -> Iterator[str]:
    """Yield the lines of a table: heads, rows, and totals."""
    columns = [layout.columns[i] for i in layout.positions]
    heads = [printable(column.name, line=True) for column in columns]
    totals = [layout.totals[i] for i in layout.positions]
    if has_totals := any(totals):
        totals[0] = totals[0] or "total"
    lines = [heads, *([row[i] for i in layout.positions] for row in layout.cells), *[totals] * has_totals]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    for i, texts in enumerate(lines):
        if has_totals and i == len(lines) - 1:
            yield ""
        aligned = (
            text.rjust(width) if column.total or column.number else text.ljust(width)
            for text, width, column in zip(texts, widths, columns, strict=True)
        )
        yield (" " * GAP).join(aligned).rstrip()
        if i == 0:
            yield "─" * (sum(widths) + GAP * (len(widths) - 1))


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
