"""`python -m amanda_docs.rooms`: draw the rooms of the core, with an arrow for each import between them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/amanda-core/src/amanda"
PICTURE = ROOT / "docs/images/rooms.svg"

GROUND = frozenset({"errors", "files", "namespace"})
"""Public modules that every room may import."""
LEFT_OUT = frozenset({"testing", "_api", "__init__", "__main__"}) | GROUND

FACES = frozenset({"action", "context"})
"""Modules that give names of `plan` to users; the picture leaves them out."""
COLUMNS = {"backend": 0, "eager": 0, "plugins": 2, "tool": 2}
"""Where the picture has a room, if not in the middle."""

Arrows = Mapping[str, frozenset[str]]


def arrows() -> Arrows:
    """Return which rooms and public modules each of them imports, for type checkers and in functions too."""
    found: dict[str, set[str]] = {}
    for path in sorted(CORE.rglob("*.py")):
        room = path.relative_to(CORE).with_suffix("").parts[0]
        if room not in LEFT_OUT:
            found.setdefault(room, set()).update(_imported(path))
    return {room: frozenset(others & found.keys() - {room}) for room, others in found.items()}


def _imported(path: Path) -> Iterator[str]:
    """Yield the rooms that a module imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "amanda":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amanda."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("amanda."))


def floors(rooms: Arrows) -> list[list[str]]:
    """Return the rooms, those that import no other first.

    Raises ValueError where rooms import each other in a circle.
    """
    left, built, found = dict(rooms), set[str](), list[list[str]]()
    while left:
        floor = sorted(room for room, others in left.items() if others <= built)
        if not floor:
            raise ValueError(f"rooms import each other: {', '.join(sorted(left))}")
        found.append(floor)
        built.update(floor)
        left = {room: others for room, others in left.items() if room not in built}
    return found


def drawn(rooms: Arrows) -> Iterator[tuple[str, str]]:
    """Yield the arrows that do not follow from others: what a room's rooms import, it reaches by them."""
    for room, others in rooms.items():
        behind = {far for near in others for far in _reached(rooms, near)}
        yield from ((room, other) for other in sorted(others - behind))


def _reached(rooms: Arrows, start: str) -> set[str]:
    return {far for near in rooms[start] for far in {near, *_reached(rooms, near)}}


def picture(rooms: Arrows) -> str:
    """Return an SVG of the floors, the topmost first, and the arrows."""
    rooms = {room: others - FACES for room, others in rooms.items() if room not in FACES}
    levels = floors(rooms)
    width, height, gap_x, gap_y = 128, 36, 36, 40
    places = {
        room: (COLUMNS.get(room, 1) * (width + gap_x) + 8, 8 + level * (height + gap_y))
        for level, floor in enumerate(reversed(levels))
        for room in floor
    }
    lines = [
        f'<line x1="{places[one][0] + width / 2:g}" y1="{places[one][1] + height:g}" '
        f'x2="{places[other][0] + width / 2:g}" y2="{places[other][1] - 4:g}" marker-end="url(#head)"/>'
        for one, other in sorted(drawn(rooms))
    ]
    boxes = [
        f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="6"/>'
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + 5:g}">{_label(room)}</text>'
        for room, (x, y) in sorted(places.items())
    ]
    size = f"{3 * width + 2 * gap_x + 16:g} {len(levels) * (height + gap_y) - gap_y + 16:g}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">',
        "<title>The rooms of amanda-core; each arrow is an import</title>",
        '<style>rect{fill:#eef2ff;stroke:#4051b5}text{font:14px sans-serif;text-anchor:middle;fill:#1a1a1a}'
        "line{stroke:#7a86b8;stroke-width:1.2}path{fill:#7a86b8}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker></defs>',
        *lines, *boxes, "</svg>", "",
    ])  # fmt: skip


def _label(room: str) -> str:
    return f"{room}/" if (CORE / room).is_dir() else room


if __name__ == "__main__":
    PICTURE.write_text(picture(arrows()))
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}\n")
