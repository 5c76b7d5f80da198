"""Custom ops through which a graph calls Python: compilers leave them where they are, in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.fx.traceback
from amanda import interceptor
from amanda.backend import Action, Execution, OpFacts, State
from amanda.errors import AmandaError
from amanda.graph import RoutineTable
from torch._higher_order_ops.effects import _register_effectful_op
from torch._library.effects import EffectType

from .._levels import in_transform
from .._tensors import TorchTensors, cast_to_fit
from .._transforms import TransformedTensors
from ._routine_inputs import TorchReads


class ExportedTensors(TorchTensors):
    """`TensorOps` while a graph is exported: exported graphs have no backward pass."""

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine; autograd stays as it is."""
        return func(*values, **kwargs)

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `value` in the type of `original`."""
        return cast_to_fit(original, value)


class SymbolicTensors(TorchTensors):
    """`TensorOps` of values that may have symbols for sizes."""

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shapes of the tensors as text: sizes may be symbols, which cannot be compared."""
        return (str(super().shapes(inputs)),)


class SymbolicTensorsInTransform(TransformedTensors, SymbolicTensors):
    """`TensorOps` of values that may have symbols for sizes, within transforms of torch.func."""


current_state = State.current
TENSORS: Any = SymbolicTensors()
_EXPORTED: Any = ExportedTensors()
_IN_TRANSFORM: Any = SymbolicTensorsInTransform()


def tensor_ops() -> Any:
    """Return the `TensorOps` for routines that are part of a graph."""
    if torch.compiler.is_exporting():
        return _EXPORTED
    return _IN_TRANSFORM if in_transform() else TENSORS


_TOKEN = "amanda_execution"


class GraphProgram:
    """The routines of an instrumented graph, in a table of calls by slot, and facts of the graph.

    state: in force when the program was made.
    runs_outside_scopes: whether routines are called outside of scopes too.
    traced: traceable routines, with the tensors that they hold.  reads: other values that they read.
    called_as_python: traceable routines that cannot be traced: at which op, and why.
    gathers_observers: whether a compiler traces the graph to its end, so that observers may wait until then.
    ordered_tools: ids of tools with routines other than observers, whose observers must see ops in order.
    prompt_observers: op ids with observers of memory into which the graph writes, and which cannot wait.
    leaves: with routines at their AccumulateGrad, each a position among the graph's inputs, or a parameter
    that the graph holds; with a name, and the tools.
    """

    _numbers = count(1)
    living: ClassVar[WeakValueDictionary[int, GraphProgram]] = WeakValueDictionary()

    def __init__(self, state: State, runs_outside_scopes: bool = False) -> None:
        """Begin with an empty table, under a number by which custom ops find the program while it lives."""
        self.number = next(self._numbers)
        self.state = state
        self.runs_outside_scopes = runs_outside_scopes
        self.table = RoutineTable()
        self.traced: list[tuple[Action, Sequence[torch.Tensor]]] = []
        self.reads = TorchReads()
        self.called_as_python: dict[Action, tuple[OpFacts, str]] = {}
        self._slot_by_key: dict[Hashable, int] = {}
        self.reports: list[tuple[str, str, str]] = []
        self.gathers_observers = False
        self.ordered_tools: set[int] = set()
        self.prompt_observers: set[tuple[int, Action]] = set()
        self.leaves: list[tuple[int | torch.Tensor, str, Sequence[Any]]] = []
        self.living[self.number] = self

    def slot_of(self, call_key: Hashable, make_call: Callable[[], Any]) -> int:
        """Return the slot of the call with a key; the first time, make the call and put it into the table."""
        if call_key not in self._slot_by_key:
            slot = self._slot_by_key[call_key] = len(self.table)
            self.table[slot] = make_call()
        return self._slot_by_key[call_key]

    def can_gather(self, action: Action, facts: OpFacts) -> bool:
        """Return True for an observer that may be called with others, later than its op."""
        if not self.gathers_observers or id(action.tool) in self.ordered_tools:
            return False
        return (facts.op_id, action) not in self.prompt_observers

    def report(self, subject: str, reason: str, where: str = "") -> None:
        """Note something that cannot be instrumented, for the reports of scopes in which the graph runs."""
        entry = (subject, reason, where)
        if entry not in self.reports:
            self.reports.append(entry)


