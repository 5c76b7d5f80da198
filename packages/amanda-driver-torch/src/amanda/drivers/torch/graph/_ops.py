"""Custom ops through which a graph calls Python: compilers leave them where they are, in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from amanda import interceptor
from amanda.backend import Action, Execution, OpFacts, State
from amanda.errors import AmandaError
from amanda.graph import Table
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType

from .._tensors import TorchTensors, cast_to_fit
from ._reads import TorchReads


class ExportedTensors(TorchTensors):
    """`TensorOps` while a graph is exported: autodiff has no part in what is kept."""

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine."""
        return func(*values, **kwargs)

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`value` in the type of `original`."""
        return cast_to_fit(original, value)


class GraphTensors(TorchTensors):
    """`TensorOps` of values that may have symbols for sizes."""

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each tensor, also in lists."""
        return (str(super().shapes(inputs)),)


current_state = State.current
TENSORS: Any = GraphTensors()
_EXPORTED: Any = ExportedTensors()


def tensors() -> Any:
    """`TensorOps` for routines that are part of a graph."""
    return _EXPORTED if torch.compiler.is_exporting() else TENSORS


_TOKEN = "amanda_execution"


class Program:
    """The routines of a graph by slot, and whose tools they are.

    state: in force when it was made.  every: whether routines are called outside of the tools' scopes too.
    traced: traceable routines, with the tensors that they hold.  reads: what else they read.
    called_as_python: those that cannot be traced: at which op, and why.
    gathering: whether a compiler traces the graph to its end, so that observers may wait for that.
    in_turn: ids of tools that insert other routines than observers, and so see ops in order.
    at_once: ids of ops, and observers there, that see memory into which the graph writes.
    leaves: those with routines at their AccumulateGrad, each a position among what the graph is given, or a
    parameter that it holds; with a name, and the tools.
    """

    _numbers = count(1)
    living: ClassVar[WeakValueDictionary[int, Program]] = WeakValueDictionary()

    def __init__(self, state: State, every: bool = False) -> None:
        self.number = next(self._numbers)
        self.state = state
        self.every = every
        self.table = Table()
        self.traced: list[tuple[Action, Sequence[torch.Tensor]]] = []
        self.reads = TorchReads()
        self.called_as_python: dict[Action, tuple[OpFacts, str]] = {}
        self._slots: dict[Hashable, int] = {}
        self.reports: list[tuple[str, str, str]] = []
        self.gathering = False
        self.in_turn: set[int] = set()
        self.at_once: set[tuple[int, Action]] = set()
        self.leaves: list[tuple[int | torch.Tensor, str, Sequence[Any]]] = []
        self.living[self.number] = self

    def slot(self, key: Hashable, make: Callable[[], Any]) -> int:
        """The slot of what is called at a place, made when it is first asked for."""
        if key not in self._slots:
            slot = self._slots[key] = len(self.table)
            self.table[slot] = make()
        return self._slots[key]

    def gathers(self, action: Action, facts: OpFacts) -> bool:
        """Return True for an observer that may be called with others, later than its op."""
        if not self.gathering or id(action.tool) in self.in_turn:
            return False
        return (facts.op_id, action) not in self.at_once

    def report(self, what: str, reason: str, where: str = "") -> None:
        """Note what cannot be instrumented, for the scopes' reports."""
        entry = (what, reason, where)
        if entry not in self.reports:
            self.reports.append(entry)


