"""The page of the paper's tables: its tests are there, and its lines are counted by what they hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_tables", ROOT / "benchmarks/paper/paper_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lines_with_code_count_and_what_is_said_does_not(tables: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text('''"""Of a module,
of two lines."""

import os  # counts

# does not

@mark
def first(
    x,
):
    """Says."""
    text = """
    is a value
    """
    return x, text


class Second:
    """Says."""

    value = 1
''')
    assert tables.code_lines(file) == 11
    assert tables.code_lines(file, ["first"]) == 8
    assert tables.code_lines(file, ["Second"]) == 2
    with pytest.raises(LookupError, match="third"):
        tables.code_lines(file, ["third"])


def test_a_test_that_is_gone_is_missed(tables: ModuleType) -> None:
    with pytest.raises(LookupError, match="no test test_none"):
        tables.checked("tests/benchmarks/test_paper_tables.py", "test_none")


def test_the_page_is_what_is_counted(tables: ModuleType) -> None:
    page = (ROOT / "docs/paper-tables.md").read_text().splitlines()
    assert all(line in page for line in [*tables.tasks(), *tables.tests()])
    own = tables.projects()[0].split(" | ").index("the tool: of its own")
    for counted in tables.projects()[2:]:
        name, *cells = counted.split(" | ")
        *_, written = (line.split(" | ")[1:] for line in page if line.startswith(f"{name} | "))
        assert written[: own - 1] == cells[: own - 1]
        if cells[own - 1].isdigit():  # a tool goes on changing
            assert abs(int(written[own - 1]) - int(cells[own - 1])) <= 0.25 * int(cells[own - 1])
