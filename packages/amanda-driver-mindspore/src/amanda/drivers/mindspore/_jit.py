"""Functions that MindSpore compiles: their ops are in a graph, which is reported."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from amanda import interceptor
from amanda.backend import Attributes
from mindspore.graph import api

REASON = "its ops are in a compiled graph; MS_JIT=0 in the environment runs it op by op"


def report_compiled(attributes: Attributes) -> None:
    """Tell the open scopes of each compiled function that is called."""
    attributes.set(api._JitExecutor, "__call__", _reported(api._JitExecutor.__call__))


def _reported(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(self, *args, **kwargs)
        activation.state.report(f"inside of the compiled {self.fn.__qualname__}", REASON)
        with interceptor.Suspension():
            return original(self, *args, **kwargs)

    return call
