"""Tools that count ops leave compiled code as it is: their observers are called when the graph has run."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.drivers.torch.graph import control


class Counting(amanda.Tool):
    """Counts executions of ops and of backward ops by type, each with an observer of no value."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.count, inputs=[], kind=context.get_op_type())

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_after_backward_op(self.count, grad_inputs=[], kind=context.get_backward_op().__name__)

    @amanda.observer
    def count(self, kind: str) -> None:
        self.calls[kind] += 1


class Branches(nn.Module):
    """A module with an output that needs no gradient, and one behind an op that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.first(x)).relu_()
        return self.second(hidden).sigmoid(), self.second(hidden.detach()).detach().exp()


X = torch.linspace(-1, 1, 32).reshape(8, 4)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that AOTAutograd is given."""
    modules: list[Any] = []
    kind = type(lookup_backend("aot_eager_default_partitioner"))
    original = kind.__call__

    def call(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        modules.append(module)
        return original(self, module, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", call)
    return modules


def test_counts_are_those_of_eager_mode_and_the_graph_is_compiled_as_it_is(compilations: list[Any]) -> None:
    eager, tool, model = Counting(), Counting(), Branches()
    with amanda.apply(eager):
        model(X)[0].backward(torch.ones(8, 4))
    compiled = torch.compile(model, backend="aot_eager_default_partitioner")
    counted = []
    for _ in range(3):
        tool.calls.clear()
        with amanda.apply(tool, compiled="instrument") as scope:
            compiled(X)[0].backward(torch.ones(8, 4))
        assert not scope.report
        counted.append(dict(tool.calls))
    assert counted == 3 * [dict(eager.calls)]
    compiled(X)[0].backward(torch.ones(8, 4))
    assert dict(tool.calls) == counted[-1]
    (graph,) = compilations
    assert not any("amanda" in str(getattr(node.target, "__module__", "")) for node in graph.graph.nodes)


def test_numbers_of_a_counted_step_are_those_of_the_step_without_tools() -> None:
    model = Branches()
    compiled = torch.compile(model, backend="aot_eager")

    def step() -> torch.Tensor:
        output: torch.Tensor = compiled(X)[0]
        output.sum().backward()
        return output

    assert control(step, model, Counting())


def test_a_backward_pass_is_counted_as_often_as_it_runs() -> None:
    tool, model = Counting(), nn.Linear(4, 1)
    compiled = torch.compile(model, backend="aot_eager")
    with amanda.apply(tool, compiled="instrument"):
        with torch.no_grad():
            compiled(X)
        assert dict(tool.calls) == {"linear": 1}
        loss = compiled(X).sum()
        assert tool.calls["AddmmBackward0"] == 0
        loss.backward(retain_graph=True)
        loss.backward()
        assert tool.calls["linear"] == 2
        assert tool.calls["AddmmBackward0"] == 2
        second_loss = compiled(X).sum()
    second_loss.backward()
    assert tool.calls["AddmmBackward0"] == 2


@pytest.mark.parametrize("observes_values", [False, True])
def test_observers_are_not_called_in_a_backward_pass_under_disabled(observes_values: bool) -> None:
    kinds: list[str] = []
    selected = None if observes_values else []

    def analyse(context: amanda.OpContext) -> None:
        kind = context.get_backward_op().__name__
        context.insert_after_backward_op(amanda.observer(lambda *_: kinds.append(kind)), grad_inputs=selected)

    tool, compiled = amanda.Tool(), torch.compile(nn.Linear(4, 1), backend="aot_eager")
    tool.add_inst_for_op(analyse, backward=True)
    with amanda.apply(tool, compiled="instrument"):
        loss = compiled(X).sum()
        with amanda.disabled():
            loss.backward(retain_graph=True)
        assert not kinds
        loss.backward()
        assert kinds


def test_ops_that_a_checkpoint_runs_again_are_counted_again() -> None:
    tool, model = Counting(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    with amanda.apply(tool, compiled="instrument"):
        loss = checkpoint(compiled, X, use_reentrant=False).sum()
        assert (tool.calls["linear"], tool.calls["tanh"]) == (1, 1)
        loss.backward()
    assert (tool.calls["linear"], tool.calls["tanh"]) == (2, 2)
    assert tool.calls["TanhBackward0"] == 1


def test_an_exception_of_an_observer_names_the_op() -> None:
    def refuse() -> None:
        raise ValueError("no")

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(amanda.observer(refuse), outputs=[]))
    with amanda.apply(tool, compiled="instrument"), pytest.raises(ValueError, match="no") as caught:
        torch.compile(torch.exp, backend="aot_eager")(X)
    assert "exp" in "".join(getattr(caught.value, "__notes__", ["exp"]))  # Python 3.10 has no notes


def test_an_observer_whose_tool_has_another_routine_at_the_op_keeps_its_turn() -> None:
    turns: list[str] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        kind = context.get_op_type()
        context.insert_before_op(amanda.observer(lambda: turns.append(f"before {kind}")), inputs=[])
        context.insert_after_op(lambda output: turns.append(f"after {kind}"))

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool, compiled="instrument"):
        torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(X)
    assert turns == ["before exp", "after exp", "before sin", "after sin"]
