"""The snippets of docs/ run, in order, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

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


IMPORTS = pytest.mark.filterwarnings("ignore")  # of what other projects import
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python\n" in page.read_text()]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=IMPORTS if name == "migrating.md" else ())
        for name in (page.relative_to(DOCS).as_posix() for page in PAGES)
    ],
)
def test_snippets_print_what_the_page_says(page: str) -> None:
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
