"""A result as people read it: the answer, then a table of what there is room for, then the notes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING, Literal

from amanda.errors import printable
from amanda.tools.results._folding import cells_of, groups_of
from amanda.tools.results._text import fitting, shortened

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from amanda.tools.results._result import Result

ROWS_SHOWN = 40
LINE = 160
_ANY = 100_000


def as_text(result: Result, whole: bool = False) -> str:
    """Return a result as text without colours, each row in one line, as wide as the terminal if there is one.

    whole: whether every row and column is shown.
    """
    from rich.console import Console
    from rich.measure import Measurement

    out = StringIO()
    console = Console(file=out, width=LINE, color_system=None, legacy_windows=False, force_jupyter=False)
    is_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal and not whole else None
    for part in parts(result, width, whole):
        console.width = width or LINE
        if not isinstance(part, str):
            least = Measurement.get(console, console.options.update(width=_ANY), part).maximum
            console.width = width or max(LINE, least)
        console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def for_console(result: Result, width: int) -> Iterator[Table | Text]:
    """Yield what a console of a width prints of a result."""
    from rich.text import Text

    for part in parts(result, width):
        yield Text(part) if isinstance(part, str) else part


def parts(result: Result, width: int | None, whole: bool = False) -> Iterator[Table | str]:
    """Yield the title, the sentences that come first, the table, what it lacks, and the other notes."""
    table, lacks = _table(result, width, whole)
    sentences = [printable(one) for one in (*result.notes(), *result.remarks)]
    if result.title:
        yield printable(result.title)
    yield from sentences[: result.leading]
    yield table
    if lacks:
        yield " ".join([*lacks, "All of it: --full, or whole(), to_pandas() and save(FILE) of the result."])
    yield from sentences[result.leading :]


def _table(result: Result, width: int | None, whole: bool) -> tuple[Table, list[str]]:
    """Return the table, and sentences on what it lacks."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = result.rows()
    groups = [[row] for row in rows]
    if len(rows) > ROWS_SHOWN and not whole:
        groups = [list(group) for group in groups_of(result.columns, rows, result.order)]
    shown = groups if whole else groups[:ROWS_SHOWN]
    places = [i for i, column in enumerate(result.columns) if column.shown]
    columns = [result.columns[i] for i in places]
    texts = (cells_of(result.columns, group) for group in shown)
    cells = [[printable(row[i], line=True) for i in places] for row in texts]
    totals = result._totals(rows)
    ends = [totals[i] for i in places]
    heads = [printable(column.name, line=True) for column in columns]
    numbers = [column.total or column.number for column in columns]
    kept, most = fitting(heads, [*cells, ends], width, numbers)
    table = Table(box=box.SIMPLE_HEAD, show_footer=any(totals))
    for i in kept:
        justify: Literal["right", "left"] = "right" if numbers[i] else "left"
        table.add_column(heads[i], ends[i], justify=justify, overflow="fold", no_wrap=numbers[i])
    for row in cells:
        table.add_row(*(Text(row[i] if numbers[i] else shortened(row[i], most)) for i in kept))
    lacks = []
    if len(groups) > len(shown):
        lacks.append(f"… {sum(map(len, groups[len(shown) :])):,} more rows.")
    if any(len(group) > 1 for group in shown):
        lacks.append("Repeated layers are one row.")
    if len(kept) < len(heads):
        left_out = (head for i, head in enumerate(heads) if i not in kept)
        lacks.append(f"There is no room for {', '.join(left_out)} here.")
    return table, lacks
