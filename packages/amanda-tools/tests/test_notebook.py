"""The magic of IPython: tools over a line or a cell, and what is shown."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import pytest

import amanda
from amanda.tools.flops import FlopsResult


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shell with the extension, and a model."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # of another environment IPython warns
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts its own there
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    shell.run_cell("%load_ext amanda")
    shell.run_cell("import torch; from torch import nn; model, x = nn.Linear(4, 2), torch.rand(3, 4)")
    yield shell
    shell.run_line_magic("reset", "-f")
    type(shell).clear_instance()


def test_a_cell_runs_under_tools(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_cell("%%amanda flops,stats:type=linear\ny = model(x)\ny.shape")
    output = capsys.readouterr().out
    assert output.index("torch.Size([3, 2])") < output.index("FLOPs") < output.index("Statistics of tensors")
    results = shell.user_ns["amanda_results"]
    assert list(results) == ["flops", "stats"]
    assert isinstance(results["flops"], FlopsResult)
    assert results["flops"].total("macs") == 3 * 4 * 2
    assert shell.user_ns["y"].shape == (3, 2)  # the cell's own variable
    shell.run_cell("model(x)")
    assert results["flops"].total("calls") == 1


def test_a_line_runs_under_tools(shell: Any) -> None:
    shell.run_cell("%amanda flops:out=flops.json y = model(x)")
    assert shell.user_ns["amanda_results"]["flops"].total("macs") == 24
    assert Path("flops.json").is_file()


def test_constructors_are_left(shell: Any) -> None:
    shell.run_cell("%amanda flops model = nn.Linear(4, 2)")
    assert shell.user_ns["amanda_results"]["flops"].total("calls") == 0


@pytest.mark.parametrize("cell", ["%amanda flops model(x)", "%%amanda flops\nmodel(x)"])
def test_what_ipython_displays_is_not_counted(
    shell: Any, cell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell(cell)
    assert "tensor([[" in capsys.readouterr().out
    assert [row[1] for row in shell.user_ns["amanda_results"]["flops"].rows()] == ["linear"]


def test_display_in_the_middle_of_a_cell_is_not_counted(shell: Any) -> None:
    shell.run_cell("%%amanda flops\nfrom IPython.display import display\ndisplay(model(x))\ny = model(x)")
    assert shell.user_ns["amanda_results"]["flops"].total("calls") == 2
    assert "format" not in vars(shell.display_formatter)


def test_an_error_closes_the_scope_and_fails_the_cell(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    execution = shell.run_cell("%%amanda flops\nmodel(x)\n1 / 0")
    output = capsys.readouterr().out
    assert output.count("division by zero") == 1
    assert output.rstrip().endswith("amanda: the cell raised ZeroDivisionError, shown above")
    assert not execution.success
    shell.run_cell("model(x)")
    assert shell.user_ns["amanda_results"]["flops"].total("calls") == 1
    assert not shell.run_cell("%%amanda flops\nmodel(").success


def test_a_traceback_has_the_frames_of_the_program_alone(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    execution = shell.run_cell(
        "%%amanda nan:stop\nfrom torch.nn.functional import relu\nrelu(model(x / 0 * 0))"
    )
    output = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # without colours
    assert not execution.success
    assert "NotFiniteError" in output
    assert "relu(model(x / 0 * 0))" in output
    assert not [line for line in output.splitlines() if "File" in line and "/amanda/" in line]
    assert "showtraceback" not in vars(shell)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("%%amanda flop\n1", "did you mean flops?"),
        ("%%amanda nan:stap\n1", "did you mean stop?"),
        ("%%amanda\n1", "no tool is given: %%amanda flops"),
        ("%%amanda flops nan\n1", "'nan' follows the tools: give tools with commas, flops,nan"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    shell: Any, line: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execution = shell.run_cell(line)
    captured = capsys.readouterr()
    assert part in captured.err
    assert not execution.success
    assert "Traceback" not in captured.out + captured.err


def test_without_the_tools_the_extension_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amanda.tools.notebook", None)
    with pytest.raises(amanda.AmandaError, match=r"needs amanda-tools: pip install .*amanda-(tools|core)"):
        amanda.load_ipython_extension(None)


def test_importing_amanda_does_not_import_ipython() -> None:
    code = "import sys, amanda; assert not {'IPython', 'amanda.tools.notebook'} & set(sys.modules)"
    children.run([sys.executable, "-c", code], check=True)
