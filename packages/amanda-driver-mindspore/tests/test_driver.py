"""The conformance suite on MindSpore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import mindspore as ms
import mindspore._c_expression as native
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.graph.api import _pynative_executor as executor

import amanda
from amanda.drivers.mindspore import MindSporeDriver
from amanda.testing import DriverTests, Sample, ViewSample, ViewTests, attached

FIRST = [[0.5, 0.25, -1.0], [1.5, -0.75, 2.0], [0.125, 1.0, -0.5]]
SECOND = [[1.0, -0.25, 0.5], [-1.5, 0.625, 1.0], [2.0, -1.0, 0.375]]


class Linear(nn.Cell):
    """A layer without bias."""

    def __init__(self, weight: Sequence[Any]) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.array(weight, np.float64)), name="weight")

    def construct(self, x: Any) -> Any:
        return mint.nn.functional.linear(x, self.weight)


class Network(nn.Cell):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(FIRST)
        self.second = Linear(SECOND)

    def construct(self, x: Any) -> Any:
        return self.second(ops.relu(self.first(x)))


class Calling(nn.Cell):
    """A cell that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        object.__setattr__(self, "function", function)  # a cell that is called is no part of this one

    def construct(self, *args: Any) -> Any:
        return self.function(*args)


def _assign_add(x: Any, y: Any) -> Any:
    ops.AssignAdd()(x, y if isinstance(y, Tensor) else Tensor(y, x.dtype))
    return x


def _batch_norm(x: Any, mean: Any, variance: Any) -> Any:
    ones, zeros = Tensor(np.ones(2, np.float32)), Tensor(np.zeros(2, np.float32))
    return ops.batch_norm(x.astype(ms.float32), mean, variance, ones, zeros, training=True)


@ms.jit
def compiled(x: Any) -> Any:
    return x + 1


class MindSporeSample(Sample):
    """MindSpore, whose nodes are made wherever the grad flag is set."""

    driver = MindSporeDriver
    op_names: ClassVar = {
        "linear": "dense",
        "cat": "concat",
        "pair": "max",
        "many": "logaddexp",
        "add_": "assign_add",
    }
    dtypes = (ms.float64, ms.float32, ms.int64, ms.complex128)
    relu_backward = "ReLUBackward"
    leaf_backward = "AccumulateGrad"

    linear = property(lambda self: mint.nn.functional.linear)
    relu = property(lambda self: ops.relu)
    add = property(lambda self: mint.add)
    add_ = property(lambda self: _assign_add)
    cat = property(lambda self: lambda tensors: ops.cat(tensors))
    pair = property(lambda self: lambda x: mint.max(x, 1))
    item = property(lambda self: Tensor.item)
    many = property(lambda self: Tensor.logaddexp)
    batch_norm = property(lambda self: _batch_norm)

    def running_statistics(self) -> Sequence[Any]:
        return [self.tensor([0.0, 0.0], ms.float32), self.tensor([1.0, 1.0], ms.float32)]

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        tensor = Tensor(np.array(values, np.float64)).astype(dtype or ms.float64)
        if requires_grad:
            tensor.requires_grad_()
        return tensor

    def parameter(self, values: Sequence[Any]) -> Any:
        return Parameter(Tensor(np.array(values, np.float64)), name="weight")

    @contextmanager
    def recording_autodiff(self) -> Iterator[None]:
        executor.set_grad_flag(True)
        yield
        executor.set_grad_flag(False)

    def bits(self, tensor: Any) -> bytes:
        return bytes(tensor.asnumpy().tobytes())

    def numbers(self, tensor: Any) -> list[Any]:
        return list(tensor.asnumpy().flatten().tolist())

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    def overwrite(self, tensor: Any) -> None:
        tensor.copy_(tensor)

    def gradient(self, tensor: Any) -> Any:
        return tensor._grad

    def backward(self, tensor: Any) -> None:
        native.run_backward((tensor,), (ops.ones_like(tensor),), True, False, ())

    def model(self) -> Any:
        return Network()

    def module(self, forward: Any) -> Any:
        return Calling(forward)

    def checkpoint(self, function: Any, tensor: Any) -> Any:
        return ms.recompute(function, tensor, use_reentrant=False)

    def run_uninstrumentable_op(self) -> None:
        compiled(Tensor([1.0]))


class MindSporeViewSample(MindSporeSample, ViewSample):
    """The same, where a slice is a view."""

    part_name = "getitem"
    part = property(lambda self: lambda x: x[0:2])  # type: ignore[assignment]
    write = property(lambda self: _add_into)

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        tensor = super().tensor(values, dtype, requires_grad)
        executor.set_grad_flag(False)  # in a gradient an assignment gives a tensor other memory
        return tensor


def _add_into(x: Any, number: float) -> None:
    for i, value in enumerate((x.asnumpy() + number).tolist()):
        x[i] = value  # `x[:] = y` gives x other memory


def test_an_absent_private_name_is_reported_and_the_driver_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*MindSporeDriver.private_names, "mindspore.graph.api:gone")
    monkeypatch.setattr(MindSporeDriver, "private_names", names)
    with attached(MindSporeDriver), amanda.apply(amanda.Tool()) as scope:
        assert ops.relu(Tensor([-1.0])).asnumpy().tolist() == [0.0]
    (entry,) = scope.report
    assert f"mindspore {ms.__version__} lacks mindspore.graph.api.gone, " in entry.reason


class TestMindSporeDriver(DriverTests):
    """The suite on MindSpore, PyNative."""

    lacks: ClassVar = {
        "out": "no op of MindSpore takes a tensor to write its result into",
        "fork": "a forked child of MindSpore waits for threads that it does not have",
        "batched_values": "MindSpore transforms functions by graphs, which are compiled",
        "grad": "MindSpore transforms functions by graphs, which are compiled",
        "jvp": "MindSpore transforms functions by graphs, which are compiled",
        "vmap": "MindSpore transforms functions by graphs, which are compiled",
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return MindSporeSample()


class TestMindSporeViews(ViewTests):
    """The suite of views on MindSpore, PyNative."""

    @pytest.fixture
    def sample(self) -> ViewSample:
        return MindSporeViewSample()
