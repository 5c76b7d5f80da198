"""Tools that change nothing, each by another way through the framework; one that says what it saw."""

from collections.abc import Callable
from typing import Any

from copies import copied
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import amanda


def nothing(*values: Any) -> None:
    """Look at every value."""


def unchanged(*values: Any) -> Any:
    """Hand every value back."""
    return values


@amanda.differentiable
def unchanged_in_autograd(*values: Any) -> Any:
    """Hand every value back, as a part of the backward pass."""
    return values


def unchanged_in_a_run(*values: Any, run: dict[str, Any]) -> Any:
    """Hand every value back, having been given those that may outlive the graph."""
    return values


def fresh(*values: Any) -> Any:
    """Hand back an equal new tensor for each."""
    return [[copied(item) for item in value] if _are_tensors(value) else copied(value) for value in values]


def cloned(*values: Any) -> Any:
    """Hand back a clone for each, at the level of function transforms that the value has."""
    return [[item.clone() for item in value] if _are_tensors(value) else _cloned(value) for value in values]


@amanda.differentiable
def fresh_in_autograd(*values: Any) -> Any:
    """Hand back an equal new tensor for each, as a part of the backward pass."""
    return [[item.clone() for item in value] if _are_tensors(value) else _cloned(value) for value in values]


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _are_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Tensor) for item in value)


FRESH: dict[str, Callable[..., Any]] = {"fresh": fresh, "fresh, in autograd": fresh_in_autograd}
"""Routines that give equal new values: what a program computes stays, what it shares with what need not."""

ROUTINES: dict[str, Callable[..., Any]] = {
    "nothing": nothing,
    "unchanged": unchanged,
    "unchanged, in autograd": unchanged_in_autograd,
    "unchanged, in a run": unchanged_in_a_run,
}


class Everywhere(amanda.Tool):
    """One routine at every point of every op, and analyses at all four points."""

    def __init__(self, routine: Callable[..., Any]) -> None:
        self.routine, self.analysed = routine, 0
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)
        self.add_inst_for_op(nothing, require_outputs=True)
        self.add_inst_for_op(nothing, backward=True, require_outputs=True)

    def _forward(self, context: amanda.OpContext) -> None:
        self.analysed += 1
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def _backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)


class Watch(amanda.Tool):
    """What executes: types of the ops, names of the backward ops, and how many ops are running."""

    def __init__(self) -> None:
        self.clear()
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def clear(self) -> None:
        """Forget all."""
        self.running = 0
        self.types: list[str] = []
        self.nodes: list[str] = []

    def _forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._enter, inputs=[], name=context.get_op_type())
        context.insert_after_op(self._leave, outputs=[])

    def _backward(self, context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        context.insert_before_backward_op(self._pass, grad_outputs=[], name=name)

    def _enter(self, name: str) -> None:
        self.running += 1
        self.types.append(name)

    def _leave(self) -> None:
        self.running -= 1

    def _pass(self, name: str) -> None:
        self.nodes.append(name)


class Outside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Kernels that torch dispatches while no op is running that the tool has seen."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._watch.running:
            self.kernels.append(func.name())
        return func(*args, **(kwargs or {}))