class GraphExecution(Execution):
    """One run of an instrumented graph, forward and backward, in which it calls routines as Python.

    A tensor in the graph, the token, stands for the execution and holds it, so that the execution lives as
    long as the graph or its backward pass needs the token.
    """

    living: ClassVar[WeakValueDictionary[int, GraphExecution]] = WeakValueDictionary()

    def __init__(self, program: GraphProgram) -> None:
        """Begin a run in the state in force; in the program's outside of scopes, or if it needs none."""
        state = current_state()
        if program.runs_outside_scopes or state.stack is None:
            state = program.state
        super().__init__(state, TENSORS, program.table, runs_all_tools=program.runs_outside_scopes)
        self.program = program
        self.living[self.number] = self

    def token(self) -> torch.Tensor:
        """Call the routines at the opening of a run; return a tensor that stands for the run and holds it."""
        self._call_openings()
        # Autograd saves the token, and so keeps the execution for its backward pass.
        token = torch.full((), self.number, dtype=torch.int64)
        setattr(token, _TOKEN, self)
        return token

    @staticmethod
    def of_token(token: torch.Tensor) -> GraphExecution:
        """Return the execution that a token stands for; raise AmandaError for one that is over."""
        # A compiler may copy the token, which loses the attribute: its number then finds the execution.
        execution = getattr(token, _TOKEN, None) or GraphExecution.living.get(int(token))
        if execution is None:
            raise AmandaError("a routine was called for an execution of a graph that is over")
        return execution

    def runs_action(self, action: Any) -> bool:
        """Return True if a scope with the action's tool is open, and `amanda.disabled()` is not in force.

        True in any case if the program runs outside of scopes; False for an opening, which has run by then.
        """
        if action.opening:  # it has run with the token
            return False
        if self.program.runs_outside_scopes:
            return True
        state = current_state()
        if state.stack is None and not any(scope.closed for scope in self.state.scopes):
            state = self.state  # on a thread that the framework started
        return state.enabled and state.is_open(action.tool)

    def call_at(self, slot: int, values: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        """Run the call at a slot, and return its outputs."""
        call: Any = self.table[slot]
        with interceptor.Suspension():
            return call.run(self, call.store_numbers(values, numbers))  # type: ignore[no-any-return]


class TapedCall(NamedTuple):
    """Inputs and outputs of a routine that takes part in autodiff, for the backward pass."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


Tensors = list[torch.Tensor]


def _begin_execution(program: int) -> torch.Tensor:
    """Return the token of a new execution of the program with a number."""
    return GraphExecution(GraphProgram.living[program]).token()


def _call_routine(
    token: torch.Tensor, values: Tensors, numbers: list[int], likes: Tensors, program: int, slot: int
) -> Tensors:
    """Call a routine, and return its outputs in memory of their own.

    likes: tensors of the graph, in whose form the outputs are returned; empty for the outputs as they are.
    program: number of the program, for `_call_without_data`.
    """
    return _copy_to_new_memory(GraphExecution.of_token(token).call_at(slot, values, numbers), likes)


def _call_taped(
    token: torch.Tensor, values: Tensors, numbers: list[int], likes: Tensors, program: int, slot: int
) -> Tensors:
    """Call a routine that takes part in autodiff, and store its inputs and outputs for `_pull_gradients`.

    Returns the outputs as `_call_routine` does.
    """
    execution = GraphExecution.of_token(token)
    # A graph of the routine's own, from leaves: the graph around it sees one op, `tape`.
    with torch.enable_grad():
        inputs = [_as_leaf(value) for value in values]
        outputs = execution.call_at(slot, inputs, numbers)
    execution.stored_values[slot] = [TapedCall(inputs, outputs)]
    return _copy_to_new_memory([output.detach() for output in outputs], likes)


def _pull_gradients(token: torch.Tensor, gradients: Tensors, likes: Tensors, slot: int) -> Tensors:
    """Return the gradients of the inputs of a taped call, in new memory; zeros for an input without one.

    gradients: of the call's outputs.  likes: its inputs in the graph.
    """
    (taped_call,) = GraphExecution.of_token(token).stored_values[slot]
    outputs, output_gradients = [], []
    for output, gradient in zip(taped_call.outputs, gradients, strict=True):
        if output.requires_grad:
            outputs.append(output)
            output_gradients.append(gradient)
    if outputs:
        with interceptor.Suspension():
            # Kept, as another pass may come through the graph around the routine.
            torch.autograd.backward(outputs, output_gradients, retain_graph=True)
    input_gradients = [tensor.grad for tensor in taped_call.inputs]
    for tensor in taped_call.inputs:  # another pass through the kept graph begins from nothing
        tensor.grad = None
    results = [
        torch.zeros_like(like) if gradient is None else gradient
        for gradient, like in zip(input_gradients, likes, strict=True)
    ]
    return _copy_to_new_memory(results, likes)


def _as_leaf(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph; it needs a gradient if its numbers can have one."""
    leaf = value.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf


def _copy_to_new_memory(results: Sequence[torch.Tensor], likes: Sequence[torch.Tensor]) -> Tensors:
    """Copy results into new tensors, of the types and layouts of `likes` if there are any.

    A custom op must not return memory of its inputs.
    Raises AmandaError for a result of another shape than that in the graph.
    """
    if not likes:
        return [result.clone(memory_format=torch.contiguous_format) for result in results]
    for result, like in zip(results, likes, strict=True):
        if result.shape != like.shape:
            raise AmandaError(
                f"a routine returned shape {tuple(result.shape)} where a graph has shape "
                f"{tuple(like.shape)}; one that changes shapes is to be @amanda.traceable and "
                "@amanda.differentiable in a graph"
            )
    # Cast and laid out as the graph was compiled for.
    return [torch.empty_like(like).copy_(result) for result, like in zip(results, likes, strict=True)]


def _call_without_data(
    token: torch.Tensor, values: Tensors, numbers: list[int], likes: Tensors, program: int, slot: int
) -> Tensors:
    """Return empty tensors of the form of a call's results, for compilers that trace without data.

    There are none for an observer.  For a replacement the op runs without data.
    """
    if likes:
        return [torch.empty_like(like) for like in likes]
    call: Any = GraphProgram.living[program].table[slot]
    replaces_op = hasattr(call, "compute")
    if not replaces_op:
        return []
    return call.outputs_without_data(call.store_numbers(values, numbers))  # type: ignore[no-any-return]


_CALL = "(Tensor token, Tensor[] values, SymInt[] numbers, Tensor[] likes, int program, int slot) -> Tensor[]"
_OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "begin": ("(int program) -> Tensor", _begin_execution,
              lambda program: torch.empty((), dtype=torch.int64)),
    "call": (_CALL, _call_routine, _call_without_data),
    "tape": (_CALL, _call_taped, _call_without_data),
    "pull": (
        "(Tensor token, Tensor[] gradients, Tensor[] likes, int slot) -> Tensor[]", _pull_gradients,
        lambda token, gradients, likes, slot: [torch.empty_like(like) for like in likes],
    ),
}  # fmt: skip


