"""A result as people read it: numbers, folded rows, text for terminals, HTML for notebooks."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

from amanda.errors import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from amanda.tools.results._result import Column, Result

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def amount(value: float, unit: str = "") -> str:
    """Return a quantity with four digits and a decimal prefix: `4.089 G`, `812 k`, `17`.

    >>> amount(4_089_184_256)
    '4.089 G'
    >>> amount(17, "B")
    '17 B'
    """
    magnitude, prefix = float(value), 0
    # What rounds to 1000 gets the next prefix.
    while abs(magnitude) >= 999.95 and prefix < len(_PREFIXES) - 1:
        magnitude /= 1000
        prefix += 1
    digits = f"{value:g}" if prefix == 0 else f"{magnitude:.4g}"
    return f"{digits} {_PREFIXES[prefix]}{unit}".rstrip()


def shortened(text: str, width: int) -> str:
    """Return text of at most so many characters: paths of files keep their end, names both ends.

    >>> shortened("model.layers.31.mlp.down_proj", 17)
    'model.la…own_proj'
    """
    if len(text) <= width:
        return text
    head = 0 if "/" in text else (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - width + 1 + head :]}"


NOTHING = "No op was executed under this tool; `with amanda.apply(tool):` runs what is in it under the tool."
"""The note of an empty result."""


def not_met(noun: str, names: Sequence[str]) -> list[str]:
    """Return a note on loaded state that no op has used; none if there is no such state.

    >>> not_met("masks", ["module.fc/linear/mask"])
    ['1 of the masks that were loaded is of no op that was met: module.fc/linear/mask.']
    """
    if not names:
        return []
    singular = f"is of no op that was met: {names[0]}"
    text = singular if len(names) == 1 else f"are of no op that was met, such as {names[0]}"
    return [f"{len(names)} of the {noun} that were loaded {text}."]


def fit_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, numbers: Sequence[bool]
) -> tuple[list[int], int]:
    """Return the columns of a table that fit a width (None: any), and the longest text of a cell.

    numbers: True for a column of numbers.

    Texts give way first, down to 24 characters, numbers never; then the column "source", then shorter texts,
    then columns from the right; three stay.
    """
    # The widest text of each column, which needs no folding.
    natural_widths = [max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(heads)]
    columns = list(range(len(heads)))
    if width is None:
        return columns, max(natural_widths, default=1)
    while True:
        source = next((i for i in columns if heads[i] == "source" and len(columns) > 3), None)
        for text_width in _TEXTS[: None if source is None else _BEFORE_SOURCE]:
            widths = [
                natural_widths[i] if numbers[i] else max(min(natural_widths[i], text_width), len(heads[i]))
                for i in columns
            ]
            if sum(widths) + _BETWEEN * len(columns) + 1 <= width or (
                len(columns) <= 3 and text_width == _TEXTS[-1]
            ):
                return columns, text_width
        columns.remove(columns[-1] if source is None else source)


_TEXTS = (200, 44, 32, 24, 16, 12)
"""Longest texts of a cell, in the order in which they are tried."""
_BEFORE_SOURCE = 4
"""How many of these are tried before the column "source" is left out."""
_BETWEEN = 3
"""Characters between two columns."""


_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
Rows = Sequence[Sequence[Any]]


def groups_of(columns: Sequence[Column], rows: Rows, order: str) -> list[Rows]:
    """Return rows in groups that differ in numbers, and in the first index in the module's path, alone.

    A group has one row of each module: the first of several equal ones, the second, and so on.
    order: the column whose sum puts the groups in order, the largest first; "" for the order of the rows.
    """
    names = [column.name for column in columns]
    if "module" not in names:
        return [[row] for row in rows]
    module = names.index("module")
    label_columns = [
        i for i, column in enumerate(columns) if not (column.total or column.number) and i != module
    ]
    groups_by_key: dict[tuple[Any, ...], list[Sequence[Any]]] = {}
    counts = Counter[tuple[Any, ...]]()
    for row in rows:
        labels = tuple(str(row[i]) for i in label_columns)  # lists of packed weights are among them
        module_and_labels = (row[module], *labels)
        # The count keeps several rows of one module apart, so that each group has one row of a module.
        key = (_INDEX.sub("*", row[module], count=1), counts[module_and_labels], *labels)
        counts[module_and_labels] += 1
        groups_by_key.setdefault(key, []).append(row)
    groups: list[Rows] = list(groups_by_key.values())
    if order in names:
        column = names.index(order)
        groups.sort(key=lambda group: -sum(row[column] or 0 for row in group))
    return groups


def cells_of(columns: Sequence[Column], group: Rows) -> list[str]:
    """Return the texts of a row that stands for a group: sums, equal values, or the least and the most."""
    return [_cell_text(column, [row[i] for row in group]) for i, column in enumerate(columns)]


def _cell_text(column: Column, values: Sequence[Any]) -> str:
    """Return the text of one cell of a row that stands for some rows."""
    present = [value for value in values if value is not None]
    if not present:
        return ""
    if column.name == "module" and len(values) > 1:
        return column.show(_folded_path(values))
    if len(values) == 1:
        return column.show(present[0])
    if column.total or column.folded == "sum":
        return column.show(sum(present))
    if column.folded == "mean":
        return column.show(sum(present) / len(present))
    lowest, highest = column.show(min(present)), column.show(max(present))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _folded_path(paths: Sequence[str]) -> str:
    """Return one path for all, with the first indices as ranges; the first path if none has an index."""
    indices = [match[0] for path in dict.fromkeys(paths) if (match := _INDEX.search(path))]
    return _INDEX.sub(_ranges(map(int, indices)), paths[0], count=1) if indices else paths[0]


def _ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges.

    >>> _ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


_STYLE = """<style>
.amanda-result { max-height: 32em; overflow: auto; margin: 0.5em 0; }
.amanda-result table {
  border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums; margin: 0; }
