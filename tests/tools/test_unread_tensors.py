"""Tensors that tools cannot read are left, named with the reason, and break no program."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import amanda
from amanda.tools.dump import DumpTool
from amanda.tools.inject import InjectTool
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import StandardMapping
from amanda.tools.nan import NanTool
from amanda.tools.patch import PatchTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool

READING: list[Callable[[], Any]] = [NanTool, StatsTool, lambda: DumpTool(Path("dump"))]


class Closed(torch.Tensor):
    """A class that refuses every op but one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Closed:
        made: Closed = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.neg.default:
            return cls(args[0].inner.neg())
        raise TypeError(f"no {function}")


class Silent(torch.Tensor):
    """A class that refuses every function, and has elements."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"no {function}")


class Measure:
    """No tensor, though it has what tensors have."""

    shape, dtype, device = torch.Size([2]), torch.float32, torch.device("cpu")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls()


@pytest.mark.parametrize("make", READING)
@pytest.mark.parametrize(
    "run", [lambda: -Closed(torch.ones(3)), lambda: nn.ReLU()(torch.rand(3, device="meta"))]
)
def test_the_result_names_what_was_not_read(
    make: Callable[[], Any], run: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tool = make()
    with amanda.apply(tool):
        run()
    assert any("Output 0 of" in one and "is not read: " in one for one in tool.result.remarks)


@pytest.mark.parametrize("make", READING)
def test_fake_tensors_are_left(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tool = make()
    with amanda.apply(tool), FakeTensorMode():
        nn.Sequential(nn.Linear(4, 4), nn.ReLU())(torch.rand(2, 4))
    assert any("FakeTensor" in one for one in tool.result.remarks)


def test_weights_without_elements_are_left_and_named() -> None:
    tool = PruneTool(0.5)
    with amanda.apply(tool), FakeTensorMode():
        nn.Linear(4, 4)(torch.rand(2, 4))
    assert "it has a shape and no elements, as a FakeTensor" in str(tool.result)


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.matmul:
            raise RuntimeError("no")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args)


def test_what_a_class_refuses_to_have_read_is_not_quantised_and_named() -> None:
    x, weight, tool = torch.rand(4, 4).as_subclass(Refusing), torch.rand(4, 4), QuantizeTool("dynamic")
    with amanda.apply(tool):
        torch.matmul(x, weight)
    assert "Refusing refuses to be read: no" in "".join(tool.result.notes())


@pytest.mark.parametrize("make", READING)
def test_gradients_under_vmap_are_left_and_the_same(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run() -> Any:
        return torch.autograd.functional.jacobian(
            lambda x: x.sin() @ torch.ones(4, 4), torch.ones(4), vectorize=True
        )

    bare, tool = run(), make()
    with amanda.apply(tool):
        assert torch.equal(run(), bare)
        assert torch.equal(run(), bare)
    assert any("transform, such as vmap" in one for one in tool.result.remarks)


@pytest.mark.parametrize("make", [*READING, InjectTool])
def test_what_looks_like_a_tensor_and_is_none_is_no_tensor(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with amanda.apply(make()):
        assert type(torch.exp(Measure())) is Measure  # type: ignore[call-overload]


def test_dtype_is_that_of_tensors_alone() -> None:
    found: list[Any] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: found.append(context["dtype"]))
    with amanda.apply(tool):
        torch.ones(1)
    dtype = found[0]
    assert dtype(Measure()) is None
    assert dtype(torch.ones(1, dtype=torch.bfloat16)) == "bfloat16"
    assert dtype(Closed(torch.ones(1))) == "Closed[float32]"
    assert dtype(torch.ones(1).as_subclass(Silent)) == "float32"


def test_a_class_that_refuses_every_function_is_read_where_its_elements_lie() -> None:
    x = torch.arange(3.0).as_subclass(Silent)
    assert tensors_of(x).unread(x) is None
    tool = StatsTool()
    with amanda.apply(tool):
        torch.arange(3.0).as_subclass(Silent)
    assert tool.result.remarks == []


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: PruneTool(0.5), lambda: QuantizeTool("dynamic"), lambda: QuantizeTool("qat"),
        lambda: QuantizeTool("static", activation_bits=None),
        lambda: PatchTool(module="0", heads=[0], num_heads=2, scale=0.0, axis=0),
    ],
)  # fmt: skip
def test_tensor_parallel_layers_compute_what_whole_ones_do(make: Callable[[], Any], mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    results = []
    for is_parallel in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        if is_parallel:
            model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with amanda.apply(make()):
            y = model(torch.linspace(-1, 1, 32).reshape(4, 8))
            y.sum().backward()
        grad = model[0].weight.grad
        results.append((y.detach(), grad.full_tensor() if is_parallel else grad))
    assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore")
def test_a_fault_in_a_dtensor_stays_in_a_dtensor(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    tool = InjectTool(type="mul", fault="value", value=7.0)
    with amanda.apply(tool):
        y = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) * 2
    assert isinstance(y, DTensor)
    assert (y.full_tensor() == 7).sum() == 1
