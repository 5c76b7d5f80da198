"""A result: rows under columns, its forms (text, JSON, CSV, HTML, plots), and rows by keys of the user."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from amanda.errors import AmandaError, did_you_mean
from amanda.files import write_file
from amanda.options import PositiveInt, checked
from amanda.tools.results._display import NOTHING, count_of, html_page, html_result, html_table, shortened
from amanda.tools.results._files import to_json
from amanda.tools.results._layout import View, as_text, attribute_name, position_of

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

ResultT = TypeVar("ResultT", bound="Result")


@dataclass(frozen=True)
class Column:
    """One column of a table.

    name: as in files and data frames.  show: how a value is written in a table.
    total: whether the values of all rows are added up below them.  number: aligned to the right.
    unit: of the values, for what shows files: "s", "ms", "us", "B"; "share" where 1 is all.
    folded: what a row that stands for repeated layers has: "sum", as every total, "mean", "min", "max", or by
        default the least and the most.
    priority: columns of a low one leave a narrow table first; above 0 they stay while texts can be cut.  None
        for that of the name: high for "module" and "type", low for "source", 0 for others.
    merge: how the values of several processes become one, where the result has no `merged` of its own; rows
        are one row if they agree in all columns without it.
    """

    name: str
    show: Callable[[Any], str] = str
    total: bool = False
    number: bool = False
    shown: bool = True
    unit: str = ""
    folded: Literal["sum", "mean", "min", "max", ""] = ""
    merge: Literal["sum", "min", "max", ""] = ""
    priority: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the column as files describe it."""
        description = {"name": self.name, "total": self.total, "unit": self.unit}
        return {**description, "merge": self.merge} if self.merge else description


