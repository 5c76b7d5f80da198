"""Faults that the first Amanda had."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import children
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import amanda


class Ids(amanda.Tool):
    """The ids of the ops of one name, one for each execution."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ids: list[int] = []
        self.add_inst_for_op(self._watch)

    def _watch(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == self.name:
            context.insert_before_op(self._note, inputs=[], op_id=context.get_op_id())

    def _note(self, op_id: int) -> None:
        self.ids.append(op_id)


def ids_of(name: str, program: Callable[[], Any], runs: int = 1) -> list[int]:
    tool = Ids(name)
    for _ in range(runs):
        with amanda.apply(tool):
            program()
    return tool.ids


X = torch.ones(1, 1, 4, 4)
W = torch.ones(1, 1, 2, 2)


def two_sums() -> None:
    X.sum(0)
    X.sum(1)


def two_convolutions() -> None:
    F.conv2d(X, W, stride=1)
    F.conv2d(X, W, stride=2)


def one_line() -> None:
    torch.exp(X), torch.exp(X)


@pytest.mark.parametrize(
    ("name", "program"), [("sum", two_sums), ("conv2d", two_convolutions), ("exp", one_line)]
)
def test_two_places_have_two_ids_which_stay(name: str, program: Callable[[], Any]) -> None:
    ids = ids_of(name, program, runs=2)
    assert len(set(ids[:2])) == 2
    assert ids[:2] == ids[2:]


def test_one_tensor_given_twice_is_one_op_with_two_inputs() -> None:
    p, inputs = torch.nn.Parameter(torch.ones(2)), []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: inputs.append(context.get_inputs()))
    with amanda.apply(tool):
        torch.add(p, p)
        torch.add(p, p)
    assert [[value is p for value in each] for each in inputs] == [[True, True]] * 2


def test_a_freed_and_reused_tensor_changes_no_id() -> None:
    def program() -> None:
        torch.exp(torch.ones(4))

    assert len(set(ids_of("exp", program, runs=5))) == 1


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("name", ["linear", "relu"])
def test_two_models_of_one_class_have_ids_of_their_own(name: str) -> None:
    models, x = [Model(), Model()], torch.ones(1, 2)
    ids = ids_of(name, lambda: [model(x) for model in models], runs=2)
    assert len(set(ids)) == 2
    assert ids[:2] == ids[2:]


def test_one_call_site_over_several_weights_has_an_id_for_each() -> None:
    weights, x = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)], torch.ones(1, 2)
    ids = ids_of("linear", lambda: [F.linear(x, weight) for weight in weights], runs=2)
    assert len(set(ids)) == 3
    assert ids[:3] == ids[3:]


def test_a_backward_op_can_be_replaced(acting: Any, applied: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    tool = acting("replace_backward_op", "ReluBackward0", lambda grad: torch.full_like(grad, 3))
    (grad,) = applied(tool, lambda: torch.autograd.grad(torch.relu(x).sum(), x))
    assert grad.tolist() == [3, 3]


def test_scopes_nest_and_the_inner_tool_acts_after_the_outer(acting: Any) -> None:
    x, order = torch.ones(2), []
    outer = acting("insert_before_op", "relu", lambda x: order.append("outer"))
    inner = acting("insert_before_op", "relu", lambda x: order.append("inner"))
    with amanda.apply(outer):
        torch.relu(x)
        with amanda.apply(inner):
            torch.relu(x)
        torch.relu(x)
    torch.relu(x)
    assert order == ["outer", "outer", "inner", "outer"]


@pytest.mark.parametrize("op", ["max", "split"])
def test_outputs_in_a_tuple_can_be_changed(op: str, acting: Any, applied: Any) -> None:
    program = {"max": lambda: torch.max(X, 1), "split": lambda: X.split(2, dim=2)}[op]
    result = applied(acting("insert_after_op", op, lambda first, second: (first + 1, second)), program)
    assert type(result) is type(program())
    assert torch.equal(result[0], program()[0] + 1)


def test_keyword_arguments_are_in_the_order_of_the_schema(acting: Any) -> None:
    calls: list[tuple[Any, ...]] = []
    with amanda.apply(acting("insert_before_op", "conv2d", lambda *inputs: calls.append(inputs))):
        torch.conv2d(stride=2, weight=W, input=X)
    ((image, weight, bias, stride),) = calls
    assert (image is X, weight is W, bias, stride) == (True, True, None, 2)


def everything_on(model: torch.nn.Module, *tensors: Tensor) -> list[Any]:
    return [
        [(name, list(vars(module))) for name, module in model.named_modules()],
        [(name, dir(tensor), list(vars(tensor))) for name, tensor in model.named_parameters()],
        [(dir(tensor), list(vars(tensor)), tensor._backward_hooks) for tensor in tensors],
        list(model.state_dict()),
    ]


def test_nothing_is_written_on_tensors_and_modules() -> None:
    def change(context: amanda.OpContext) -> None:
        context["mask"] = 1
        context.insert_before_op(lambda *inputs: None)

    def change_gradient(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *grads: None)

    model, x = Model(), torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    before = everything_on(model, x)
    tool = amanda.Tool()
    tool.add_inst_for_op(change)
    tool.add_inst_for_op(change_gradient, backward=True)
    with amanda.apply(tool):
        y = model(x)
        y.sum().backward()
        inside = everything_on(model, x)
        assert vars(y) == {}
    assert inside == everything_on(model, x) == before


IMPORTING = """
import torch
import torch.nn.functional as F
holders = [torch, F, torch.Tensor, torch.nn.Module, torch.autograd, torch.autograd.graph, torch._C._nn,
           torch._C.TensorBase, torch._ops.OpOverload, torch.utils.checkpoint]
def state():
    return [{name: id(value) for name, value in vars(holder).items()} for holder in holders]
before = state()
import amanda
from amanda.drivers.torch import TorchDriver
TorchDriver()
assert state() == before
with amanda.apply(amanda.Tool()):
    torch.ones(2).add(1)
    assert state() != before
assert state() == before
"""


def test_importing_patches_nothing_and_a_scope_leaves_nothing() -> None:
    children.run([sys.executable, "-W", "error", "-c", IMPORTING], check=True)


def test_a_scope_belongs_to_its_thread() -> None:
    inside, outside = Ids("relu"), threading.Barrier(2)
    errors: list[BaseException] = []

    def run_outside() -> None:
        try:
            outside.wait(10)
            torch.relu(X)
            outside.wait(10)
        except threading.BrokenBarrierError as error:
            errors.append(error)

    thread = threading.Thread(target=run_outside)
    thread.start()
    with amanda.apply(inside):
        outside.wait(10)
        outside.wait(10)
        torch.relu(X)
    thread.join()
    assert errors == []
    assert len(inside.ids) == 1
