"""A result as people read it: numbers, shortened texts, HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def amount(value: float, unit: str = "") -> str:
    """Return a quantity with four digits and a decimal prefix: `4.089 G`, `812 k`, `17`.

    Args:
        value: Number of units.
        unit: Goes behind the prefix, such as "B"; "" without one.

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


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1: `1 op`, `4,089 ops`.

    Args:
        number: How many.
        noun: In the singular; its plural ends in "s".
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def shortened(text: str, width: int) -> str:
    """Return text of at most so many characters, with "…" in the place of others.

    Args:
        text: Paths keep their end, names of ops both ends, with "_backward", and other texts their beginning.
        width: The most characters.

    >>> shortened("model.layers.31.mlp.down_proj", 17)
    '…31.mlp.down_proj'
    >>> shortened("scaled_dot_product_attention_backward", 24)
    'scaled_dot_pro…_backward'
    """
    if len(text) <= width:
        return text
    if "/" in text or (" " not in text and ("." in text or text.startswith("…"))):
        end = text[len(text) - width :]
        # From the next component on; a slash is kept, so that the path of a file is told from a name.
        component_begin = end.find("/", 1) if "/" in text else end.find(".") + 1
        components = end[component_begin:] if component_begin > 0 else ""
        return f"…{components if 2 * len(components) > width else end[1:]}"
    if " " in text:
        words = text[:width].rpartition(" ")[0]
        return f"{words} …" if width // 2 < len(words) < width - 1 else f"{text[: width - 1]}…"
    keeps_backward = text.endswith(_BACKWARD) and width > len(_BACKWARD) + 2
    tail_length = len(_BACKWARD) if keeps_backward else width // 2
    return f"{text[: width - 1 - tail_length]}…{text[len(text) - tail_length :]}"


_BACKWARD = "_backward"

NOTHING = "No op that this tool selects ran in its scope; `scope.report` names patterns that matched no op."
"""The note of an empty result."""


def not_met(noun: str, names: Sequence[str]) -> list[str]:
    """Return a note on loaded state that no op has used; none if there is no such state.

    Args:
        noun: Plural for the state.
        names: Keys of the state that no op has used.

    >>> not_met("masks", ["module.fc/linear/mask"])
    ['1 of the masks that were loaded is of no op that was met: module.fc/linear/mask.']
    """
    if not names:
        return []
    singular = f"is of no op that was met: {names[0]}"
    text = singular if len(names) == 1 else f"are of no op that was met, such as {names[0]}"
    return [f"{len(names)} of the {noun} that were loaded {text}."]


_STYLE = """<style>
.amanda-result { max-height: 32em; overflow: auto; margin: 0.5em 0; }
.amanda-result table {
  border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums; margin: 0; }
.amanda-result caption { text-align: left; font-weight: 600; padding: 2px 8px; white-space: nowrap; }
.amanda-result table th, .amanda-result table td {
  border: 0; padding: 2px 8px; text-align: left; vertical-align: top; white-space: pre; max-width: none; }
.amanda-result table .number { text-align: right; }
.amanda-result thead th {
  position: sticky; top: 0; background: var(--jp-layout-color0, Canvas); box-shadow: inset 0 -1px #8886; }
.amanda-result tfoot th { box-shadow: inset 0 1px #8886; }
.amanda-result tbody tr:nth-child(even) { background: #8881; }
.amanda-result p { margin: 4px 8px; font-size: 12px; opacity: 0.8; }
</style>"""


def html_table(
    title: str, names: Sequence[str], numbers: Sequence[bool], rows: Sequence[Sequence[tuple[str, Any]]],
    totals: Sequence[str],
) -> str:  # fmt: skip
    """Return an HTML table.

    numbers: True for a column that is aligned to the right.  rows: for each cell its text and its value; the
    value is the tooltip of shortened text.
    """
    marks = [' class="number"' if number else "" for number in numbers]
    names_and_marks = zip(names, marks, strict=True)
    head = "".join(f'<th scope="col"{mark}>{escape(name)}</th>' for name, mark in names_and_marks)
    body = "".join(f"<tr>{_cells(row, marks)}</tr>" for row in rows)
    foot = "".join(f"<th{mark}>{escape(total)}</th>" for total, mark in zip(totals, marks, strict=True))
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    footer = f"<tfoot><tr>{foot}</tr></tfoot>" if any(totals) else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{footer}</table>"


def _cells(row: Sequence[tuple[str, Any]], marks: Sequence[str]) -> str:
    """Return the cells of a row as HTML.  marks: attributes of each column's cells."""
    # A tooltip shows text that was shortened.
    tooltips = [
        f' title="{escape(value)}"' if isinstance(value, str) and value != text else "" for text, value in row
    ]
    return "".join(
        f"<td{mark}{tooltip}>{escape(text)}</td>"
        for (text, _), mark, tooltip in zip(row, marks, tooltips, strict=True)
    )


def html_result(above: Sequence[str], table: str, below: Sequence[str]) -> str:
    """Return a table as HTML, "" without one, with sentences above and below."""
    first, last = ("".join(f"<p>{escape(text)}</p>" for text in sentences) for sentences in (above, below))
    return f'{_STYLE}<div class="amanda-result">{first}{table}{last}</div>'


def html_page(title: str, content: str) -> str:
    """Return an HTML page with a content."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        "<style>body { font-family: sans-serif; } body .amanda-result { max-height: none; }</style>"
        f"</head><body>{content}</body></html>\n"
    )
