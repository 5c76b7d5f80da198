"""A result as text, and the table in it: combined rows, columns that fit, shortened texts."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from amanda.errors import printable
from amanda.tools.results._display import shortened

if TYPE_CHECKING:
    from amanda.tools.results._result import Column, Result

ROWS_SHOWN = 15
GAP = 2
"""Characters between two columns."""


@dataclass(frozen=True)
class View:
    """The part of a table that is printed.

    top: number of rows; None for ROWS_SHOWN, and for all of a table that is printed row by row.
    sort: name of the column by which they are in order, the largest first; "" for the order of the result.
    depth: number of components of a module's path, below which rows are combined.
    whole: every row and column, with no row combined.  tree: modules as a tree, if the result has one.
    """

    top: int | None = None
    sort: str = ""
    depth: int | None = None
    whole: bool = False
    tree: bool = False


_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")
Rows = Sequence[Sequence[Any]]


def attribute_name(name: str) -> str:
    """Return the name of a column as an attribute of a row.

    >>> [attribute_name(name) for name in ("MACs", "FLOPs/byte", "self ms", "q0.5")]
    ['macs', 'flops_per_byte', 'self_ms', 'q0_5']
    """
    return re.sub(r"\W+", "_", name.lower().replace("/", "_per_")).strip("_")


def position_of(columns: Sequence[Column], name: str) -> int | None:
    """Return the position of a column, by its name or that of the attribute; None if there is none."""
    names = [attribute_name(column.name) for column in columns]
    return names.index(attribute_name(name)) if attribute_name(name) in names else None


def groups_of(columns: Sequence[Column], rows: Rows, view: View, order: str = "") -> list[Rows]:
    """Return rows in groups, each of which is printed as one row; a group of one is a row as it is.

    Of a table that is too long for the view, repeated layers are one group: rows that differ in numbers, and
    in the first index of the module's path, alone.  With a depth, the rows of one module at that depth are.
    Groups are sorted by the view's column; of a long table else by `order`, a column or "".
    """
    is_long = len(rows) > (view.top or ROWS_SHOWN) and not view.whole
    groups: list[Rows] = [[row] for row in rows]
    if (is_long or view.depth is not None) and position_of(columns, "module") is not None:
        groups = _combine_layers(columns, rows, view.depth)
    position = position_of(columns, view.sort or order)
    if position is None or not (view.sort or is_long):
        return groups
    return sorted(groups, key=lambda group: sort_key(columns[position], [row[position] for row in group]))


def sort_key(column: Column, values: Sequence[Any]) -> tuple[bool, Any]:
    """Return a key (is NaN, value) for a group: large numbers come first, texts in order, NaN last."""
    if not (column.total or column.number):
        return False, str(values[0])
    numbers = [value or 0 for value in values]
    # No comparison with NaN holds, so sorted rows would be in any order.
    if any(number != number for number in numbers):
        return True, 0
    return False, -(sum(numbers) if column.total or column.folded == "sum" else max(numbers))


def _combine_layers(columns: Sequence[Column], rows: Rows, depth: int | None) -> list[Rows]:
    """Return groups of rows that agree in their texts, and in the module but for its first index.

    Without a depth a group has one row of each module; with one, all rows within a module, with its path.
    """
    module, source = (position_of(columns, name) for name in ("module", "source"))
    assert module is not None
    # At a depth, lines of the program do not tell the ops of a module apart.
    left_out = (module,) if depth is None else (module, source)
    text_positions = [
        i for i, column in enumerate(columns) if not (column.total or column.number) and i not in left_out
    ]
    groups_by_key: dict[tuple[Any, ...], list[Sequence[Any]]] = {}
    row_counts = Counter[tuple[Any, ...]]()
    for row in rows:
        texts = tuple(str(row[i]) for i in text_positions)  # lists of packed weights are among them
        if depth is not None:
            # TensorFlow's scopes have slashes, PyTorch's paths dots.
            path = "".join(re.findall(r"[./]?[^./]+", row[module])[:depth])
            row = [path if i == module else value for i, value in enumerate(row)]
        path = row[module]
        # The second row of a module with these texts belongs into a second group, and so on.
        number = row_counts[path, texts] if depth is None else 0
        row_counts[path, texts] += 1
        key = (_INDEX.sub("*", path, count=1), number, *texts)
        groups_by_key.setdefault(key, []).append(row)
    return list(groups_by_key.values())


def _cell_text(column: Column, values: Sequence[Any]) -> str:
    """Return a cell of a row that stands for some rows, as `Column.folded` says; "…" for unequal texts."""
    present_values = [value for value in values if value is not None]
    if not present_values:
        return ""
    if column.name == "module" and len(values) > 1:
        # The first path, with the first indices of all paths as ranges.
        indices = [match[0] for path in dict.fromkeys(values) if (match := _INDEX.search(path))]
        return column.show(
            _INDEX.sub(ranges(map(int, indices)), values[0], count=1) if indices else values[0]
        )
    if len(values) == 1:
        return column.show(present_values[0])
    if column.total or column.folded == "sum":
        return column.show(sum(present_values))
    if column.folded == "mean":
        return column.show(sum(present_values) / len(present_values))
    lowest, highest = column.show(min(present_values)), column.show(max(present_values))
    if lowest == highest or column.folded == "min":
        return lowest
    if column.folded == "max":
        return highest
    return f"{lowest} to {highest}" if column.number else "…"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


_READABLE = 28
"""Width down to which texts are shortened before columns are left out."""
_SHORTEST = 12
"""Width down to which they are shortened where the columns that matter most would not fit."""
_SHORT_PATH = 24
"""Width of modules that are shown in full, whatever they share."""
_FEWEST = 3
"""Columns that stay however narrow the table is."""


@dataclass
class TableLayout:
    """The cells of a table that fit a width.

    positions: of the columns that are shown.  cells: all texts, by row and column.
    hidden: names of columns for which there is no room.  repeated: columns with the same text in every row,
    and that text.  prefix: what "…" at the start of a module stands for, if one prefix was left out.
    """

    columns: Sequence[Column]
    cells: list[list[str]]
    totals: Sequence[str]
    positions: list[int] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    repeated: dict[str, str] = field(default_factory=dict)
    prefix: str = ""

    @classmethod
    def fitting(
        cls, columns: Sequence[Column], cells: list[list[str]], totals: Sequence[str], width: int | None
    ) -> TableLayout:
        """Return the layout for a width; None for every column in full.

        Columns that repeat others go first, then a prefix that modules share.  Then texts are shortened, and
        columns of low priority left out, those from the right first; texts that are still too long are cut
        further before columns of high priority go.
        """
        layout = cls(columns, cells, totals, [i for i, column in enumerate(columns) if column.shown])
        if width is not None:
            layout._leave_out_repetitions(width)
            layout._shorten_texts(layout._leave_out_columns(width))
        return layout

    def _leave_out_repetitions(self, width: int) -> None:
        """Leave out empty columns and phases that types imply; for want of room, a prefix and equal texts."""
        texts_by_position = {i: {row[i] for row in self.cells} for i in self.positions}
        empty_columns = {i for i in self.positions if texts_by_position[i] == {""} and not self.totals[i]}
        phase, kind = (position_of(self.columns, name) for name in ("phase", "type"))
        if phase is not None and kind is not None and kind in self.positions:
            is_implied = all(row[phase] == _phase_of_type(row[kind]) for row in self.cells)
            if is_implied and self.cells:
                empty_columns.add(phase)
        self._remove(empty_columns)
        if self._width_at(_READABLE) <= width:
            return
        self._fold_prefix()
        if self._width_at(_READABLE) <= width:
            return
        texts = {i: texts_by_position[i] for i in self.positions[2:] if not self.totals[i]}
        # Of one row all texts are equal: there only numbers of nothing.
        has_several_rows = len(self.cells) > 1
        equal_columns = {i for i in texts if len(texts[i]) == 1 and (has_several_rows or texts[i] == {"0"})}
        for i in sorted(equal_columns):
            if _priority(self.columns[i]) < 0:
                self.hidden.append(self.columns[i].name)
            else:
                self.repeated[self.columns[i].name] = self.cells[0][i]
        self._remove(equal_columns)

    def _fold_prefix(self) -> None:
        """Leave out the prefix of two components or more that most modules share, unless all are short."""
        module = position_of(self.columns, "module")
        if module is None or module not in self.positions:
            return
        paths = [row[module] for row in self.cells]
        if max(map(len, paths), default=0) <= _SHORT_PATH:
            return
        # "model.layers." and "model.layers.0." of "model.layers.0.mlp", but not "model.".
        prefix_counts = Counter(
            path[: match.end()] for path in paths for match in re.finditer(r"(?<=\.)[^.]+\.", path)
        )
        shared_prefixes = [prefix for prefix, count in prefix_counts.items() if 2 * count > len(paths)]
        # The one that saves the most characters.
        self.prefix = max(shared_prefixes, key=lambda prefix: len(prefix) * prefix_counts[prefix], default="")
        if self.prefix:
            for row in self.cells:
                if row[module].startswith(self.prefix):
                    row[module] = f"…{row[module].removeprefix(self.prefix)}"

    def _leave_out_columns(self, width: int) -> int:
        """Leave out columns of low priority until the others fit; return the width to shorten texts to."""
        longest_width = max((len(row[i]) for row in self.cells for i in self.positions), default=1)
        while True:
            # The column to leave out next: of the lowest priority, the last one.
            priorities = {i: _priority(self.columns[i]) for i in self.positions}
            lowest = min(self.positions, key=lambda i: (priorities[i], -i))
            # Texts of a column that matters may be cut shorter, if that keeps the column.
            min_width = _READABLE if priorities[lowest] <= 0 and len(self.positions) > _FEWEST else _SHORTEST
            for text_width in range(max(longest_width, min_width), min_width - 1, -1):
                if self._width_at(text_width) <= width:
                    return text_width
            if len(self.positions) <= _FEWEST:
                return _SHORTEST
            self.hidden.insert(0, self.columns[lowest].name)
            self._remove({lowest})

    def _remove(self, positions: set[int]) -> None:
        self.positions = [i for i in self.positions if i not in positions]

    def _width_at(self, text_width: int) -> int:
        widths = [self._column_width(i, text_width) for i in self.positions]
        return sum(widths) + GAP * (len(widths) - 1)

    def _column_width(self, i: int, text_width: int) -> int:
        """Return the width of a column whose texts are cut to about `text_width`; numbers are never cut."""
        column = self.columns[i]
        natural_width = max([len(self.totals[i]), *(len(row[i]) for row in self.cells)])
        if not (column.total or column.number):
            # Names of types are known by their beginning; places and shapes are what people look for.
            extra_width = 0 if column.name == "type" else 8
            natural_width = min(natural_width, text_width + extra_width)
        return max(natural_width, len(column.name))

    def _shorten_texts(self, text_width: int) -> None:
        """Shorten the texts of each column."""
        for i in self.positions:
            if not (self.columns[i].total or self.columns[i].number):
                texts = shortened_texts([row[i] for row in self.cells], self._column_width(i, text_width))
                for row, text in zip(self.cells, texts, strict=True):
                    row[i] = text


_SORTED = 10
"""Priority of the column by which rows are in order: the last to leave a narrow table."""
_PRIORITIES = {"module": 9, "type": 8, "phase": 1, "source": -1}


def _priority(column: Column) -> int:
    return _PRIORITIES.get(column.name, 0) if column.priority is None else column.priority


def _phase_of_type(kind: str) -> str:
    return "backward" if kind.endswith("_backward") or kind == "accumulate_grad" else "forward"


def shortened_texts(texts: Sequence[str], width: int) -> list[str]:
    """Return texts of at most so many characters, of which different ones stay different if they can.

    >>> shortened_texts(["encoder.layers.0.mlp.up", "decoder.layers.0.mlp.up"], 16)
    ['encoder…0.mlp.up', 'decoder…0.mlp.up']
    """
    short_by_text = {text: shortened(text, width) for text in texts}
    counts = Counter(short_by_text.values())
    for text in [text for text, short in short_by_text.items() if counts[short] > 1]:
        head, dot, rest = text.partition(".")
        if dot and len(head) < width // 2:
            short_by_text[text] = head + shortened(f".{rest}", width - len(head))
    return [short_by_text[text] for text in texts]


def as_text(result: Result, view: View, width: int | None = None) -> str:
    """Return a result as text: title, the sentences that come first, the table, and the other sentences.

    width: None for that of the terminal, or 80 without one; the variable COLUMNS sets another.
    """
    result = result._printed(view)
    sentences = [printable(sentence) for sentence in (result.title, *result._sentences)]
    count_above = 1 + result._leading + bool(result.lead)
    table_width = None if view.whole else width or shutil.get_terminal_size().columns
    table, omissions = _table_and_omissions(result, table_width, view)
    above = folded("\n".join(filter(None, sentences[:count_above])), width)
    below = folded("\n".join(filter(None, [omissions, *sentences[count_above:]])), width)
    return "\n".join([*filter(None, [above]), *table, *filter(None, [below])])


def folded(text: str, width: int | None = None) -> str:
    """Return sentences with their lines folded, or as they are where nobody reads them at a terminal.

    Args:
        text: Sentences, on a line or several.
        width: Characters of a line; None for those of the terminal, or of COLUMNS.
    """
    # Sentences of a log are searched for, so they are folded for readers at a terminal alone.
    is_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
    if not (width or is_terminal or os.environ.get("COLUMNS")):
        return text
    width = width or shutil.get_terminal_size().columns
    wrapper = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        wrapper.subsequent_indent = line[: len(line) - len(line.lstrip())]
        lines.append(wrapper.fill(line))
    return "\n".join(lines)


def _table_and_omissions(result: Result, width: int | None, view: View) -> tuple[list[str], str]:
    """Return the lines of the table, none without rows, and sentences on what it lacks."""
    if not result._shows_table:
        return [], ""
    rows = result.rows()
    # Each group is printed as one row.
    groups: Sequence[Rows] = [[row] for row in rows]
    if result._combines:
        groups = groups_of(result.columns, rows, view, result._order)
    top = view.top or (ROWS_SHOWN if result._combines else None)
    shown_groups = groups if view.whole else groups[:top]
    cells = [[printable(_cell_text(column, [row[i] for row in group]), line=True)
              for i, column in enumerate(result.columns)] for group in shown_groups]  # fmt: skip
    sort_position = position_of(result.columns, view.sort) if view.sort else None
    columns = [
        replace(column, priority=_SORTED) if i == sort_position else column
        for i, column in enumerate(result.columns)
    ]
    layout = TableLayout.fitting(columns, cells, result._totals(rows), width)
    return list(_lines(layout)), " ".join(_omissions(layout, groups, len(shown_groups)))


def _lines(layout: TableLayout) -> Iterator[str]:
    """Yield the lines of a table: heads, rows, and totals."""
    columns = [layout.columns[i] for i in layout.positions]
    totals = [layout.totals[i] for i in layout.positions]
    has_totals = any(totals)
    lines = [[printable(column.name, line=True) for column in columns]]
    lines += [[row[i] for i in layout.positions] for row in layout.cells]
    if has_totals:
        lines.append([totals[0] or "total", *totals[1:]])
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


def _omissions(layout: TableLayout, groups: Sequence[Rows], shown_count: int) -> Iterator[str]:
    """Yield sentences on rows and columns that a table leaves out, and on what its texts stand for."""
    is_combined = any(len(group) > 1 for group in groups)
    if shown_count < len(groups) or is_combined:
        number = f"{shown_count:,} of {len(groups):,}" if shown_count < len(groups) else f"{shown_count:,}"
        yield f"Showing {number} rows{' (repeated layers combined)' * is_combined}."
    if layout.prefix:
        yield f'"…" stands for "{layout.prefix}".'
    if layout.repeated:
        yield f"In every row: {', '.join(f'{name} {text}' for name, text in layout.repeated.items())}."
    if layout.hidden:
        yield f"Hidden columns: {', '.join(layout.hidden)}."
    if shown_count < len(groups) or is_combined or layout.hidden:
        yield "Show everything: --full (shell) or result.whole() (Python)."
