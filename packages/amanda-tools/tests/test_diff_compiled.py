"""Compiled code against eager code: planted bugs are found, and what was not compared is said."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import children
import pytest
import torch
from torch import nn

import amanda
from amanda.__main__ import main
from amanda.tools.diff import diff
from amanda.tools.dump import Dump, DumpTool

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


def one_more(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that compiles wrongly."""
    return lambda *values: tuple(one + 1 for one in graph.forward(*values))


def dumped(folder: Path, model: Any, compiled: Literal["eager", "instrument"]) -> Path:
    tool = DumpTool(folder, outputs="full", gradients="full", weights="full")
    with amanda.apply(tool, compiled=compiled):
        model(X).square().sum().backward()
    assert tool.result.entries
    return folder


def test_a_wrong_compiler_is_found_where_compiled_code_runs(model: Model) -> None:
    compiled = torch.compile(model, backend=one_more)
    for mode in ("instrument", None):
        result = diff(lambda: model(X), lambda: compiled(X), compiled=mode)
        assert result.first is not None
        assert result.first.type == "returned"
        assert result.told == ()
    # Run a too, and its control and the run that proves a cause.
    assert diff(compiled, model, X, control="again", bisect=True).first is not None


def test_compiled_code_that_no_tool_can_enter_is_compared_as_eager_code(model: Model) -> None:
    def breaks(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise NotImplementedError("no backend here")

    compiled = torch.compile(model, backend=breaks)
    result = diff(lambda: compiled(X), lambda: model(X))
    assert not result
    assert result.told[0] == "Eager code was compared with eager code, and nothing that a compiler made"
    assert "Compiled code of a does not run under tools: BackendCompilerFailed (" in str(result)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of inductor's own imports
def test_a_wrong_kernel_is_found_at_its_op(model: Model) -> None:
    options = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy", "fx_graph_cache": False}
    compiled = torch.compile(model, backend="inductor", options=options)
    with torch.no_grad():
        assert not diff(lambda: model(X), lambda: compiled(X), compiled="eager")
        first = diff(lambda: model(X), lambda: compiled(X), compiled="instrument").first
    assert first is not None
    assert (first.type, first.module, first.inputs) == ("relu", "relu", True)


def test_a_comparison_gives_no_hints_on_its_own_runs(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As with inductor, which is slow to compile.
    monkeypatch.setattr("amanda.drivers.torch.graph._compiler._backend_name", lambda backend: "inductor")
    compiled = torch.compile(model, backend="aot_eager")
    for options in ({}, {"control": "float64"}, {"compiled": "eager"}):
        diff(lambda: model(X), lambda: compiled(X), **options)  # type: ignore[arg-type]
    assert not [record for record in caplog.records if record.name == "amanda"]
    with amanda.apply(amanda.Tool()):
        compiled(X)
    assert "compiled model Model.forward: ran op by op" in caplog.text


def test_eager_against_eager_is_said_first(model: Model) -> None:
    compiled = torch.compile(model, backend=one_more)
    result = diff(lambda: model(X), lambda: compiled(X), compiled="eager")
    assert not result
    lines = str(result).splitlines()
    assert lines[1] == "Eager code was compared with eager code, and nothing that a compiler made."
    assert lines[2].startswith("Eager code of b: compiled model Model.forward (")
    assert result.to_dict()["told"] == list(result.told)
    assert not diff(lambda: model(X), lambda: model(X)).told


def test_dumps_of_eager_and_compiled_code_are_compared_op_by_op(model: Model, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    other.relu = nn.LeakyReLU(0.0)  # type: ignore[assignment]
    one = dumped(tmp_path / "eager", model, "eager")
    two = dumped(tmp_path / "compiled", torch.compile(model, backend="aot_eager"), "instrument")
    result = diff(one, two)
    assert not result
    assert not result.modules
    assert (result.only_a, result.only_b, result.told) == ((), (), ())
    assert {one.verdict for one in result.comparisons} == {"same"}
    other.relu.negative_slope = 0.3  # type: ignore[assignment]
    wrong = dumped(tmp_path / "wrong", torch.compile(other, backend="aot_eager"), "instrument")
    for pair in ((one, wrong), (wrong, one)):
        first = diff(*pair).first
        assert first is not None
        assert (first.module, {first.type, first.other_type}) == ("relu", {"relu", "leaky_relu"})


def test_a_dump_holds_which_callables_ran_op_by_op(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = torch.compile(model, backend=one_more)
    folder = dumped(tmp_path / "dump", compiled, "eager")
    ((name, where),) = Dump(folder).op_by_op
    assert name == "compiled model Model.forward"
    assert where.startswith(__file__)
    assert main(["diff", str(folder), str(folder)]) == 0
    assert "Eager code was compared with eager code" in capsys.readouterr().out


PROGRAM = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
X = torch.ones(2, 4)


def one_more(graph, inputs):
    return lambda *values: [one + 1 for one in graph(*values)]


compiled = torch.compile(model, backend=one_more)


def eager():
    return model(X)


def compiles():
    return compiled(X)


if __name__ == "__main__":
    print(compiles().mean().item() - eager().mean().item() > 0.9)
"""


def test_the_command_compares_functions_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "wrong_program.py"
    program.write_text(PROGRAM)
    one, other = f"{program}:eager", f"{program}:compiles"
    assert main(["diff", one, other, "--compiled", "eager"]) == 0
    assert "Eager code was compared with eager code" in capsys.readouterr().out
    assert main(["diff", one, other]) == 1
    assert "First divergence, forward: returned" in capsys.readouterr().out
    assert main(["diff", one, f"{program}:compile"]) == 2
    assert "did you mean compiles?" in capsys.readouterr().err


@pytest.mark.long
def test_amanda_run_runs_compiled_code_where_it_is_asked_to(tmp_path: Path) -> None:
    program = tmp_path / "wrong_program.py"
    program.write_text(PROGRAM)
    for options, right in (([], "False"), (["--compiled", "instrument"], "True")):
        line = [sys.executable, "-m", "amanda", "run", "-t", "flops", *options, "--", str(program)]
        done = children.run(line, check=True)
        assert done.stdout.split() == [right]
        assert ("ran op by op, as eager code" in done.stderr) == (not options)
