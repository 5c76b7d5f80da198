"""Brings each execution of an op into the graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import amanda
from amanda.tools.kit import leaves
from amanda.tools.trace._graph import Position, each, indices_at
from amanda.tools.trace._living import Living
from amanda.tools.trace._recorder import UNKNOWN, Executed, Frame, ProgramOp, Recorder
from amanda.tools.trace._values import Values

_NODES_KEPT = 256
"""Most executions of an op between its forward and its backward pass."""


class Following:
    """Follows the tensors of a framework from op to op.

    An execution is the same op as one before if its inputs are the same tensors, apart from having been
    written, and from new ones that come from outside.
    """

    def __init__(self, values: Values, recorder: Recorder) -> None:
        self.values = values
        self._living = Living(values, recorder)
        self._recorder = recorder

    @amanda.observer
    def enter(self, *inputs: Any, place: ProgramOp, recomputed: bool = False) -> None:
        """Record what an op reads that is about to run."""
        if self._recorder.drops(place):
            return
        target = self._target(place, inputs, recomputed)
        if target is None:
            read = tuple(each(self._living.read, one) for one in inputs)
        else:
            read = self._recorder.ops[target].op.inputs
            self._living.identify_all(inputs, read, only_changed=True)
        given = [self._living.given(one) for one in leaves(inputs)]
        serial, number = self._living.serial, self.values.next_number()
        place.begin(Frame(read, target, None, given, serial, number))

    @amanda.observer
    def leave(self, *outputs: Any, place: ProgramOp, recomputed: bool = False) -> None:
        """Record what an op has made and written."""
        frame = place.end()
        if frame is None:
            return
        written = self._written(place, frame)
        index, executed = self._executed(place, frame, recomputed)
        number = self.values.next_number()
        if number is not None and frame.number is not None and number != frame.number:
            place.nodes.append((frame.number, number, index))
            del place.nodes[:-_NODES_KEPT]
        for tensor in written.values():
            self._living.note_write(tensor, index)
        self._make(place, frame, executed, outputs)
        for position, tensor in written.items():
            if frame.target is None:
                after = self._living.last_index(tensor)
                if after is None or place.symbolic or after not in indices_at(executed.outputs):
                    after = self._living.add_version(index, frame.given[position].tensor, tensor)
                executed.written[position] = after
            if position in executed.written:
                self._living.identify(tensor, executed.written[position])

    @amanda.observer
    def enter_backward(self, *gradients: Any, place: ProgramOp) -> None:
        """Record the gradients that enter a backward op: several where they are added up."""
        if self._recorder.drops(place):
            return
        number, arrived = self.values.arrived(len(gradients))
        forward, place.resumed = place.resumed, None
        if forward is None and place.forward is not None:
            forward = place.forward.maker(number)
        target = place.by_forward.get(forward)
        if target is None and self._recorder.is_full:
            target = place.ops[-1]
        read: list[Position] = []
        for gradient, sent in zip(gradients, arrived, strict=True) if target is None else ():
            found = each(partial(self._living.read, kind="gradient"), gradient) if not sent else sent[0]
            read.append(tuple(sent) if len(sent) > 1 else found)
        place.begin(Frame(tuple(read), target, forward))

    @amanda.observer
    def leave_backward(self, *gradients: Any, place: ProgramOp) -> None:
        """Record the gradients that leave a backward op, or are accumulated by it."""
        frame = place.end()
        if frame is None:
            return
        index, executed = self._executed(place, frame)
        place.by_forward[frame.forward] = index
        self._make(place, frame, executed, gradients)
        total = self.values.send([one if isinstance(one, int) else None for one in executed.outputs])
        if total is not None and frame.target is None:
            before = self._living.current_index(total)
            executed.parts.append(self._living.add_version(index, before, total))
        if total is not None and executed.parts:
            self._living.identify(total, executed.parts[0])

    def add_symbols(self, context: amanda.OpContext, place: ProgramOp) -> None:
        """Record the op of a graph, whose inputs and outputs are symbols, if it is new."""
        if place.ops:
            return
        if context.is_backward():
            self.enter_backward(*(context.get_grad_outputs() or ()), place=place)
            self.leave_backward(*(context.get_grad_inputs() or ()), place=place)
            return
        self.enter(*context.get_inputs(), place=place)
        self.leave(*(context.get_outputs() or ()), place=place)
        for index in place.ops:
            self.values.note_call(context, list(indices_at(self._recorder.ops[index].op.inputs)))

    def given(self, context: amanda.OpContext) -> list[int]:
        """Return the recorded tensors that the op of a context is given at this moment."""
        values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or []
        if context.is_backward():
            _, arrived = self.values.arrived(len(values), take=False)
            if any(arrived):
                return [index for sent in arrived for index in sent]
        found = map(self._living.current_index, filter(self.values.is_tensor, leaves(values)))
        return [index for index in found if index is not None]

    def _target(self, place: ProgramOp, inputs: Sequence[Any], recomputed: bool) -> int | None:
        """Return the recorded op that an execution is another one of; None for a new op."""
        if not place.ops:
            return None
        roots = tuple(each(self._living.root_of, one) for one in inputs)
        for index in place.ops:
            if agree(roots, self._recorder.ops[index].roots):
                return index
        full = len(place.ops) >= self._recorder.executions or self._recorder.is_full
        return place.ops[-1] if recomputed or full else None

    def _executed(self, place: ProgramOp, frame: Frame, recomputed: bool = False) -> tuple[int, Executed]:
        """Return the recorded op of an execution: a new one, or one more time the target."""
        if frame.target is None:
            index = self._recorder.add_op(place, frame.inputs, frame.forward, recomputed)
        else:
            index = frame.target
            self._recorder.count(index, recomputed)
        place.last = index
        return index, self._recorder.ops[index]

    def _make(self, place: ProgramOp, frame: Frame, executed: Executed, outputs: Sequence[Any]) -> None:
        """Record the outputs of a new op, and note of which recorded tensors an execution's outputs are."""
        if frame.target is None:
            given = [one for one in frame.given if one is not None]
            make = partial(self._living.make, place, op=executed.op.index, given=given)
            executed.outputs = tuple(each(make, one, keep=True) for one in outputs)
        self._living.identify_all(outputs, executed.outputs)

    def _written(self, place: ProgramOp, frame: Frame) -> dict[int, Any]:
        """Return by flat position the inputs that the op itself has written, and no op within it."""
        found: dict[int, Any] = {}
        for position, given in enumerate(frame.given):
            tensor = None if given is None else given.reference()
            if tensor is None or any(tensor is one for one in found.values()):
                continue
            wrote = position in place.facts.written or self.values.version(tensor) != given.version
            if wrote and not self._living.writes_since(tensor, frame.serial):
                found[position] = tensor
        return found


def agree(one: Any, recorded: Any) -> bool:
    """Return True if the roots of inputs are those of a recorded op; an unknown tensor may be any."""
    if isinstance(one, tuple) and isinstance(recorded, tuple):
        return len(one) == len(recorded) and all(map(agree, one, recorded))
    return bool(one == recorded or (one == UNKNOWN and recorded is not None))
