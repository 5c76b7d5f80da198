"""Graphs that write memory of which a routine changes a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from view_programs import add_to_chunk, add_to_view, copy_into_slice, fill_diagonal, write_base

import amanda
from amanda import interceptor
from amanda.drivers.torch.graph import instrument

pytestmark = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: without native code compiled callables run op by op", run=False
)


class Same(amanda.Tool):
    """Gives an equal value for each result."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_after_op(self.same))

    def same(self, *values: Any) -> Any:
        return [value * 1.0 if isinstance(value, Tensor) else value for value in values]


@pytest.mark.parametrize("program", [copy_into_slice, add_to_view, fill_diagonal, add_to_chunk, write_base])
def test_a_graph_that_writes_a_changed_view_runs_op_by_op_and_says_so(program: Callable[[], Tensor]) -> None:
    expected = program()
    compiled = torch.compile(program, backend="aot_eager")
    with amanda.apply(Same(), compiled="instrument") as scope:
        for _ in range(2):
            assert torch.equal(compiled(), expected)
    assert torch.equal(compiled(), expected)
    (entry,) = scope.report
    assert "runs op by op" in entry.reason
    assert program.__name__ in entry.what


def test_a_graph_whose_views_nobody_writes_stays_a_graph() -> None:
    compiled = torch.compile(lambda x: torch.relu(x * 2).view(-1).t() + 1, backend="aot_eager")
    with amanda.apply(Same(), compiled="instrument") as scope:
        assert torch.equal(compiled(torch.ones(2, 2)), torch.full((4,), 3.0))
    assert not scope.report


def test_a_traced_graph_that_writes_a_changed_view_is_refused() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            b = torch.zeros_like(x)
            b.view(-1).add_(x.view(-1))
            return b

    graph = torch.fx.symbolic_trace(Writes())
    with pytest.raises(amanda.errors.AmandaError, match="add_ writes into the memory"):
        instrument(graph, Same(), example=(torch.ones(2),))
