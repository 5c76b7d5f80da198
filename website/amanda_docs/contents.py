"""A table of contents of the sources: what each module is about, and how many names each room offers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MARKER = "<!-- contents of the packages -->"


class Module(NamedTuple):
    """A module: its path in the repository, the first line of its docstring, and its public names."""

    path: Path
    summary: str
    names: tuple[str, ...]


def modules(distribution: Path) -> Iterator[Module]:
    """Yield the modules of a distribution, each package before what is in it."""
    for path in sorted((distribution / "src").rglob("*.py"), key=lambda path: (path.parent, path)):
        tree = ast.parse(path.read_text())
        summary = (ast.get_docstring(tree) or "").partition("\n")[0]
        yield Module(path, summary, tuple(_public_names(tree)))


def contents() -> str:
    """Return a table for each distribution: module, public names, summary."""
    parts = []
    for distribution in sorted((ROOT / "packages").iterdir()):
        rows = ["| module | public names | about |", "|---|---|---|"]
        for module in modules(distribution):
            inside = module.path.relative_to(distribution / "src").as_posix().removeprefix("amanda/")
            link = f"[{inside}](../{module.path.relative_to(ROOT)})"
            rows.append(f"| {link} | {len(module.names) or ''} | {module.summary} |")
        parts.append(f"### {distribution.name}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _public_names(tree: ast.Module) -> list[str]:
    """Return what a module lists in `__all__`; an empty list without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []
