"""Observers that are given no value: called when a graph has run, which is compiled without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from amanda import interceptor
from amanda.backend import Action, OpFacts, matched
from amanda.plan import Actions
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import _StopRecomputationError

from ._gathering import can_wait
from ._ops import GraphExecution, Program
from ._record import backward_nodes, sequence

_NODE = "CompiledFunctionBackward"
"""Name of the one node that all backward ops of a graph are for autograd, which AOTAutograd makes."""


class Whole:
    """Observers of no value at the ops, and at the backward ops, of a graph that AOTAutograd compiles.

    It runs all ops of the graph, then all backward ops that lead from its outputs to its inputs.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._forward: list[tuple[Action, OpFacts]] = []
        self._backward: list[tuple[Action, OpFacts]] = []

    def __bool__(self) -> bool:
        return bool(self._forward or self._backward)

    def take(self, actions: Actions, facts: OpFacts, is_run: bool = True) -> Actions:
        """Take observers of no value over, and return the actions that are left for the graph.

        An observer stays where its tool has another routine at the op.
        is_run: whether the compiled code runs the op.
        """
        taken = []
        for action in actions.all:
            own = [one for one in actions.all if one.tool is action.tool]
            if all(can_wait(one) and one.select == () for one in own):
                taken.append(action)
        if not taken:
            return actions
        if is_run:
            side = self._forward if facts.backward_op_id is None else self._backward
            side += [(action, facts) for action in taken]
        left = Actions()
        left.add(action for action in actions.all if action not in taken)
        return left

    def run(self, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the compiled graph, then call the observers; those of backward ops in the backward pass."""
        execution = GraphExecution(self._program)
        start = sequence()
        try:
            with interceptor.Suspension():
                outputs = compiled(*args)
        except _StopRecomputationError:  # of a checkpoint, which has all that it needs of a graph that ran
            self._call(self._forward, execution)
            raise
        self._call(self._forward, execution)
        if self._backward:
            self._follow(outputs, args, start, execution)
        return outputs

    def _follow(self, outputs: Any, args: Sequence[Any], start: int, execution: GraphExecution) -> None:
        made = [one for one in tree_flatten((outputs, args))[0] if isinstance(one, torch.Tensor)]
        nodes = [node for node, _ in backward_nodes(made, start, sequence())]
        whole = next((node for node in nodes if type(node).__name__ == _NODE), None)
        if whole is not None:
            whole.register_hook(lambda *_: self._call(self._backward, execution))
        elif nodes:
            what, reason = "backward ops of a compiled graph", "autograd runs them one by one, unobserved"
            execution.state.report(what, reason)

    @staticmethod
    def _call(observers: Iterable[tuple[Action, OpFacts]], execution: GraphExecution) -> None:
        """Call those whose tools' scopes are open; a hot path."""
        runs: dict[int, bool] = {}
        with interceptor.Suspension(), torch.no_grad():
            for action, facts in observers:
                tool = id(action.tool)
                if tool not in runs:
                    runs[tool] = execution.runs_action(action)
                if runs[tool]:
                    try:
                        with action.tool._amanda.lock:
                            result = action.func(**action.kwargs)
                        if result is not None:
                            matched(action, result, ())
                    except BaseException as error:
                        facts.explain(error, action)
                        raise
