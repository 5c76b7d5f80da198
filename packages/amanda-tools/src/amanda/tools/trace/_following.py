"""Brings each execution of an op into the graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import amanda
from amanda.tools.trace._frames import Frame, Frames
from amanda.tools.trace._graph import Position, each, flat, flat_indices
from amanda.tools.trace._living import Living
from amanda.tools.trace._recorder import UNKNOWN, Executed, Place, Recorder
from amanda.tools.trace._values import Values

_NODES_KEPT = 256
"""Most executions of an op between its forward and its backward pass."""


class Following:
    """Follows the tensors of a framework from op to op.

    An execution is the same op as one before if its inputs are the same tensors, apart from having been
    written, and from new ones that come from outside.  executions: most ops of one place; further executions
    are counted at the last.  limit: most ops.
    """

    def __init__(self, values: Values, recorder: Recorder, executions: int, limit: int) -> None:
        self.values = values
        self._living = Living(values, recorder)
        self._recorder = recorder
        self._executions = executions
        self._limit = limit
        self._frames = Frames()

    # ---- forward ops ----

    @amanda.observer
    def enter(self, *inputs: Any, place: Place) -> None:
        """Record what an op reads that is about to run."""
        if self._is_dropped(place):
            return
        target = self._target(place, inputs)
        if target is None:
            read = self._living.read_all(inputs)
        else:
            read = self._recorder.ops[target].op.inputs
            self._living.identify_all(inputs, read, only_changed=True)
        given = [self._living.given(one) for one in flat(inputs)]
        number = self.values.next_number()
        self._frames.push(Frame(place, read, target, None, given, self._living.memory.serial, number))

    @amanda.observer
    def leave(self, *outputs: Any, place: Place) -> None:
        """Record what an op has made and written."""
        frame = self._frames.pop(place)
        if frame is None:
            return
        written = self._written(frame)
        index, executed = self._executed(frame)
        self._note_nodes(frame, index)
        for tensor in written.values():
            self._living.memory.note(tensor, index)
        if frame.target is None:
            given = [one for one in frame.given if one is not None]
            executed.outputs = self._living.make_all(place, outputs, index, given)
        else:
            self._living.identify_all(outputs, executed.outputs)
        for position, tensor in written.items():
            if frame.target is None:
                executed.written[position] = self._after_write(frame, executed, position, tensor, index)
            if position in executed.written:
                self._living.identify(tensor, executed.written[position])

    # ---- backward ops ----

    @amanda.observer
    def enter_backward(self, *gradients: Any, place: Place) -> None:
        """Record the gradients that enter a backward op."""
        if self._is_dropped(place):
            return
        arrived = self.values.arrived(len(gradients))
        number = self.values.node_number()
        forward, place.resumed = place.resumed, None
        if forward is None and place.forward is not None:
            forward = place.forward.maker(number)
        target = place.by_forward.get(forward)
        if target is None and len(self._recorder.ops) >= self._limit:
            target = place.ops[-1]
        read = () if target is not None else self._read_gradients(gradients, arrived)
        self._frames.push(Frame(place, read, target, forward))

    def _read_gradients(
        self, gradients: Sequence[Any], arrived: list[list[int]] | None
    ) -> tuple[Position, ...]:
        """Return what is at each gradient that enters: a list where several are added up."""
        read: list[Position] = []
        for gradient, sent in zip(gradients, arrived or [[] for _ in gradients], strict=True):
            if sent:
                read.append(sent[0] if len(sent) == 1 else tuple(sent))
            else:
                read.append(each(partial(self._living.read, kind="gradient"), gradient))
        return tuple(read)

    @amanda.observer
    def leave_backward(self, *gradients: Any, place: Place) -> None:
        """Record the gradients that leave a backward op."""
        frame = self._frames.pop(place)
        if frame is None:
            return
        index, executed = self._executed(frame)
        place.by_forward[frame.forward] = index
        if frame.target is None:
            executed.outputs = self._living.make_all(place, gradients, index)
        else:
            self._living.identify_all(gradients, executed.outputs)
        self.values.send([one if isinstance(one, int) else None for one in executed.outputs])
        total = self.values.accumulated()
        if total is not None:
            self._accumulate(frame, executed, index, total)

    def _accumulate(self, frame: Frame, executed: Executed, index: int, total: Any) -> None:
        """Record the new value of a leaf's gradient."""
        if frame.target is None:
            before = self._living.current_index(total)
            if before is None:
                described = self.values.describe(total)
                executed.parts.append(self._recorder.add_tensor(described, "gradient", None, index))
            else:
                executed.parts.append(self._living.add_version(index, before, total))
        if executed.parts:
            self._living.identify(total, executed.parts[0])

    # ---- for the tool, and for tools that depend on it ----

    def add_symbols(self, place: Place, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Record an op of a graph, whose inputs and outputs are symbols; return True if it is new."""
        if place.ops:
            return False
        backward = place.op.phase == "backward"
        enter, leave = (self.enter_backward, self.leave_backward) if backward else (self.enter, self.leave)
        enter(*inputs, place=place)
        leave(*outputs, place=place)
        return bool(place.ops)

    def given(self, context: amanda.OpContext) -> list[int]:
        """Return the recorded tensors that the op of a context is given at this moment."""
        values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or []
        if context.is_backward():
            arrived = self.values.arrived(len(values), take=False)
            if arrived is not None and any(arrived):
                return [index for sent in arrived for index in sent]
        found = map(self._living.current_index, filter(self.values.is_tensor, flat(values)))
        return [index for index in found if index is not None]

    # ---- executions ----

    def _target(self, place: Place, inputs: Sequence[Any]) -> int | None:
        """Return the recorded op that an execution is another one of; None for a new op."""
        if not place.ops:
            place.in_backward = self.values.in_backward()
            return None
        roots = tuple(each(self._living.root_of, one) for one in inputs)
        for index in place.ops:
            if agree(roots, self._recorder.ops[index].roots):
                return index
        again = self.values.in_backward() and not place.in_backward  # a checkpoint's
        full = len(place.ops) >= self._executions or len(self._recorder.ops) >= self._limit
        return place.ops[-1] if again or full else None

    def _executed(self, frame: Frame) -> tuple[int, Executed]:
        """Return the recorded op of an execution: a new one, or one more time the target."""
        if frame.target is None:
            index = self._recorder.add_op(frame.place, frame.inputs, frame.forward)
        else:
            index = frame.target
            self._recorder.count(index)
        frame.place.last = index
        return index, self._recorder.ops[index]

    def _note_nodes(self, frame: Frame, index: int) -> None:
        number = self.values.next_number()
        if number is not None and frame.number is not None and number != frame.number:
            frame.place.nodes.append((frame.number, number, index))
            del frame.place.nodes[:-_NODES_KEPT]

    def _is_dropped(self, place: Place) -> bool:
        if place.ops or len(self._recorder.ops) < self._limit:
            return False
        self._recorder.drop(place)
        return True

    def _written(self, frame: Frame) -> dict[int, Any]:
        """Return by flat position the inputs that the op itself has written, and no op within it."""
        found: dict[int, Any] = {}
        for position, given in enumerate(frame.given):
            tensor = None if given is None else given.reference()
            if given is None or tensor is None:
                continue
            wrote = position in frame.place.written or self.values.version(tensor) != given.version
            if wrote and not any(tensor is one for one in found.values()):
                within = self._living.memory.since(tensor, frame.serial)
                found.update({} if within else {position: tensor})
        return found

    def _after_write(self, frame: Frame, executed: Executed, position: int, tensor: Any, op: int) -> int:
        """Return the index of a written input: of the output that it is, or a new one."""
        index = self._living.last_index(tensor)
        if index is not None and index in flat_indices(executed.outputs) and not frame.place.symbolic:
            return index
        given = frame.given[position]
        assert given is not None
        return self._living.add_version(op, given.tensor, tensor)


def agree(one: Any, recorded: Any) -> bool:
    """Return True if the roots of inputs are those of a recorded op; an unknown tensor may be any."""
    if isinstance(one, tuple) and isinstance(recorded, tuple):
        return len(one) == len(recorded) and all(map(agree, one, recorded))
    return bool(one == recorded or (one == UNKNOWN and recorded is not None))
