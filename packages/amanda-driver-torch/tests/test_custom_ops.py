"""Custom ops of torch.library and registered C++ ops: each call is one op."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import amanda

OpsOf = Callable[[Callable[[], Any]], list[str]]

X = torch.tensor([1.0, 2.0])


@torch.library.custom_op("amanda_tests::scaled_sin", mutates_args=())
def scaled_sin(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x.sin() * scale


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _scaled_cos(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (x,) = ctx.saved_tensors
    return grad * x.cos() * ctx.scale, None


scaled_sin.register_autograd(_scaled_cos, setup_context=_keep)

CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "definition": scaled_sin,
    "packet": torch.ops.amanda_tests.scaled_sin,
    "overload": torch.ops.amanda_tests.scaled_sin.default,
}


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("amanda_defined", "DEF") as defined:
        defined.define("bump(Tensor x, int by=1) -> Tensor")
        defined.define("bump_(Tensor(a!) x, int by=1) -> Tensor(a!)")
        defined.impl("bump", lambda x, by=1: x + by, "CPU")
        defined.impl("bump_", lambda x, by=1: x.add_(by), "CPU")
        yield defined


@pytest.mark.parametrize("way", CALLS)
def test_a_custom_op_is_one_op_whichever_way_it_is_called(way: str, ops_of: OpsOf) -> None:
    assert ops_of(lambda: CALLS[way](X)) == ["scaled_sin", "sin", "__mul__"]


@pytest.mark.parametrize("way", CALLS)
def test_a_custom_op_is_one_op_where_autograd_records_it(way: str, ops_of: OpsOf) -> None:
    x = X.clone().requires_grad_()
    assert ops_of(lambda: CALLS[way](x)) == ["scaled_sin", "sin", "__mul__"]


def test_the_inputs_of_a_custom_op_are_in_the_order_of_its_schema(acting: Any, applied: Any) -> None:
    calls: list[list[Any]] = []
    tool = acting("insert_before_op", "scaled_sin", lambda *inputs: calls.append([*inputs]))
    applied(tool, lambda: CALLS["packet"](scale=3.0, x=X))
    assert [inputs[0] is X and inputs[1] for inputs in calls] == [3.0] * 3


def test_the_backward_op_of_a_custom_op_is_mapped_to_it(backward_ops: Any, applied: Any) -> None:
    x = X.clone().requires_grad_()
    tool = backward_ops()
    applied(tool, lambda: scaled_sin(x).sum().backward())
    assert [forward for forward, _ in tool.pairs] == ["sum", "scaled_sin", "scaled_sin"]
    assert tool.pairs[-1] == ("scaled_sin", "AccumulateGrad")


def test_an_op_of_a_library_is_one_op(library: Any, ops_of: OpsOf) -> None:
    assert ops_of(lambda: torch.ops.amanda_defined.bump(X, by=2)) == ["bump", "__add__"]
    assert ops_of(lambda: torch.ops.amanda_defined.bump.default(X)) == ["bump", "__add__"]


def test_a_changed_value_is_written_into_what_a_custom_op_writes(
    library: Any, acting: Any, applied: Any
) -> None:
    def program() -> tuple[bool, list[float]]:
        x = torch.zeros(2)
        return torch.ops.amanda_defined.bump_(x, 3) is x, x.tolist()

    tool = acting("insert_after_op", "bump_", lambda x: x * 10)
    assert program() == (True, [3, 3])
    assert applied(tool, program) == (True, [30, 30])


def test_an_op_registered_inside_the_scope_is_seen() -> None:
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    with torch.library._scoped_library("amanda_late", "DEF") as late, amanda.apply(tool):
        late.define("twice(Tensor x) -> Tensor")
        late.impl("twice", lambda x: x * 2, "CPU")
        torch.ops.amanda_late.twice(X)
        torch.ops.amanda_late.twice.default(X)
    assert names == ["twice", "__mul__"] * 2


def test_a_cpp_op_is_one_op(ops_of: OpsOf) -> None:
    assert ops_of(lambda: torch.ops.aten.mul(X, X)) == ["mul"]
    assert ops_of(lambda: torch.ops.aten.mul.Tensor(X, X)) == ["mul"]
    assert ops_of(lambda: torch.ops.aten.linear.default(X, X[None])) == ["__getitem__", "linear"]
