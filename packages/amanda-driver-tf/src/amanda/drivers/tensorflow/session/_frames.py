"""Control flow of version 1: the loop frame of each operation, and the predicates under which it runs.

In a loop, as in functions, the execution's number is a vector: the number itself, then the round of each
loop. In each frame one node, the carrier, has that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework.types_pb2 import DT_INT32, DT_INT64

from ..graph import RewrittenBody, constant, control_trigger, loop_entries, new_node

Frame = tuple[str, ...]
"""The names of the loops around an operation, from the outermost in."""
Guard = tuple[str, int]
"""A condition under which an operation runs: a predicate's tensor, and 1 if it has to be True, else 0."""
OUTSIDE: Hashable = (), frozenset()
"""Group of the operations outside of all loops and branches."""
_FLOW = ("Enter", "Exit", "Switch", "_SwitchN", "Merge", "NextIteration")
_node = partial(new_node, T=DT_INT64)


class Frames:
    """The loop frame of each operation, and the branches of conditionals around the operation.

    ops: in topological order, but for the NextIteration ops of loops.
    number_name: of the node with the execution's number outside of all loops.
    """

    def __init__(self, ops: Sequence[Any], number_name: str) -> None:
        self._number_name = number_name
        self._frame_by_op: dict[str, Frame] = {}
        self._guards: dict[tuple[str, int], frozenset[Guard]] = {}
        self._enters: dict[Frame, list[Any]] = {}  # Enter ops
        self._guards_around_frame: dict[Frame, frozenset[Guard]] = {}
        self._loop_by_exit: dict[str, Frame] = {}
        self._conditions: dict[Frame, str] = {}  # names of the LoopCond ops
        self._remaining_rounds: dict[Frame, Any] = {}  # of loops of gradients; see `_remaining_rounds_merge`
        for op in ops:
            self._add_op(op)
        self._frame_by_carrier = {self._carrier(frame): frame for frame in ((), *self._enters)}
        self._frame_by_carrier |= {
            _entry_carrier(self._carrier(frame)): frame[:-1] for frame in self._conditions
        }

    def _add_op(self, op: Any) -> None:
        """Record the frame and the guards of an operation, from those of its inputs."""
        frame, guards = self._frame_of_sources(op), self._guards_of_sources(op)
        if op.type in ("Enter", "RefEnter"):
            frame = (*frame, op.get_attr("frame_name").decode())
            self._enters.setdefault(frame, []).append(op)
            self._guards_around_frame[frame] = self._guards_around_frame.get(frame, frozenset()) | guards
        elif op.type in ("Exit", "RefExit"):
            # An Exit runs when its loop has ended, whichever branches the rounds took: the guards around the
            # loop hold.
            guards = self._guards_around_frame.get(frame, frozenset())
            self._loop_by_exit[op.name] = frame
            frame = frame[:-1]
        self._frame_by_op[op.name] = frame
        # An op without outputs has guards, too, for ops that wait for it.
        for i in range(max(1, len(op.outputs))):
            self._guards[op.name, i] = guards
        if op.type == "LoopCond":
            self._conditions[frame] = op.name
            remaining_rounds = _remaining_rounds_merge(op)
            if remaining_rounds is not None:
                self._remaining_rounds[frame] = remaining_rounds
        if op.type in ("Switch", "RefSwitch"):
            predicate = op.inputs[1].name
            # Output 0 is alive where the predicate is False, output 1 where it is True.
            for i in range(2):
                self._guards[op.name, i] = guards | {(predicate, i)}

    def _frame_of_sources(self, op: Any) -> Frame:
        """Return the innermost frame of what an operation reads or waits for; () outside of loops."""
        sources = (*(tensor.op for tensor in op.inputs), *op.control_inputs)
        # A NextIteration comes after the Merge that reads it, and is not recorded yet.
        frames = [self._frame_by_op[source.name] for source in sources if source.name in self._frame_by_op]
        innermost: Frame = max(frames, key=len, default=())
        return innermost

    def _guards_of_sources(self, op: Any) -> frozenset[Guard]:
        """Return the guards under which an operation's inputs are alive and its control inputs run."""
        input_guards = [
            self._guards[tensor.op.name, tensor.value_index]
            for tensor in op.inputs
            if tensor.op.name in self._frame_by_op
        ]
        control_guards = [self._guards.get((source.name, 0), frozenset()) for source in op.control_inputs]
        guards = frozenset[Guard]().union(*control_guards)
        if not input_guards:
            return guards
        # A Merge runs if one of its inputs is alive, so only guards of all inputs hold behind it.
        if op.type in ("Merge", "RefMerge"):
            return guards | frozenset.intersection(*input_guards)
        return guards | frozenset.union(*input_guards)

    @staticmethod
    def is_flow(op: Any) -> bool:
        """Return True for an op of control flow, whose values may be dead or in several frames."""
        return op.type.removeprefix("Ref") in _FLOW

    def group(self, op: Any, values: Sequence[Any]) -> Hashable:
        """Return a key of the rounds and branches of an operation's values: the frame and the guards.

        Values with equal keys may share a node.  None for values that may not: at an operation that leads
        into a loop, where another number is read, at an operation of control flow that waits for others, and
        in several frames.
        """
        if not self.is_flow(op):  # all its values live where the operation runs
            return self._frame_by_op[op.name], self._guards.get((op.name, 0), frozenset())
        endpoints = {(tensor.op.name, tensor.value_index) for tensor in values}
        frames = {self._frame_by_op.get(name) for name, _ in endpoints}
        begins_loop = (
            op.type in ("Merge", "RefMerge")
            and loop_entries(op)
            and any(tensor.op is not op for tensor in values)
        )
        needs_own_node = begins_loop or op.control_inputs or op.type in ("Enter", "RefEnter", "_SwitchN")
        if needs_own_node or len(frames) != 1 or not endpoints <= self._guards.keys():
            return None
        return frames.pop(), frozenset[Guard]().union(*(self._guards[endpoint] for endpoint in endpoints))

    def encloses(self, outer: Any, inner: Any) -> bool:
        """Return True if a group lies in a loop or branch that another group is around; see `group`."""
        (frame, guards), (inner_frame, inner_guards) = outer, inner
        if frame != inner_frame:
            return bool(inner_frame[: len(frame)] == frame)
        # Each round tests the loop's condition, which is not a branch.
        loop_condition = f"{self._conditions.get(frame)}:0"
        return bool(guards < {(predicate, i) for predicate, i in inner_guards if predicate != loop_condition})

    def depth_at(self, op: Any) -> int:
        """Return the number of loops around an operation whose rounds are in the number there."""
        frame = self._frame_by_op[op.name]
        return self._depth(frame[:-1] if op.type in ("Enter", "RefEnter") else frame)

    def _depth(self, frame: Frame) -> int:
        """Return the number of loops in a frame's path; a frame without a condition counts no rounds."""
        return sum(frame[: i + 1] in self._conditions for i in range(len(frame)))

    def number_ref_at(self, op: Any, ahead: bool) -> str:
        """Return the carrier of the number that nodes ahead of an operation, or behind it, read.

        Ahead of an operation that leads into a loop or out of it is the other side of the loop's border.
        """
        frame = self._frame_by_op[op.name]
        if ahead and op.type in ("Enter", "RefEnter"):
            frame = frame[:-1]
        if ahead and op.type in ("Exit", "RefExit"):
            frame = self._loop_by_exit[op.name]
        if ahead and op.type in ("Merge", "RefMerge") and frame in self._conditions and loop_entries(op):
            return _entry_carrier(self._carrier(frame))
        return self._carrier(frame)

    def end_of(self, inner: str, outer: str) -> str | None:
        """Return the node outside a loop that runs when the loop and all routines in it have ended.

        inner, outer: the carriers that a node in the loop and a node outside read.  None if no loop lies
        between.
        """
        outer_frame, inner_frame = self._frame_by_carrier[outer], self._frame_by_carrier[inner]
        # The outermost of the loops between both: it ends last.
        loop = inner_frame[: len(outer_frame) + 1]
        is_between = loop != outer_frame and loop[:-1] == outer_frame and loop in self._conditions
        return _end_name(self._carrier(loop)) if is_between else None

    def carriers(self, rewritten: RewrittenBody) -> list[Any]:
        """Return the nodes that bring the execution's number into each frame and count the rounds there."""
        nodes = self._end_nodes(rewritten) if rewritten.has_backward_ops else []
        end_names = {node.name for node in nodes}
        for frame in self._enters:
            name = self._carrier(frame)
            # In a loop the carrier itself is a vector with the round, see `_round_nodes`.
            is_loop = frame in self._conditions
            enter = self._enter_node(f"{name}/outer" if is_loop else name, frame, is_constant=True)
            forward_loop = self._forward_loop(frame)
            if forward_loop is not None:
                names_before = self._names_at_end(forward_loop, end_names)
                entry_nodes = self._nodes_at_entry(forward_loop, rewritten)
                if entry_nodes:
                    nodes.append(control_trigger(f"{name}/begun", entry_nodes))
                    names_before.append(f"{name}/begun")
                # A loop of gradients reads values that routines keep in its forward loop, so it enters when
                # the forward loop and its routines have ended, and those at its entry have run.
                enter.input.extend(f"^{name_before}" for name_before in names_before)
            nodes.append(enter)
            if is_loop:
                nodes += self._round_nodes(name, frame, enter)
        return nodes

    def _names_at_end(self, loop: Frame, ends: Collection[str]) -> list[str]:
        """Return the names of the nodes by which a loop, and the routines in it, end.

        ends: names of the nodes that leave loops with routines.
        """
        names = [exit_name for exit_name, exited_loop in self._loop_by_exit.items() if exited_loop == loop]
        end_name = _end_name(self._carrier(loop))
        return [*names, end_name] if end_name in ends else names

    def _nodes_at_entry(self, loop: Frame, rewritten: RewrittenBody) -> list[str]:
        """Return the nodes with routines on values that enter a loop."""
        names = [
            name for op in self._enters[loop] for name in rewritten.inserted_names_by_op.get(op.name, ())
        ]
        entry_carrier = _entry_carrier(self._carrier(loop))
        names += [name for name, number in rewritten.number_ref_by_name.items() if number == entry_carrier]
        return names

    def _enter_node(self, name: str, frame: Frame, is_constant: bool) -> Any:
        """Return an Enter node that brings the number around a frame into the frame."""
        enter = self._enters[frame][0]
        node = _node(name, "Enter", [self._carrier(frame[:-1])])
        node.attr["frame_name"].s = enter.get_attr("frame_name")
        node.attr["is_constant"].b = is_constant
        node.attr["parallel_iterations"].i = enter.get_attr("parallel_iterations")
        return node

    def _forward_loop(self, frame: Frame) -> Frame | None:
        """Return the forward loop of a loop of gradients; None for other loops."""
        remaining_rounds = self._remaining_rounds.get(frame)
        if remaining_rounds is None:
            return None
        # The number of rounds to go enters from the Exit of the forward loop's counter.
        enter = remaining_rounds.inputs[0].op
        counter_exit = enter.inputs[0].op
        return self._loop_by_exit.get(counter_exit.name)

    def _end_nodes(self, rewritten: RewrittenBody) -> list[Any]:
        """Return nodes that leave each loop with routines once these have run, in every round."""
        # The loop's own values may leave before observers have ended, since nothing reads an observer's
        # result. So a token goes round the loop, and in each round waits for all nodes with routines.
        nodes_by_frame = defaultdict[Frame, list[str]](list)
        for node, carrier in rewritten.number_ref_by_name.items():
            nodes_by_frame[self._frame_by_carrier[carrier]].append(node)
        nodes: list[Any] = []
        # Inner loops first: their ends are nodes that the loops around wait for.
        for frame in sorted(self._conditions, key=len, reverse=True):
            name = self._carrier(frame)
            if not nodes_by_frame[frame]:
                continue
            enter = self._enter_node(f"{name}/token", frame, is_constant=False)
            ran = control_trigger(f"{name}/ran", nodes_by_frame[frame])
            merge = _node(f"{name}/begin", "Merge", [enter.name, f"{name}/again"], N=2)
            token = _node(f"{name}/all", "Identity", [merge.name, f"^{ran.name}"])
            switch = _node(f"{name}/goes_on", "Switch", [token.name, self._conditions[frame]])
            again = _node(f"{name}/again", "NextIteration", [f"{switch.name}:1"])
            nodes += [enter, ran, merge, token, switch, again, _node(_end_name(name), "Exit", [switch.name])]
            nodes_by_frame[frame[:-1]].append(_end_name(name))
        return nodes

    def _round_nodes(self, name: str, frame: Frame, outer: Any) -> list[Any]:
        """Return nodes that count a loop's rounds, and append the round to the number around the loop.

        A loop that computes gradients counts its rounds down, so that each finds the values of its forward
        round.
        name: of the frame's carrier.  outer: the Enter that brings the number around the loop into the loop.
        """
        remaining_rounds = self._remaining_rounds.get(frame)
        outer_number = outer.input[0]
        first_round_nodes = _first_round_nodes(f"{name}/first", remaining_rounds, outer_number)
        first_round = first_round_nodes[-1].name
        entry_nodes = self._append_round(_entry_carrier(name), outer_number, first_round, frame)
        enter = node_def_pb2.NodeDef()
        enter.CopyFrom(outer)
        enter.name, enter.input[:] = f"{name}/enter", [first_round]
        enter.attr["is_constant"].b = False
        current_round = _node(f"{name}/round", "Merge", [enter.name, f"{name}/next"], N=2)
        switch = _node(f"{name}/switch", "Switch", [current_round.name, self._conditions[frame]])
        step_value = np.array([1 if remaining_rounds is None else -1], np.int64)
        step = constant(f"{name}/step", step_value, [f"^{outer.name}"])
        next_round = _node(f"{name}/changed", "AddV2", [f"{switch.name}:1", step.name])
        iteration = _node(f"{name}/next", "NextIteration", [next_round.name])
        carrier_nodes = self._append_round(name, outer.name, current_round.name, frame)
        round_nodes = [enter, current_round, switch, step, next_round, iteration]
        return [*first_round_nodes, *entry_nodes, *round_nodes, *carrier_nodes]

    def _append_round(self, name: str, number: str, round: str, frame: Frame) -> list[Any]:
        """Return nodes that append a round to the number around a frame; the last one is named `name`."""
        axis = constant(f"{name}/axis", np.int32(0), [f"^{number}"])
        nodes = [axis]
        # Outside of loops the number is a scalar, which becomes the first element of the vector.
        if not self._depth(frame[:-1]):
            number_vector = _node(f"{name}/vector", "ExpandDims", [number, axis.name], Tdim=DT_INT32)
            number = number_vector.name
            nodes.append(number_vector)
        return [*nodes, _node(name, "ConcatV2", [number, round, axis.name], N=2, Tidx=DT_INT32)]

    def _carrier(self, frame: Frame) -> str:
        """Return the name of the node with the number in a frame."""
        place = f"{len(frame)}_{'_'.join(frame).replace('/', '_')}"
        return f"{self._number_name}/{place}" if frame else self._number_name


