"""The table of contents of the sources is readable, and rooms offer few names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from amanda.backend import EagerDriver
from amanda.drivers.torch import TorchDriver
from amanda_docs import differences
from amanda_docs.contents import MARKER, ROOT, contents, modules

DISTRIBUTIONS = sorted((ROOT / "packages").iterdir())
MOST_NAMES = 25
# What these offer is long by nature: errors and values of files, keys of a mapping, methods of one library,
# kinds of options, and the primitives of one tool with many methods.
LONGER = {
    "amanda/interceptor": 61, "amanda/drivers/tensorflow/graph": 36, "amanda/tools/results": 35,
    "amanda/tools/mapping": 33, "amanda/tools/quantize": 32, "amanda/options": 30,
}  # fmt: skip


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda path: path.name)
def test_a_line_says_what_each_module_is_about(distribution: Path) -> None:
    summaries = {module.path: module.summary for module in modules(distribution)}
    assert [path for path, summary in summaries.items() if not 12 < len(summary) <= 110] == []
    assert [path for path, summary in summaries.items() if not summary.endswith((".", ":"))] == []
    # A module that only gives others' names has the summary of that module.
    repeated = [summary for summary, count in Counter(summaries.values()).items() if count > 1]
    assert len(repeated) <= 1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda path: path.name)
def test_a_room_offers_few_names(distribution: Path) -> None:
    sizes = {
        module.path.parent.relative_to(distribution / "src").as_posix(): len(module.names)
        for module in modules(distribution)
        if module.path.name == "__init__.py"
    }
    assert {room: size for room, size in sizes.items() if size > LONGER.get(room, MOST_NAMES)} == {}


def test_the_page_has_the_table() -> None:
    assert MARKER in (ROOT / "docs/how-it-works.md").read_text()
    table = contents()
    assert "| [plan/analysis.py](../packages/amanda-core/src/amanda/plan/analysis.py) |" in table


def test_the_page_has_a_column_for_each_driver() -> None:
    assert differences.MARKER in (ROOT / "docs/how-it-works.md").read_text()
    head, _, *rows = differences.differences().splitlines()
    assert [cell.strip() for cell in head.split("|")[2:-1]] == list(differences.DRIVERS)
    assert set(differences.DRIVERS.values()) == {
        path.name for path in DISTRIBUTIONS if path.name.startswith("amanda-driver-")
    }
    assert [row.split("|")[1].strip() for row in rows] == list(differences.QUESTIONS)
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert len(cells) == len(differences.DRIVERS) + 1
        assert all(cells), row


def test_the_columns_say_what_the_classes_say() -> None:
    eager, graph = differences.modes("PyTorch")
    assert (eager.modes, graph.modes) == (*TorchDriver.modes, "graph")
    assert issubclass(TorchDriver, EagerDriver)
    assert eager.base == "EagerDriver"
    text = (TorchDriver.attach.__doc__ or "").splitlines()[0]
    assert f"| eager: {text}<br>" in differences.differences()
    assert [mode.modes for mode in differences.modes("TensorFlow")] == ["eager", "function", "graph"]
