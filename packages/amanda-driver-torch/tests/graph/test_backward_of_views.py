"""Backward ops of views in compiled graphs: where they are not those of eager mode, the report says so."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda


class Counted(amanda.Tool):
    """Counts executions of backward ops; by observers of no value if `alone`."""

    def __init__(self, alone: bool) -> None:
        self.alone = alone
        self.runs: Counter[tuple[str, str]] = Counter()
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        name = context.get_forward_op_type(), context.get_backward_op().__name__

        @amanda.observer
        def count(*_: Any) -> None:
            self.runs[name] += 1

        if context.get_forward_op_type() != "sum":  # outside of the graph
            context.insert_after_backward_op(count, grad_inputs=[] if self.alone else None)


def one_view(x: torch.Tensor) -> Any:
    return (x * 2).view(2, 2)


def view_beside_its_base(x: torch.Tensor) -> Any:
    y = x * 2
    return y, y.view(2, 2).t()


def view_of_an_input(x: torch.Tensor) -> Any:
    return x.view(2, 2), x * 2


def views_alone(x: torch.Tensor) -> Any:
    return x.view(2, 2)


def view_that_is_read(x: torch.Tensor) -> Any:
    return (x * 2).view(2, 2).exp(), x.view(2, 2).exp()


def write_into_a_view(x: torch.Tensor) -> Any:
    y = x * 2
    y[0].mul_(3)
    return y


def write_into_a_view_that_is_given(x: torch.Tensor) -> Any:
    y = x * 2
    z = y[:2]
    z.mul_(3)
    return y, z


UNLIKE = {
    (view_beside_its_base, "aot_eager", False), (view_of_an_input, "aot_eager", False),
    (views_alone, "aot_eager", False), (views_alone, "aot_eager", True),
    *((write_into_a_view_that_is_given, backend, alone)
      for backend in ("eager", "aot_eager") for alone in (False, True)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it of a graph's inputs
@pytest.mark.parametrize("alone", [False, True], ids=["values", "no-value"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "program",
    [one_view, view_beside_its_base, view_of_an_input, views_alone, view_that_is_read, write_into_a_view,
     write_into_a_view_that_is_given],
)  # fmt: skip
def test_backward_ops_are_those_of_eager_mode_or_reported(
    program: Callable[..., Any], backend: str, alone: bool
) -> None:
    torch._dynamo.reset()
    leaf = torch.ones(4, requires_grad=True)
    runs = []
    for called in (program, torch.compile(program, backend=backend)):
        tool = Counted(alone)
        with amanda.apply(tool, compiled="instrument") as scope:
            outputs = called(leaf * 1)
            sum(output.sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
        runs.append(tool.runs)
    is_unlike = (program, backend, alone) in UNLIKE
    assert (runs[0] != runs[1]) == is_unlike
    entries = [entry for entry in scope.report if "rounded" not in entry.reason]
    assert bool(entries) == is_unlike
