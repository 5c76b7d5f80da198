"""Functions under jit: traced anew for the tools; JAX's own, and inner ones, are part of their caller."""

import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from amanda import interceptor
from amanda.backend import Attributes
from jax._src import core, dtypes, pjit, stages
from jax._src.sharding_impls import UnspecifiedValue

from ._contexts import under
from ._traces import is_within_jit

AHEAD = "it was compiled ahead of time, so its ops are in an executable; call the function itself"
_NO_PROGRAM = SimpleNamespace(effects=(), consts=())


class _Part(NamedTuple):
    """Stands for the program of a function whose ops are those of its caller.  info: of its jit."""

    info: Any


def follow_jit(attributes: Attributes, settle: Callable[[], None]) -> None:
    """Trace functions with tools in force, and report executables that were made ahead of time.

    settle: called behind each function that was traced, or that has routines in Python.
    """
    attributes.set(pjit, "_infer_params", _tracing(pjit._infer_params))
    attributes.set(pjit, "_run_python_pjit", _running(pjit._run_python_pjit, settle))
    attributes.set(stages.Compiled, "__call__", _reported(stages.Compiled.__call__))
    attributes.when_imported("jax._src.export._export", lambda: _report_exported(attributes))


def _report_exported(attributes: Attributes) -> None:
    kind = sys.modules["jax._src.export._export"].Exported
    attributes.set(kind, "call", _reported(kind.call))


def _tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(fun, info, args, kwargs)
        if sys._getframe(1).f_code.co_name == "jit_trace":
            with interceptor.Suspension(), under(None):
                return original(fun, info, args, kwargs)
        if _is_part(fun, info):
            return _Part(info), []
        interceptor.reset_root()
        return original(fun, info, args, kwargs)

    return _infer_params


def _is_part(fun: Any, info: Any) -> bool:
    """Return True for a function whose ops are those of its caller: it runs as under `jax.disable_jit`."""
    placed = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    if any(one is not None and not isinstance(one, UnspecifiedValue) for one in placed):
        return False
    return str(getattr(fun, "__module__", "")).partition(".")[0] == "jax" or is_within_jit()


def _running(original: Callable[..., Any], settle: Callable[[], None]) -> Callable[..., Any]:
    @wraps(original)
    def _run_python_pjit(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if type(p) is _Part:
            info = p.info
            if is_within_jit():
                args, kwargs = _staged(info, args, kwargs)
            results = jax.tree_util.tree_map(_as_array, fun(*args, **kwargs))
            return results, None, None, None, _NO_PROGRAM, None, None, ()
        if interceptor.active() is None:
            return original(p, args_flat, fun, args, kwargs)
        with interceptor.Suspension(), under(None):
            results = original(p, args_flat, fun, args, kwargs)
        settle()
        return results

    return _run_python_pjit


def _staged(info: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments as the function is traced with them: numbers are symbols, unless they are static."""
    static = {i % len(args) for i in info.static_argnums} if args else set()
    own = [one if i in static else jax.tree_util.tree_map(_symbol, one) for i, one in enumerate(args)]
    names = info.static_argnames
    return own, {
        name: one if name in names else jax.tree_util.tree_map(_symbol, one) for name, one in kwargs.items()
    }


def _symbol(value: Any) -> Any:
    return (
        value
        if isinstance(value, core.Tracer)
        else core.trace_ctx.trace.stage_value(dtypes.canonicalize_value(value))
    )


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jax.numpy.asarray(value)


def _reported(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(self, *args, **kwargs)
        name = getattr(self, "fun_name", None) or type(self).__name__
        activation.state.report(f"inside of the compiled {name}", AHEAD)
        with interceptor.Suspension(), under(None):
            return original(self, *args, **kwargs)

    return call
