"""The tutorial on JAX runs, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import json
from importlib.util import find_spec
from typing import Any

import pytest
from repository import repository_path

pytestmark = pytest.mark.usefixtures("attached_driver")

NOTEBOOK = repository_path("examples/tutorial_jax.ipynb")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not there")
def test_each_cell_prints_what_the_notebook_shows() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        assert printed.getvalue() == "".join("".join(output["text"]) for output in cell["outputs"])
