"""Tensor subclasses and modes of others, in a scope and around it."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from programs import bits, same_under
from torch.masked import masked_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amanda

X = torch.linspace(-1, 1, 20).reshape(5, 4)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def gradients(model: torch.nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(harmless: amanda.Tool) -> None:
    def run() -> list[Any]:
        rows = [X[:2].clone(), X[2:].clone()]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        weight = torch.ones(4, 3, requires_grad=True)
        y = torch.relu(jagged @ weight)
        y.values().sum().backward()
        strided = torch.nested.nested_tensor(rows)
        return [weight.grad, y.values(), torch.nested.to_padded_tensor(torch.relu(strided) * 2, 0.0)]

    same_under(harmless, run)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors", "ignore:It is not recommended")
def test_masked_tensors(harmless: amanda.Tool) -> None:
    def run() -> list[Any]:
        masked = masked_tensor(X.clone(), X > 0, requires_grad=True)
        total = (masked * 2).sum()
        total.backward()
        return [total.get_data(), masked.grad.get_data()]

    same_under(harmless, run)


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed = torch.distributed
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_distributed_tensors_and_models(harmless: amanda.Tool) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))

    def run() -> list[Any]:
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        y = torch.relu(distribute_tensor(X, mesh, [Replicate()]) @ weight)
        y.sum().backward()
        assert isinstance(y, DTensor)
        assert isinstance(weight.grad, DTensor)
        model = torch.nn.parallel.DistributedDataParallel(network())
        model(X).sum().backward()
        return [y.full_tensor(), weight.grad.full_tensor(), *gradients(model)]

    same_under(harmless, run)


def test_parameters_without_a_shape_get_theirs(harmless: amanda.Tool) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        layers = torch.nn.LazyConv1d(3, 2), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(2)
        model = torch.nn.Sequential(*layers)
        y = model(X[None])
        y.sum().backward()
        assert type(model[0].weight) is torch.nn.Parameter
        return [y, *gradients(model)]

    same_under(harmless, run)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch makes its own rules
def test_dual_tensors_carry_their_tangents(harmless: amanda.Tool) -> None:
    def run() -> list[Any]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(X, torch.ones_like(X))
            return [*forward_ad.unpack_dual(network()(dual))]

    same_under(harmless, run)


class Functions(TorchFunctionMode):
    """Notes what it is brought."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """Notes what reaches it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.log.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_in_a_scope_are_brought_the_program_and_no_tool(harmless: amanda.Tool) -> None:
    def run() -> list[Any]:
        log: list[str] = []
        model = network()
        with Dispatched(log), Functions(log), FlopCounterMode(display=False) as flops:
            model(X).sum().backward()
        return [log, flops.get_total_flops(), *gradients(model)]

    same_under(harmless, run)


def test_modes_around_a_scope_are_brought_the_program_and_no_tool(harmless: amanda.Tool) -> None:
    log: list[str] = []
    model = network()

    def run() -> list[Any]:
        log.clear()
        model.zero_grad()
        model(X).sum().backward()
        return [[*log], *gradients(model)]

    with Functions(log), Dispatched(log):
        run()  # until it there are no gradients to be set to zero
        bare = bits(run())
        with amanda.apply(harmless):
            assert bits(run()) == bare
            assert bits(run()) == bare
        assert bits(run()) == bare


def test_a_scope_and_a_mode_may_end_in_any_order(harmless: amanda.Tool) -> None:
    scope = amanda.apply(harmless)
    with Functions([]):
        scope.start()
        network()(X)
    network()(X).sum().backward()
    scope.stop()
    assert type(torch.nn.Module.__call__).__name__ == "function"
    assert torch._C._len_torch_function_stack() == 0
