"""Tables in Markdown."""

from collections.abc import Iterable

from _estimates import Estimate
from _figures import span


def table(head: Iterable[str], rows: Iterable[Iterable[str]], words: bool = False) -> list[str]:
    """A table in Markdown; numbers are to the right of the first column, or words."""
    titles = list(head)
    rule = ["---", *("---" if words else "---:" for _ in titles[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows)] + [""]


def with_span(estimate: Estimate, digits: str) -> str:
    """A value and its interval."""
    return f"{estimate.middle:{digits}} {span(estimate, digits)}"
