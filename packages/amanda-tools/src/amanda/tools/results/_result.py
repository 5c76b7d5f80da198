"""A result: rows under columns, and every form in which people want them."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from amanda.errors import AmandaError, printable
from amanda.tools.results import _html
from amanda.tools.results._text import fitting, shortened

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

ROWS_SHOWN = 40
LINE = 160
_ANY = 100_000


@dataclass(frozen=True)
class Column:
    """One column of a table.

    name: as in files and data frames.  show: how a value is written in a table.
    total: whether the values of all rows are added up below them.  number: aligned to the right.
    unit: of the values, for what shows files: "s", "ms", "us", "B"; "share" where 1 is all.
    merge: how the values of several processes become one, where the result has no `merged` of its own; rows
        are one row if they agree in all columns without it.
    """

    name: str
    show: Callable[[Any], str] = str
    total: bool = False
    number: bool = False
    shown: bool = True
    unit: str = ""
    merge: Literal["sum", "min", "max", "mean", ""] = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the column as files describe it."""
        told = {"name": self.name, "total": self.total, "unit": self.unit}
        return {**told, "merge": self.merge} if self.merge else told


class Result(ABC):
    """Rows of plain values, with what is to be said about them.

    name, version: of the schema of its files.  title: above the table.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    columns: ClassVar[Sequence[Column]]
    title: str = ""
    remarks: Sequence[str] = ()
    """Sentences of whoever made or merged it, below those of `notes`."""

    @abstractmethod
    def rows(self) -> Sequence[Sequence[Any]]:
        """The rows, each with a value for every column."""

    def notes(self) -> Sequence[str]:
        """Sentences below the table: conventions, and what is not in it."""
        return ()

    def facts(self) -> Mapping[str, Any]:
        """Return what files contain besides the rows."""
        return {}

    @property
    def _sentences(self) -> list[str]:
        return [*self.notes(), *self.remarks]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.measure import Measurement

        text = StringIO()
        console = Console(file=text, width=LINE, color_system=None, legacy_windows=False)
        table, _ = self._table(None)
        console.width = max(LINE, Measurement.get(console, console.options.update(width=_ANY), table).maximum)
        console.print(table)
        console.width = LINE
        for note in self._sentences:
            console.print(printable(note), highlight=False, markup=False)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """The table as wide as the terminal lets it be, with the notes."""
        from rich.text import Text

        table, left_out = self._table(options.max_width)
        yield table
        if left_out:
            yield Text(f"There is no room for {', '.join(left_out)} here.")
        yield from map(Text, map(printable, self._sentences))

    def _table(self, width: int | None) -> tuple[Table, Sequence[str]]:
        """The table, and the names of the columns that it lacks for want of width."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        rows = self.rows()
        places = [i for i, column in enumerate(self.columns) if column.shown]
        columns = [self.columns[i] for i in places]
        totals = self._totals(rows)
        shown = map(self._shown, rows[:ROWS_SHOWN])
        cells = [[printable(row[i], line=True) for i in places] for row in shown]
        ends = [totals[i] for i in places]
        heads = [printable(column.name, line=True) for column in columns]
        numbers = [column.total or column.number for column in columns]
        kept, most = fitting(heads, [*cells, ends], width, numbers)
        table = Table(
            title=printable(self.title) or None,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            show_footer=any(totals),
        )
        for i in kept:
            justify: Literal["right", "left"] = "right" if numbers[i] else "left"
            table.add_column(heads[i], ends[i], justify=justify, overflow="fold", no_wrap=numbers[i])
        for row in cells:
            table.add_row(*(Text(shortened(row[i], most)) for i in kept))
        if len(rows) > ROWS_SHOWN:
            table.add_row(f"… {len(rows) - ROWS_SHOWN} more")
        return table, [head for i, head in enumerate(heads) if i not in kept]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table at IPython's prompt."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        rows = self.rows()
        cells = [list(zip(self._shown(row), row, strict=True)) for row in rows]
        names = [column.name for column in self.columns]
        numbers = [column.total or column.number for column in self.columns]
        return _html.table(self.title, names, numbers, cells, self._totals(rows), self._sentences)

    def _shown(self, row: Sequence[Any]) -> list[str]:
        return [
            "" if value is None else column.show(value)
            for column, value in zip(self.columns, row, strict=True)
        ]

    def _totals(self, rows: Sequence[Sequence[Any]]) -> list[str]:
        sums = [
            column.show(sum(row[i] or 0 for row in rows)) if column.total and rows else ""
            for i, column in enumerate(self.columns)
        ]
        if any(sums) and not sums[0]:
            sums[0] = "total"
        return sums

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame, a column for each of `columns`."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise AmandaError('to_pandas needs pandas: pip install "amanda-tools[pandas]"') from error
        return pandas.DataFrame(list(self.rows()), columns=[column.name for column in self.columns])

    def to_dict(self) -> dict[str, Any]:
        """Schema and version, facts, what is said of the table, and each row as an object of its columns."""
        names = [column.name for column in self.columns]
        return {
            "schema": f"amanda.{self.name}",
            "version": self.version,
            **self.facts(),
            "title": self.title,
            "notes": self._sentences,
            "columns": [column.to_dict() for column in self.columns],
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows()],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """The rows as comma-separated values, with the columns' names first."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows(self.rows())
        return text.getvalue()

    def to_html(self) -> str:
        """The table as a page of its own."""
        return _html.page(self.title or self.name, self._repr_html_())

    @property
    def suffixes(self) -> Sequence[str]:
        """Return the suffixes of the forms in which it can be saved, those of several parts last."""
        return sorted(self._forms(), key=lambda suffix: (suffix.count("."), suffix))

    def save(self, path: str | Path) -> Path:
        """Write a file in the form that its suffix names.

        Raises AmandaError for a suffix that names none; then nothing is written.
        """
        path = Path(path)
        forms = self._forms()
        suffix = max((one for one in forms if path.name.endswith(one)), key=len, default="")
        if not suffix:
            known = ", ".join(self.suffixes)
            raise AmandaError(f"{path} has no suffix of a form in which {self.name} can be saved: {known}")
        text = forms[suffix]()
        path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
        return path

    def _forms(self) -> dict[str, Callable[[], str]]:
        return {".json": self.to_json, ".csv": self.to_csv, ".html": self.to_html, ".txt": self.__str__}
