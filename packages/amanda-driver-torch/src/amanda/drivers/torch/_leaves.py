"""Leaves whose gradients the routines of tools see within compiled graphs, before autograd stores them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from amanda.backend import State
from torch.autograd.graph import GradientEdge

from ._asked import asks_for_graphs

_NOTES = "amanda_leaves"
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class Leaf(NamedTuple):
    """A leaf that a graph is given, what to call it, and the tools with routines at its AccumulateGrad."""

    tensor: torch.Tensor
    name: str
    tools: Sequence[Any]


def note(values: Iterable[Any], start: int, leaves: Sequence[Leaf]) -> None:
    """Note the leaves of a compiled graph at the nodes of autograd, numbered from `start`, that it made."""
    for value in values:
        node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is not None and node._sequence_nr() >= start:
            node.metadata.setdefault(_NOTES, []).append(leaves)


def tell(state: State, outputs: Sequence[Any], accumulates: bool) -> None:
    """Report leaves of compiled graphs whose routines see another gradient in this pass than in eager mode.

    accumulates: whether the pass stores gradients.
    """
    if not asks_for_graphs(state):
        return
    leaves: dict[int, Leaf] = {}
    edges: Counter[Any] = Counter()
    waiting: list[Any] = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        for noted in node.metadata.get(_NOTES, ()):
            leaves.update({id(leaf.tensor): leaf for leaf in noted if any(map(state.is_open, leaf.tools))})
        for child, _ in node.next_functions:
            if type(child) is _AccumulateGrad:
                edges[child] += 1
            elif child not in met:
                met.add(child)
                waiting.append(child)
    for node, count in edges.items():
        leaf = leaves.get(id(node.variable))
        if leaf is None:
            continue
        what = f"AccumulateGrad of {leaf.name}"
        if not accumulates:
            state.report(what, "a compiled graph calls its routines, though this pass stores no gradient")
        elif count > 1:
            reason = (
                "a compiled graph calls its routines for each gradient that it hands over, not for their sum"
            )
            state.report(what, reason)
        if leaf.tensor._backward_hooks:
            state.report(what, "a compiled graph calls its routines before hooks on the tensor")
