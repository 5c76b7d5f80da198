"""Callables in the place of nodes of a rewritten graph: native ops with the routines of tools around them.

Whatever runs the graph calls them: a backend that traces the graph into another graph, which makes traceable
routines part of that graph, or a backend that runs the graph as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from amanda.backend import OpFacts
from amanda.plan import Actions, is_among
from torch.utils._pytree import tree_flatten

from ._node_runs import NodeReplay, backward_nodes, fill_template, sequence_number
from ._observers import WaitingObservers
from ._ops import TENSORS, GraphProgram
from ._routine_inputs import HeldTensors
from ._routines import NodeRoutines


class BackwardSite(NamedTuple):
    """A backward op with its facts, and the actions of tools at it."""

    facts: OpFacts
    actions: Actions


class OpStep:
    """A native op of a node with its facts, and the actions of tools at it.

    backward: backward ops with actions, by the backward op's place among those of the op.
    """

    def __init__(self, facts: OpFacts, actions: Actions) -> None:
        self.facts = facts
        self.actions = actions
        self.backward: dict[int, BackwardSite] = {}

    def __bool__(self) -> bool:
        return bool(self.actions or self.backward)


class InstrumentedCall:
    """Callable of a rewritten graph; its first arguments are an execution's token and the held tensors.

    held_tensors: the tensors that its traceable routines hold.
    """

    def __init__(self, name: str, program: GraphProgram) -> None:
        """Take the name of the node; a trial of the routines adds the tensors that they hold."""
        self.__name__ = self.__qualname__ = f"instrumented_{name}"
        self.__module__ = "amanda"
        self.program = program
        self.held_tensors = HeldTensors()

    def __deepcopy__(self, memo: Any) -> InstrumentedCall:
        return self  # compilers copy graphs, whose copies belong to the same program and tools

    def __call__(self, token: torch.Tensor | None, *values: Any) -> Any:
        """Return the node's value; values: the held tensors as the graph has them, then the node's inputs."""
        held_count = len(self.held_tensors.tensors)
        # Hooks in the backward pass hold `routines`: no output may be reachable from there, or autograd's
        # graph would be a cycle that is never freed.
        held_values, values = values[:held_count], values[held_count:]
        routines = NodeRoutines(self.program, token, lambda: self.held_tensors.replaced_by(held_values))
        with routines.running():
            return self.run(routines, values)

    def run(self, routines: NodeRoutines, values: Sequence[Any]) -> Any:
        """Return the node's value."""
        raise NotImplementedError


class InstrumentedNode(InstrumentedCall):
    """Callable in the place of a node: the node's native ops with routines around them."""

    def __init__(self, name: str, program: GraphProgram, replay: NodeReplay, steps: Sequence[OpStep]) -> None:
        super().__init__(name, program)
        self.replay = replay
        self.steps = steps

    def run(self, routines: NodeRoutines, values: Sequence[Any]) -> Any:
        """Run the node's native ops with the routines at them, and return the node's value."""
        # The inputs of the node, then the results of its ops: slots of templates are indices of this list.
        slot_values = tree_flatten(list(values))[0]
        for call, step in zip(self.replay.calls, self.steps, strict=True):
            args, kwargs = fill_template((call.args, call.kwargs), slot_values)
            if step:
                outputs = _run_op_with_routines(step, self.replay.bind(call.site, args, kwargs), routines)
            else:
                outputs = call.site.invoke(args, kwargs)
            slot_values += tree_flatten(outputs)[0]
        return fill_template(self.replay.result, slot_values)


def _run_op_with_routines(step: OpStep, call: Any, routines: NodeRoutines) -> Any:
    """Run a native op with its routines, and hook its backward ops; return the op's outputs.

    If routines may change the result of an op in place, the op writes a clone of its target.
    """
    # Before routines, then the op or its replacement, hooks for its backward ops, after routines.
    actions, facts = step.actions, step.facts
    inputs = routines.run_all(actions.before, call.inputs, facts, call.written_positions)
    target = inputs[0] if _is_changed_in_place(step, call, inputs) else None
    if target is not None:
        # The op may save its result for the backward op: the op writes a clone, and the routine's value
        # goes into the target.
        inputs = [target.clone(), *inputs[1:]]
    first_number = sequence_number()
    outputs = NotImplemented  # as a replacement returns that leaves the op to torch
    if actions.replace is not None:
        outputs = routines.replace_op(actions.replace, call, inputs, facts)
    if outputs is NotImplemented:
        outputs = call.invoke(inputs)
    values, rebuild = call.append_unreturned(outputs, inputs, *TENSORS.flatten(outputs))
    written_tensors = call.target_tensors(inputs, values)
    if step.backward:
        tensors = [value for value in (*values, *written_tensors) if isinstance(value, torch.Tensor)]
        for node, place in list(backward_nodes(tensors, first_number, sequence_number())):
            if place in step.backward:
                routines.hook_node(node, *step.backward[place])
    if target is not None:
        (changed_value,) = routines.run_all(actions.after, values, facts)
        return rebuild([target.copy_(changed_value)])
    mutable_positions = [i for i, value in enumerate(values) if is_among(value, written_tensors)]
    changed_values = routines.run_all(actions.after, values, facts, mutable_positions)
    return outputs if changed_values is values else rebuild(changed_values)


def _is_changed_in_place(step: OpStep, call: Any, inputs: Sequence[Any]) -> bool:
    """Return True if routines may change what an op has written into the tensor that it is called on."""
    in_place = call.target_positions == (0,) and isinstance(inputs[0], torch.Tensor)
    return in_place and any(action.select != () and not action.observer for action in step.actions.after)


class InstrumentedLeaf(InstrumentedCall):
    """Callable between a parameter and all its readers, so that routines see the whole gradient."""

    def __init__(self, name: str, program: GraphProgram, site: BackwardSite) -> None:
        super().__init__(name, program)
        self.site = site

    def run(self, routines: NodeRoutines, values: Sequence[Any]) -> Any:
        """Return a view of the leaf with a hook that runs routines; the leaf if no gradient will come."""
        (leaf,) = values
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        # The node of the view gets the sum of the gradients of all readers, as AccumulateGrad does.
        leaf_view = leaf.view_as(leaf)
        facts, actions = self.site

        def run_leaf_routines(gradients: Sequence[Any]) -> Any:
            """Return the gradient after the routines before AccumulateGrad; those after it get no value."""
            with routines.running():
                gradients = tuple(routines.run_all(actions.before, list(gradients), facts))
                routines.run_all(actions.after, [], facts)  # AccumulateGrad hands no gradients on
                return gradients

        leaf_view.grad_fn.register_prehook(run_leaf_routines)
        return leaf_view


class WaitingObserversCall(InstrumentedCall):
    """Callable before an output of the graph that hands over values to the waiting observers."""

    def run(self, routines: NodeRoutines, values: Sequence[Any]) -> Any:
        """Hand over the values that wait in this execution, and return the output as it is."""
        (output,) = values
        if routines.token is not None:
            WaitingObservers.of_token(self.program, routines.token).hand_over(routines.token)
        return output
