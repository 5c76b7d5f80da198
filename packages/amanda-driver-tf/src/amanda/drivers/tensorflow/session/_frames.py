"""Control flow of version 1: in which loop frame an operation runs, and under which predicates.

In a loop the execution's number is a vector, which goes on with the round of each loop, as in functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework.types_pb2 import DT_INT32, DT_INT64

from ..graph import Rewritten, constant, either, enters, new_node

Frame = tuple[str, ...]
Guard = tuple[str, int]
OUTSIDE: Hashable = (), frozenset()
"""Group of the operations outside of all loops and branches."""
_FLOW = ("Enter", "Exit", "Switch", "_SwitchN", "Merge", "NextIteration")
_node = partial(new_node, T=DT_INT64)


class Frames:
    """Of each operation its frame, and the branches of conditionals that it lies in.

    ops: in an order where each comes after those that it reads, but for the ends of loops.
    number: the node that carries the execution's number outside of all loops.
    """

    def __init__(self, ops: Sequence[Any], number: str) -> None:
        self._number = number
        self._frame: dict[str, Frame] = {}
        self._guards: dict[tuple[str, int], frozenset[Guard]] = {}
        self._enters: dict[Frame, list[Any]] = {}
        self._outer: dict[Frame, frozenset[Guard]] = {}
        self._inner: dict[str, Frame] = {}
        self._conditions: dict[Frame, str] = {}
        self._left: dict[Frame, Any] = {}
        for op in ops:
            self._place(op)
        self._carried = {self._carrier(frame): frame for frame in ((), *self._enters)}
        self._carried |= {_entering(self._carrier(frame)): frame[:-1] for frame in self._conditions}

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
            self._enters.setdefault(frame, []).append(op)
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
        if op.type in ("Switch", "RefSwitch"):
            predicate = op.inputs[1].name
            for i in range(2):
                self._guards[op.name, i] = guards | {(predicate, i)}

    @staticmethod
    def is_flow(op: Any) -> bool:
        """Return True for an operation some of whose values are dead, or in another frame than others."""
        return op.type.removeprefix("Ref") in _FLOW

    def group(self, op: Any, values: Sequence[Any]) -> Hashable:
        """Return a key of what runs in the same rounds and branches as some values of an operation.

        None where it is alone: at what leads into a loop, whose number is another one, and where the
        operation waits for others, or the values are of several frames.
        """
        if not self.is_flow(op):
            return self._frame[op.name], self._guards.get((op.name, 0), frozenset())
        made = {(one.op.name, one.value_index) for one in values}
        frames = {self._frame.get(name) for name, _ in made}
        begins = op.type in ("Merge", "RefMerge") and enters(op) and any(one.op is not op for one in values)
        alone = begins or op.control_inputs or op.type in ("Enter", "RefEnter", "_SwitchN")
        if alone or len(frames) != 1 or not made <= self._guards.keys():
            return None
        return frames.pop(), frozenset[Guard]().union(*(self._guards[one] for one in made))

    def encloses(self, outer: Any, inner: Any) -> bool:
        """Return True if a group lies in a loop or a branch that another group is around of."""
        (frame, guards), (deeper, more) = outer, inner
        if frame != deeper:
            return bool(deeper[: len(frame)] == frame)
        condition = f"{self._conditions.get(frame)}:0"  # of the loop itself, which each round asks
        return bool(guards < {one for one in more if one[0] != condition})

    def depth_at(self, op: Any) -> int:
        """Return how many loops are around an operation, as far as the number there tells their rounds."""
        frame = self._frame[op.name]
        return self._depth(frame[:-1] if op.type in ("Enter", "RefEnter") else frame)

    def _depth(self, frame: Frame) -> int:
        return sum(frame[: i + 1] in self._conditions for i in range(len(frame)))

    def number_at(self, op: Any, ahead: bool) -> str:
        """The node that carries the execution's number, ahead of an operation or behind it."""
        frame = self._frame[op.name]
        if ahead and op.type in ("Enter", "RefEnter"):
            frame = frame[:-1]
        if ahead and op.type in ("Exit", "RefExit"):
            frame = self._inner[op.name]
        if ahead and op.type in ("Merge", "RefMerge") and frame in self._conditions and enters(op):
            return _entering(self._carrier(frame))
        return self._carrier(frame)

    def end_of(self, inner: str, outer: str) -> str | None:
        """Return what a node around a loop waits for instead of one in it: its end, and that of its routines.

        inner, outer: the numbers that the nodes read.  None where there is no loop between them.
        """
        around, frame = self._carried[outer], self._carried[inner]
        loop = frame[: len(around) + 1]
        between = loop != around and loop[:-1] == around and loop in self._conditions
        return _end(self._carrier(loop)) if between else None

    def carriers(self, rewritten: Rewritten) -> list[Any]:
        """Nodes that bring the execution's number into every frame, and count its rounds there."""
        made = self._ends(rewritten) if rewritten.backward else []
        ends = {node.name for node in made}
        for frame in self._enters:
            name = self._carrier(frame)
            node = self._enter(f"{name}/outer" if frame in self._conditions else name, frame, True)
            ended = self._ended(frame)
            if ended is not None:
                waits = [one for one, inner in self._inner.items() if inner == ended]
                waits += [end for end in (_end(self._carrier(ended)),) if end in ends]
                begun = self._ahead(ended, rewritten)
                if begun:
                    made.append(either(f"{name}/begun", begun))
                    waits.append(f"{name}/begun")
                node.input.extend(f"^{one}" for one in waits)
            made.append(node)
            if frame in self._conditions:
                made += self._rounds(name, frame, node)
        return made

    def _ahead(self, loop: Frame, rewritten: Rewritten) -> list[str]:
        """The nodes with routines on what enters a loop."""
        at_enters = [one for op in self._enters[loop] for one in rewritten.inserted.get(op.name, ())]
        entering = _entering(self._carrier(loop))
        return [*at_enters, *(one for one, number in rewritten.numbers.items() if number == entering)]

    def _enter(self, name: str, frame: Frame, is_constant: bool) -> Any:
        enter = self._enters[frame][0]
        made = _node(name, "Enter", [self._carrier(frame[:-1])])
        made.attr["frame_name"].s = enter.get_attr("frame_name")
        made.attr["is_constant"].b = is_constant
        made.attr["parallel_iterations"].i = enter.get_attr("parallel_iterations")
        return made

    def _ended(self, frame: Frame) -> Frame | None:
        """The loop that a loop of gradients belongs to: that keeps values, so it has to end before."""
        left = self._left.get(frame)
        source = None if left is None else left.inputs[0].op.inputs[0].op
        return None if source is None else self._inner.get(source.name)

    def _ends(self, rewritten: Rewritten) -> list[Any]:
        """Nodes that leave a loop when all routines in it have run, in every round.

        A token goes round, for the loop's own values leave it before routines end that give nothing back.
        """
        inside = defaultdict[Frame, list[str]](list)
        for node, carrier in rewritten.numbers.items():
            inside[self._carried[carrier]].append(node)
        made: list[Any] = []
        for frame in sorted(self._conditions, key=len, reverse=True):
            name = self._carrier(frame)
            if not inside[frame]:
                continue
            enter = self._enter(f"{name}/token", frame, False)
            ran = either(f"{name}/ran", inside[frame])
            merge = _node(f"{name}/begin", "Merge", [enter.name, f"{name}/again"], N=2)
            token = _node(f"{name}/all", "Identity", [merge.name, f"^{ran.name}"])
            switch = _node(f"{name}/goes_on", "Switch", [token.name, self._conditions[frame]])
            again = _node(f"{name}/again", "NextIteration", [f"{switch.name}:1"])
            made += [enter, ran, merge, token, switch, again, _node(_end(name), "Exit", [switch.name])]
            inside[frame[:-1]].append(_end(name))
        return made

    def _rounds(self, name: str, frame: Frame, outer: Any) -> list[Any]:
        """Nodes that put the round of a frame behind the number of what is around it.

        A loop that computes gradients counts its rounds down.
        """
        left = self._left.get(frame)
        first = _first(f"{name}/first", left, outer.input[0])
        entering = self._with_round(_entering(name), outer.input[0], first[-1].name, frame)
        enter = node_def_pb2.NodeDef()
        enter.CopyFrom(outer)
        enter.name, enter.input[:] = f"{name}/enter", [first[-1].name]
        enter.attr["is_constant"].b = False
        merge = _node(f"{name}/round", "Merge", [enter.name, f"{name}/next"], N=2)
        switch = _node(f"{name}/switch", "Switch", [merge.name, self._conditions[frame]])
        step = constant(f"{name}/step", np.array([1 if left is None else -1], np.int64), [f"^{outer.name}"])
        changed = _node(f"{name}/changed", "AddV2", [f"{switch.name}:1", step.name])
        again = _node(f"{name}/next", "NextIteration", [changed.name])
        whole = self._with_round(name, outer.name, merge.name, frame)
        return [*first, *entering, enter, merge, switch, step, changed, again, *whole]

    def _with_round(self, name: str, around: str, round: str, frame: Frame) -> list[Any]:
        """Nodes that put a round of a frame behind the number of what is around it."""
        axis = constant(f"{name}/axis", np.int32(0), [f"^{around}"])
        made = [axis]
        if not self._depth(frame[:-1]):
            vector = _node(f"{name}/vector", "ExpandDims", [around, axis.name], Tdim=DT_INT32)
            around = vector.name
            made.append(vector)
        return [*made, _node(name, "ConcatV2", [around, round, axis.name], N=2, Tidx=DT_INT32)]

    def _carrier(self, frame: Frame) -> str:
        """The node that carries the number, and the round, in a frame."""
        place = f"{len(frame)}_{'_'.join(frame).replace('/', '_')}"
        return f"{self._number}/{place}" if frame else self._number


def _first(name: str, left: Any, number: str) -> list[Any]:
    """Nodes around a loop that make the number of its first round, the last one.

    left: the Merge that has how many rounds are left, if they are counted down.
    """
    waits = [f"^{number}"]
    if left is None:
        return [constant(name, np.array([0], np.int64), waits)]
    count = left.inputs[0].op.inputs[0]
    read = f"{count.op.name}:{count.value_index}"
    cast = new_node(f"{name}/count", "Cast", [read], SrcT=count.dtype.as_datatype_enum, DstT=DT_INT64)
    last = constant(f"{name}/last", np.array([-1], np.int64), waits)
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


def _entering(carrier: str) -> str:
    """Carries the number and the first round around the frame, for what enters it."""
    return f"{carrier}/entering"


def _end(carrier: str) -> str:
    """Leaves the frame when all routines have run there."""
    return f"{carrier}/end"
