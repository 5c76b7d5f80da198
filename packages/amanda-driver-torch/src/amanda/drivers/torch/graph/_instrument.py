"""`instrument`: a copy of one FX graph with the routines of tools in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from amanda import apply
from amanda.backend import Namespace, State
from amanda.errors import AmandaError
from amanda.options import checked
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten

from ._graph_copy import inline_bodies
from ._ops import GraphProgram
from ._rewrite import FxRewriting
from ._symbols import GraphSymbols

if TYPE_CHECKING:
    from amanda import Tool


@cache
def namespace() -> Namespace:
    """Return the namespace of the ops, `pytorch/<version>/graph`."""
    return Namespace(f"pytorch/{torch.__version__.split('+')[0]}/graph")


@checked
def instrument(module: GraphModule, *tools: Tool, example: Sequence[Any] | None = None) -> GraphModule:
    """Return a copy of a graph with the routines of tools in it, which run whenever the graph runs.

    module: of `torch.fx.symbolic_trace`, of `torch.export` (`program.module()`), or any other, of torch's
    functions or of ATen's operators.  example: positional arguments for the graph; needed where the graph has
    no examples of its inputs, as after symbolic_trace.
    Returns `module` itself if the tools insert nothing.  Routines marked @amanda.traceable are tensor code
    of the graph, so that `torch.export.export(instrumented, args)` gives a program that runs without Amanda;
    others are calls of Python, by `torch.ops.amanda`.  No scope is needed to run the copy.
    Raises AmandaError if an example is needed and missing.

    >>> import amanda, torch
    >>> from amanda.drivers.torch.graph import instrument
    >>> program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    >>> instrument(program.module(), amanda.Tool())(torch.ones(1, 2)).shape
    torch.Size([1, 3])
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    symbols: Sequence[Any] = [node.meta.get("val", node.meta.get("example_value")) for node in placeholders]
    names = [node.name for node in placeholders]
    inputs = _inputs_for_analysis(names, symbols, example)
    if any(symbol is None for symbol in symbols):
        symbols = inputs
    # The copy runs its routines outside of scopes, so the scope here is for the analysis alone.
    with apply(*tools) as scope:
        program = GraphProgram(State.current(), runs_outside_scopes=True)
        body = inline_bodies(module) or module
        rewriting = FxRewriting(body, GraphSymbols(body, inputs, symbols), program, namespace())
        instrumented = rewriting.rewrite()
        for entry in program.reports:
            scope.report.add(*entry)
    if instrumented is None:
        return module
    instrumented.meta["amanda"] = program  # programs are looked up weakly: the copy keeps its own alive
    return instrumented


def _inputs_for_analysis(
    names: Sequence[str], symbols: Sequence[Any], example: Sequence[Any] | None
) -> Sequence[Any]:
    """Return the values of the example, or the graph's symbols if there is no example.

    names: of the graph's inputs.  symbols: their values without data, None where unknown.
    Raises AmandaError for an example of another number of values, or if values are missing.
    """
    if example is not None:
        inputs = tree_flatten(tuple(example))[0]
        if len(inputs) != len(names):
            raise AmandaError(
                f"the graph takes {len(names)} values ({', '.join(names)}), the example has {len(inputs)}"
            )
        return inputs
    if any(symbol is None for symbol in symbols):
        raise AmandaError(
            "the graph does not say what it is given: instrument(module, tool, example=(x,)), with arguments "
            "that it may be called with"
        )
    return symbols
