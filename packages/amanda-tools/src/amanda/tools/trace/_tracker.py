"""Tracker of live tensors from op to op: their indices in the graph, and the writes into shared memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.trace._graph import (
    UNKNOWN,
    GraphRecorder,
    OpenExecution,
    Position,
    ProgramOp,
    RecordedOp,
    indices_at,
    map_position,
)
from amanda.tools.trace._values import FrameworkValues, MemorySpan

_WRITES_LIMIT = 128
"""Most writes kept for one memory; a tensor that was not read since misses earlier writes."""
_BASE = 1 << 20
"""Address that stands for the start of a memory."""
_WORK: Any = 10_000
"""Bound of the work of np.shares_memory."""
_STATE = ("parameter", "buffer")
"""Kinds that a tensor keeps when it is written."""


class InputState(NamedTuple):
    """An input before the op: a weak reference, index and version of the tensor."""

    reference: Callable[[], Any]
    tensor: int
    version: int | None


@dataclass(slots=True, eq=False)
class _LiveTensor:
    """A live tensor: its index as of a write into its memory, and a weak reference."""

    index: int
    serial: int
    reference: Callable[[], Any]


class MemoryWrite(NamedTuple):
    """A write by an op.  serial: number of the write."""

    serial: int
    op: int
    span: MemorySpan


class LiveTensors:
    """Live tensors of a framework, by weak references: their indices, and the writes into their memory.

    serial: number of the last write.
    """

    def __init__(self, values: FrameworkValues, recorder: GraphRecorder) -> None:
        self.values = values
        self.serial = 0
        self._recorder = recorder
        # By id, as tensors compare element by element; an entry goes when its tensor does.
        self._live: dict[int, _LiveTensor] = {}
        # By the memory that is written: its views share the list, which goes with the memory.
        self._writes: weakref.WeakKeyDictionary[Any, list[MemoryWrite]] = weakref.WeakKeyDictionary()

    def input_state(self, value: Any) -> InputState | None:
        """Return the state of an input before the op; None for values that are not recorded tensors."""
        live = self._live.get(id(value))
        return None if live is None else InputState(live.reference, live.index, self.values.version(value))

    def last_index(self, tensor: Any) -> int | None:
        """Return the index of a tensor as of the last op that read or made it; None for an unknown one."""
        live = self._live.get(id(tensor))
        return None if live is None else live.index

    def current_index(self, tensor: Any) -> int | None:
        """Return the index of a tensor at this moment, after recording the writes into its memory."""
        live = self._live.get(id(tensor))
        if live is None:
            return None
        # Writes through other tensors of this memory become versions only once somebody reads this tensor.
        for write in self.writes_since(tensor, live.serial):
            live.index = self.add_version(write.op, live.index, tensor)
            self._recorder.ops[write.op].parts.append(live.index)
        live.serial = self.serial
        return live.index

    def note_write(self, tensor: Any, op: int) -> None:
        """Note that an op has written a tensor, for as long as its memory is in use."""
        memory_span = self.values.memory(tensor)
        if memory_span is not None:
            owner, span = memory_span
            self.serial += 1
            writes = self._writes.setdefault(owner, [])
            writes.append(MemoryWrite(self.serial, op, span))
            # A loop may write a buffer without end.
            del writes[:-_WRITES_LIMIT]

    def writes_since(self, tensor: Any, serial: int) -> list[MemoryWrite]:
        """Return the writes since a serial number that changed a tensor, in their order."""
        writes: list[MemoryWrite] = []
        memory_and_span = None if serial == self.serial else self.values.memory(tensor)
        if memory_and_span is None:
            return writes
        memory, span = memory_and_span
        # newest first, so that a write of the same span ends the search
        for write in reversed(self._writes.get(memory, ())):
            if write.serial <= serial:
                break
            # The same span: a write of all that the tensor sees, before which nothing matters.
            if write.span == span:
                writes.append(write)
                break  # earlier writes are overwritten
            if may_overlap(write.span, span):
                writes.append(write)
        return writes[::-1]

    def add_version(self, op: int, earlier_index: int | None, tensor: Any) -> int:
        """Record a tensor in written memory; return its index.  earlier_index: None for a new gradient."""
        kind, name = "gradient", None
        if earlier_index is not None:
            earlier = self._recorder.values[earlier_index]
            kind, name = earlier.tensor.kind, earlier.tensor.name
            # A write of a part leaves the rest, so the op reads the earlier tensor as well.
            earlier.consumers[op] = None
        described = self.values.describe(tensor, kind=kind, name=name, producer=op, alias_of=earlier_index)
        return self._recorder.add_tensor(described, is_same_tensor=True)

    def set_index(self, tensor: Any, index: int) -> None:
        """Set the index of a live tensor."""
        live = self._live.get(id(tensor))
        if live is None:
            self._live[id(tensor)] = _LiveTensor(index, self.serial, self._reference(tensor, id(tensor)))
        else:
            live.index, live.serial = index, self.serial

    def _reference(self, tensor: Any, key: int) -> Callable[[], Any]:
        """Return a weak reference whose end drops the index; a strong one if no weak one is possible."""
        try:
            # The id is free for another tensor as soon as this one is gone.
            return weakref.ref(tensor, lambda _: self._live.pop(key, None))
        except TypeError:  # no weak references: the tensor lives as long as the tracker
            return lambda: tensor

    def set_indices(
        self, values: Sequence[Any], positions: Sequence[Position], only_changed: bool = False
    ) -> None:
        """Set the indices of tensors.  only_changed: only of unknown tensors, or those written since."""
        for tensor, index in self._tensors_with_indices(values, positions):
            live = self._live.get(id(tensor)) if only_changed else None
            if live is None or self.writes_since(tensor, live.serial):
                self.set_index(tensor, index)

    def _tensors_with_indices(
        self, values: Sequence[Any], positions: Sequence[Position]
    ) -> Iterator[tuple[Any, int]]:
        """Yield each tensor among values with its index, those in lists too."""
        # A repeated execution may give fewer values than the first one.
        for value, position in zip(values, positions, strict=False):
            if isinstance(position, tuple):
                if isinstance(value, (list, tuple)):
                    yield from self._tensors_with_indices(value, position)
            elif position is not None and self.values.is_tensor(value):
                yield value, position

    def root_of(self, value: Any) -> int | None:
        """Return the index that a tensor had before it was first written.

        UNKNOWN for a tensor that is not recorded, and for a handle; None for no tensor.
        """
        if not self.values.is_tensor(value):
            return None
        # The handle of a variable or an iterator is another object at each execution.
        index = None if self.values.is_handle(value) else self.last_index(value)
        return UNKNOWN if index is None else self._recorder.values[index].root

    def record_input(self, value: Any, kind: str | None = None) -> int | None:
        """Return the index of an input, which is recorded if it comes from outside; None for no tensor.

        kind: of an input from outside; None to ask the framework.
        """
        if not self.values.is_tensor(value):
            return None
        index = self.current_index(value)
        if index is None:
            # An argument of a function is a symbol of its own; the caller's tensor is what is read.
            outer = self.values.captured_tensor(value)
            index = outer if outer is None or isinstance(outer, int) else self.record_input(outer)
            if index is None:
                origin_kind, name = self.values.origin(value)
                described = self.values.describe(value, kind=kind or origin_kind, name=name)
                index = self._recorder.add_tensor(described)
            self.set_index(value, index)
        return index

    def record_output(
        self, place: ProgramOp, value: Any, op: int, input_states: Sequence[InputState]
    ) -> int | None:
        """Record an output; return its index, None for no tensor.  input_states: of tensors among inputs."""
        if not self.values.is_tensor(value):
            return None
        alias = self.last_index(value)
        kind, name = place.facts.makes, self.values.name(value)
        # Known already: the op gave back an input, as ops in place do.
        is_known = alias is not None
        if alias is None:
            # symbols have no memory to share
            inputs = () if place.symbolic else input_states
            # A view has memory that an input has; what the first input's kind says goes to the output too.
            alias = self._input_sharing_memory(value, inputs) if kind else input_states[0].tensor
        owner = None if alias is None else self._recorder.values[alias]
        if owner is not None and is_known and place.symbolic and owner.tensor.producer is None:
            owner.tensor = replace(owner.tensor, producer=op, kind=kind)  # a loop reads it before it is made
            return alias
        if owner is not None and (not kind or (owner.tensor.kind in _STATE and is_known)):
            kind, name = owner.tensor.kind, owner.tensor.name
        described = self.values.describe(value, kind=kind, name=name, producer=op, alias_of=alias)
        return self._recorder.add_tensor(described, is_known, from_outside=place.facts.brings_in)

    def _input_sharing_memory(self, value: Any, input_states: Sequence[InputState]) -> int | None:
        """Return the index of the input whose memory a value shares; None without one."""
        memory = self.values.memory(value) if input_states else None
        for state in input_states if memory is not None else ():
            tensor = state.reference()
            input_memory = None if tensor is None else self.values.memory(tensor)
            if input_memory is not None and memory is not None and input_memory[0] is memory[0]:
                return state.tensor
        return None


def may_overlap(span: MemorySpan, other_span: MemorySpan) -> bool:
    """Return False if two tensors of one memory surely share no element."""
    try:
        # Strided views may interleave without sharing an element; to decide this exactly may take exponential
        # time, so the work is bounded and a doubtful case counts as shared.
        return bool(np.shares_memory(_array_of_span(span), _array_of_span(other_span), max_work=_WORK))
    except (getattr(np, "exceptions", np).TooHardError, ValueError):  # NumPy 1.25 moved it
        return True


@lru_cache(1024)
def _array_of_span(span: MemorySpan) -> Any:
    """Return an array with the addresses of a span, for np.shares_memory; reading elements would crash."""
    interface = {
        "version": 3, "shape": span.shape, "typestr": f"|V{span.width}",
        # Not the address of the tensor, which NumPy would not be allowed to read: only distances matter.
        "data": (_BASE + span.start * span.width, True),
        "strides": tuple(step * span.width for step in span.strides),
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


_NODES_KEPT = 256
"""Most executions of an op whose backward pass is still to come."""


class ExecutionTracker:
    """Record each execution of an op: its inputs, outputs and writes.

    An execution is one more call of a recorded op if both read the same tensors, which may have been written
    since, or new data from outside in their place.
    """

    def __init__(self, values: FrameworkValues, recorder: GraphRecorder) -> None:
        self.values = values
        self._tensors = LiveTensors(values, recorder)
        self._recorder = recorder

    @amanda.observer
    def before_op(self, *inputs: Any, place: ProgramOp, recomputed: bool = False) -> None:
        """Record the inputs of an op before it runs; none of a new op after the limit."""
        if self._recorder.drop_if_full(place):
            return
        # A repeated execution adds no op: its tensors take the indices of the first one.
        target = self._matching_op(place, inputs, recomputed)
        if target is None:
            input_positions = tuple(map_position(self._tensors.record_input, value) for value in inputs)
        else:
            input_positions = self._recorder.ops[target].op.inputs
            self._tensors.set_indices(inputs, input_positions, only_changed=True)
        # Versions before the op: one that has changed afterwards tells an input that was written.
        input_states = [self._tensors.input_state(value) for value in leaves(inputs)]
        serial, number = self._tensors.serial, self.values.next_node_number()
        place.begin(OpenExecution(input_positions, target, None, input_states, serial, number))

    @amanda.observer
    def after_op(self, *outputs: Any, place: ProgramOp, recomputed: bool = False) -> None:
        """Record the outputs of an op, and the inputs that it wrote."""
        frame = place.end()
        if frame is None:
            return
        # Before the outputs are recorded, as an output may be a written input.
        written_tensors = self._written_inputs(place, frame)
        index, executed = self._count_or_add_op(place, frame, recomputed)
        number = self.values.next_node_number()
        # The op has made nodes: their numbers lead from the backward pass to this execution.
        if number is not None and frame.number is not None and number != frame.number:
            place.nodes.append((frame.number, number, index))
            del place.nodes[:-_NODES_KEPT]
        for tensor in written_tensors.values():
            self._tensors.note_write(tensor, index)
        self._record_outputs(place, frame, executed, outputs)
        for position, tensor in written_tensors.items():
            if frame.target is None:
                # An op in place gives back its input, which is among the outputs then and has its new index
                # already.
                new_index = self._tensors.last_index(tensor)
                if new_index is None or place.symbolic or new_index not in indices_at(executed.outputs):
                    new_index = self._tensors.add_version(index, frame.input_states[position].tensor, tensor)
                executed.written[position] = new_index
            if position in executed.written:
                self._tensors.set_index(tensor, executed.written[position])

    @amanda.observer
    def before_backward_op(self, *gradients: Any, place: ProgramOp) -> None:
        """Record the gradients that enter a backward op: several if autodiff added them up."""
        if self._recorder.drop_if_full(place):
            return
        # Autodiff may add up gradients before a node sees them: every summand that was sent is read.
        number, arrived = self.values.incoming_gradients(len(gradients))
        forward, place.resumed = place.resumed, None
        # Of several executions of the forward op, the one whose nodes have this number.
        if forward is None and place.forward is not None:
            forward = place.forward.op_of_node(number)
        target = place.by_forward.get(forward)
        # After the limit further executions are counted at the last op.
        if target is None and self._recorder.is_full:
            target = place.ops[-1]
        input_positions: list[Position] = []
        for gradient, sent_indices in zip(gradients, arrived, strict=True) if target is None else ():
            if len(sent_indices) > 1:
                input_positions.append(tuple(sent_indices))
            elif sent_indices:
                input_positions.append(sent_indices[0])
            else:
                record = partial(self._tensors.record_input, kind="gradient")
                input_positions.append(map_position(record, gradient))
        place.begin(OpenExecution(tuple(input_positions), target, forward))

    @amanda.observer
    def after_backward_op(self, *gradients: Any, place: ProgramOp) -> None:
        """Record the gradients that leave a backward op, or are accumulated by it."""
        frame = place.end()
        if frame is None:
            return
        index, executed = self._count_or_add_op(place, frame)
        place.by_forward[frame.forward] = index
        self._record_outputs(place, frame, executed, gradients)
        # The next nodes receive these, in the order of the node's edges.
        sent = [position if isinstance(position, int) else None for position in executed.outputs]
        total = self.values.send_gradients(sent)
        # A leaf's gradient is written by each pass: a new version of the same tensor.
        if total is not None and frame.target is None:
            earlier_index = self._tensors.current_index(total)
            executed.parts.append(self._tensors.add_version(index, earlier_index, total))
        if total is not None and executed.parts:
            self._tensors.set_index(total, executed.parts[0])

    def add_symbols(self, context: amanda.OpContext, place: ProgramOp) -> None:
        """Record a new op of a graph, whose inputs and outputs are symbols."""
        if place.ops:
            return
        if context.is_backward():
            self.before_backward_op(*(context.get_grad_outputs() or ()), place=place)
            self.after_backward_op(*(context.get_grad_inputs() or ()), place=place)
            return
        self.before_op(*context.get_inputs(), place=place)
        self.after_op(*(context.get_outputs() or ()), place=place)
        for index in place.ops:
            self.values.note_call(context, list(indices_at(self._recorder.ops[index].op.inputs)))

    def current_inputs(self, context: amanda.OpContext) -> list[int]:
        """Return the indices of the inputs that a context's op has now; of a backward op, of the gradients.

        Summands stand for a gradient that autograd added up.  Tensors without an index are left out.
        """
        values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or []
        if context.is_backward():
            # `take=False`: the op itself takes the summands when it runs.
            _, summands_by_gradient = self.values.incoming_gradients(len(values), take=False)
            if any(summands_by_gradient):
                return [index for summands in summands_by_gradient for index in summands]
        indices = map(self._tensors.current_index, filter(self.values.is_tensor, leaves(values)))
        return [index for index in indices if index is not None]

    def _matching_op(self, place: ProgramOp, inputs: Sequence[Any], recomputed: bool) -> int | None:
        """Return the recorded op that an execution repeats; None for a new op."""
        if not place.ops:
            return None
        # Roots, not indices: a parameter that an optimizer has written since is the same input.
        roots = tuple(map_position(self._tensors.root_of, value) for value in inputs)
        for index in place.ops:
            if roots_agree(roots, self._recorder.ops[index].roots):
                return index
        # A recomputation in a checkpoint has other tensors as inputs, and is the same op nevertheless.
        full = len(place.ops) >= self._recorder.executions or self._recorder.is_full
        return place.ops[-1] if recomputed or full else None

    def _count_or_add_op(
        self, place: ProgramOp, frame: OpenExecution, recomputed: bool = False
    ) -> tuple[int, RecordedOp]:
        """Count an execution at its target, or add a new op; return index and op."""
        if frame.target is None:
            index = self._recorder.add_op(place, frame.inputs, frame.forward, recomputed)
        else:
            index = frame.target
            self._recorder.count(index, recomputed)
        place.last = index
        return index, self._recorder.ops[index]

    def _record_outputs(
        self, place: ProgramOp, frame: OpenExecution, executed: RecordedOp, outputs: Sequence[Any]
    ) -> None:
        """Record the outputs of a new op, and set the indices of an execution's outputs."""
        if frame.target is None:
            states = [state for state in frame.input_states if state is not None]
            record = partial(self._tensors.record_output, place, op=executed.op.index, input_states=states)
            executed.outputs = tuple(map_position(record, output, keep=True) for output in outputs)
        self._tensors.set_indices(outputs, executed.outputs)

    def _written_inputs(self, place: ProgramOp, frame: OpenExecution) -> dict[int, Any]:
        """Return the inputs that the op wrote, by flat position, without those that ops within it wrote."""
        written_tensors: dict[int, Any] = {}
        for position, state in enumerate(frame.input_states):
            tensor = None if state is None else state.reference()
            # An op may be given a tensor twice.
            if tensor is None or any(tensor is other for other in written_tensors.values()):
                continue
            is_written = position in place.facts.written or self.values.version(tensor) != state.version
            # What ops within this one have written is recorded at those ops.
            if is_written and not self._tensors.writes_since(tensor, frame.serial):
                written_tensors[position] = tensor
        return written_tensors


def roots_agree(roots: Any, recorded_roots: Any) -> bool:
    """Return True if inputs have the roots of a recorded op's inputs; an unknown tensor fits any root."""
    if isinstance(roots, tuple) and isinstance(recorded_roots, tuple):
        return len(roots) == len(recorded_roots) and all(map(roots_agree, roots, recorded_roots))
    return bool(roots == recorded_roots or (roots == UNKNOWN and recorded_roots is not None))
