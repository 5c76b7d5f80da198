"""Tables in Markdown."""

from collections.abc import Callable, Iterable, Mapping

from _estimates import Estimate, Values, median, quotient

Times = Mapping[str, Values]
"""One value a round, by variant."""


def row(*cells: object) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*titles: object, words: bool = False) -> str:
    """Return the first two lines of a table; columns after the first are of numbers, or of words."""
    return f"{row(*titles)}\n{row('---', *['---' if words else '---:'] * (len(titles) - 1))}"


def table(titles: Iterable[object], rows: Iterable[Iterable[object]], words: bool = False) -> str:
    """Return a table."""
    return "\n".join([head(*titles, words=words), *(row(*cells) for cells in rows)])


def grid(columns: Mapping[str, Mapping[str, object]]) -> str:
    """Return a table of the cells of columns by the names of rows; a cell that a column lacks is empty."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = ([name, *(column.get(name, "") for column in columns.values())] for name in names)
    return table(["", *columns], rows)


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
