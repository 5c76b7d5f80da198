"""FX graphs with routines in them: of torch.fx.symbolic_trace, and exported programs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.drivers.torch.graph import instrument
from amanda.errors import AmandaError

KINDS = ["conv2d", "batch_norm", "relu_", "flatten", "linear", "dropout"]


class Counting(amanda.Tool):
    """Counts the ops of a graph, and the calls of a routine before each."""

    def __init__(self) -> None:
        self.analysed: list[tuple[str, str]] = []
        self.called: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        name = context.get_op_type()
        self.analysed.append((name, context.get_scope()))
        context.insert_before_op(self.count, name=name)

    def count(self, *values: Any, name: str) -> None:
        assert not any(isinstance(value, torch._subclasses.FakeTensor) for value in values)
        self.called.append(name)


class Masking(amanda.Tool):
    """Masks weights by what they hold when they are analysed."""

    def __init__(self, traceable: bool = True) -> None:
        self.wrap = amanda.traceable if traceable else (lambda routine: routine)
        self.calls = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() in ("conv2d", "linear"):
            weight = context.get_value("weight")
            mask = (weight.abs() > weight.abs().median()).to(weight.dtype)

            def masked(value: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return value * mask

            context.insert_before_op(self.wrap(masked), inputs=["weight"])


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2)
    return nn.Sequential(*layers, nn.Dropout(0.5)).eval()


X = torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)


def masked_output(net: nn.Module) -> Any:
    with torch.no_grad():
        for layer in (net[0], net[4]):
            layer.weight *= layer.weight.abs() > layer.weight.abs().median()
        return net(X)


@pytest.mark.parametrize("kind", ["symbolic_trace", "export"])
def test_the_ops_are_those_of_eager_mode(kind: str) -> None:
    net = network()
    if kind == "export":
        graph, example = torch.export.export(net, (X,)).module(), None
    else:
        graph, example = torch.fx.symbolic_trace(net), (X,)
    counting = Counting()
    instrumented = instrument(graph, counting, example=example)
    assert counting.analysed == [(name, str(i)) for i, name in enumerate(KINDS)]
    assert not counting.called
    for _ in range(2):
        assert torch.equal(instrumented(X), net(X))
    assert counting.called == KINDS * 2


@pytest.mark.parametrize("traceable", [True, False])
def test_a_routine_changes_what_an_op_reads(traceable: bool) -> None:
    tool = Masking(traceable)
    instrumented = instrument(torch.export.export(network(), (X,)).module(), tool)
    tool.calls = 0
    assert torch.equal(instrumented(X), masked_output(network()))
    assert tool.calls == 2


def test_traceable_routines_are_operators_of_a_program_that_is_exported_again(tmp_path: Path) -> None:
    instrumented = instrument(torch.export.export(network(), (X,)).module(), Masking())
    torch.export.save(torch.export.export(instrumented, (X,)), tmp_path / "masked.pt2")
    program = torch.export.load(tmp_path / "masked.pt2")
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("aten.mul.Tensor") == 2
    assert not [name for name in names if "amanda" in name]
    assert torch.equal(program.module()(X), masked_output(network()))


def test_a_graph_in_which_nothing_is_inserted_is_itself() -> None:
    graph = torch.export.export(network(), (X,)).module()
    assert instrument(graph, amanda.Tool()) is graph


def test_sizes_that_change_are_kept() -> None:
    size = torch.export.Dim("size", min=2)
    program = torch.export.export(network(), (X,), dynamic_shapes=({0: size},))
    counting = Counting()
    instrumented = instrument(program.module(), counting)
    more = torch.cat([X, X, X])
    assert torch.equal(instrumented(more), network()(more))
    assert counting.called == KINDS


def test_a_missing_example_is_said() -> None:
    with pytest.raises(AmandaError, match=r"does not say what it is given: .*example="):
        instrument(torch.fx.symbolic_trace(network()), amanda.Tool())
    with pytest.raises(AmandaError, match=r"takes 1 values \(input_1\), the example has 2"):
        instrument(torch.fx.symbolic_trace(network()), amanda.Tool(), example=(X, X))


def test_a_value_that_is_known_later_is_said() -> None:
    def analyse(context: amanda.OpContext) -> None:
        context.get_value(0)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with pytest.raises(AmandaError, match="known when the graph runs"):
        instrument(torch.export.export(network(), (X,)).module(), tool)


def test_an_exception_of_a_routine_is_itself_and_says_where() -> None:
    def fails(value: Any) -> None:
        raise KeyError("lost")

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(fails, inputs=[0]))
    instrumented = instrument(torch.export.export(network(), (X,)).module(), tool)
    with pytest.raises(KeyError, match="lost") as raised:
        instrumented(X)
    assert "conv2d" in "".join(raised.value.__notes__)
