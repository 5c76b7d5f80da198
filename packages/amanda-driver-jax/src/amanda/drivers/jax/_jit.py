"""Functions under jit: traced anew for the tools, and the user's own where nothing was put into them."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from amanda import interceptor
from amanda.backend import Attributes, State
from jax._src import core, pjit

from ._contexts import Programs, follow, key_of, under
from ._inputs import Program, with_inputs
from ._programs import Counts, counting, made, part
from ._requirements import wrap
from ._taps import ORIGINALS
from ._traces import is_differentiated, is_tangent, is_within_jit
from ._variants import Variant

AHEAD = "it was compiled ahead of time, so its ops are in an executable; call the function itself"
IN_ONE = "its derivative is taken after it was traced: JAX computes values and tangents in one program there"
_NO_PROGRAM = SimpleNamespace(effects=(), consts=())


class _Part(NamedTuple):
    """Stands for the program of a function of JAX's own that runs op by op.  infer: gives its program."""

    infer: Callable[[], Any]


class _Guarded(NamedTuple):
    """A program that Python has to look at before each call.  params: JAX's."""

    params: Any


class _Found(NamedTuple):
    """The findings of tracing a program: what is in it, and what is read for it at each call."""

    counts: Counts
    program: Program | None = None
    guards: bool = False
    reports: Sequence[tuple[str, str]] = ()


def follow_jit(attributes: Attributes) -> None:
    """Trace functions with tools in force, and report executables that were made ahead of time."""
    attributes.set(pjit, "_infer_params", _tracing(pjit._infer_params))
    attributes.set(pjit, "_run_python_pjit", _running(pjit._run_python_pjit))
    wrap(attributes, "stages", "Compiled.__call__", _reported)
    wrap(attributes, "export._export", "Exported.call", _reported)
    wrap(attributes, "pallas.pallas_call", "_trace_kernel_to_jaxpr", _suspended)


def _suspended(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def trace(*args: Any, **kwargs: Any) -> Any:
        with interceptor.Suspension(), under():
            return original(*args, **kwargs)

    return trace


def _tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    def variant_key(state: State, variant: Variant) -> Any:
        return under(key_of(state, variant.number)) if variant.number else nullcontext()

    @wraps(original)
    def _infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(fun, info, args, kwargs)
        asked = sys._getframe(1).f_code.co_name == "jit_trace"
        if asked or is_tangent(jax.tree_util.tree_leaves((args, kwargs))):
            with interceptor.Suspension(), under():
                return original(fun, info, args, kwargs)
        within = is_within_jit()
        if not within and _is_of_jax(fun, info):
            return _Part(partial(original, fun, info, args, kwargs)), []
        if within:
            with counting() as counts:
                program, flat = original(part(fun, args, kwargs), info, args, kwargs)
            found = _Found(counts)
        else:
            interceptor.reset_root()
            programs = Programs.of(activation.state.layer)
            function, variants = programs.function(fun)
            with variants.current() as variant:
                with counting() as counts, variant_key(activation.state, variant):
                    program, flat = original(function, info, args, kwargs)
                closed = program.params["jaxpr"]
                if closed not in programs.found:
                    own = with_inputs(program, variant.inputs)
                    told = variant.reports()
                    programs.found[closed] = _Found(counts, own, variant.reads.guards or bool(told), told)
            found = programs.found[closed]
            activation.state.report_all(variant, found.reports)
            if found.counts.rules and any(map(is_differentiated, flat)):
                for unseen in found.counts.rules:
                    activation.state.report(unseen, IN_ONE)
        if found.program is not None:
            return _Guarded(found.program.params), [*found.program.inputs(), *flat[len(program.consts) :]]
        if found.counts.insertions or (found.counts.taps and not core.trace_state_clean()):
            return _Guarded(program) if found.guards else program, flat
        with interceptor.Suspension(), under():  # nothing is in it: the program is the user's own
            return original(fun, info, args, kwargs)

    return _infer_params


def _is_of_jax(fun: Any, info: Any) -> bool:
    placed = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    if any(one is not None and one is not pjit.UNSPECIFIED for one in placed):
        return False
    return str(getattr(fun, "__module__", "")).partition(".")[0] == "jax"


def _running(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _run_python_pjit(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if type(p) is _Part:
            with counting() as counts:
                results = jax.tree_util.tree_map(_as_array, fun(*args, **kwargs))
            if not (counts.insertions or counts.taps):  # the function itself, which XLA fuses
                own = jax.tree_util.tree_leaves(results)
                with interceptor.Suspension(), under():
                    results, *_ = original(*p.infer(), fun, args, kwargs)
                ORIGINALS.note_all(results, own)
            return results, None, None, None, _NO_PROGRAM, None, None, ()
        own = made()
        if type(p) is _Guarded:
            p = p.params
            with interceptor.Suspension(), under():
                flat = pjit.jit_p.bind(*args_flat, **p.params)
            results = jax.tree_util.tree_unflatten(p.out_tree, flat)
            ORIGINALS.note_all(results, own)
            return results, flat, None, None, _NO_PROGRAM, None, None, ()
        if interceptor.active() is None:
            return original(p, args_flat, fun, args, kwargs)
        with interceptor.Suspension(), under():
            results = original(p, args_flat, fun, args, kwargs)
        if is_within_jit():
            ORIGINALS.note_all(results[0], own)
        elif core.trace_state_clean():
            follow()  # a tool may have had ops analysed again
        return results

    return _run_python_pjit


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
        with interceptor.Suspension(), under():
            return original(self, *args, **kwargs)

    return call