class Result(ABC):
    """Rows of plain values, with what is to be said about them.

    Iterating gives each row as a named tuple: `for row in result: print(row.module, row.macs)`.
    name, version: of the schema of its files.  title: above the table.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    columns: ClassVar[Sequence[Column]]
    title: str = ""
    _order: ClassVar[str] = ""
    """Name of the column by which rows are in order, the largest first; "" for another order."""
    _combines: ClassVar[bool] = True
    """False for a table that is printed row by row, however long it is."""
    lead: str = ""
    """Sentence of whoever made it, above all others: what the numbers are of, or why there are none."""
    remarks: Sequence[str] = ()
    """Sentences of whoever made or merged it, below those of `notes`."""

    @abstractmethod
    def rows(self) -> Sequence[Sequence[Any]]:
        """Return the rows, each with a value for every column."""

    def notes(self) -> Sequence[str]:
        """Return sentences below the table: conventions, and what is not in it."""
        return ()

    def _facts(self) -> Mapping[str, Any]:
        """Return what files contain besides the rows."""
        return {}

    @property
    def _leading(self) -> int:
        """The number of notes that come above the table: what most want to know."""
        return 0

    @property
    def _shows_table(self) -> bool:
        """True if text and HTML have the table: it has rows, and the notes do not say all that is in them."""
        return bool(self.rows())

    @property
    def _sentences(self) -> list[str]:
        # A lead tells why there is nothing, better than a note for all results.
        notes = [note for note in self.notes() if not (self.lead and note == NOTHING)]
        return [*filter(None, [self.lead]), *notes, *self.remarks]

    def _of_tool(self: ResultT, tool: Any) -> ResultT:
        """Return the result; if it is empty since its tool was never in a scope, the lead says so."""
        if not tool._amanda.was_used and NOTHING in self.notes():
            reason = "Nothing was recorded: no scope of this tool was entered"
            self.lead = f"{reason}; run the model in `with amanda.apply(tool):`."
        return self

    def __iter__(self) -> Iterator[Any]:
        """Yield each row as a named tuple, with columns in lower case: `row.flops_per_byte`."""
        fields = [attribute_name(column.name) for column in self.columns]
        row_class: Any = namedtuple("Row", fields, rename=True)  # type: ignore[misc]
        yield from map(row_class._make, self.rows())

    def __len__(self) -> int:
        return len(self.rows())

    def __getitem__(self, index: Any) -> Any:
        """Return the row at an index as iterating gives it; a list of rows for a slice."""
        return list(self)[index]

    def __bool__(self) -> bool:
        return True  # also without rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.headline}"

    @property
    def headline(self) -> str:
        """The first sentence of the result: its totals, or the number of its rows."""
        if (self._leading or self.lead) and self._sentences:
            return self._sentences[0].removesuffix(".")
        count = len(self.rows())
        return count_of(count, "row") if count else "No op was recorded"

    def __str__(self) -> str:
        return as_text(self, View())

    @checked
    def table(self, top: PositiveInt | None = None, sort: str = "", depth: PositiveInt | None = None) -> str:
        """Return the result as text.

        Args:
            top: Number of rows; None for 15, and for all rows of a tree.
            sort: A column, whose largest values come first.
            depth: Number of components of a module's path, below which rows are combined.

        Raises:
            AmandaError: For another column.
            OptionError: For other values.
        """
        if sort and not self._has_column(sort):
            names = [column.name for column in self.columns]
            raise AmandaError(f"{self.name} has no column {sort!r}; {did_you_mean(sort, names)}")
        return as_text(self, View(top, sort, depth))

    def whole(self) -> str:
        """Return the result as text with every row and every column."""
        return as_text(self, View(whole=True))

    def _has_column(self, name: str) -> bool:
        return position_of(self.columns, name) is not None

    def _text(self, width: int | None = None, **view: Any) -> str:
        """Return the result as text; view: fields of a `View`, of which a column it lacks is ignored."""
        view = {**view, "sort": view.get("sort", "") if self._has_column(view.get("sort", "")) else ""}
        return as_text(self, View(**view), width)

    def _printed(self, view: View) -> Result:
        """Return the result whose table is printed; this one, unless a subclass has another form."""
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the text, as wide as the console lets it be."""
        from rich.text import Text

        yield Text(as_text(self, View(), options.max_width))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return the table as HTML, with the leading notes above it and the others below."""
        # Subclasses print another order of rows, or other rows, than they keep.
        if (printed := self._printed(View())) is not self:
            return printed._repr_html_()
        notes = self._sentences
        if not self._shows_table:
            return html_result([*filter(None, [self.title]), *notes], "", ())
        rows = self.rows()
        cells = [list(zip(self._cell_texts(row), row, strict=True)) for row in rows]
        names = [column.name for column in self.columns]
        are_numbers = [column.total or column.number for column in self.columns]
        totals = self._totals(rows)
        if any(totals) and not totals[0]:
            totals[0] = "total"
        table = html_table(self.title, names, are_numbers, cells, totals)
        count_above = self._leading + bool(self.lead)
        return html_result(notes[:count_above], table, notes[count_above:])

    def _cell_texts(self, row: Sequence[Any]) -> list[str]:
        """Return the values of a row as its columns show them; "" for None."""
        texts = []
        for column, value in zip(self.columns, row, strict=True):
            text = "" if value is None else column.show(value)
            # A page has room for the end of a path.
            texts.append(shortened(text, 44) if column.name == "source" else text)
        return texts

    def _totals(self, rows: Sequence[Sequence[Any]]) -> list[str]:
        """Return the sums of columns as texts; "" of columns without a total."""
        return [column.show(sum(row[i] or 0 for row in rows)) if column.total and rows else ""
                for i, column in enumerate(self.columns)]  # fmt: skip

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a data frame with the same columns; raise AmandaError without pandas."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise AmandaError('to_pandas needs pandas: pip install "amanda-tools[pandas]"') from error
        return pandas.DataFrame(list(self.rows()), columns=[column.name for column in self.columns])

    def to_dict(self) -> dict[str, Any]:
        """Return schema, version, facts, the texts of the table, and each row as an object of its columns."""
        names = [column.name for column in self.columns]
        return {
            "schema": f"amanda.{self.name}", "version": self.version, **self._facts(), "title": self.title,
            **({"lead": self.lead} if self.lead else {}), "notes": self._sentences,
            "columns": [column.to_dict() for column in self.columns],
            "rows": [dict(zip(names, row, strict=True)) for row in self.rows()],
        }  # fmt: skip

    def to_json(self) -> str:
        """Return `to_dict` as JSON; NaN and infinities are words."""
        return to_json(self.to_dict(), indent=1)

    def to_csv(self) -> str:
        """Return the rows as comma-separated values, with the columns' names first."""
        text = StringIO()
        # "\n" on every system, so that files of one result are equal.
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows(self.rows())
        return text.getvalue()

    def to_html(self) -> str:
        """Return the table as a page of its own."""
        return html_page(self.title or self.name, self._repr_html_())

    @property
    def _suffixes(self) -> Sequence[str]:
        """Return the suffixes of the forms in which it can be saved, those of several parts last."""
        return sorted(self._forms(), key=lambda suffix: (suffix.count("."), suffix))

    def save(self, path: str | Path) -> Path:
        """Write a file in the form that its suffix names; return its path.

        A file that was there is replaced by the whole new one.

        Args:
            path: File to write.

        Raises:
            AmandaError: For a suffix that names none.
            FileError: Where the file cannot be written.
        """
        path = Path(path)
        forms = self._forms()  # functions that return the text, by suffix
        # The longest, since ".view.html" ends in ".html" too.
        suffix = max((ending for ending in forms if path.name.endswith(ending)), key=len, default="")
        if not suffix:
            supported = ", ".join(self._suffixes)
            raise AmandaError(f"{path} has no suffix of a form that {self.name} has: {supported}")
        text = forms[suffix]()
        return write_file(path, text if text.endswith("\n") else f"{text}\n")

    def _forms(self) -> dict[str, Callable[[], str]]:
        return {".json": self.to_json, ".csv": self.to_csv, ".html": self.to_html, ".txt": self.whole}
