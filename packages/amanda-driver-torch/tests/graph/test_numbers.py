"""Numbers that a compiled function is given: dynamo makes symbols of them, of floats by way of tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import RoutineError


def scaled(x: torch.Tensor, factor: float, rows: int) -> torch.Tensor:
    return (torch.relu(x) * factor + factor).reshape(rows, -1)


class Seeing(amanda.Tool):
    """Notes the ops, and what the product and the reshape are given beside the tensor."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, str]] = []
        self.values: list[Any] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        name = context.get_op_type()
        context.insert_after_op(amanda.observer(lambda *_: self.ops.append((str(context.namespace), name))))
        if name in ("mul", "reshape"):
            context.insert_before_op(self.see)

    def see(self, x: torch.Tensor, number: Any) -> tuple[torch.Tensor, Any]:
        self.values.append(number)
        return x, number


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_that_change_are_numbers_to_routines(backend: str) -> None:
    x = torch.linspace(-1, 1, 6)
    compiled = torch.compile(scaled, backend=backend)
    tool = Seeing()
    for factor, rows in ((0.5, 2), (0.25, 3), (3.0, 6), (7.5, 1)):
        tool.values.clear()
        tool.ops.clear()
        with amanda.apply(tool, compiled="instrument") as scope:
            output = compiled(x, factor, rows)
        assert torch.equal(output, scaled(x, factor, rows))
        assert [type(value) for value in tool.values] == [float, tuple]
        assert tool.values == [factor, (rows, -1)]
        assert [name for _, name in tool.ops] == ["relu", "mul", "add", "reshape"]
        assert all(namespace.endswith("graph") for namespace, _ in tool.ops)
        assert not scope.report


class Halving(amanda.Tool):
    """Halves what batch normalisation gives."""

    def __init__(self, mark: Callable[[Any], Any]) -> None:
        self.routine = mark(lambda output: output / 2)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "batch_norm":
            context.insert_after_op(self.routine)


@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.traceable])
def test_batch_normalisation_is_instrumented_where_all_is_dynamic(mark: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    x, model = torch.rand(2, 3, 4, 4), nn.BatchNorm2d(3)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    with amanda.apply(Halving(mark), compiled="instrument"):
        output = compiled(x)
        output.sum().backward()
    torch.testing.assert_close(output, expected / 2)
    assert int(model.num_batches_tracked) == 2


def test_a_number_that_python_changes_is_an_error() -> None:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "mul":
            context.insert_before_op(lambda x, number: (x, number * 3))

    tool.add_inst_for_op(analyse)
    compiled = torch.compile(scaled, backend="aot_eager")
    with (
        pytest.raises(RoutineError, match=r"changed value 1, 0.5, to 1.5; .* mark it @amanda.traceable"),
        amanda.apply(tool, compiled="instrument"),
    ):
        compiled(torch.ones(4), 0.5, 2)