class GraphExecution(Execution):
    """One run of a graph, forward and backward; it lives as long as the tensor that stands for it is read."""

    living: ClassVar[WeakValueDictionary[int, GraphExecution]] = WeakValueDictionary()

    def __init__(self, program: Program) -> None:
        state = current_state()
        if program.every or state.stack is None:
            state = program.state
        super().__init__(state, TENSORS, program.table, every=program.every)
        self.program = program
        self.living[self.number] = self

    def token(self) -> torch.Tensor:
        """The tensor that stands for it."""
        self._call_openings()
        token = torch.full((), self.number, dtype=torch.int64)
        setattr(token, _TOKEN, self)
        return token

    @staticmethod
    def by(token: torch.Tensor) -> GraphExecution:
        """The execution that a tensor stands for."""
        found = getattr(token, _TOKEN, None) or GraphExecution.living.get(int(token))
        if found is None:
            raise AmandaError("a routine was called for an execution of a graph that is over")
        return found

    def runs_action(self, action: Any) -> bool:
        """Return True if a scope with the action's tool is open, and `amanda.disabled()` is not in force."""
        if action.opening:
            return False
        if self.program.every:
            return True
        state = current_state()
        if state.stack is None and not any(scope.closed for scope in self.state.scopes):
            state = self.state  # on a thread that the framework started
        return state.enabled and state.is_open(action.tool)

    def call_at(self, slot: int, values: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        """Return what the routine at a slot gives; its exceptions as they are."""
        called: Any = self.table[slot]
        with interceptor.Suspension():
            return called.run(self, called.handed(values, numbers))  # type: ignore[no-any-return]


class Kept(NamedTuple):
    """The record that a routine which takes part in autodiff leaves for the backward pass."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


Tensors = list[torch.Tensor]


def _begin(program: int) -> torch.Tensor:
    return GraphExecution(Program.living[program]).token()


def _call(
    token: torch.Tensor, values: Tensors, numbers: list[int], likes: Tensors, program: int, slot: int
) -> Tensors:
    return _owned(GraphExecution.by(token).call_at(slot, values, numbers), likes, slot)


def _tape(
    token: torch.Tensor, values: Tensors, numbers: list[int], likes: Tensors, program: int, slot: int
) -> Tensors:
    execution = GraphExecution.by(token)
    with torch.enable_grad():
        inputs = [_leaf(value) for value in values]
        outputs = execution.call_at(slot, inputs, numbers)
    execution.stores[slot] = [Kept(inputs, outputs)]
    return _owned([one.detach() for one in outputs], likes, slot)


def _pull(token: torch.Tensor, gradients: Tensors, likes: Tensors, slot: int) -> Tensors:
    (kept,) = GraphExecution.by(token).stores[slot]
    pairs = [(one, grad) for one, grad in zip(kept.outputs, gradients, strict=True) if one.requires_grad]
    if pairs:
        outputs, grads = zip(*pairs, strict=True)
        with interceptor.Suspension():
            torch.autograd.backward(outputs, grads, retain_graph=True)
    pulled = [one.grad for one in kept.inputs]
    for one in kept.inputs:
        one.grad = None
    zeros = [torch.zeros_like(like) if one is None else one for one, like in zip(pulled, likes, strict=True)]
    return _owned(zeros, likes, slot)


def _leaf(value: torch.Tensor) -> torch.Tensor:
    leaf = value.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf


def _owned(results: Sequence[torch.Tensor], likes: Sequence[torch.Tensor], slot: int) -> Tensors:
    """Results as tensors that share no memory with what the op was given."""
    if not likes:
        return [one.clone(memory_format=torch.contiguous_format) for one in results]
    for one, like in zip(results, likes, strict=True):
        if one.shape != like.shape:
            raise AmandaError(
                f"a routine returned shape {tuple(one.shape)} where a graph has shape {tuple(like.shape)}; "
                "one that changes shapes is to be @amanda.traceable and @amanda.differentiable in a graph"
            )
    return [torch.empty_like(like).copy_(one) for one, like in zip(results, likes, strict=True)]


def _like(
    token: torch.Tensor, values: Tensors, numbers: list[int], likes: Tensors, program: int, slot: int
) -> Tensors:
    if likes:
        return [torch.empty_like(one) for one in likes]
    called: Any = Program.living[program].table[slot]
    if not hasattr(called, "compute"):
        return []
    return called.made(called.handed(values, numbers))  # type: ignore[no-any-return]


_CALL = "(Tensor token, Tensor[] values, SymInt[] numbers, Tensor[] likes, int program, int slot) -> Tensor[]"
_OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "begin": ("(int program) -> Tensor", _begin, lambda program: torch.empty((), dtype=torch.int64)),
    "call": (_CALL, _call, _like),
    "tape": (_CALL, _tape, _like),
    "pull": (
        "(Tensor token, Tensor[] gradients, Tensor[] likes, int slot) -> Tensor[]", _pull,
        lambda token, gradients, likes, slot: [torch.empty_like(one) for one in likes],
    ),
}  # fmt: skip


@cache
def custom_ops() -> Any:
    """`torch.ops.amanda`, registered with torch when a graph first needs it.

    begin: starts an execution.  call: a routine.  tape: one that takes part in autodiff; pull: its gradients.
    """
    library: Any = torch.library.Library("amanda", "DEF")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name, (schema, kernel, without_data) in _OPS.items():
        library.define(name + schema)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"amanda::{name}", without_data, lib=library)
        op = getattr(torch.ops.amanda, name).default
        _register_effectful_op(op, EffectType.ORDERED)
        torch.fx.node.has_side_effect(op)
    return torch.ops.amanda


_libraries: list[Any] = []  # an op lives as long as its library
