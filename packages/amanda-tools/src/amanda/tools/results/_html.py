"""A table for notebooks and browsers, in the colours of where it is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

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


def table(
    title: str,
    names: Sequence[str],
    numbers: Sequence[bool],
    rows: Sequence[Sequence[tuple[str, Any]]],
    totals: Sequence[str],
    notes: Sequence[str],
    first: Sequence[str] = (),
) -> str:
    """An HTML table.

    numbers: whether a column is aligned to the right.  rows: for each cell what is shown, and the value,
    which the pointer shows where it is longer.  first: sentences above the table.
    """
    marks = [' class="number"' if number else "" for number in numbers]
    head = "".join(
        f'<th scope="col"{mark}>{escape(name)}</th>' for name, mark in zip(names, marks, strict=True)
    )
    body = "".join(f"<tr>{_cells(row, marks)}</tr>" for row in rows)
    foot = "".join(f"<th{mark}>{escape(total)}</th>" for total, mark in zip(totals, marks, strict=True))
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    summed = f"<tfoot><tr>{foot}</tr></tfoot>" if any(totals) else ""
    above, said = ("".join(f"<p>{escape(one)}</p>" for one in each) for each in (first, notes))
    return (
        f'{_STYLE}<div class="amanda-result">{above}<table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody>{summed}</table>{said}</div>"
    )


def _cells(row: Sequence[tuple[str, Any]], marks: Sequence[str]) -> str:
    return "".join(
        f"<td{mark}{_whole(shown, value)}>{escape(shown)}</td>"
        for (shown, value), mark in zip(row, marks, strict=True)
    )


def _whole(shown: str, value: Any) -> str:
    return f' title="{escape(value)}"' if isinstance(value, str) and value != shown else ""


def page(title: str, content: str) -> str:
    """A page of its own."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        "<style>body { font-family: sans-serif; } body .amanda-result { max-height: none; }</style>"
        f"</head><body>{content}</body></html>\n"
    )
