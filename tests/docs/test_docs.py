"""The snippets of README.md and docs/ run, in order, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import children
import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block, with as many empty lines before it as it has lines above it."""
    text = (DOCS / page).read_text()
    above = (text[: found.start(2)].count("\n") for found in BLOCK.finditer(text))
    return [
        (found[1], "\n" * lines * (found[1] == "python") + found[2])
        for lines, found in zip(above, BLOCK.finditer(text), strict=True)
    ]


PAGES = ["../README.md"] + [
    page.relative_to(DOCS).as_posix()
    for page in sorted(DOCS.rglob("*.md"))
    if "```python\n" in page.read_text()
]
RECIPES = [page for page in PAGES if page.startswith("recipes/")]
OPTIONAL = (
    "dask", "diffusers", "lightning", "sentence_transformers", "tensorboard", "torch_geometric",
)  # fmt: skip
"""Libraries that `nox -s recipes` installs: elsewhere a recipe that imports one is skipped."""
APART = {"errors/DriverError.md", "migrating.md"}
"""Pages in a process of their own: they patch torch for good, or set what TensorFlow reads at its import."""


@pytest.mark.parametrize("page", RECIPES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of what libraries call
def test_recipes_print_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for library in OPTIONAL:
        if re.search(rf"^(import|from) {library}\b", (DOCS / page).read_text(), re.MULTILINE):
            pytest.importorskip(library)
    check(page)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RECIPES])
def test_snippets_print_what_the_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where they may write files
    if page in APART:
        done = children.run(
            [sys.executable, __file__, page], env={**os.environ, "PYTHONPATH": children.PLACE}
        )
        assert done.returncode == 0, done.stderr
    else:
        check(page)


def check(page: str) -> None:
    """Run the snippets of a page, each of which prints what the block of text after it has."""
    names: dict[str, Any] = {"__name__": page}
    printed, run = "", 0
    for language, text in blocks(page):
        if language == "python":
            assert printed == "", f"a snippet of {page} prints what the page does not show"
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, str(DOCS / page), "exec"), names)
            printed, run = output.getvalue(), run + 1
        elif language == "text":
            assert printed == text
            printed = ""
    assert printed == ""
    assert run >= 1


def test_limitations_have_the_words_of_reports() -> None:
    page = (DOCS / "limitations.md").read_text()
    table = page.partition("## What no mode sees")[2].partition("\n## ")[0]
    words = re.findall(r'\| "(.+?)" \|$', table, re.MULTILINE)
    sources = "".join(path.read_text() for path in sorted(DOCS.parent.glob("packages/*/src/**/*.py")))
    assert len(words) >= 9
    assert [one for one in words if one not in sources] == []


if __name__ == "__main__":
    check(sys.argv[1])
