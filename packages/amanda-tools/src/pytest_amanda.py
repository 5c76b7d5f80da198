"""The plugin that pytest loads when it starts: an option, a marker, and a fixture that imports tools.

A module of its own at the top, for pytest takes the files of a distribution that has none there for modules
below `amanda/tools`, and warns that `pytest` is imported already.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from amanda.tools.pytest import Traced


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--amanda-update`."""
    parser.getgroup("amanda").addoption(
        "--amanda-update", action="store_true", help="rewrite the graph snapshots of amanda_trace"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", "amanda_trace: the amanda_trace fixture traces the whole body of the test"
    )


@pytest.fixture
def amanda_trace(request: pytest.FixtureRequest) -> Iterator[Traced]:
    """Traces what a test runs: `with amanda_trace:`, `amanda_trace(model, x)`, or the marker of that name."""
    from amanda.tools.pytest import Traced

    folder = request.path.parent / "__graphs__" / request.path.stem
    traced = Traced(_file(folder, request.node.name), bool(request.config.getoption("--amanda-update")))
    if request.node.get_closest_marker("amanda_trace") is None:
        yield traced
        return
    with traced:
        yield traced


def _file(folder: Path, test: str) -> Path:
    """Return where the snapshots of a test are; parameters in its name become a part of a file's name."""
    return folder / "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in test)
