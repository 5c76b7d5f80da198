"""The example of the driver template does not drift from the core's own."""

from __future__ import annotations

import re
import runpy
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_driver_is_the_cores_own_renamed() -> None:
    files = runpy.run_path(str(ROOT / ".ci" / "example_driver.py"))["example"]()
    assert len(files) == 6
    for file, text in files.items():
        assert file.read_text() == text, "python .ci/example_driver.py brings templates/driver up to date"


def test_what_the_page_quotes_is_in_the_example() -> None:
    example = "".join(runpy.run_path(str(ROOT / ".ci" / "example_driver.py"))["example"]().values())
    example += (ROOT / "packages/amanda-core/tests/test_backward_recipes.py").read_text()
    quoted = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/writing-a-driver.md").read_text(), re.M | re.S)
    assert quoted
    for block in quoted:
        assert block in example or textwrap.indent(block, "    ") in example
