"""The tutorial notebook runs, and prints what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from amanda.interceptor import NATIVE

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


def printed(notebook: Any) -> list[tuple[str, str]]:
    """Each code cell and what it gave, without what went to stderr."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [
                output["text"] if output.output_type == "stream" else output["data"]["text/plain"]
                for output in cell.outputs
                if output.get("name") != "stderr"
            ]
            cells.append((cell.source, "".join(outputs)))
    return cells


@pytest.mark.xfail(
    not NATIVE, strict=True, reason="never: BERT holds a reference to gelu, which the fallback cannot detour"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the event loop that nbclient starts
def test_the_notebook_gives_what_it_shows() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    executed = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(executed, timeout=300, kernel_name="python3", resources=where).execute()
    assert printed(executed) == printed(stored)


def test_the_notebook_shows_the_numbers_of_the_tutorial() -> None:
    shown = "".join(output for _, output in printed(nbformat.read(NOTEBOOK, as_version=4)))
    for line in (
        "conv2d: 4, Conv: 4",
        "conv2d: 53, Conv: 53",
        "linear: 73, Addmm: 72",
        "relu: 1, Relu: 1",
        "rnn: 1, mul: 16",
    ):
        assert line in shown
