"""Tracker of live tensors from op to op: their indices in the graph, and the writes into shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ReferenceType

import amanda
from amanda import interceptor
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

_BASE_ADDRESS = 1 << 20
"""Address that stands for the start of a memory."""
_WORK_LIMIT: Any = 10_000
"""Bound of the work of np.shares_memory."""
_STATE_KINDS = ("parameter", "buffer")
"""Kinds that a tensor keeps when it is written."""


class InputState(NamedTuple):
    """An input before the op: a weak reference, index and version of the tensor."""

    reference: Callable[[], Any]
    tensor_index: int
    version: int | None


class MemoryWrite(NamedTuple):
    """A write into a span of memory by a recorded op.  serial: number of the write."""

    serial: int
    op: int
    span: MemorySpan


class LiveTensors:
    """Live tensors of a framework: their indices, and the writes into their memory.

    live: their indices by weak references, which native code sets too.
    """

    def __init__(self, values: FrameworkValues, recorder: GraphRecorder) -> None:
        self.values = values
        self.live = interceptor.LiveTensors()
        self._recorder = recorder

    def input_state(self, value: Any) -> InputState | None:
        """Return the state of an input before the op; None for values that are not recorded tensors."""
        live = self.live.find(value)
        return None if live is None else InputState(live[2], live[0], self.values.version(value))

    def last_index(self, tensor: Any) -> int | None:
        """Return the index of a tensor as of the last op that read or made it; None for an unknown one."""
        live = self.live.find(tensor)
        return None if live is None else live[0]

    def current_index(self, tensor: Any) -> int | None:
        """Return a tensor's index now, after recording writes into its memory; None for an unknown one."""
        live = self.live.find(tensor)
        if live is None:
            return None
        index, serial, _ = live
        # Writes through other tensors of this memory become versions only once somebody reads this tensor.
        for write in self.writes_since(tensor, serial):
            index = self.add_version(write.op, index, tensor)
            self._recorder.ops[write.op].other_versions.append(index)
        self.set_index(tensor, index)
        return index

    def note_write(self, tensor: Any, op: int) -> None:
        """Note that an op has written a tensor, while its memory, if known, is in use; drop old writes."""
        memory_and_span = self.values.memory(tensor)
        if memory_and_span is not None:
            memory, span = memory_and_span
            self.live.note_write(memory, self.values.memory_address(memory), op, span)

    def writes_since(self, tensor: Any, serial: int) -> list[MemoryWrite]:
        """Return the writes since a serial number that changed a tensor, in their order.

        A write of all that the tensor sees hides those before it.  None of a tensor whose memory is unknown.
        """
        writes: list[MemoryWrite] = []
        memory_and_span = None if serial == self.live.serial else self.values.memory(tensor)
        if memory_and_span is None:
            return writes
        memory, span = memory_and_span
        # newest first, so that a write of the same span ends the search
        for number, op, written_span in self.live.writes(self.values.memory_address(memory), serial):
            write = MemoryWrite(number, op, MemorySpan(*written_span))
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
            earlier_tensor = self._recorder.tensors[earlier_index]
            kind, name = earlier_tensor.kind, earlier_tensor.name
            # A write of a part leaves the rest, so the op reads the earlier tensor as well.
            earlier_tensor.consumers[op] = None
        new_tensor = self.values.describe(tensor, kind=kind, name=name, producer=op, alias_of=earlier_index)
        return self._recorder.add_tensor(new_tensor, is_same_tensor=True)

    def set_index(self, tensor: Any, index: int) -> None:
        """Set the index of a tensor as of the last write; add a tensor that is unknown, by weak reference."""
        self.live.set(tensor, index, self._recorder.tensors[index].root)

    def set_indices(
        self, values: Sequence[Any], positions: Sequence[Position], only_changed: bool = False
    ) -> None:
        """Set the indices of tensors.  only_changed: only of unknown tensors, or those written since."""
        for tensor, index in self._tensors_with_indices(values, positions):
            live = self.live.find(tensor) if only_changed else None
            if live is None or self.writes_since(tensor, live[1]):
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
        return UNKNOWN if index is None else self._recorder.tensors[index].root

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
                new_tensor = self.values.describe(value, kind=kind or origin_kind, name=name)
                index = self._recorder.add_tensor(new_tensor)
            self.set_index(value, index)
        return index

    def record_output(
        self, program_op: ProgramOp, value: Any, op: int, input_states: Sequence[InputState]
    ) -> int | None:
        """Record an output, or an alias of the input with its memory; return its index, None without one."""
        if not self.values.is_tensor(value):
            return None
        alias = self.last_index(value)
        kind, name = program_op.facts.makes, self.values.name(value)  # kind is "" for that of the first input
        is_input = alias is not None  # as ops in place give back
        if alias is None and not kind:
            alias = input_states[0].tensor_index
        elif alias is None and not program_op.symbolic:  # symbols have no memory to share
            alias = self._index_of_input_sharing_memory(value, input_states)
        if alias is not None:
            aliased_tensor = self._recorder.tensors[alias]
            if is_input and program_op.symbolic and aliased_tensor.producer is None:
                # A loop of a graph reads the tensor before this op makes it.
                aliased_tensor.producer, aliased_tensor.kind = op, kind
                return alias
            if not kind or (is_input and aliased_tensor.kind in _STATE_KINDS):
                kind, name = aliased_tensor.kind, aliased_tensor.name
        new_tensor = self.values.describe(value, kind=kind, name=name, producer=op, alias_of=alias)
        return self._recorder.add_tensor(new_tensor, is_input, from_outside=program_op.facts.brings_in)

    def _index_of_input_sharing_memory(self, value: Any, input_states: Sequence[InputState]) -> int | None:
        """Return the index of the input whose memory a value shares; None without one."""
        memory_and_span = self.values.memory(value) if input_states else None
        if memory_and_span is None:
            return None
        for state in input_states:
            tensor = state.reference()
            input_memory_and_span = None if tensor is None else self.values.memory(tensor)
            if input_memory_and_span is not None and input_memory_and_span[0] is memory_and_span[0]:
                return state.tensor_index
        return None


