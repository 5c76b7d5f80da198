"""Reports of functions and cells that MindSpore compiles, whose ops are out of reach in a graph."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from amanda import interceptor
from amanda.backend import Attributes
from mindspore import nn
from mindspore.graph import api

REASON = "its ops are in a compiled graph; MS_JIT=0 in the environment runs it op by op"


def report_compiled(attributes: Attributes) -> None:
    """Report each compiled function that is called, and each cell in graph mode, to the open scopes."""
    by_function = _stand_in_for_compiled(api._JitExecutor.__call__, lambda executor: executor.fn.__qualname__)
    attributes.set(api._JitExecutor, "__call__", by_function)
    in_graph_mode = _stand_in_for_compiled(nn.Cell.compile_and_run, lambda cell: type(cell).__qualname__)
    attributes.set(nn.Cell, "compile_and_run", in_graph_mode)


def _stand_in_for_compiled(original: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
    """Stand-in for a method that runs compiled code: reports it, and runs it uninstrumented."""

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(self, *args, **kwargs)
        activation.state.report(f"inside of the compiled {name(self)}", REASON)
        with interceptor.Suspension():
            return original(self, *args, **kwargs)

    return call
