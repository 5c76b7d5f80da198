"""The stand-in of a node in a rewritten graph: its native ops, with the routines of tools around them.

It is called wherever the graph runs: by a backend that traces the graph into another, which makes
traceable routines part of that, and by one that runs the graph as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from amanda.backend import OpFacts
from amanda.plan import Actions, is_among
from torch.utils._pytree import tree_flatten

from ._gathering import Gathering
from ._held import Held
from ._ops import TENSORS, Program
from ._record import Replay, backward_nodes, filled, sequence
from ._routines import Routines


class BackwardSite(NamedTuple):
    """A backward op with its facts and its actions."""

    facts: OpFacts
    plan: Actions


class Step:
    """A native op with its facts and its actions.

    backward: by the backward op's place among those of the op.
    """

    def __init__(self, facts: OpFacts, plan: Actions) -> None:
        self.facts = facts
        self.plan = plan
        self.backward: dict[int, BackwardSite] = {}

    def __bool__(self) -> bool:
        return bool(self.plan or self.backward)


class Inlet:
    """A callable of a rewritten graph, called with an execution's token and what its routines hold first.

    held: the tensors that traceable routines hold.
    """

    def __init__(self, name: str, program: Program) -> None:
        self.__name__ = self.__qualname__ = f"instrumented_{name}"
        self.__module__ = "amanda"
        self.program = program
        self.held = Held()

    def __deepcopy__(self, memo: Any) -> Inlet:
        return self

    def __call__(self, token: torch.Tensor | None, *values: Any) -> Any:
        """The node's value, of what tensors stand for those that are held, and of what the node is given."""
        count = len(self.held.tensors)
        # Routines in the backward pass are held by autograd's nodes, so they must not hold an output in turn.
        standing_in, values = values[:count], values[count:]
        routines = Routines(self.program, token, lambda: self.held.replaced_by(standing_in))
        with routines.at_work():
            return self.run(routines, values)

    def run(self, routines: Routines, values: Sequence[Any]) -> Any:
        """The node's value."""
        raise NotImplementedError


class Instrumented(Inlet):
    """A node that comes to native ops."""

    def __init__(self, name: str, program: Program, replay: Replay, steps: Sequence[Step]) -> None:
        super().__init__(name, program)
        self.replay = replay
        self.steps = steps

    def run(self, routines: Routines, values: Sequence[Any]) -> Any:
        placed = tree_flatten(list(values))[0]
        for call, step in zip(self.replay.calls, self.steps, strict=True):
            args, kwargs = filled((call.args, call.kwargs), placed)
            if step:
                outputs = _run(step, self.replay.bind(call.site, args, kwargs), routines)
            else:
                outputs = call.site.invoke(args, kwargs)
            placed += tree_flatten(outputs)[0]
        return filled(self.replay.result, placed)


def _run(step: Step, call: Any, routines: Routines) -> Any:
    plan, facts = step.plan, step.facts
    inputs = routines.in_turn(plan.before, call.inputs, facts, call.mutable)
    target = inputs[0] if _is_changed_in_place(step, call, inputs) else None
    if target is not None:  # what the op saves for its backward op is not written once more
        inputs = [target.clone(), *inputs[1:]]
    start = sequence()
    outputs = NotImplemented
    if plan.replace is not None:
        outputs = routines.replace(plan.replace, call, inputs, facts)
    if outputs is NotImplemented:
        outputs = call.invoke(inputs)
    values, rebuild = call.with_written(outputs, inputs, *TENSORS.flatten(outputs))
    written = call.written(inputs, values)
    if step.backward:
        tensors = [one for one in (*values, *written) if isinstance(one, torch.Tensor)]
        for node, place in list(backward_nodes(tensors, start, sequence())):
            if place in step.backward:
                routines.hook(node, *step.backward[place])
    if target is not None:
        (changed,) = routines.in_turn(plan.after, values, facts)
        return rebuild([target.copy_(changed)])
    mutable = [i for i, one in enumerate(values) if is_among(one, written)]
    changed = routines.in_turn(plan.after, values, facts, mutable)
    return outputs if changed is values else rebuild(changed)


def _is_changed_in_place(step: Step, call: Any, inputs: Sequence[Any]) -> bool:
    """Return True if routines may change what an op has written into the tensor that it is called on."""
    in_place = call.targets == (0,) and isinstance(inputs[0], torch.Tensor)
    return in_place and any(action.select != () and not action.observer for action in step.plan.after)


class Leaf(Inlet):
    """A parameter as the graph reads it: routines see its whole gradient."""

    def __init__(self, name: str, program: Program, site: BackwardSite) -> None:
        super().__init__(name, program)
        self.site = site

    def run(self, routines: Routines, values: Sequence[Any]) -> Any:
        (leaf,) = values
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        read = leaf.view_as(leaf)
        facts, plan = self.site

        def entering(gradients: Sequence[Any]) -> Any:
            with routines.at_work():
                gradients = tuple(routines.in_turn(plan.before, list(gradients), facts))
                routines.in_turn(plan.after, [], facts)
                return gradients

        read.grad_fn.register_prehook(entering)
        return read


class Last(Inlet):
    """An output of the graph, before which observers that wait are called."""

    def run(self, routines: Routines, values: Sequence[Any]) -> Any:
        (output,) = values
        if routines.token is not None:
            Gathering.of(self.program, routines.token).hand_over(routines.token)
        return output
