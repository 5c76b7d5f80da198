"""Tables in Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from _estimates import Estimate, Values, median, quotient

Times = Mapping[str, Values]
"""One value a round, by variant."""


def table(head: Sequence[str], rows: Iterable[Iterable[object]], words: bool = False) -> str:
    """Return a table; numbers are to the right of the first column, or words to the left."""
    rule = ["---", *["---" if words else "---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in (head, rule, *rows))


def grid(columns: Mapping[str, Mapping[str, object]], corner: str = "") -> str:
    """Return a table of the cells of columns by the names of rows; a cell that a column lacks is empty."""
    rows = dict.fromkeys(row for column in columns.values() for row in column)
    return table(
        [corner, *columns], ([row, *(column.get(row, "") for column in columns.values())] for row in rows)
    )


def against(
    columns: Mapping[str, Times],
    form: str = ".3f",
    bare: str = "{:.0f} ms",
    scale: float = 1e3,
    compare: Callable[[Values, Values], Estimate] = quotient,
    first: str = "bare",
) -> str:
    """Return a table of bare programs and, of each variant, how it compares with the bare one.

    form: of the estimate that `compare` gives.  bare, scale, first: how the bare one is written, in which
    unit, and what its row is called.
    """
    return grid(
        {
            title: {first: bare.format(median(times["bare"]).middle * scale)}
            | {name: f"{compare(times[name], times['bare']):{form}}" for name in times if name != "bare"}
            for title, times in columns.items()
        }
    )
