"""Leaves whose gradients the routines of tools see within compiled graphs, before autograd stores them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from amanda.backend import State
from torch.autograd.graph import GradientEdge

from ._compiled_callables import asks_for_graphs

_NOTES_KEY = "amanda_leaves"
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class WatchedLeaf(NamedTuple):
    """An input of a graph that is a leaf, its name, and the tools with routines at its AccumulateGrad."""

    tensor: torch.Tensor
    name: str
    tools: Sequence[Any]


def note_leaves(values: Iterable[Any], start: int, leaves: Sequence[WatchedLeaf]) -> None:
    """Note the leaves of a compiled graph at the nodes of autograd that it made, numbered from `start`."""
    # The sequence number tells nodes of this run from those that lead to inputs of the graph.
    for value in values:
        node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is not None and node._sequence_nr() >= start:
            node.metadata.setdefault(_NOTES_KEY, []).append(leaves)


def report_leaves(state: State, outputs: Sequence[Any], accumulates: bool) -> None:
    """Report leaves of compiled graphs whose routines see other gradients in this pass than in eager mode.

    accumulates: whether the pass stores gradients.
    """
    if not asks_for_graphs(state):
        return
    watched_leaves, gradient_counts = _leaves_behind(outputs, state)
    for node, count in gradient_counts.items():
        # By `id`, since the notes hold the tensors and so keep their addresses in use.
        leaf = watched_leaves.get(id(node.variable))
        if leaf is None:
            continue
        subject = f"AccumulateGrad of {leaf.name}"
        if not accumulates:
            state.report(subject, "a compiled graph calls its routines, though this pass stores no gradient")
        elif count > 1:
            reason = (
                "a compiled graph calls its routines for each gradient that it hands over, not for their sum"
            )
            state.report(subject, reason)
        if leaf.tensor._backward_hooks:
            state.report(subject, "a compiled graph calls its routines before hooks on the tensor")


def _leaves_behind(outputs: Sequence[Any], state: State) -> tuple[dict[int, WatchedLeaf], Counter[Any]]:
    """Return the noted leaves behind outputs, by `id`, and the number of edges to each AccumulateGrad node.

    Of the leaves those that a tool with an open scope watches.
    """
    watched_leaves: dict[int, WatchedLeaf] = {}
    gradient_counts: Counter[Any] = Counter()
    waiting: list[Any] = [
        output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs
    ]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        for noted_leaves in node.metadata.get(_NOTES_KEY, ()):
            open_leaves = [leaf for leaf in noted_leaves if any(map(state.is_open, leaf.tools))]
            watched_leaves.update({id(leaf.tensor): leaf for leaf in open_leaves})
        for child, _ in node.next_functions:
            if type(child) is _AccumulateGrad:
                gradient_counts[child] += 1
            elif child not in visited:
                visited.add(child)
                waiting.append(child)
    return watched_leaves, gradient_counts
