"""Graphs recorded in a scope hold the program and nothing of a tool that changes values; it is said once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import amanda

X = torch.linspace(-1, 1, 20).reshape(5, 4)


class Program(torch.nn.Module):
    """Ops of a module and of its caller's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x) + 1).sum()


def symbolic(program: Program) -> Any:
    return torch.fx.symbolic_trace(program).graph


def proxied(program: Program) -> Any:
    return make_fx(program)(X).graph


def exported(program: Program, strict: bool = False) -> Any:
    return torch.export.export(program, (X,), strict=strict).graph


def doubling() -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda value: value * 2, outputs=[0]))
    return tool


@pytest.mark.parametrize("record", [symbolic, proxied, exported])
def test_a_recorded_graph_has_no_op_of_a_routine(
    record: Callable[[Program], Any], caplog: pytest.LogCaptureFixture
) -> None:
    bare = [node.name for node in record(Program()).nodes]
    program = Program()
    with amanda.apply(doubling()) as scope:
        assert [node.name for node in record(program).nodes] == bare
    (entry,) = scope.report
    assert entry.reason == "the ops are recorded as they are"
    assert caplog.text.count(entry.reason) == 1


@pytest.mark.parametrize(
    "program",
    [lambda x: torch.cat([x, x]), lambda x: torch.cat(tensors=[x, x]), lambda x: X[x, 0]],
    ids=["list", "list by name", "index"],
)
def test_an_op_that_takes_traced_tensors_in_a_list_is_recorded_as_it_is(program: Any) -> None:
    types: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: types.append(context.get_op_type()))
    with amanda.apply(tool) as scope:
        torch.fx.symbolic_trace(program)
    assert not types
    assert [entry.what for entry in scope.report] == ["torch.fx.symbolic_trace"]


def test_a_strict_export_in_a_scope_has_no_op_of_a_routine() -> None:
    bare = [node.name for node in exported(Program(), strict=True).nodes]
    with amanda.apply(doubling()):
        assert [node.name for node in exported(Program(), strict=True).nodes] == bare


def test_a_scope_opened_in_a_compiled_function_sees_its_ops_or_says_that_it_does_not(op_log: Any) -> None:
    scope = amanda.apply(op_log)

    def program(x: torch.Tensor) -> torch.Tensor:
        with scope:
            x = torch.relu(x)
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X), torch.relu(X) + 1)
    assert op_log.names == ["relu", "relu"] or "TorchDriver" in [entry.what for entry in scope.report]


def test_a_replay_of_a_cuda_graph_is_reported() -> None:
    with amanda.apply(amanda.Tool()) as scope, pytest.raises(AttributeError):
        torch.cuda.CUDAGraph.replay(object())  # where there is no GPU, a graph cannot be made
    assert [entry.what for entry in scope.report] == ["replays of CUDA graphs"]
