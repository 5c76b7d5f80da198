"""Statistics in graphs that torch.compile instruments: those of eager mode, and the step's own numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.drivers.torch.graph import control
from amanda.tools.stats import Accumulator, Bins, Measured, StatsResult, StatsTool

X = torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def measured(call: Callable[[Any], torch.Tensor], **options: Any) -> StatsResult:
    tool = StatsTool()
    with amanda.apply(tool, **options) as scope:
        for _ in range(2):
            call(X).square().sum().backward()  # type: ignore[no-untyped-call]
    assert options or not scope.report
    return tool.result


def place(one: Measured) -> tuple[str, ...]:
    return one.phase, one.type, one.module, one.tensor


def test_statistics_in_a_graph_are_those_of_eager_mode() -> None:
    net = network()
    torch._dynamo.reset()
    eager = {place(one): one for one in measured(net).measured}
    found = {
        place(one): one
        for one in measured(torch.compile(net, backend="aot_eager"), compiled="instrument").measured
    }
    assert {one for one in eager if one[2]} <= found.keys()
    for key in eager.keys() & found.keys():
        one, other = found[key], eager[key]
        assert (one.executions, one.statistics.elements) == (other.executions, other.statistics.elements)
        assert one.statistics.zeros == other.statistics.zeros
        told, wanted = (list(dataclasses.asdict(it.statistics).values()) for it in (one, other))
        assert told == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_statistics_leave_a_compiled_step_its_numbers() -> None:
    net = network()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager")

    def step() -> torch.Tensor:
        output: torch.Tensor = compiled(X)
        output.sum().backward()  # type: ignore[no-untyped-call]
        return output

    found = control(step, net, StatsTool())
    assert found
    assert found.compared == 1 + 2 * 4


class Spread(amanda.Tool):
    """Measures what matrix products give, by the accumulators of `stats`."""

    def __init__(self) -> None:
        self.products = Accumulator(Bins.of(4096))
        self.calls = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_after_op(self.see, outputs=[0])

    @amanda.observer
    def see(self, output: torch.Tensor) -> None:
        self.products.add(output)

    @amanda.gathered(see)
    def see_all(self, executions: amanda.action.Executions) -> None:
        self.calls += 1
        Accumulator.add_all((self.products, one.values[0]) for one in executions)


def test_a_tool_of_ones_own_measures_many_tensors_in_one_call() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    torch._dynamo.reset()
    eager, graph = Spread(), Spread()
    with torch.no_grad():
        with amanda.apply(eager):
            net(torch.ones(3, 8))
        with amanda.apply(graph, compiled="instrument"):
            torch.compile(net, backend="aot_eager")(torch.ones(3, 8))
    assert (eager.calls, graph.calls) == (0, 1)
    assert graph.products.statistics().elements == 5 * 3 * 8
    assert graph.products.sketch() == eager.products.sketch()
