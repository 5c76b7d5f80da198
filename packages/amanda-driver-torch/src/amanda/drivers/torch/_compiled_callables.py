"""Callables of torch.compile in scopes: are their graphs instrumented, and what is reported of them."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeGuard

import torch
from amanda.backend import State
from torch.autograd.graph import GradientEdge

from ._requirements import torch_attribute

GRAPHS_UNSUPPORTED = (
    "it lacks what graphs are instrumented with, so that compiled callables run op by op in scopes"
)
RAN_OP_BY_OP = (
    "ran op by op, as eager code: what the compiler made of it did not run; "
    '--compiled instrument (shell) or compiled="instrument" (Python) puts tools into the compiled code'
)
"""Reason of a report on a compiled callable that ran its Python code."""
_LEAVES_KEY = "amanda_leaves"
_TORCH = f"{Path(torch.__file__).parent}/"
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def instruments_compiled_code(state: object) -> TypeGuard[State]:
    """Return True if compiled callables are to be instrumented in this state."""
    if type(state) is not State or state.stack is None or not state.scopes:
        return False
    return state.scopes[-1].compiled == "instrument"  # the innermost scope decides


def dynamo_has_stances() -> bool:
    """Return True if dynamo, once imported, has stances, which decide if compiled code runs (torch 2.6)."""
    # Importing dynamo takes seconds, and a program without torch.compile does not need it.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return hasattr(frames, "_callback_from_stance") and torch_attribute("compiler.set_stance") is not None


def report_op_by_op(state: State, frame: FrameType | None) -> None:
    """Report the compiled callable that a frame of dynamo's is about to run as eager code."""
    state.report(*op_by_op_report_entry(None if frame is None else frame.f_locals.get("fn")))


def op_by_op_report_entry(function: Callable[..., Any] | None) -> tuple[str, str, str]:
    """Return a report's entry on a compiled callable, None if unknown: name, reason, "file:line" of code."""
    kind, name, code = describe_callable(function)
    # The line of a layer of torch's own says nothing of the program.
    is_of_user = isinstance(code, CodeType) and not code.co_filename.startswith(_TORCH)
    location = f"{code.co_filename}:{code.co_firstlineno}" if is_of_user else ""
    return f"compiled {kind} {name}" if name else "compiled code", RAN_OP_BY_OP, location


def describe_callable(function: Callable[..., Any] | None) -> tuple[str, str, Any]:
    """Return kind, name and code of the user's callable within wrappers; name "" and code None if unknown."""
    # dynamo and decorators wrap the user's function, whose name and line the report is to show.
    if function is not None:
        function = inspect.unwrap(function, stop=lambda wrapper: _model_of(wrapper) is not None)
    model = _model_of(function)
    if model is not None:
        model_class = type(model)
        return "model", f"{model_class.__qualname__}.forward", getattr(model_class.forward, "__code__", None)
    if function is not None and not hasattr(function, "__qualname__"):  # an object with `__call__`
        function = type(function).__call__
    return "function", getattr(function, "__qualname__", ""), getattr(function, "__code__", None)


def _model_of(function: Any) -> torch.nn.Module | None:
    """Return the model that is a function or that a method is bound to; None of other functions."""
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


class WatchedLeaf(NamedTuple):
    """An input of a graph that is a leaf, its name, and the tools with routines at its AccumulateGrad."""

    tensor: torch.Tensor
    name: str
    tools: Sequence[Any]


def note_watched_leaves(values: Iterable[Any], first_number: int, leaves: Sequence[WatchedLeaf]) -> None:
    """Store the leaves of a compiled graph at the nodes of its outputs, where `report_leaves` finds them.

    first_number: sequence number from which on nodes are of this run; nodes of the graph's inputs are older.
    """
    for value in values:
        node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is not None and node._sequence_nr() >= first_number:
            node.metadata.setdefault(_LEAVES_KEY, []).append(leaves)


def report_leaves(state: State, outputs: Sequence[Any], accumulates: bool) -> None:
    """Report leaves of compiled graphs whose routines see other gradients in this pass than in eager mode.

    accumulates: whether the pass stores gradients.
    """
    if not instruments_compiled_code(state):
        return
    leaf_by_id, edge_count_by_node = _find_watched_leaves(outputs, state)
    for node, edge_count in edge_count_by_node.items():
        # The stored leaves hold the tensors, so that no other tensor gets an `id` of theirs.
        leaf = leaf_by_id.get(id(node.variable))
        if leaf is None:
            continue
        subject = f"AccumulateGrad of {leaf.name}"
        if not accumulates:
            state.report(subject, "a compiled graph calls its routines, though this pass stores no gradient")
        elif edge_count > 1:
            reason = (
                "a compiled graph calls its routines for each gradient that it hands over, not for their sum"
            )
            state.report(subject, reason)
        if leaf.tensor._backward_hooks:
            state.report(subject, "a compiled graph calls its routines before hooks on the tensor")


def _find_watched_leaves(outputs: Sequence[Any], state: State) -> tuple[dict[int, WatchedLeaf], Counter[Any]]:
    """Return the leaves stored at nodes behind outputs, by `id`, and the edges to each AccumulateGrad node.

    A leaf is left out if no tool that watches it has an open scope.
    """
    leaf_by_id: dict[int, WatchedLeaf] = {}
    edge_count_by_node: Counter[Any] = Counter()
    waiting: list[Any] = [
        output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs
    ]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        for leaves_of_graph in node.metadata.get(_LEAVES_KEY, ()):
            leaf_by_id.update(
                {id(leaf.tensor): leaf for leaf in leaves_of_graph if any(map(state.is_open, leaf.tools))}
            )
        for child, _ in node.next_functions:
            if type(child) is _AccumulateGrad:
                edge_count_by_node[child] += 1
            elif child not in visited:
                visited.add(child)
                waiting.append(child)
    return leaf_by_id, edge_count_by_node
