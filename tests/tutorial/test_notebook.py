"""The tutorial notebooks run, and print what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from amanda.interceptor import NATIVE

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK, TENSORFLOW = EXAMPLES / "tutorial.ipynb", EXAMPLES / "tutorial_tensorflow.ipynb"


def executed(path: Path) -> list[tuple[str, str]]:
    """Each code cell of a notebook and what it gives now."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(EXAMPLES)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    return printed(notebook)


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


@pytest.mark.long
@pytest.mark.xfail(
    not NATIVE, strict=True, reason="never: BERT holds a reference to gelu, which the fallback cannot detour"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the event loop that nbclient starts
def test_the_notebook_gives_what_it_shows() -> None:
    assert executed(NOTEBOOK) == printed(nbformat.read(NOTEBOOK, as_version=4))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the event loop that nbclient starts
def test_the_notebook_of_tensorflow_gives_what_it_shows() -> None:
    assert executed(TENSORFLOW) == printed(nbformat.read(TENSORFLOW, as_version=4))


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


def test_the_notebook_of_tensorflow_shows_the_numbers_of_the_tutorial() -> None:
    shown = [output for _, output in printed(nbformat.read(TENSORFLOW, as_version=4))]
    by_name, by_type = "forward: 106, backward: 53", "forward: 53, backward: 53"
    assert sum(by_name in output for output in shown) == 1
    assert sum(by_type in output for output in shown) == 4  # in a session, twice; a function; eagerly
    assert "forward: 106, backward: 106" in "".join(shown)  # two batches of fit
    assert "PyTorch:    53 53\nTensorFlow: 53 53" in "".join(shown)
