"""Backward ops that have been analysed: native code calls their routines, with the same meaning."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda import interceptor
from amanda.drivers.torch import TorchDriver
from amanda.errors import MutationError, RoutineError
from amanda.tools.nan import NanTool
from amanda.tools.trace import TraceTool

natively = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: only native code calls routines by itself", run=False
)


class FunctionMode(TorchFunctionMode):
    """Keeps native code out."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class PassingMode(TorchDispatchMode):
    """Keeps native code from calling routines."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


class Product(torch.nn.Module):
    """A product and its gradient: at every call the same ops."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b


class AtMul(amanda.Tool):
    """Routines at the backward op of a product."""

    def __init__(self, before: Any = None, after: Any = None, **selected: Any) -> None:
        self.before, self.after, self.selected = before, after, selected
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "MulBackward0":
            if self.before:
                context.insert_before_backward_op(self.before)
            if self.after:
                context.insert_after_backward_op(self.after, **self.selected)


@pytest.fixture(params=["native", "Python"])
def gradients(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """The gradients of five passes: native code calls the routines after the first, or Python does."""

    def run(tool: amanda.Tool, times: int = 5) -> list[Any]:
        model = Product()
        a, b = (torch.full((2,), value, requires_grad=True) for value in (3.0, 5.0))
        numbers = []
        with amanda.apply(tool):
            for _ in range(times):
                with FunctionMode() if request.param == "Python" else nullcontext():
                    numbers.append(
                        [
                            gradient.tolist()
                            for gradient in torch.autograd.grad(model(a, b), (a, b), torch.ones(2))
                        ]
                    )
        return numbers

    return run


@natively
def test_after_the_first_pass_a_routine_is_called_by_native_code() -> None:
    callers: list[str] = []

    def routine(*_: Any) -> None:
        callers.append(sys._getframe(1).f_code.co_name)

    model, a = Product(), torch.ones(2, requires_grad=True)
    with amanda.apply(AtMul(before=routine)):
        for _ in range(3):
            model(a, a).sum().backward()
    assert callers == ["call_outside_modes", "_engine_run_backward", "_engine_run_backward"]


@natively
def test_an_op_whose_backward_is_known_passes_through_no_python_but_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[str] = []
    bind = TorchDriver.bind

    def noted(self: TorchDriver, site: interceptor.Site, *arguments: Any) -> Any:
        bound.append(site.key)
        return bind(self, site, *arguments)

    monkeypatch.setattr(TorchDriver, "bind", noted)
    model, a = Product(), torch.ones(2, requires_grad=True)
    with amanda.apply(AtMul(before=lambda *_: None)):
        for _ in range(5):
            model(a, a).backward(torch.ones(2))
    assert bound.count("mul") == 2


def test_a_gradient_that_a_routine_returns_goes_on(gradients: Any) -> None:
    assert gradients(AtMul(before=lambda grad: grad * 2)) == [[[10.0, 10.0], [6.0, 6.0]]] * 5
    assert gradients(AtMul(after=lambda a, b: (a, b * 2))) == [[[5.0, 5.0], [6.0, 6.0]]] * 5
    assert gradients(AtMul(after=lambda b: b * 2, grad_inputs=[1])) == [[[5.0, 5.0], [6.0, 6.0]]] * 5


def test_each_routine_runs_once_a_pass(gradients: Any) -> None:
    calls: list[str] = []
    gradients(AtMul(before=lambda grad: calls.append("before"), after=lambda a, b: calls.append("after")))
    assert calls == ["before", "after"] * 5


def test_a_gradient_written_into_is_an_error_at_the_routine(gradients: Any) -> None:
    turns = iter(range(5))

    def routine(grad: torch.Tensor) -> None:
        if next(turns) == 3:
            grad.mul_(2)

    with pytest.raises(MutationError, match="wrote into value 0") as caught:
        gradients(AtMul(before=routine))
    assert "insert_before_backward_op" in "".join(caught.value.__notes__)


def test_a_wrong_count_of_gradients_is_an_error_that_names_the_op(gradients: Any) -> None:
    turns = iter(range(5))
    with pytest.raises(RoutineError, match="returned 3 values; it was given 2") as caught:
        gradients(AtMul(after=lambda a, b: (a, b, a) if next(turns) == 3 else None))
    assert "MulBackward0" in "".join(caught.value.__notes__)


def test_a_closed_scope_is_not_heard_of_at_a_known_op() -> None:
    calls: list[Any] = []
    model, a = Product(), torch.ones(2, requires_grad=True)
    tool = AtMul(before=lambda *_: calls.append(1))
    with amanda.apply(tool):
        for _ in range(3):
            model(a, a).sum().backward()
        late = model(a, a).sum()
    late.backward()
    assert len(calls) == 3


@natively
# `TraceTool` has routines at the two leaves too.
@pytest.mark.parametrize(("tool_class", "hook_count"), [(NanTool, 3), (TraceTool, 5)])
def test_an_observer_that_is_idle_before_a_backward_op_takes_no_hook(
    tool_class: type[amanda.Tool], hook_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from amanda.drivers.torch import _autograd, _nodes

    monkeypatch.setattr(_nodes.NodeHooks, "of_program", True)  # so that no pass runs without hooks
    hook_counts: list[int] = []
    remove = _autograd._BackwardPass.remove_hooks

    def removing(self: Any) -> None:
        hook_counts.append(len(self._node_handles))
        remove(self)

    monkeypatch.setattr(_autograd._BackwardPass, "remove_hooks", removing)
    a, b = (torch.full((2,), value, requires_grad=True) for value in (3.0, 5.0))
    model = Product()
    with amanda.apply(tool_class()):
        for _ in range(4):
            model(a, b).exp().sum().backward()
        with PassingMode():  # Python calls both observers
            model(a, b).exp().sum().backward()
    assert hook_counts[1:] == [hook_count] * 3 + [2 * hook_count]


@natively
def test_hooks_of_the_program_are_called_beside_those_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    from amanda.drivers.torch import _nodes

    monkeypatch.setattr(_nodes.NodeHooks, "of_program", False)
    a, called = torch.ones(2, requires_grad=True), list[str]()

    def hook_within_the_pass(y: torch.Tensor) -> None:
        node: Any = y.grad_fn
        y.register_hook(  # type: ignore[no-untyped-call]
            lambda _: handles.append(node.register_hook(lambda *_: called.append("within")))
        )

    with amanda.apply(NanTool()):
        for _ in range(3):
            y, handles = a * 2, list[Any]()
            assert y.grad_fn is not None
            before = y.grad_fn.register_hook(lambda *_: called.append("before"))
            hook_within_the_pass(y)
            y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
            before.remove()
            handles[0].remove()
            y.sum().backward()  # type: ignore[no-untyped-call]
            assert called == ["before", "within", "within"]
            called.clear()
