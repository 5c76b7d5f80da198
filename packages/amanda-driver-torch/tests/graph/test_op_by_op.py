"""Scopes report compiled callables that ran as eager code, and graphs given to a backend with routines."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.linear(x))  # type: ignore[no-any-return]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class OneMore:
    """A backend whose code gives one more than the program's; graphs: nodes of the graphs it was given."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs.append([f"{node.op} {node.target}" for node in graph.graph.nodes])
        return lambda *values: tuple(value + 1 for value in graph.forward(*values))


def seeing(kind: str) -> amanda.Tool:
    """A tool that observes what ops of one type give."""
    tool = amanda.Tool()
    see = amanda.observer(lambda output: None)

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == kind:
            context.insert_after_op(see)

    tool.add_inst_for_op(analyse)
    return tool


def test_callables_that_run_op_by_op_are_named_once_with_their_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = torch.compile(Model(), backend="eager")
    itself = Model()
    itself.compile(backend="eager")
    function = torch.compile(doubled, backend="eager")
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(amanda.Tool()) as scope:
        for _ in range(2):
            function(model(X) + itself(X))
    assert [entry.what for entry in scope.report] == [
        "compiled model Model.forward", "compiled function doubled",
    ]  # fmt: skip
    assert scope.report.op_by_op == scope.report
    lines = [Model.forward.__code__.co_firstlineno, doubled.__code__.co_firstlineno]
    assert [entry.where.rsplit(":", 1) for entry in scope.report] == [[__file__, str(line)] for line in lines]
    assert all("ran op by op, as eager code" in entry.reason for entry in scope.report)
    assert caplog.text.count("compiled model Model.forward") == 1
    assert "not instrumented" not in caplog.text


class Doubling:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_layers_of_torch_and_objects_have_names_too() -> None:
    subjects: list[Any] = [torch.nn.Sequential(torch.nn.ReLU()), Model(), Doubling()]
    with amanda.apply(amanda.Tool()) as scope:
        for subject in subjects:
            torch.compile(subject, backend="eager")(X)
    names = ["model Sequential.forward", "model Model.forward", "function Doubling.__call__"]
    assert [entry.what for entry in scope.report] == [f"compiled {name}" for name in names]
    assert [entry.where.rpartition(":")[0] for entry in scope.report] == ["", __file__, __file__]


def test_a_callable_that_the_user_has_run_as_eager_code_is_not_reported() -> None:
    compiled = torch.compile(Model(), backend=OneMore())
    with torch.compiler.set_stance("force_eager"), amanda.apply(amanda.Tool()) as scope:
        compiled(X)
    assert not scope.report
    with amanda.apply(amanda.Tool()) as scope, torch.compiler.set_stance("force_eager"):
        compiled(X)
    assert not scope.report


def test_compiled_code_runs_where_tools_are_disabled_and_on_threads_without_the_scope() -> None:
    model = Model()
    compiled = torch.compile(model, backend=OneMore())
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(compiled(X)))
    with amanda.apply(seeing("relu")) as scope, amanda.disabled():
        results.append(compiled(X))
        thread.start()
        thread.join()
    assert all(torch.equal(result, model(X) + 1) for result in results)
    assert len(results) == 2
    assert not scope.report


def test_a_backend_is_given_the_graph_that_dynamo_captured_where_tools_insert_nothing() -> None:
    model, bare, within = Model(), OneMore(), OneMore()
    torch.compile(model, backend=bare)(X)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=within)
    with amanda.apply(seeing("conv2d"), compiled="instrument") as scope:
        output = compiled(X)
    assert torch.equal(output, model(X) + 1)
    assert within.graphs == bare.graphs
    assert not scope.report


def test_a_backend_of_the_users_that_is_given_another_graph_is_reported() -> None:
    model, backend = Model(), OneMore()
    compiled = torch.compile(model, backend=backend)
    with amanda.apply(seeing("relu"), compiled="instrument") as scope:
        output = compiled(X)
    assert torch.equal(output, model(X) + 1)
    (entry,) = scope.report
    assert entry.what == "graph given to the backend OneMore"
    assert entry.reason.startswith("1 of its nodes")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with amanda.apply(seeing("relu"), compiled="instrument") as scope:
        compiled(X)
    assert not scope.report


def test_the_line_of_a_callable_is_in_the_users_file() -> None:
    with amanda.apply(amanda.Tool()) as scope:
        torch.compile(lambda x: x + 1, backend="eager")(X)
    assert Path(scope.report[0].where.rsplit(":", 1)[0]) == Path(__file__)


def test_a_tool_that_opens_scopes_itself_leaves_compiled_code_as_it_is() -> None:
    class Opens(amanda.Tool):
        intercepts = False

    backend = OneMore()
    function = torch.compile(doubled, backend=backend)
    expected = function(X)
    with amanda.apply(Opens()) as scope:
        assert torch.equal(function(X), expected)
    assert len(backend.graphs) == 1
    assert list(scope.report) == []
