"""Brings each execution of an op into the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda
from amanda.tools.trace._frames import Frame, Frames, Given, flat, reference
from amanda.tools.trace._graph import Position, spread
from amanda.tools.trace._living import Living
from amanda.tools.trace._recorder import UNKNOWN, Executed, Place, Recorder
from amanda.tools.trace._values import Values

_NODES_KEPT = 256
"""So many executions of an op may be between its forward and its backward pass."""


class Following:
    """Follows the tensors of a framework from op to op.

    An execution is the same op as one before if its inputs are the same tensors, apart from having been
    written, and from new ones that come from outside.  executions: so many ops one place may have; further
    executions are counted at the last.  limit: of ops.
    """

    def __init__(self, values: Values, recorder: Recorder, executions: int, limit: int) -> None:
        self.values = values
        self.living = Living(values, recorder)
        self._recorder = recorder
        self._executions = executions
        self._limit = limit
        self._frames = Frames()

    # ---- forward ops ----

    @amanda.observer
    def enter(self, *inputs: Any, place: Place) -> None:
        """An op is about to run."""
        if self._is_dropped(place):
            return
        target = self._same(place, inputs)
        if target is not None:
            read = self._recorder.ops[target].inputs
            self.living.recall_all(inputs, read)
        else:
            read = self.living.read_all(inputs)
        given = [self._given(one) for one in flat(inputs)]
        number = self.values.next_number()
        self._frames.push(Frame(place, read, target, None, given, self.living.memory.serial, number))

    @amanda.observer
    def leave(self, *outputs: Any, place: Place) -> None:
        """Take the outputs of an op that has run."""
        frame = self._frames.pop(place)
        if frame is None:
            return
        written = self._written(frame)
        index, executed, folded = self._executed(frame)
        self._note_nodes(frame, index)
        if not folded:
            known = [one for one in frame.given if one is not None]
            read, near = [one.tensor for one in known], [one.reference() for one in known]
            executed.outputs = tuple(self.living.make(place, one, index, read, near) for one in outputs)
        for tensor in written.values():
            self.living.memory.note(self.values, tensor, index)
        self.living.know_all(outputs, executed.outputs)
        for position, tensor in written.items():
            if not folded:
                executed.written[position] = self._after_write(frame, executed, position, tensor, index)
            if position in executed.written:
                self.living.know(tensor, executed.written[position])

    def add_symbols(self, place: Place, inputs: Sequence[Any], outputs: Sequence[Any]) -> int | None:
        """Record an op of a graph, whose inputs and outputs stand for values; its index if it is new."""
        if place.ops or self._is_dropped(place):
            return None
        read = self.living.read_all(inputs)
        index = self._recorder.add_op(place, read, None, calls=None)
        executed = self._recorder.ops[index]
        flat_read = list(spread(read))
        executed.outputs = tuple(self.living.make(place, one, index, flat_read) for one in outputs)
        self.living.know_all(outputs, executed.outputs)
        for position in place.written:
            before = read[position] if position < len(read) else None
            if isinstance(before, int):
                executed.written[position] = self.living.written_by(index, before, inputs[position])
                self.living.know(inputs[position], executed.written[position])
        return index

    # ---- backward ops ----

    @amanda.observer
    def enter_backward(self, *gradients: Any, place: Place) -> None:
        """A backward op is about to run."""
        if self._is_dropped(place):
            return
        arrived = self.values.entering(len(gradients))
        number = self.values.node_number()
        forward, place.recalled = place.recalled, None
        if forward is None and place.forward is not None:
            forward = place.forward.maker(number)
        target = place.by_forward.get(forward)
        if target is None and len(self._recorder.ops) >= self._limit:
            target = place.ops[-1]
        read = () if target is not None else self.read_gradients(gradients, arrived)
        self._frames.push(Frame(place, read, target, forward))

    def read_gradients(
        self, gradients: Sequence[Any], arrived: list[list[int]] | None
    ) -> tuple[Position, ...]:
        """Return the recorded tensor of each gradient that enters an op; several that arrive are added up."""
        read: list[Position] = []
        for i, gradient in enumerate(gradients):
            sent = [] if arrived is None else arrived[i]
            if len(sent) > 1:
                read.append(tuple(sent))
            else:
                read.append(sent[0] if sent else self.living.read(gradient, "gradient"))
        return tuple(read)

    @amanda.observer
    def leave_backward(self, *gradients: Any, place: Place) -> None:
        """Take the outputs of an op that has run."""
        frame = self._frames.pop(place)
        if frame is None:
            return
        index, executed, folded = self._executed(frame)
        place.by_forward[frame.forward] = index
        if not folded:
            executed.outputs = tuple(self.living.make(place, one, index) for one in gradients)
        self.living.know_all(gradients, executed.outputs)
        self.values.leave([one if isinstance(one, int) else None for one in executed.outputs])
        total = self.values.accumulated()
        if total is not None:
            self._accumulate(executed, index, total, folded)

    def add_backward_symbols(self, place: Place, entering: Sequence[Any], leaving: Sequence[Any]) -> None:
        """Record a backward op of a graph."""
        if place.ops or self._is_dropped(place):
            return
        read = self.read_gradients(entering, None)
        forward = None if place.forward is None else place.forward.maker(None)
        index = self._recorder.add_op(place, read, forward, calls=None)
        executed = self._recorder.ops[index]
        executed.outputs = tuple(self.living.make(place, one, index, list(spread(read))) for one in leaving)
        self.living.know_all(leaving, executed.outputs)

    def _accumulate(self, executed: Executed, index: int, total: Any, folded: bool) -> None:
        """A leaf's gradient has a new value."""
        if not folded:
            before = self.living.index_of(total)
            if before is None:
                described = self.values.describe(total)
                executed.parts.append(self._recorder.add_tensor(described, "gradient", None, index))
            else:
                executed.parts.append(self.living.written_by(index, before, total))
        if executed.parts:
            self.living.know(total, executed.parts[0])

    # ---- for tools that depend on the tool ----

    def given(self, context: amanda.OpContext) -> list[int]:
        """The recorded tensors that the op of a context is given at this moment."""
        if context.is_forward():
            values = context.get_inputs()
        else:
            values = context.get_grad_outputs() or []
            arrived = self.values.entering(len(values), take=False)
            if arrived is not None and any(arrived):
                return [index for sent in arrived for index in sent]
        tensors = filter(self.values.is_tensor, flat(values))
        return [index for index in map(self.living.index_of, tensors) if index is not None]

    # ---- what ops lean on ----

    def _same(self, place: Place, inputs: Sequence[Any]) -> int | None:
        """The recorded op that an execution is another one of; None where it is a new op."""
        if not place.ops:
            place.in_backward = self.values.in_backward()
            return None
        roots = [*map(self.living.root_of, inputs)]
        for index in place.ops:
            if agree(roots, self._recorder.ops[index].roots):
                return index
        again = self.values.in_backward() and not place.in_backward  # a checkpoint's
        full = len(place.ops) >= self._executions or len(self._recorder.ops) >= self._limit
        return place.ops[-1] if again or full else None

    def _executed(self, frame: Frame) -> tuple[int, Executed, bool]:
        """The op of the graph for an execution, and whether it was there before."""
        if frame.target is None:
            index = self._recorder.add_op(frame.place, frame.inputs, frame.forward)
        else:
            index = frame.target
            self._recorder.count(index)
        frame.place.last = index
        return index, self._recorder.ops[index], frame.target is not None

    def _note_nodes(self, frame: Frame, index: int) -> None:
        """Keep which nodes of autodiff an op has made."""
        number = self.values.next_number()
        if number is not None and frame.number is not None and number != frame.number:
            frame.place.made.append((frame.number, number, index))
            del frame.place.made[:-_NODES_KEPT]

    def _is_dropped(self, place: Place) -> bool:
        if place.ops or len(self._recorder.ops) < self._limit:
            return False
        self._recorder.drop(place)
        return True

    def _given(self, value: Any) -> Given | None:
        index = self.living.last_index(value) if self.values.is_tensor(value) else None
        return None if index is None else Given(reference(value), index, self.values.version(value))

    def _written(self, frame: Frame) -> dict[int, Any]:
        """By flat position: the inputs that the op itself has written, not an op within it."""
        found: dict[int, Any] = {}
        for position, given in enumerate(frame.given):
            tensor = None if given is None else given.reference()
            if given is None or tensor is None:
                continue
            wrote = position in frame.place.written or self.values.version(tensor) != given.version
            if wrote and not any(tensor is one for one in found.values()):
                within = self.living.memory.since(self.values, tensor, frame.serial)
                found.update({} if within else {position: tensor})
        return found

    def _after_write(self, frame: Frame, executed: Executed, position: int, tensor: Any, op: int) -> int:
        """Return the recorded tensor of an input after a write: an output of the op, or a new tensor."""
        index = self.living.last_index(tensor)
        if index is not None and index in spread(executed.outputs):
            return index
        given = frame.given[position]
        assert given is not None
        return self.living.written_by(op, given.tensor, tensor)


def agree(roots: Sequence[Position], recorded: Sequence[Position]) -> bool:
    """Return True if inputs are those of a recorded op, where an unknown input may be any."""
    if len(roots) != len(recorded):
        return False
    for one, other in zip(roots, recorded, strict=True):
        if isinstance(one, tuple) and isinstance(other, tuple):
            if not agree(one, other):
                return False
        elif one != other and (one != UNKNOWN or other is None):
            return False
    return True