@cache
def custom_ops() -> Any:
    """Return `torch.ops.amanda`, registered with torch when a graph first needs the ops.

    begin: begins an execution, and returns its token.  call: calls a routine.
    tape: calls a routine that takes part in autodiff.  pull: computes the gradients of its inputs.
    """
    library: Any = torch.library.Library("amanda", "DEF")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name, (schema, kernel, without_data) in _OPS.items():
        library.define(name + schema)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"amanda::{name}", without_data, lib=library)
        op = getattr(torch.ops.amanda, name).default
        # Without these two, compilers would reorder calls, merge equal ones, and drop unused ones.
        _register_effectful_op(op, EffectType.ORDERED)
        torch.fx.node.has_side_effect(op)
    return torch.ops.amanda


def call_python(name: str, *args: Any) -> Any:
    """Call a custom op as a part of the traced graph, but of no checkpoint, which would call it again."""
    metadata: Any = torch.fx.traceback.get_current_meta()  # that nodes get which are traced now
    checkpoint_keys = [key for key in ("recompute", "ac_graph_id") if key in metadata]
    checkpoint_metadata = {key: metadata.pop(key) for key in checkpoint_keys}
    try:
        return getattr(custom_ops(), name)(*args)
    finally:
        metadata.update(checkpoint_metadata)


_libraries: list[Any] = []  # an op lives as long as its library
