"""The control of observed compiled code compares numbers to the bit, and puts the model back."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amanda
from amanda.drivers.torch.graph import Control, control


class Added(amanda.Tool):
    """Sees what linear ops give, and adds something to it."""

    def __init__(self, more: float) -> None:
        self.more, self.elements = more, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_after_op(self.add if self.more else self.see)

    def add(self, output: torch.Tensor) -> torch.Tensor:
        return output + self.more

    @amanda.observer
    def see(self, output: torch.Tensor) -> None:
        self.elements += output.numel()


def controlled(tool: amanda.Tool, noisy: bool = False) -> tuple[Control, bool]:
    """Control a step of a model with dropout; whether model and generator are as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    compiled, x, runs = torch.compile(model, backend="aot_eager"), torch.rand(8, 4), [0]

    def step() -> dict[str, torch.Tensor]:
        runs[0] += noisy
        output = compiled(x)
        output.sum().backward()
        return {"logits": output * (1 + runs[0])}

    before = [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()
    comparison = control(step, model, tool)
    same = all(map(torch.equal, before[0], model.state_dict().values()))
    same = same and torch.equal(before[1], torch.get_rng_state())
    return comparison, same and all(tensor.grad is None for tensor in model.parameters())


def test_an_observed_step_has_the_numbers_of_the_unobserved_one() -> None:
    tool = Added(0)
    comparison, is_restored = controlled(tool)
    assert comparison
    assert is_restored
    assert comparison.compared == 1 + 2 * 6 + 3
    assert str(comparison) == "16 tensors are those of the unobserved run, to the bit"
    assert tool.elements == 8 * 4 + 8 * 2


def test_a_step_that_a_tool_changes_is_told_apart() -> None:
    comparison, is_restored = controlled(Added(1.0))
    assert not comparison
    assert is_restored
    assert comparison.noise == []
    assert dict(comparison.differences)["output['logits']"] == pytest.approx(1, abs=1e-5)
    assert "two unobserved runs are equal to the bit" in str(comparison)


def test_a_step_that_does_not_repeat_itself_is_told() -> None:
    comparison, _ = controlled(Added(0), noisy=True)
    assert [difference.name for difference in comparison.noise] == ["output['logits']"]
    assert str(comparison).endswith("two unobserved runs differ in 1")


@pytest.mark.parametrize("observed", [torch.tensor([1.0, -0.0]), torch.tensor([1.0])])
def test_bits_and_shapes_are_compared(observed: torch.Tensor) -> None:
    outputs = iter([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), observed])
    comparison = control(lambda: next(outputs), nn.Identity(), amanda.Tool())
    assert [difference.name for difference in comparison.differences] == ["output"]


class Counted(amanda.Tool):
    """Counts ops, and sees no value."""

    def __init__(self) -> None:
        self.calls = amanda.Tally()
        self.add_inst_for_op(lambda context: context.insert_after_op(self.calls, outputs=[]))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of inductor's own imports
@pytest.mark.parametrize(("make", "is_told"), [(Counted, False), (lambda: Added(0), True)])
def test_inductor_keeps_values_for_observers_alone_and_the_report_says_so(
    make: Callable[[], amanda.Tool], is_told: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled, x = torch.compile(model), torch.rand(8, 4)

    def step() -> torch.Tensor:
        output: torch.Tensor = compiled(x)
        output.sum().backward()
        return output

    assert is_told or control(step, model, make())
    with amanda.apply(make(), compiled="instrument") as scope:
        step()
    entries = [entry for entry in scope.report if entry.what == "compiled graph of Sequential.forward"]
    assert [("control compares them" in entry.reason) for entry in entries] == [True] * is_told
