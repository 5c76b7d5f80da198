"""Ops that the compiler leaves to Python, between its graphs and where it captures none."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import amanda

# Dynamo asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Doubling(amanda.Tool):
    """Doubles what linear ops give, by a routine that a compiler would like to capture."""

    def __init__(self, traceable: bool) -> None:
        self.analysed: list[str] = []
        self.scopes: list[str] = []
        self.calls = 0
        self.routine = amanda.traceable(self.doubled) if traceable else self.counted
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            self.analysed.append(str(context.namespace).split("/")[-1])
            self.scopes.append(context.get_scope())
            context.insert_after_op(self.routine)

    def counted(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logging.getLogger(__name__).info("at a linear op")
        return self.doubled(output)

    def doubled(self, output: torch.Tensor) -> torch.Tensor:
        return sum([output.clone() for _ in range(2)], torch.zeros_like(output))


class Net(nn.Module):
    """A module of the user's own, of one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.parametrize("traceable", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_module_of_torch_that_compiles_itself_runs_op_by_op(traceable: bool, before: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.rand(2, 3)
    bare = model(x)
    model.compile(backend="aot_eager")
    if before:
        assert torch.equal(model(x), bare)
    tool = Doubling(traceable)
    for calls in (2, 4):
        with amanda.apply(tool, compiled="instrument") as scope:
            for _ in range(2):
                assert torch.equal(model(x), 2 * bare)
        assert tool.calls == (0 if traceable else calls)
        assert not scope.report
    # Up to torch 2.13 dynamo leaves the `forward` of torch's own modules to Python.
    in_graphs = torch.torch_version.TorchVersion(torch.__version__) >= (2, 14)
    assert tool.analysed[:1] == ["graph" if in_graphs else "eager"]
    assert torch.equal(model(x), bare)
    assert in_graphs or not counters["frames"]["total"]


@pytest.mark.parametrize("before", [True, False])
def test_modules_that_compile_themselves_are_instrumented_in_graphs(before: bool) -> None:
    nets = [Net(), Net()]
    model, x = nn.Sequential(*nets), torch.rand(2, 3)
    tool = Doubling(traceable=True)
    with amanda.apply(Doubling(traceable=True)):
        expected = model(x)
    bare = model(x)
    for module in (model, nets[1]):
        module.compile(backend="aot_eager")
    if before:
        assert torch.equal(model(x), bare)
    for _ in range(2):
        with amanda.apply(tool, compiled="instrument") as scope:
            assert torch.equal(model(x), expected)
            assert torch.equal(nets[1](x), nets[1].layer(x))
        assert not scope.report
    assert tool.analysed[:2] == ["graph", "graph"]
    assert tool.scopes[:2] == ["0.layer", "1.layer"]
    assert torch.equal(model(x), bare)


def test_routines_at_ops_between_graphs_are_the_users_python() -> None:
    layer = nn.Linear(3, 3)

    @torch._dynamo.decorators.skip
    def by_hand(x: torch.Tensor) -> Any:
        return layer(x)

    @torch.compile(backend="aot_eager")
    def run(x: torch.Tensor) -> Any:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return by_hand(y) + 1

    x = torch.rand(2, 3)
    bare = layer(x).detach()
    tool = Doubling(traceable=False)
    with torch.no_grad(), amanda.apply(tool, compiled="instrument"):
        results = [run(x) for _ in range(3)]
    for result in results:
        assert torch.equal(result, 2 * bare + 1)
    assert tool.calls == 3


def run_under(stance: str, compiled: Any, before: str = "default") -> tuple[Doubling, str, bool]:
    """Run a compiled model; return the tool, the report, and whether the tool acted."""
    tool = Doubling(traceable=True)
    model, x = Net(), torch.rand(2, 3)
    bare = model(x)
    model.compile(backend="aot_eager")
    with torch.compiler.set_stance(before), amanda.apply(tool, compiled=compiled) as scope:
        if stance == "before":
            output = model(x)
        else:
            with torch.compiler.set_stance(stance):
                output = model(x)
    return tool, str(scope.report), torch.equal(output, 2 * bare)


def test_a_stance_that_asks_to_compile_leaves_it_to_the_scope_how() -> None:
    tool, report, has_acted = run_under("default", "instrument")
    assert has_acted
    assert tool.analysed == ["graph"]
    assert "everything" in report


def test_a_stance_that_asks_for_python_gets_it() -> None:
    for stance, before in (("before", "force_eager"), ("force_eager", "default")):
        tool, report, has_acted = run_under(stance, "instrument", before)
        assert has_acted
        assert tool.analysed == ["eager"]
        assert "everything" in report


def test_a_stance_that_hides_ops_is_reported() -> None:
    for compiled, stance in (("eager", "default"), ("instrument", "eager_on_recompile")):
        # Whether the tool acts in what dynamo makes of hidden ops depends on the version of torch.
        assert f"stance is {stance!r}" in run_under(stance, compiled)[1]
