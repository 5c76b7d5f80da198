"""Nothing of ours stays in the graph, and nothing of the graph with us."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

import amanda
from amanda.drivers.torch import _autograd

P = torch.nn.Parameter(torch.eye(3) + 0.5)


class Watching(amanda.Tool):
    """Analyses every op, forward and backward, and records nothing."""

    def __init__(self) -> None:
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self.read, backward, require_outputs)

    def read(self, context: amanda.OpContext) -> None:
        context.get_inputs()


class Changing(amanda.Tool):
    """Changes every value and gradient to a copy, and hands values from forward to backward."""

    def __init__(self, mark: Callable[[Any], Any] = lambda routine: routine) -> None:
        self.copies, self.keep = mark(copies), lambda *values, run: run.update(values=values)
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.keep)
        context.insert_before_op(self.copies)
        context.insert_after_op(self.copies)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.copies)
        context.insert_after_backward_op(self.copies)


def copies(*values: Any) -> list[Any]:
    return [
        value * 1 if isinstance(value, Tensor) and value.is_floating_point() else value for value in values
    ]


class Token:
    """Lives as long as the node that holds it."""


class Held(torch.autograd.Function):
    alive: ClassVar["weakref.WeakSet[Token]"] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Held.alive.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def forward() -> Tensor:
    x = Held.apply(P)
    y = F.linear(x, P).relu() + x.T
    y = y * 2
    y.add_(1)
    return y[0].max(0).values.sum()


def first_order() -> None:
    forward().backward()


def never_backward() -> None:
    forward()


def twice() -> None:
    loss = forward()
    loss.backward(retain_graph=True)
    loss.backward()


def second_order() -> None:
    x = Held.apply(P)
    (grad,) = torch.autograd.grad((x.exp() * x).sum(), P, create_graph=True)
    torch.autograd.grad((grad * grad).sum(), P)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    P.grad = None


@pytest.mark.parametrize("program", [first_order, never_backward, twice, second_order])
@pytest.mark.parametrize(
    "make",
    [Watching, Changing, lambda: Changing(amanda.differentiable)],
    ids=["watching", "changing", "differentiable"],
)
@pytest.mark.parametrize("cache", [amanda.cache_enabled, amanda.cache_disabled])
def test_a_graph_dies_with_its_last_user_without_the_collector(program: Any, make: Any, cache: Any) -> None:
    with amanda.apply(make()), cache():
        for _ in range(3):
            program()
            assert len(Held.alive) == 0


def test_a_tensor_dies_with_its_last_user() -> None:
    with amanda.apply(Watching()):
        y = P * 2
        z = y.exp()
        of_y, of_z = weakref.ref(y), weakref.ref(z)
        del y, z
        assert of_y() is None
        assert of_z() is None


def test_memory_is_flat_over_iterations() -> None:
    with amanda.apply(Changing()):
        for _ in range(5):
            first_order()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(50):
            first_order()
        gc.collect()
        assert len(gc.get_objects()) - before < 50


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the nodes that were given a hook."""
    names: list[str] = []
    remove_hook_handles = _autograd.remove_hook_handles

    def noted(handles: list[tuple[Any, Any]]) -> None:
        names.extend({id(node): node.name() for node, _ in handles}.values())
        remove_hook_handles(handles)

    monkeypatch.setattr(_autograd, "remove_hook_handles", noted)
    return names


def marked(root: Node | None) -> list[str]:
    waiting, names = [root], []
    while waiting:
        node = waiting.pop()
        if node is not None:
            waiting += [child for child, _ in node.next_functions]
            names += [node.name()] if node.metadata else []  # type: ignore[truthy-function]
    return names


def test_an_analysed_op_without_actions_has_no_hook_and_no_mark(hooked: list[str]) -> None:
    with amanda.apply(Watching()):
        first_order()
        assert hooked
        hooked.clear()
        loss = forward()
        assert marked(loss.grad_fn) == []
        loss.backward()
    assert hooked == []


def test_only_the_nodes_that_an_action_wants_have_hooks(hooked: list[str], acting: Any) -> None:
    with amanda.apply(acting("insert_before_backward_op", "ReluBackward0", lambda grad: grad)):
        first_order()
        hooked.clear()
        first_order()
    assert hooked == ["ReluBackward0"]


def test_hooks_are_gone_after_a_backward_pass_that_failed() -> None:
    def fail(*grads: Any) -> None:
        raise ZeroDivisionError

    def record(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(fail)

    tool = amanda.Tool()
    tool.add_inst_for_op(record, backward=True)
    x = torch.ones(2, requires_grad=True)
    with amanda.apply(tool):
        y = x.exp().sum()
        with pytest.raises(ZeroDivisionError):
            y.backward(retain_graph=True)
    y.backward()
    assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]


def test_values_for_the_analysis_of_backward_ops_go_as_soon_as_these_have_run() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.get_inputs(), backward=True)
    x = torch.ones(8, requires_grad=True)
    gone = []
    with amanda.apply(tool):
        first = x.exp()
        last = (first * 2).sigmoid()
        storage = StorageWeakRef(last.untyped_storage())
        first.register_hook(lambda _: gone.append(storage.expired()))
        y = last.sum()
        del last
        assert not storage.expired()
        y.backward()
    assert gone == [True]
