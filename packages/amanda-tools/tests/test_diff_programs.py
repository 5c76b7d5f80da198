"""Programs that are compared from the command line, and compiled code that fails or differs unobserved."""

from __future__ import annotations

import site
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import amanda
from amanda.__main__ import main
from amanda.errors import AmandaError
from amanda.tools.diff import Command, diff

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.first(x)))  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def compiles_no_relu(graph: Any, inputs: Any) -> Any:
    if any(node.target is torch.ops.aten.relu.default for node in graph.graph.nodes):
        raise ValueError("there is no relu here")
    return make_boxed_func(graph.forward)


def test_an_op_that_cannot_be_compiled_is_found(model: Model) -> None:
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiles_no_relu))
    with torch.no_grad():
        result = diff(model, compiled, X, compiled="instrument", bisect=True)
    first = result.first
    assert first is not None
    assert (first.type, first.module) == ("relu", "relu")
    assert first.failure.startswith("ValueError (there is no relu here)")
    assert result.sentence.startswith("b fails at relu in relu (forward), ")
    assert [one.verdict for one in result.comparisons] == ["same", "different", "same", "same"]
    with torch.no_grad(), pytest.raises(Exception, match="there is no relu here"):
        compiled(X)  # as without a tool


def test_a_failing_op_that_a_does_not_have_is_an_error(model: Model) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return model.last(model.first(x)).relu()  # type: ignore[no-any-return]

    compiled = torch.compile(other, backend=aot_autograd(fw_compiler=compiles_no_relu))
    a = lambda: model.last(model.first(X))  # noqa: E731
    with torch.no_grad(), pytest.raises(AmandaError, match="at an op that a does not have"):
        diff(a, lambda: compiled(X), compiled="instrument")


def test_a_failure_that_no_op_explains_is_raised(model: Model) -> None:
    def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise ValueError("nothing compiles")

    with pytest.raises(Exception, match="nothing compiles"):
        diff(model, torch.compile(model, backend=broken), X, compiled="instrument")


def test_compiled_code_that_differs_unobserved_is_said(model: Model) -> None:
    def hides(graph: Any, inputs: Any) -> Callable[..., Any]:
        """A backend that compiles wrongly where no tool looks."""
        if any(node.op == "call_function" and "amanda" in str(node.target) for node in graph.graph.nodes):
            return graph.forward  # type: ignore[no-any-return]
        return lambda *values: tuple(one + 1 for one in graph.forward(*values))

    with torch.no_grad():
        result = diff(model, torch.compile(model, backend=hides), X, compiled="instrument")
        honest = diff(model, torch.compile(model, backend="aot_eager"), X, compiled="instrument")
    assert not result
    assert any(told.startswith("The compiled code of b returned other numbers") for told in result.told)
    assert honest.told == ()


BUGS = [
    ("relu", "accuracy", "relu"),
    *(
        pytest.param(*bug, marks=pytest.mark.long)
        for bug in (
            ("relu", "compile_error", "relu"),
            ("log1p", "accuracy", "log1p"),
            ("log1p", "compile_error", "log1p"),
        )
    ),
]


class Logs(nn.Module):
    """Both ops whose kernels inductor can be told to spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log1p(self.last(self.relu(self.first(x))).square())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of inductor's own imports
@pytest.mark.parametrize(("name", "value", "found"), BUGS)
def test_a_bug_planted_in_inductor_is_found_at_its_op(name: str, value: str, found: str) -> None:
    torch.manual_seed(0)
    model = Logs()
    options = {f"cpp.inject_{name}_bug_TESTING_ONLY": value, "fx_graph_cache": False}
    compiled = torch.compile(model, backend="inductor", options=options)
    with torch.no_grad():
        result = diff(model, compiled, X, compiled="instrument", control="float64", bisect=True)
    assert result.first is not None
    assert (result.first.type, result.first.inputs) == (found, True if value == "accuracy" else None)
    assert bool(result.first.failure) == (value == "compile_error")
    assert result.remaining is None or not result.remaining


PROGRAM = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
eps = float(sys.argv[1])
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, eps=eps), nn.Dropout(0.1), nn.Linear(16, 4))
model = torch.compile(model, backend="aot_eager") if "--compile" in sys.argv else model
with torch.no_grad():
    print(model(torch.randn(3, 8)).shape)
"""