def _first_round_nodes(name: str, remaining_rounds: Any, number: str) -> list[Any]:
    """Return nodes around a loop, the last of which has the number of the loop's first round.

    remaining_rounds: the Merge with the number of rounds to go, where rounds are counted down; else None.
    """
    control_inputs = [f"^{number}"]
    if remaining_rounds is None:
        return [constant(name, np.array([0], np.int64), control_inputs)]
    enter = remaining_rounds.inputs[0].op
    round_count = enter.inputs[0]
    count_ref = f"{round_count.op.name}:{round_count.value_index}"
    dtype = round_count.dtype.as_datatype_enum
    cast = new_node(f"{name}/count", "Cast", [count_ref], SrcT=dtype, DstT=DT_INT64)
    minus_one = constant(f"{name}/last", np.array([-1], np.int64), control_inputs)
    return [cast, minus_one, _node(name, "AddV2", [cast.name, minus_one.name])]


def _remaining_rounds_merge(condition: Any) -> Any:
    """Return the Merge with the number of rounds to go in a loop of gradients; None for other loops.

    condition: the loop's LoopCond.
    TensorFlow names its Enter "b_count", and the loop goes on while the number is at least 1.
    """
    condition_op = condition.inputs[0].op
    if condition_op.type != "GreaterEqual":
        return None
    merge = condition_op.inputs[0].op
    if merge.type != "Merge":
        return None
    enter = merge.inputs[0].op
    is_count = enter.type == "Enter" and enter.name.rpartition("/")[2].startswith("b_count")
    return merge if is_count else None


def _entry_carrier(carrier: str) -> str:
    """Return the name of the node outside a loop with the number of the loop's first round.

    Routines at values that enter the loop read that number.
    """
    return f"{carrier}/entering"


def _end_name(carrier: str) -> str:
    """Return the name of the node that leaves a loop when all routines in it have run."""
    return f"{carrier}/end"
