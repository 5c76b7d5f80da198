"""A picture of the error along the order of execution."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 260, 50, 30
_LOWEST = 1e-9
_COLOURS = {"forward": "#2563eb", "backward": "#d97706", "optimizer": "#059669", "construction": "#6b7280"}


def error_plot(comparisons: Sequence[Any], ringed: Collection[int | None]) -> str:
    """Draw relative errors on a logarithmic scale, one point for each comparison, as an SVG element.

    ringed: positions of points with a ring.  A dash marks the tolerance of each.
    """
    if not comparisons:
        return ""
    step = (_WIDTH - _LEFT - 10) / max(len(comparisons) - 1, 1)
    points = [_point(one, _LEFT + i * step, i in ringed) for i, one in enumerate(comparisons)]
    lines = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{_y(10.0**n):.1f}" y2="{_y(10.0**n):.1f}" stroke="#8884"/>'
        f'<text x="{_LEFT - 6}" y="{_y(10.0**n) + 4:.1f}" text-anchor="end">1e{n}</text>'
        for n in range(-9, 2, 2)
    ]
    words = "".join(f'<tspan fill="{colour}">● {phase}</tspan> ' for phase, colour in _COLOURS.items())
    label = f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{words} relative error in the order of execution</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        'aria-label="relative error in the order of execution" font-size="12" fill="currentColor" '
        f'style="font-family:sans-serif">{"".join(lines)}{label}{"".join(points)}</svg>'
    )


def _point(one: Any, x: float, is_ringed: bool) -> str:
    y, colour = _y(one.relative), _COLOURS[one.phase]
    told = escape(f"{one.type} {one.module} {one.source}: {one.relative:.3g}, {one.verdict}")
    ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="#dc2626" stroke-width="2"/>'
    limit = _y(one.tolerance)
    dash = f'<path d="M{x - 2:.1f} {limit:.1f}h4" stroke="#8888"/>'
    point = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{told}</title></circle>'
    return dash + (ring if is_ringed else "") + point


def _y(error: float) -> float:
    """Return the height of an error; those below 1e-9 lie at the bottom, those above 10 at the top."""
    exponent = math.log10(min(max(error, _LOWEST), 10.0))
    return 10 + (1 - exponent) / 10 * (_HEIGHT - _BOTTOM - 20)