def may_overlap(span: MemorySpan, other_span: MemorySpan) -> bool:
    """Return False if two tensors of one memory surely share no element."""
    try:
        # Strided views may interleave without sharing an element; to decide this exactly may take exponential
        # time, so the work is bounded and a doubtful case counts as shared.
        return bool(np.shares_memory(_array_of_span(span), _array_of_span(other_span), max_work=_WORK_LIMIT))
    except (getattr(np, "exceptions", np).TooHardError, ValueError):  # NumPy 1.25 moved it
        return True


@lru_cache(1024)
def _array_of_span(span: MemorySpan) -> Any:
    """Return an array with the addresses of a span, for np.shares_memory; reading elements would crash."""
    interface = {
        "version": 3, "shape": span.shape, "typestr": f"|V{span.width}",
        # Not the address of the tensor, which NumPy would not be allowed to read: only distances matter.
        "data": (_BASE_ADDRESS + span.start * span.width, True),
        "strides": tuple(step * span.width for step in span.strides),
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


class ExecutionTracker:
    """Record each execution of an op: its inputs, outputs and writes.

    An execution is one more call of a recorded op if both read the same tensors, which may have been written
    since, or new data from outside in their place.
    """

    def __init__(self, values: FrameworkValues, recorder: GraphRecorder) -> None:
        self.values = values
        self._tensors = LiveTensors(values, recorder)
        self.live = self._tensors.live
        self._recorder = recorder
        recorder.live.append(self.live)

    @amanda.observer
    def before_op(self, *inputs: Any, program_op: ProgramOp, recomputed: bool = False) -> None:
        """Record the inputs of an op before it runs, or find the op that it repeats; none after the limit."""
        if self._recorder.drop_if_full(program_op):
            return
        # A repeated execution adds no op: its tensors take the indices of the first one.
        repeated_op = self._matching_op(program_op, inputs, recomputed)
        if repeated_op is None:
            input_positions = tuple([map_position(self._tensors.record_input, value) for value in inputs])
        else:
            input_positions = self._recorder.ops[repeated_op].inputs
            self._tensors.set_indices(inputs, input_positions, only_changed=True)
        # Versions before the op: one that has changed afterwards tells an input that was written.
        input_states = [self._tensors.input_state(value) for value in leaves(inputs)]
        serial, next_number = self.live.serial, self.values.next_node_number()
        execution = OpenExecution(input_positions, repeated_op, None, input_states, serial, next_number)
        program_op.records.begin(execution)

    @amanda.observer
    def after_op(self, *outputs: Any, program_op: ProgramOp, recomputed: bool = False) -> None:
        """Record an op with its outputs and the inputs that it wrote, or count one more execution of it."""
        execution = self._end(program_op)
        if execution is None:
            return
        # Before the outputs are recorded, as an output may be a written input.
        written_tensors = self._written_inputs(program_op, execution)
        index, recorded = self._count_or_add_op(program_op, execution, recomputed)
        first_number, end_number = execution.next_node_number, self.values.next_node_number()
        # The op has made nodes: their numbers lead from the backward pass to this execution.
        if first_number is not None and end_number is not None and first_number != end_number:
            program_op.records.add_nodes(first_number, end_number, index)
        for tensor in written_tensors.values():
            self._tensors.note_write(tensor, index)
        self._record_outputs(program_op, execution, recorded, outputs)
        for position, tensor in written_tensors.items():
            if execution.repeated_op is None:
                # An op in place gives back its input, which has its new index then, as an output.
                new_index = self._tensors.last_index(tensor)
                if new_index is None or program_op.symbolic or new_index not in indices_at(recorded.outputs):
                    earlier_index = execution.input_states[position].tensor_index
                    new_index = self._tensors.add_version(index, earlier_index, tensor)
                recorded.written_inputs[position] = new_index
            if position in recorded.written_inputs:
                self._tensors.set_index(tensor, recorded.written_inputs[position])
        if execution.repeated_op is None:
            self._recorder.add_record(program_op, recorded, recorded.written_inputs)

    def _end(self, program_op: ProgramOp) -> OpenExecution | None:
        """End the innermost execution of this thread, which native code may have begun; None without one."""
        execution: Any = program_op.records.end()
        if execution is None or isinstance(execution, OpenExecution):
            return execution
        repeated_op, states, serial, next_number = execution
        input_states = [None if state is None else InputState(*state) for state in states]
        return OpenExecution((), repeated_op, None, input_states, serial, next_number)

    @amanda.observer
    def before_backward_op(self, *gradients: Any, program_op: ProgramOp) -> None:
        """Record the gradients that enter a backward op, or the summands of each, or find the op repeated."""
        if self._recorder.drop_if_full(program_op):
            return
        # Autodiff may add up gradients before a node sees them: every summand that was sent is read.
        node_number, summands_by_gradient = self._incoming_gradients(len(gradients))
        forward_op, program_op.resumed_forward_op = program_op.resumed_forward_op, None
        # Of several executions of the forward op, the one whose nodes have this number.
        if forward_op is None and program_op.forward is not None:
            forward_op = program_op.forward.op_of_node(node_number)
        repeated_op = program_op.op_by_forward_op.get(forward_op)
        # After the limit further executions are counted at the last op.
        if repeated_op is None and self._recorder.is_full:
            repeated_op = program_op.ops[-1]
            program_op.records.accepts_any = True
        input_positions: list[Position] = []
        if repeated_op is None:
            for gradient, summands in zip(gradients, summands_by_gradient, strict=True):
                if summands:
                    input_positions.append(tuple(summands) if len(summands) > 1 else summands[0])
                else:  # no traced op sent it
                    record_gradient = partial(self._tensors.record_input, kind="gradient")
                    input_positions.append(map_position(record_gradient, gradient))
        program_op.records.begin(OpenExecution(tuple(input_positions), repeated_op, forward_op))

    @amanda.observer
    def after_backward_op(self, *gradients: Any, program_op: ProgramOp) -> None:
        """Record gradients that leave a backward op, or accumulate at a leaf, and send them to next nodes."""
        if isinstance(entered := program_op.records.current(), list):
            # Native code took the execution for a repeated one, and left out the routine before the op.
            program_op.records.end()
            grad_outputs = [item() if isinstance(item, ReferenceType) else item for item in entered]
            self.before_backward_op(*grad_outputs, program_op=program_op)
        execution = self._end(program_op)
        if execution is None:
            return
        index, recorded = self._count_or_add_op(program_op, execution)
        self._record_outputs(program_op, execution, recorded, gradients)
        # The next nodes receive these, in the order of the node's edges.
        node_gradients = self.values.gradients
        leaf_gradient = None if node_gradients is None else node_gradients.send(recorded.outputs)
        # A leaf's gradient is written by each pass: a new version of the same tensor.
        if leaf_gradient is not None and execution.repeated_op is None:
            earlier_index = self._tensors.current_index(leaf_gradient)
            recorded.other_versions.append(self._tensors.add_version(index, earlier_index, leaf_gradient))
        if leaf_gradient is not None and recorded.other_versions:
            self._tensors.set_index(leaf_gradient, recorded.other_versions[0])
        if execution.repeated_op is None:
            program_op.op_by_forward_op[execution.forward_op] = index
            self._recorder.add_record(program_op, recorded, dict(enumerate(recorded.other_versions[:1])))

    def _incoming_gradients(
        self, count: int, take: bool = True
    ) -> tuple[int | None, Sequence[Sequence[int]]]:
        """Return the number of the present node, and for each of its gradients the recorded summands.

        The number is None for a node that accumulates a leaf's gradient.  take: drop the summands.
        """
        gradients = self.values.gradients
        return (None, [()] * count) if gradients is None else gradients.receive(count, take)

    def add_symbols(self, context: amanda.OpContext, program_op: ProgramOp) -> None:
        """Record an op of a graph, once: its inputs and outputs are symbols, which no execution changes."""
        if program_op.ops:
            return
        if context.is_backward():
            self.before_backward_op(*(context.get_grad_outputs() or ()), program_op=program_op)
            self.after_backward_op(*(context.get_grad_inputs() or ()), program_op=program_op)
            return
        self.before_op(*context.get_inputs(), program_op=program_op)
        self.after_op(*(context.get_outputs() or ()), program_op=program_op)
        for index in program_op.ops:
            self.values.note_call(context, indices_at(self._recorder.ops[index].inputs))

    def current_inputs(self, context: amanda.OpContext) -> list[int]:
        """Return the indices of the inputs that a context's op has now; of a backward op, of the gradients.

        Summands stand for a gradient that autograd added up.  Tensors without an index are left out.
        """
        values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or []
        if context.is_backward():
            # `take=False`: the op itself takes the summands when it runs.
            _, summands_by_gradient = self._incoming_gradients(len(values), take=False)
            if any(summands_by_gradient):
                return [index for summands in summands_by_gradient for index in summands]
        indices = map(self._tensors.current_index, filter(self.values.is_tensor, leaves(values)))
        return [index for index in indices if index is not None]

    def _matching_op(self, program_op: ProgramOp, inputs: Sequence[Any], recomputed: bool) -> int | None:
        """Return the recorded op that an execution repeats, after the limit the last; None for a new op."""
        if not program_op.ops:
            return None
        # Roots, not indices: a parameter that an optimizer has written since is the same input.
        roots = tuple([map_position(self._tensors.root_of, value) for value in inputs])
        for index in program_op.ops:
            if roots_agree(roots, self._recorder.ops[index].input_roots):
                return index
        # A recomputation in a checkpoint has other tensors as inputs, and is the same op nevertheless.
        is_full = len(program_op.ops) >= self._recorder.executions or self._recorder.is_full
        program_op.records.accepts_any = is_full
        return program_op.ops[-1] if recomputed or is_full else None

    def _count_or_add_op(
        self, program_op: ProgramOp, execution: OpenExecution, recomputed: bool = False
    ) -> tuple[int, RecordedOp]:
        """Count an execution at the op that it repeats, or add a new op; return index and op."""
        if execution.repeated_op is None:
            index = self._recorder.add_op(program_op, execution.inputs, execution.forward_op, recomputed)
        else:
            index = execution.repeated_op
            self._recorder.count(index, recomputed)
        program_op.last_executed = index
        return index, self._recorder.ops[index]

    def _record_outputs(
        self, program_op: ProgramOp, execution: OpenExecution, recorded: RecordedOp, outputs: Sequence[Any]
    ) -> None:
        """Record the outputs of a new op, and set the indices of an execution's outputs."""
        if execution.repeated_op is None:
            states = [state for state in execution.input_states if state is not None]
            op = recorded.index
            record_output = partial(self._tensors.record_output, program_op, op=op, input_states=states)
            recorded.outputs = tuple([map_position(record_output, output, keep=True) for output in outputs])
        self._tensors.set_indices(outputs, recorded.outputs)

    def _written_inputs(self, program_op: ProgramOp, execution: OpenExecution) -> dict[int, Any]:
        """Return the inputs that the op itself wrote, not ops within it, by flat position."""
        written_tensors: dict[int, Any] = {}
        for position, state in enumerate(execution.input_states):
            tensor = None if state is None else state.reference()
            # An op may be given a tensor twice.
            if tensor is None or any(tensor is other for other in written_tensors.values()):
                continue
            is_written = position in program_op.facts.written or self.values.version(tensor) != state.version
            # What ops within this one have written is recorded at those ops.
            if is_written and not self._tensors.writes_since(tensor, execution.write_serial):
                written_tensors[position] = tensor
        return written_tensors


def roots_agree(roots: Any, recorded_roots: Any) -> bool:
    """Return True if inputs have the roots of a recorded op's inputs; an unknown tensor fits any root."""
    if isinstance(roots, tuple) and isinstance(recorded_roots, tuple):
        return len(roots) == len(recorded_roots) and all(map(roots_agree, roots, recorded_roots))
    return bool(roots == recorded_roots or (roots == UNKNOWN and recorded_roots is not None))
