"""The distributions in empty environments, without an index: what comes along, and that it works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import Empty

pytestmark = pytest.mark.installs

CORE = {"amanda-core", "cffi", "pluggy", "pycparser"}
TRAIN = """
import torch
model = torch.nn.Linear(4, 2)
for _ in range(3):
    model(torch.rand(8, 4)).sum().backward()
"""
IMPORT_TOOLS = """
import importlib, pkgutil, sys, amanda.tools
names = [module.name for module in pkgutil.iter_modules(amanda.tools.__path__) if module.name[0] != "_"]
assert len(names) >= int(sys.argv[1]), names
for name in names:
    importlib.import_module(f"amanda.tools.{name}")
"""


def test_the_core_comes_with_what_it_needs_and_nothing_else(empty: Empty) -> None:
    empty.install("amanda-core")
    assert empty.installed() == CORE
    done = empty.run("amanda", "info")
    assert done.returncode == 0, done.stdout
    assert "native" in done.stdout


def test_the_core_with_one_driver_comes_with_nothing_else(empty: Empty) -> None:
    empty.install("amanda-core[tf]")
    assert empty.installed() == {*CORE, "amanda-driver-tf", "numpy"}
    done = empty.run("amanda", "info", "--load")
    assert done.returncode == 0, done.stdout
    assert "tensorflow is not installed: pip install tensorflow" in done.stdout
    assert "torch" not in done.stdout


def test_pytorch_and_the_tools_come_with_two_extras_and_count_a_program(empty: Empty, tmp_path: Path) -> None:
    empty.install("amanda-core[torch,tools]")
    assert {"amanda-core", "amanda-driver-torch", "amanda-tools"} == {
        name for name in empty.installed() if name.startswith("amanda")
    }
    (tmp_path / "train.py").write_text(TRAIN)
    done = empty.run("amanda", "run", "flops", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"{3 * 8 * 4 * 2 * 2} MACs" in done.stdout  # forward, and the gradient of the weight
    done = empty.run("amanda", "doctor")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("extras", "names", "packages"),
    [
        ("tools", {"amanda-tools"}, 18),
        ("compress", {"amanda-tools", "amanda-compress"}, 30),
        ("labs", {"amanda-tools", "amanda-compress", "amanda-labs"}, 40),
    ],
)
def test_every_tool_is_imported_where_there_is_no_framework(
    empty: Empty, extras: str, names: set[str], packages: int
) -> None:
    empty.install(f"amanda-core[{extras}]")
    installed = {name for name in empty.installed() if name.startswith("amanda")}
    assert installed == {"amanda-core", *names}
    done = empty.run("python", "-c", IMPORT_TOOLS, str(packages))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("first", ["amanda-labs", "amanda-tools"])
def test_distributions_of_tools_install_in_any_order_and_each_goes_alone(empty: Empty, first: str) -> None:
    names = ["amanda-labs", "amanda-compress", "amanda-tools"]
    for name in names if first == names[0] else reversed(names):
        empty.install(name)
        done = empty.run("python", "-m", "pip", "--isolated", "check")
        assert done.returncode == 0, done.stdout
    for name in ("amanda-labs", "amanda-compress"):
        empty.run("python", "-m", "pip", "--isolated", "uninstall", "--yes", "--quiet", name)
    done = empty.run("amanda", "tools")
    assert done.returncode == 0, done.stdout
    assert re.search(r'pip install "amanda-core\[compress\]"\n[^"]*prune, quantize', done.stdout)
    for name in ("search", "inject", "patch"):
        done = empty.run("python", "-c", f"import amanda; amanda.load_tool('{name}')")
        assert done.returncode == 1
        assert 'pip install "amanda-core[labs]"' in done.stdout


def test_pytest_takes_the_plugin_without_a_warning(empty: Empty, tmp_path: Path) -> None:
    empty.install("amanda-core[tools]", "pytest")
    (tmp_path / "test_it.py").write_text("def test_it(amanda_trace):\n    with amanda_trace:\n        pass\n")
    done = empty.run("python", "-W", "error", "-m", "pytest", "-q", "-W", "error", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
