"""Notebooks of examples/: executed, and made pages with their outputs."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, cast

import nbformat as untyped_nbformat
from nbclient import NotebookClient

from amanda_docs.pages import ELSEWHERE, PAGES, ROOT, relinked

nbformat = cast(Any, untyped_nbformat)
TIMEOUT = 600
IMAGES = {"image/png": ".png", "image/svg+xml": ".svg"}


def write_notebooks(executed: Path, run: bool = True) -> None:
    """Make a page of each notebook, as it is in the folder `executed`.

    run: whether one that is not there is executed; otherwise its page has the outputs that the file has.
    Raises CellExecutionError when a cell fails.
    """
    executed.mkdir(parents=True, exist_ok=True)
    for name, page in ELSEWHERE.items():
        path = ROOT / name
        if path.suffix == ".ipynb":
            if run and not (executed / path.name).exists():
                nbformat.write(_run(path), executed / path.name)
            kept = executed / path.name if (executed / path.name).exists() else path
            text = _markdown(nbformat.read(kept, as_version=4), PAGES / Path(page).with_suffix(""))
            (PAGES / page).write_text(relinked(text, path, PAGES / page))


def _run(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=where).execute()
    return notebook


def _markdown(notebook: Any, images: Path) -> str:
    """The cells as Markdown; images of outputs go to files whose names begin with `images`."""
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            shown = [output for output in cell.outputs if output.get("name") != "stderr"]
            parts += [_output(output, f"{images}-{number}") for output in shown]
    return "\n\n".join(parts) + "\n"


def _output(output: Any, image: str) -> str:
    if output.output_type == "stream":
        return _text(output.text)
    data = output.data
    for kind, suffix in IMAGES.items():
        if kind in data:
            binary = data[kind].encode() if kind == "image/svg+xml" else base64.b64decode(data[kind])
            Path(image + suffix).write_bytes(binary)
            return f"![Output]({Path(image + suffix).name})"
    return f"<div>{data['text/html']}</div>" if "text/html" in data else _text(data["text/plain"])


def _text(text: str) -> str:
    return f"``` {{ .text .output }}\n{text.rstrip()}\n```"
