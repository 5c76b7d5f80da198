"""Control flow of version 1: in which loop frame an operation runs, and under which predicates.

In a loop the execution's number is a vector, which goes on with the round of each loop, as in functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorflow.core.framework import node_def_pb2, types_pb2

from ..graph import constant

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
        self._conditions: dict[Frame, str] = {}
        self._left: dict[Frame, Any] = {}
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
        if op.type == "LoopCond":
            self._conditions[frame] = op.name
            left = _rounds_left(op)
            if left is not None:
                self._left[frame] = left
        if op.type in ("Switch", "RefSwitch") and op.inputs[1].op.type != "LoopCond":
            predicate = op.inputs[1].name
            for i in range(2):
                self._guards[op.name, i] = guards | {(predicate, i)}

    def alone(self, op: Any) -> bool:
        """Whether an operation runs in a loop or a branch, so that it may run often or not at all."""
        branches = op.type in ("Exit", "RefExit", "Switch", "RefSwitch", "Merge", "RefMerge")
        return branches or bool(self._frame[op.name] or self._guards.get((op.name, 0)))

    def depth_at(self, op: Any) -> int:
        """How many loops are around an operation, as far as the number there tells their rounds."""
        frame = self._frame[op.name]
        return self._depth(frame[:-1] if op.type in ("Enter", "RefEnter") else frame)

    def _depth(self, frame: Frame) -> int:
        return sum(frame[: i + 1] in self._conditions for i in range(len(frame)))

    def number_at(self, op: Any, ahead: bool, number: str) -> str:
        """The node that carries the execution's number, ahead of an operation or behind it."""
        frame = self._frame[op.name]
        if ahead and op.type in ("Enter", "RefEnter"):
            frame = frame[:-1]
        if ahead and op.type in ("Exit", "RefExit"):
            frame = self._inner[op.name]
        return _carrier(number, frame)

    def carriers(self, number: str) -> list[Any]:
        """Nodes that bring the execution's number into every frame, and count its rounds there."""
        made = []
        for frame, enter in self._enters.items():
            name = _carrier(number, frame)
            counted = frame in self._conditions
            node = node_def_pb2.NodeDef(name=f"{name}/outer" if counted else name, op="Enter")
            node.input.extend([_carrier(number, frame[:-1]), *self._waits(frame)])
            node.attr["T"].type = types_pb2.DT_INT64
            node.attr["frame_name"].s = enter.get_attr("frame_name")
            node.attr["is_constant"].b = True
            node.attr["parallel_iterations"].i = enter.get_attr("parallel_iterations")
            made.append(node)
            if counted:
                made += self._rounds(name, frame, node)
        return made

    def _waits(self, frame: Frame) -> list[str]:
        """A loop of gradients begins when the loop that it belongs to, where values are kept, has ended."""
        left = self._left.get(frame)
        source = None if left is None else left.inputs[0].op.inputs[0].op
        ended = None if source is None else self._inner.get(source.name)
        return [f"^{name}" for name, inner in self._inner.items() if ended and inner == ended]

    def _rounds(self, name: str, frame: Frame, outer: Any) -> list[Any]:
        """Nodes that put the round of a frame behind the number of what is around it.

        A loop that computes gradients counts its rounds down.
        """
        waits = [f"^{outer.name}"]
        left = self._left.get(frame)
        first = _first(f"{name}/first", left, outer.input[0])
        enter = node_def_pb2.NodeDef()
        enter.CopyFrom(outer)
        enter.name, enter.input[:] = f"{name}/enter", [first[-1].name]
        enter.attr["is_constant"].b = False
        merge = _node(f"{name}/round", "Merge", [enter.name, f"{name}/next"], N=2)
        switch = _node(f"{name}/switch", "Switch", [merge.name, self._conditions[frame]])
        step = _const(f"{name}/step", np.array([1 if left is None else -1], np.int64), waits)
        changed = _node(f"{name}/changed", "AddV2", [f"{switch.name}:1", step.name])
        again = _node(f"{name}/next", "NextIteration", [changed.name])
        axis = _const(f"{name}/axis", np.int32(0), waits)
        made = [*first, enter, merge, switch, step, changed, again, axis]
        around = outer.name
        if not self._depth(frame[:-1]):
            vector = _node(f"{name}/vector", "ExpandDims", [around, axis.name], Tdim=types_pb2.DT_INT32)
            around = vector.name
            made.append(vector)
        reads = [around, merge.name, axis.name]
        return [*made, _node(name, "ConcatV2", reads, N=2, Tidx=types_pb2.DT_INT32)]


def _first(name: str, left: Any, number: str) -> list[Any]:
    """Nodes around a loop that make the number of its first round, the last one.

    left: the Merge that has how many rounds are left, if they are counted down.
    """
    waits = [f"^{number}"]
    if left is None:
        return [_const(name, np.array([0], np.int64), waits)]
    count = left.inputs[0].op.inputs[0]
    cast = node_def_pb2.NodeDef(
        name=f"{name}/count", op="Cast", input=[f"{count.op.name}:{count.value_index}"]
    )
    cast.attr["SrcT"].type = count.dtype.as_datatype_enum
    cast.attr["DstT"].type = types_pb2.DT_INT64
    last = _const(f"{name}/last", np.array([-1], np.int64), waits)
    return [cast, last, _node(name, "AddV2", [cast.name, last.name])]


def _rounds_left(condition: Any) -> Any:
    """The Merge of a loop of gradients that has how many rounds are left, with the present one; else None.

    TensorFlow names what enters it b_count; the loop goes on while it is 1 at least.
    """
    test = condition.inputs[0].op
    merge = test.inputs[0].op if test.type == "GreaterEqual" else test
    enter = merge.inputs[0].op if merge.type == "Merge" else merge
    counts = enter.type == "Enter" and enter.name.rpartition("/")[2].startswith("b_count")
    return merge if counts else None


def _node(name: str, type: str, inputs: Sequence[str], N: int = 0, **types: int) -> Any:
    """A node on 64-bit integers."""
    node = node_def_pb2.NodeDef(name=name, op=type, input=inputs)
    for attribute, value in {"T": types_pb2.DT_INT64, **types}.items():
        node.attr[attribute].type = value
    if N:
        node.attr["N"].i = N
    return node


def _const(name: str, value: Any, waits: Sequence[str]) -> Any:
    """A constant in the frame of what it waits for."""
    node = constant(name, value)
    node.input.extend(waits)
    return node


def _carrier(number: str, frame: Frame) -> str:
    return number if not frame else f"{number}/{len(frame)}_{'_'.join(frame).replace('/', '_')}"
