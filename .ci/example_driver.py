"""The example of the driver template: the core's own driver of the fake framework, and its plugin, renamed.

`python .ci/example_driver.py` writes it into templates/driver, after that was changed.
It has the framework by a name of its own: a driver is found by what it drives, which a program imports.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages/amanda-core"
TEMPLATE = ROOT / "templates/driver/template"
PLUGIN = ROOT / "tests/plugins/fake-arrays/fake_arrays.py"
ONLY_HERE = "{{% if framework == 'tinyframe' %}}{}{{% endif %}}"
IMPORTED = re.compile(
    r"from amanda\.testing import .*?\nfrom amanda\.testing\.fake\._graphs import .*?\n", re.S
)
IMPORTS = """from amanda.testing import DriverTests, Sample, never
from amanda.drivers.tinyframe import FakeDriver
from amanda.testing import fake
"""
FRAMEWORK = '''"""tinyframe, the framework that is driven: that of `amanda.testing`, by a name of its own."""

import sys

from amanda.testing import fake
from amanda.testing.fake import *  # noqa: F403
from amanda.testing.fake import _autograd, _operators

__all__ = [*fake.__all__, "_autograd", "_operators"]
sys.modules[__name__] = fake
'''
MODULES = {
    "mapping": ("tinyframe's operators in the words of StandardMapping; it imports no tool.", "def standard"),
    "tensors": ("tinyframe's tensors for tools, which compute with arrays of NumPy.", "class FakeTensors"),
    "parameters": ("tinyframe's parameters, which `finalize` of a tool writes.", "class FakeParameters"),
}
"""Modules that the plugin is divided into: what each is about, and the line at which it begins."""
RENAMED = {
    r"from amanda\.testing import fake\b": "import tinyframe",
    r"return fake\n": "return tinyframe\n",
    r"amanda\.testing\.fake": "tinyframe",
    r"\bFake(?=[A-Z])|(?<=Test)Fake": "Tinyframe",
    r"[Tt]he fake framework": "tinyframe",
    r"\bfake\b": "tinyframe",
}


def example() -> dict[Path, str]:
    """The files of the template that belong to the example, and what is in them."""
    driver = TEMPLATE / "src/amanda/drivers/{{ framework }}"
    suite = (CORE / "tests/test_fake_driver.py").read_text().partition("\n\nclass Hearing")[0]
    files = {TEMPLATE / "tests" / ONLY_HERE.format("test_driver.py"): IMPORTED.sub(IMPORTS, suite) + "\n"}
    source = CORE / "src/amanda/testing/_fake_driver.py"
    files[driver / ONLY_HERE.format("_driver.py")] = source.read_text()
    for name, text in modules_of_tools().items():
        files[driver / ONLY_HERE.format(f"{name}.py")] = text
    tidy = {file: tidied(renamed(text)) for file, text in files.items()}
    return {**tidy, TEMPLATE / "tests" / ONLY_HERE.format("tinyframe.py"): FRAMEWORK}


def modules_of_tools() -> dict[str, str]:
    """Return the modules of a driver by which the shipped tools work on the fake framework, by name."""
    imports, *_ = PLUGIN.read_text().partition("\n\n\n")
    imports = imports.partition('"""\n\n')[2]
    starts = [PLUGIN.read_text().index(line) for _, line in MODULES.values()]
    parts = [PLUGIN.read_text()[i:j] for i, j in zip(starts, [*starts[1:], None], strict=True)]
    texts = {}
    for (name, (about, _)), part in zip(MODULES.items(), parts, strict=True):
        tensors = "from amanda.drivers.tinyframe.tensors import FakeTensors\n" * (name == "parameters")
        texts[name] = f'"""{about}"""\n\n{imports}\n{tensors}\n\n{part}'
    return texts


def renamed(text: str) -> str:
    """Of tinyframe instead of the fake framework."""
    for pattern, other in RENAMED.items():
        text = re.sub(pattern, other, text)
    return text


def tidied(text: str) -> str:
    """With imports in order, as the project formats them."""
    for command in (("check", "--select=I,F401", "--fix-only", "--quiet"), ("format", "--quiet")):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename=example.py", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


if __name__ == "__main__":
    for file, text in example().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
