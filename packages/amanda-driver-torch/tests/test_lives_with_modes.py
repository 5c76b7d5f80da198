"""Modes of torch that a scope meets: results are those without a tool."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import amanda


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    )


X = torch.linspace(-1, 1, 20).reshape(5, 4)


def results(mode: Callable[[], Any], backward: bool) -> list[torch.Tensor]:
    tensors = []
    for _ in range(2):
        net = network()
        with mode():
            output = net(X)
        tensors.append(output)
        if backward:
            output.float().sum().backward()
            tensors += [p.grad for p in net.parameters() if p.grad is not None]
    return tensors


@pytest.mark.parametrize(
    ("mode", "backward"),
    [
        (torch.no_grad, False),
        (torch.inference_mode, False),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), True),
        (lambda: torch.autograd.set_detect_anomaly(True, check_nan=True), True),
        (contextlib.nullcontext, True),
    ],
    ids=["no_grad", "inference_mode", "autocast", "anomaly", "none"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_results_are_those_without_a_tool(
    harmless: amanda.Tool, mode: Callable[[], Any], backward: bool
) -> None:
    bare = results(mode, backward)
    with amanda.apply(harmless):
        instrumented = results(mode, backward)
    for expected, value in zip(bare, instrumented, strict=True):
        assert torch.equal(expected, value)
        assert (expected.dtype, expected.requires_grad, expected.is_inference()) == (
            value.dtype,
            value.requires_grad,
            value.is_inference(),
        )


def test_the_profiler_records_the_same_kernels_under_an_empty_tool() -> None:
    def kernels() -> list[str]:
        net = network()
        with torch.profiler.profile() as profile:
            net(X).sum().backward()
        return [event.name for event in profile.events()]

    bare = kernels()
    with amanda.apply(amanda.Tool()):
        assert kernels() == bare == kernels()


def test_meta_tensors_stay_meta_and_have_plans_of_their_own(harmless: amanda.Tool) -> None:
    with amanda.apply(harmless):
        for device in ("cpu", "meta", "cpu", "meta"):
            net = network().to(device)
            loss = net(X.to(device)).sum()
            loss.backward()
            assert loss.device.type == device
            assert net[0].weight.grad.device.type == device


def test_fake_tensors_stay_fake_and_take_no_memory(harmless: amanda.Tool) -> None:
    with amanda.apply(harmless), FakeTensorMode():
        net = torch.nn.Sequential(torch.nn.Linear(40_000, 40_000), torch.nn.ReLU())
        for _ in range(2):
            output = net(torch.empty(5, 40_000))
            output.sum().backward()
        assert isinstance(output, FakeTensor)
        assert isinstance(net[0].weight.grad, FakeTensor)


def test_a_wrapper_subclass_keeps_its_type_and_values(harmless: amanda.Tool) -> None:
    def run() -> tuple[TwoTensor, Any]:
        torch.manual_seed(0)
        x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
        weight = torch.nn.Parameter(torch.randn(4, 4))
        y = torch.relu(x @ weight)
        y.sum().backward()
        return y, weight.grad

    bare = run()
    with amanda.apply(harmless):
        instrumented = [run() for _ in range(2)]
    for y, grad in instrumented:
        assert isinstance(y, TwoTensor)
        assert isinstance(grad, TwoTensor)
        assert torch.equal(y.a, bare[0].a)
        assert torch.equal(grad.b, bare[1].b)


def test_complex_tensors_are_bit_identical(harmless: amanda.Tool) -> None:
    def run() -> list[torch.Tensor]:
        z = torch.complex(X, -X).requires_grad_()
        y = (z @ z.mH).abs().sum() + torch.fft.fft(z).real.sum()
        y.backward()
        return [y, z.grad]  # type: ignore[list-item]

    bare = run()
    with amanda.apply(harmless):
        assert all(map(torch.equal, bare, run()))
        assert all(map(torch.equal, bare, run()))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_are_the_same(harmless: amanda.Tool) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        table = torch.nn.Embedding(10, 3, sparse=True)
        table(torch.tensor([1, 2, 1])).sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad.to_dense()

    bare = run()
    with amanda.apply(harmless):
        assert torch.equal(run(), bare)
        assert torch.equal(run(), bare)