@pytest.mark.long
def test_two_programs_are_compared_from_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, found = tmp_path / "train.py", tmp_path / "found.zip"
    program.write_text(PROGRAM)
    line = ["diff", "--a", f"{program} 1e-5"]
    assert main([*line, "--b", f"{program} 1e-5 --compile", "--python-b", sys.executable]) == 0
    assert capfd.readouterr().out.startswith("No difference")
    assert main([*line, "--b", f"{program} 1.5e-5 --compile", "--save", str(found)]) == 1
    sentence = capfd.readouterr().out.partition("\n")[0]
    assert sentence.startswith("The runs first differ at layer_norm in 1 (forward), ")
    assert "its inputs agree (" in sentence
    assert "with a's value in its place, not one bit of it remains" in sentence
    assert main(["diff", "--open", str(found)]) == 1
    assert "layer_norm in 1" in capfd.readouterr().out.partition("\n")[0]
    assert main(["diff", "--open", str(found), "--b", f"{program} 1e-5", "--no-bisect"]) == 0


def test_a_wrong_command_line_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["--a", "train.py"], "b is missing; give two runs, or --a and --b"),
        (["x", "y", "--python-b", "python"], "--python-b is the interpreter of the program of --b"),
        (["x", "--a", "y"], "a is given twice: as x, and as --a 'y'"),
        (["--open", str(tmp_path)], "Is a directory"),
    ):
        assert main(["diff", *arguments]) == 2
        assert told in capsys.readouterr().err


def test_a_tool_is_named_by_its_import_path() -> None:
    from amanda.tools.command import ToolSpec
    from amanda.tools.steps import Steps

    made = ToolSpec.parse("amanda.tools.diff.Float64Tool").make(Steps())
    assert isinstance(made.tool, amanda.Tool)
    with pytest.raises(AmandaError, match=r"tool amanda.tools.diff.Float cannot be imported"):
        ToolSpec.parse("amanda.tools.diff.Float").make(Steps())


@pytest.mark.long
def test_the_other_interpreter_has_another_version_of_a_library_or_no_amanda(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, other = tmp_path / "train.py", tmp_path / "other"
    program.write_text(
        "import sys, torch\n"
        "sys.path.append(sys.argv[1])\n"
        "import library\n"
        "torch.manual_seed(0)\n"
        "with torch.no_grad():\n"
        "    library.norm(torch.nn.Linear(8, 8)(torch.randn(3, 8)))\n"
    )
    venv.create(other)
    packages = next((other / "lib").glob("python*/site-packages"))
    (tmp_path / "library").mkdir()
    for folder, epsilon in ((tmp_path / "library", "1e-5"), (packages, "1e-3")):
        code = f"return torch.nn.functional.layer_norm(x, (8,), eps={epsilon})"
        (folder / "library.py").write_text(f"import torch\n\n\ndef norm(x):\n    {code}\n")
    python, one = other / "bin" / "python", f"{program} {tmp_path / 'library'}"
    line = ["diff", "--a", one, "--b", one, "--python-b", str(python)]
    assert main(line) == 2
    told = capfd.readouterr().err
    assert f"{python} does not have Amanda (ModuleNotFoundError: No module named 'amanda')" in told
    given = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (packages / "all.pth").write_text("".join(given))
    assert main(line) == 1
    sentence = capfd.readouterr().out.partition("\n")[0]
    assert sentence.startswith("The runs first differ at layer_norm")
    assert "not one bit of it remains" in sentence


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("exit 3", "with status 3; give the interpreter"),
        ("kill -9 $$", "with signal SIGKILL; give the interpreter"),
        ("echo no library >&2; exit 127", "with status 127 (no library); give the interpreter"),
    ],
)
def test_an_interpreter_that_does_not_run_is_said(tmp_path: Path, code: str, told: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{code}\n")
    python.chmod(0o755)
    with pytest.raises(AmandaError, match=f"{python} runs no Python code: it ended with ") as caught:
        Command("train.py", python=str(python)).record(tmp_path / "dump")
    assert told in str(caught.value)


def test_a_program_that_a_signal_ends_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert main(["diff", "--a", str(program), "--b", str(program)]) == 2
    assert "ended with signal SIGKILL" in capfd.readouterr().err
