"""Pages that follow one call through the code name functions that the call runs, in files where they are."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import children
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("follow-*.md"))
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./(packages/[^)]+)\)")
# A profile function sees the threads that Python starts, and not those of TensorFlow.
ON_THREADS_OF_TENSORFLOW = {"RoutineSlot.__call__", "Execution.call"}
RECORDER = """
import sys, threading

called = set()


def record(frame, event, argument):
    if event == "call":
        called.add((frame.f_code.co_filename, frame.f_code.co_qualname))


threading.setprofile(record)
sys.setprofile(record)
exec(compile(sys.stdin.read(), "page", "exec"), {"__name__": "page"})
sys.setprofile(None)
threading.setprofile(None)
for file, name in called:
    if "amanda" in file:
        print("called", file, name)
"""


def links(page: Path) -> list[tuple[str, Path]]:
    """Return the functions that a page names, each with its file."""
    return [(name, ROOT / path) for name, path in LINK.findall(page.read_text())]


def defined(path: Path) -> set[str]:
    """Return the qualified names of the functions and classes of a Python or C file."""
    if path.suffix != ".py":
        # Definitions begin in the first column, and unlike declarations do not end with a semicolon.
        lines = re.findall(r"^\w.*[^;]$", path.read_text(), re.MULTILINE)
        return {name for line in lines for name in re.findall(r"(\w+)\(", line)}
    names = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                names.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            elif not isinstance(child, ast.expr):
                visit(child, prefix)

    visit(ast.parse(path.read_text()), "")
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_function_on_the_page_is_in_its_file(page: Path) -> None:
    assert len(links(page)) > 8
    assert [name for name, path in links(page) if name not in defined(path)] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_calls_each_python_function_on_the_page(page: Path) -> None:
    block = re.search(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    done = children.run([sys.executable, "-c", RECORDER], input=block[1])
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("called ")]
    called = {(Path(file).resolve(), name) for _, file, name in lines}
    named = {(path.resolve(), name) for name, path in links(page) if path.suffix == ".py"}
    named = {(path, name) for path, name in named if name not in ON_THREADS_OF_TENSORFLOW}
    assert named - called == set()
