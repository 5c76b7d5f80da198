"""Control flow of version 1: in which loop frame an operation runs, and under which predicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.core.framework import node_def_pb2, types_pb2

Frame = tuple[str, ...]
Guard = tuple[str, int]


class Frames:
    """Of each operation its frame, and the branches of conditionals that it lies in.

    ops: in an order where each comes after those that it reads, but for the ends of loops.
    """

    def __init__(self, ops: Sequence[Any]) -> None:
        self._frame: dict[str, Frame] = {}
        self._guards: dict[tuple[str, int], frozenset[Guard]] = {}
        self._enters: dict[Frame, Any] = {}
        self._outer: dict[Frame, frozenset[Guard]] = {}
        self._inner: dict[str, Frame] = {}
        for op in ops:
            self._place(op)

    def _place(self, op: Any) -> None:
        known = [one for one in (*(t.op for t in op.inputs), *op.control_inputs) if one.name in self._frame]
        frame: Frame = max((self._frame[one.name] for one in known), key=len, default=())
        read = [self._guards[t.op.name, t.value_index] for t in op.inputs if t.op.name in self._frame]
        waited = [self._guards.get((one.name, 0), frozenset()) for one in op.control_inputs]
        merges = op.type in ("Merge", "RefMerge")
        guards = frozenset[Guard]().union(*waited)
        if read:
            guards |= frozenset.intersection(*read) if merges else frozenset.union(*read)
        if op.type in ("Enter", "RefEnter"):
            frame = (*frame, op.get_attr("frame_name").decode())
            self._enters.setdefault(frame, op)
            self._outer[frame] = self._outer.get(frame, frozenset()) | guards
        elif op.type in ("Exit", "RefExit"):
            guards = self._outer.get(frame, frozenset())
            self._inner[op.name] = frame
            frame = frame[:-1]
        self._frame[op.name] = frame
        self._guards[op.name, 0] = guards
        for i in range(1, len(op.outputs)):
            self._guards[op.name, i] = guards
        if op.type in ("Switch", "RefSwitch") and op.inputs[1].op.type != "LoopCond":
            predicate = op.inputs[1].name
            for i in range(2):
                self._guards[op.name, i] = guards | {(predicate, i)}

    def alone(self, op: Any) -> bool:
        """Whether an operation runs in a loop or a branch, so that it may run often or not at all."""
        branches = op.type in ("Exit", "RefExit", "Switch", "RefSwitch", "Merge", "RefMerge")
        return branches or bool(self._frame[op.name] or self._guards.get((op.name, 0)))

    def tells_rounds(self, op: Any) -> bool:
        """Whether an operation is in no loop, as the rounds of these are not told apart."""
        return not self._frame[op.name]

    def number_at(self, op: Any, ahead: bool, number: str) -> str:
        """The node that carries the execution's number, ahead of an operation or behind it."""
        frame = self._frame[op.name]
        if ahead and op.type in ("Enter", "RefEnter"):
            frame = frame[:-1]
        if ahead and op.type in ("Exit", "RefExit"):
            frame = self._inner[op.name]
        return _carrier(number, frame)

    def carriers(self, number: str) -> list[Any]:
        """Nodes that bring the execution's number into every frame."""
        made = []
        for frame, enter in self._enters.items():
            node = node_def_pb2.NodeDef(name=_carrier(number, frame), op="Enter")
            node.input.append(_carrier(number, frame[:-1]))
            node.attr["T"].type = types_pb2.DT_INT64
            node.attr["frame_name"].s = enter.get_attr("frame_name")
            node.attr["is_constant"].b = True
            node.attr["parallel_iterations"].i = enter.get_attr("parallel_iterations")
            made.append(node)
        return made


def _carrier(number: str, frame: Frame) -> str:
    return number if not frame else f"{number}/{len(frame)}_{'_'.join(frame).replace('/', '_')}"
