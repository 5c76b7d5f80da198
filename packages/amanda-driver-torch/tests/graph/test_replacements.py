"""Replacements of ops in compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import ActionError, RoutineError


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class FromAfar(amanda.Tool):
    """Replaces a ReLU by a function of what the layer before it reads."""

    def __init__(self) -> None:
        self.layer = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            self.layer = context.get_op_id()
        elif context.get_op_type() == "relu":
            context.replace_op(self.compute, reads=[(self.layer, 0)])

    def compute(self, x: Any, reads: Any) -> Any:
        return x + reads[0]


def test_a_replacement_that_reads_inputs_of_other_ops_is_refused() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend="aot_eager")
    with (
        amanda.apply(FromAfar(), compiled="instrument"),
        pytest.raises(ActionError, match="of relu is to read inputs of other ops") as caught,
    ):
        compiled(torch.rand(2, 3))
    assert "FromAfar" in "".join(caught.value.__notes__)


def test_ops_in_place_are_replaced_with_the_gradients_of_eager_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Threshold(0.1, 2.0, inplace=True), nn.Linear(4, 2))
    x = torch.rand(2, 3)
    tool = amanda.Tool()

    def shifted(value: Any, *inputs: Any, original: Any) -> Any:
        return original(value, *inputs) * value + 1

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "threshold_":
            context.replace_op(shifted)

    tool.add_inst_for_op(analyse)
    results = []
    for run, compiled in ((model, "eager"), (torch.compile(model, backend="aot_eager"), "instrument")):
        model.zero_grad()
        with amanda.apply(tool, compiled=compiled):
            y = run(x)
            y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad.clone() for parameter in model.parameters())])  # type: ignore[union-attr]
    assert not torch.equal(results[0][0], model(x))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (lambda x: None, "returned None where relu gives a tensor"),
        (lambda x: 1.0, "returned float where relu gives a tensor"),
        (lambda x: (x, x), "returned 2 outputs; relu gives 1"),
    ],
)
def test_a_replacement_that_returns_something_else_than_outputs_is_an_error(
    results: Any, message: str
) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda c: c.replace_op(results) if c.get_op_type() == "relu" else None)
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend="aot_eager")
    with (
        amanda.apply(tool, compiled="instrument"),
        pytest.raises(RoutineError, match=message) as caught,
    ):
        compiled(torch.rand(2, 3))
    assert "of relu (op " in caught.value.__notes__[0]