.amanda-result caption { text-align: left; font-weight: 600; padding: 2px 8px; white-space: nowrap; }
.amanda-result table th, .amanda-result table td {
  border: 0; padding: 2px 8px; text-align: left; vertical-align: top; white-space: nowrap; max-width: none; }
.amanda-result table .number { text-align: right; }
.amanda-result thead th {
  position: sticky; top: 0; background: var(--jp-layout-color0, Canvas); box-shadow: inset 0 -1px #8886; }
.amanda-result tfoot th { box-shadow: inset 0 1px #8886; }
.amanda-result tbody tr:nth-child(even) { background: #8881; }
.amanda-result p { margin: 4px 8px; font-size: 12px; opacity: 0.8; }
</style>"""


def html_table(
    title: str,
    names: Sequence[str],
    numbers: Sequence[bool],
    rows: Sequence[Sequence[tuple[str, Any]]],
    totals: Sequence[str],
    notes: Sequence[str],
    first: Sequence[str] = (),
) -> str:
    """Return an HTML table.

    numbers: True for a column that is aligned to the right.  rows: for each cell its text and its value; the
    value is the tooltip of shortened text.  first: sentences above the table.
    """
    marks = [' class="number"' if number else "" for number in numbers]
    head = "".join(
        f'<th scope="col"{mark}>{escape(name)}</th>' for name, mark in zip(names, marks, strict=True)
    )
    body = "".join(f"<tr>{_cells(row, marks)}</tr>" for row in rows)
    foot = "".join(f"<th{mark}>{escape(total)}</th>" for total, mark in zip(totals, marks, strict=True))
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    footer = f"<tfoot><tr>{foot}</tr></tfoot>" if any(totals) else ""
    html_above, html_below = (
        "".join(f"<p>{escape(sentence)}</p>" for sentence in each) for each in (first, notes)
    )
    return (
        f'{_STYLE}<div class="amanda-result">{html_above}<table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody>{footer}</table>{html_below}</div>"
    )


def _cells(row: Sequence[tuple[str, Any]], marks: Sequence[str]) -> str:
    """Return the cells of a row as HTML.  marks: attributes of each column's cells."""
    return "".join(
        f"<td{mark}{_title_attribute(text, value)}>{escape(text)}</td>"
        for (text, value), mark in zip(row, marks, strict=True)
    )


def _title_attribute(text: str, value: Any) -> str:
    """Return the attribute for a tooltip that shows text in full; "" where the cell shows it already."""
    return f' title="{escape(value)}"' if isinstance(value, str) and value != text else ""


def html_sentences(sentences: Sequence[str]) -> str:
    """Return sentences as HTML, for a result without a table."""
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return f'{_STYLE}<div class="amanda-result">{paragraphs}</div>'


def html_page(title: str, content: str) -> str:
    """Return an HTML page with a content."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        "<style>body { font-family: sans-serif; } body .amanda-result { max-height: none; }</style>"
        f"</head><body>{content}</body></html>\n"
    )


ROWS_SHOWN = 40
LINE = 160
_ANY = 100_000


def as_text(result: Result, whole: bool = False) -> str:
    """Return a result as text without colours, each row in one line, as wide as the terminal if there is one.

    whole: show every row and column.
    """
    from rich.console import Console
    from rich.measure import Measurement

    out = StringIO()
    console = Console(file=out, width=LINE, color_system=None, legacy_windows=False, force_jupyter=False)
    # A pipe has no width, and a file is read by programs: lines are never folded there.
    is_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal and not whole else None
    for part in parts(result, width, whole):
        console.width = width or LINE
        if not isinstance(part, str):
            # Rich would fold a table that is wider than its console.
            natural_width = Measurement.get(console, console.options.update(width=_ANY), part).maximum
            console.width = width or max(LINE, natural_width)
        console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def for_console(result: Result, width: int) -> Iterator[Table | Text]:
    """Yield the parts of a result for a console of a width."""
    from rich.text import Text

    for part in parts(result, width):
        yield Text(part) if isinstance(part, str) else part


def parts(result: Result, width: int | None, whole: bool = False) -> Iterator[Table | str]:
    """Yield the title, the sentences that come first, the table, what it lacks, and the other notes."""
    sentences = [printable(sentence) for sentence in (*result.notes(), *result.remarks)]
    if result.title:
        yield printable(result.title)
    yield from sentences[: result.leading]
    if result.shows_table:
        table, lacks = _build_table(result, width, whole)
        yield table
    if result.shows_table and lacks:
        yield " ".join([*lacks, "All of it: --full, or whole(), to_pandas() and save(FILE) of the result."])
    yield from sentences[result.leading :]


def _build_table(result: Result, width: int | None, whole: bool) -> tuple[Table, list[str]]:
    """Return the table, and sentences on what it lacks."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = result.rows()
    # A short table shows every row as it is; only a long one is folded.
    groups = [[row] for row in rows]
    if len(rows) > ROWS_SHOWN and not whole:
        groups = [list(group) for group in groups_of(result.columns, rows, result.order)]
    visible = groups if whole else groups[:ROWS_SHOWN]
    shown_indices = [i for i, column in enumerate(result.columns) if column.shown]
    columns = [result.columns[i] for i in shown_indices]
    row_texts = (cells_of(result.columns, group) for group in visible)
    cells = [[printable(row[i], line=True) for i in shown_indices] for row in row_texts]
    totals = result._totals(rows)
    shown_totals = [totals[i] for i in shown_indices]
    heads = [printable(column.name, line=True) for column in columns]
    numbers = [column.total or column.number for column in columns]
    fitting_columns, text_width = fit_columns(heads, [*cells, shown_totals], width, numbers)
    table = Table(box=box.SIMPLE_HEAD, show_footer=any(totals))
    for i in fitting_columns:
        justify: Literal["right", "left"] = "right" if numbers[i] else "left"
        table.add_column(heads[i], shown_totals[i], justify=justify, overflow="fold", no_wrap=numbers[i])
    for row in cells:
        table.add_row(
            *(Text(row[i] if numbers[i] else shortened(row[i], text_width)) for i in fitting_columns)
        )
    omissions = []
    if len(groups) > len(visible):
        omissions.append(f"… {sum(map(len, groups[len(visible) :])):,} more rows.")
    if any(len(group) > 1 for group in visible):
        omissions.append("Repeated layers are one row.")
    if len(fitting_columns) < len(heads):
        left_out = (head for i, head in enumerate(heads) if i not in fitting_columns)
        omissions.append(f"There is no room for {', '.join(left_out)} here.")
    return table, omissions
