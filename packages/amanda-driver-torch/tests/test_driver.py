"""The conformance suite on PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from suite_device import DEVICE

from amanda import interceptor
from amanda.drivers.torch import TorchDriver
from amanda.testing import DriverTests, Sample, ViewSample, ViewTests, never

FALLBACK_GAPS = {
    "test_an_op_looked_up_before_the_scope_is_seen": never("without native code attributes are replaced"),
}
FIRST = [[0.5, 0.25, -1.0], [1.5, -0.75, 2.0], [0.125, 1.0, -0.5]]
SECOND = [[1.0, -0.25, 0.5], [-1.5, 0.625, 1.0], [2.0, -1.0, 0.375]]


class Network(torch.nn.Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.second = torch.nn.Linear(3, 3, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor(FIRST))
            self.second.weight.copy_(torch.tensor(SECOND))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(F.relu(self.first(x)))


class Calling(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        object.__setattr__(self, "function", function)  # a module that is called is no part of this one

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _batch_norm(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
    return F.batch_norm(x, mean, variance, training=True)


class TorchSample(Sample):
    """PyTorch."""

    driver = TorchDriver
    op_names: ClassVar = {"pair": "aminmax", "many": "linear"}
    dtypes = (torch.float64, torch.float32, torch.int64, torch.complex128)
    relu_backward = "ReluBackward0"
    leaf_backward = "AccumulateGrad"

    linear = property(lambda self: F.linear)
    relu = property(lambda self: torch.relu)
    add = property(lambda self: torch.add)
    add_ = property(lambda self: torch.Tensor.add_)
    cat = property(lambda self: torch.cat)
    pair = property(lambda self: torch.aminmax)
    item = property(lambda self: torch.Tensor.item)
    many = property(lambda self: F.linear)
    batch_norm = property(lambda self: _batch_norm)

    def running_statistics(self) -> Sequence[Any]:
        return [self.tensor([0.0, 0.0]), self.tensor([1.0, 1.0])]

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        dtype = dtype or torch.float64
        return torch.tensor(values, dtype=dtype, device=DEVICE, requires_grad=requires_grad)

    def parameter(self, values: Sequence[Any]) -> Any:
        return torch.nn.Parameter(self.tensor(values))

    def bits(self, tensor: Any) -> bytes:
        return bytes(tensor.detach().cpu().numpy().tobytes())

    def numbers(self, tensor: Any) -> list[Any]:
        return list(tensor.detach().flatten().tolist())

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)

    def overwrite(self, tensor: Any) -> None:
        tensor.mul_(1)

    def backward(self, tensor: Any) -> None:
        tensor.sum().backward()

    def model(self) -> Any:
        return Network().to(DEVICE)

    def module(self, forward: Any) -> Any:
        return Calling(forward)

    def checkpoint(self, function: Any, tensor: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, tensor, use_reentrant=False)

    def vmap(self, function: Any) -> Any:
        return torch.func.vmap(function)

    def grad(self, function: Any) -> Any:
        return torch.func.grad(function)

    def jvp(self, function: Any) -> Any:
        return lambda x, tangent: torch.func.jvp(function, (x,), (tangent,))[1]

    def run_uninstrumentable_op(self) -> None:
        torch.fx.symbolic_trace(lambda x: torch.relu(x))


class TorchViewSample(TorchSample, ViewSample):
    """PyTorch, whose slices are views."""

    part_name = "__getitem__"

    def part(self, x: Any) -> Any:
        return x[:2]


class TestViews(ViewTests):
    """The suite of views on PyTorch."""

    @pytest.fixture
    def sample(self) -> ViewSample:
        return TorchViewSample()


class ReentrantSample(TorchSample):
    """PyTorch with checkpoints that start a backward pass of their own."""

    def checkpoint(self, function: Any, tensor: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, tensor, use_reentrant=True)


# torch's own tangents, at their first use
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
class TestTorchDriver(DriverTests):
    """The suite on PyTorch, eager."""

    gaps: ClassVar = {} if interceptor.NATIVE else FALLBACK_GAPS

    @pytest.fixture
    def sample(self) -> Sample:
        return TorchSample()


@pytest.mark.parametrize(
    "test",
    [
        DriverTests.test_ops_computed_again_by_a_checkpoint_have_the_ids_of_the_first_run,
        DriverTests.test_a_checkpoint_outside_modules_computes_the_same_ops_again,
        DriverTests.test_a_checkpoint_computes_the_same_executions_again,
        DriverTests.test_a_checkpoint_whose_scope_has_closed_runs_with_the_tools_of_the_backward_pass,
    ],
)
def test_reentrant_checkpoints_too(test: Any) -> None:
    test(DriverTests(), ReentrantSample())
