"""torch.func's transforms in compiled functions: their ops run as they are, and it is reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda


def per_row(x: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = torch.vmap(torch.sin)(x)
    return torch.cos(rows)


def slope(x: torch.Tensor) -> torch.Tensor:
    slopes: torch.Tensor = torch.func.grad(lambda value: torch.sin(value).sum())(x)
    return torch.cos(slopes)


@pytest.mark.parametrize("program", [per_row, slope])
@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.traceable])
def test_ops_outside_of_a_transform_are_instrumented(
    program: Callable[[torch.Tensor], torch.Tensor], mark: Callable[[Any], Any]
) -> None:
    x = torch.rand(2, 3)
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() in ("sin", "cos"):
            context.insert_after_op(mark(lambda output: output * 2))

    tool.add_inst_for_op(analyse)
    compiled = torch.compile(program, backend="aot_eager")
    bare = program(x)
    with amanda.apply(tool, compiled="instrument") as scope:
        assert torch.equal(compiled(x), 2 * bare)
    assert [line.what for line in scope.report] == ["a torch.func transform (vmap, grad, ...)"]
    assert torch.equal(compiled(x), bare)
