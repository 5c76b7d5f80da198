"""One FX graph with the routines of tools in it."""

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

from ._ops import Program
from ._rewrite import Rewriting
from ._symbols import Symbols

if TYPE_CHECKING:
    from amanda import Tool


@cache
def namespace() -> Namespace:
    """`pytorch/<version>/graph`."""
    return Namespace(f"pytorch/{torch.__version__.split('+')[0]}/graph")


@checked
def instrument(module: GraphModule, *tools: Tool, example: Sequence[Any] | None = None) -> GraphModule:
    """A copy of a graph with the tools' routines in it, which run whenever it does, outside of scopes too.

    module: of `torch.fx.symbolic_trace`, of `torch.export` (`program.module()`), or any other, of torch's
    functions or of ATen's operators.  example: positional arguments that it may be called with; needed
    where the graph itself does not say what it is given, as that of symbolic_trace.
    Gives `module` itself where the tools insert nothing.  Routines marked @amanda.traceable are tensor code
    of the graph, so that `torch.export.export(instrumented, args)` gives a program that runs without Amanda;
    others are calls of Python, by `torch.ops.amanda`.
    Raises AmandaError where the example is missing.

    >>> import amanda, torch
    >>> from amanda.drivers.torch.graph import instrument
    >>> program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    >>> instrument(program.module(), amanda.Tool())(torch.ones(1, 2)).shape
    torch.Size([1, 3])
    """
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    symbols = [node.meta.get("val", node.meta.get("example_value")) for node in places]
    given: list[Any] = symbols
    if example is not None:
        given = tree_flatten(tuple(example))[0]
        if len(given) != len(places):
            raise AmandaError(
                f"the graph takes {len(places)} values ({', '.join(node.name for node in places)}), "
                f"the example has {len(given)}"
            )
    elif any(symbol is None for symbol in symbols):
        raise AmandaError(
            "the graph does not say what it is given: instrument(module, tool, example=(x,)), with arguments "
            "that it may be called with"
        )
    if any(symbol is None for symbol in symbols):
        symbols = given
    with apply(*tools) as scope:
        program = Program(State.current(), every=True)
        rewriting = Rewriting(module, Symbols(module, given, symbols), program, namespace())
        instrumented = rewriting.rewritten()
        for entry in program.reports:
            scope.report.add(*entry)
    if instrumented is None:
        return module
    instrumented.meta["amanda"] = program
    return instrumented
