"""Functions under jit: traced anew for the tools, and the user's own where nothing was put into them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from amanda import interceptor
from amanda.backend import Attributes
from jax._src import core, pjit
from jax._src.tree_util import FlatTree

from ._contexts import Programs, follow, key_of, under, unseen
from ._primitives import ORIGINALS
from ._requirements import FUNCTIONS_OF_OPS, wrap
from ._traces import INSERTION, TAP, is_differentiated, is_tangent, is_within_jit, made, noting, part
from ._twins import is_linear, run_twice, wants_backward
from ._variants import Program, with_inputs

AHEAD = "it was compiled ahead of time, so its ops are in an executable; call the function itself"
PARTITIONED = "JAX keeps it with its partitioning, as a part of one primitive; call the function itself"
IN_ONE = "its derivative is taken after it was traced: JAX computes values and tangents in one program there"
_NO_PROGRAM = SimpleNamespace(effects=(), consts=())


class _Part(NamedTuple):
    """Stands for the program of a function of JAX's own that runs op by op.

    infer: returns its program.  inputs: its arguments, in the form that JAX passes to the function.
    """

    infer: Callable[[], Any]
    inputs: Any


class _Guarded(NamedTuple):
    """A program that Python has to look at before each call.  params: JAX's."""

    params: Any


class _Found(NamedTuple):
    """The findings of tracing a program: what is in it, and what is read for it at each call."""

    notes: Mapping[str, None]
    program: Program | None = None
    guards: bool = False
    reports: Sequence[tuple[str, str]] = ()


def follow_jit(attributes: Attributes) -> None:
    """Trace functions with tools in force, and report executables that were made ahead of time."""
    attributes.set(pjit, "_infer_params", _tracing(pjit._infer_params))
    attributes.set(pjit, "_run_python_pjit", _running(pjit._run_python_pjit))
    wrap(attributes, "stages:Compiled.__call__", partial(_reported, AHEAD))
    wrap(attributes, "export._export:Exported.call", partial(_reported, AHEAD))
    wrap(attributes, "custom_partitioning:custom_partitioning.__call__", partial(_reported, PARTITIONED))
    for function in FUNCTIONS_OF_OPS:
        wrap(attributes, function, unseen())


def _tracing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(fun, info, args, kwargs)
        asked = sys._getframe(1).f_code.co_name == "jit_trace"
        if asked or is_tangent(jax.tree_util.tree_leaves((args, kwargs))):
            with unseen():
                return original(fun, info, args, kwargs)
        if is_within_jit():
            with noting() as notes:
                program, flat = original(part(fun, args, kwargs, ORIGINALS.of), info, args, kwargs)
            found = _Found(notes)
        elif _is_of_jax(fun, info):
            inputs = FlatTree.flatten_static_argnums_argnames(
                args, kwargs, info.static_argnums, info.static_argnames
            )
            return _Part(partial(original, fun, info, args, kwargs), inputs), []
        else:
            interceptor.reset_root()
            state = activation.state
            programs = Programs.of(state.stack)
            function = programs.function(fun)
            with function.variant() as variant:
                key = under(key_of(state, variant.number)) if variant.number else nullcontext()
                with noting() as notes, key:
                    program, flat = original(function.call, info, args, kwargs)
                closed = program.params["jaxpr"]
                if closed not in programs.found:
                    own, reports = with_inputs(program, variant.inputs), variant.reports()
                    guards = variant.reads.guards or bool(reports)
                    programs.found[closed] = _Found(notes, own, guards, reports)
            found = programs.found[closed]
            state.report_all(variant, found.reports)
            if any(map(is_differentiated, flat)):
                for ops in (one for one in found.notes if one not in (INSERTION, TAP)):
                    state.report(ops, IN_ONE)
        if found.program is not None:
            return _Guarded(found.program.params), [*found.program.inputs(), *flat[len(program.consts) :]]
        if INSERTION in found.notes or (TAP in found.notes and not core.trace_state_clean()):
            return _Guarded(program) if found.guards else program, flat
        with unseen():  # nothing is in it: the program is the user's own
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
            results = _run_part(p, fun, partial(original, fun=fun, args=args, kwargs=kwargs))
            return results, None, None, None, _NO_PROGRAM, None, None, ()
        own = made()
        if type(p) is _Guarded:
            p = p.params
            with unseen():
                flat = pjit.jit_p.bind(*args_flat, **p.params)
            results = jax.tree_util.tree_unflatten(p.out_tree, flat)
            ORIGINALS.note_all(results, own)
            return results, flat, None, None, _NO_PROGRAM, None, None, ()
        if interceptor.active() is None:
            return original(p, args_flat, fun, args, kwargs)
        with unseen():
            results = original(p, args_flat, fun, args, kwargs)
        if is_within_jit():
            ORIGINALS.note_all(results[0], own)
        elif core.trace_state_clean():
            follow()  # a tool may have had ops analysed again
        return results

    return _run_python_pjit


def _run_part(part: _Part, fun: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """Run a function of JAX's op by op for the tools.  run: runs a program with inputs."""
    tree: Any = None
    with unseen():
        inputs = part.inputs.map(_as_array)

    def function() -> list[Any]:
        with unseen():
            program, flat = part.infer()
            results, *_ = run(program, [*flat[: len(program.consts)], *inputs.vals])
        return list(jax.tree_util.tree_leaves(results))

    def ops(values: Sequence[Any]) -> list[Any]:
        nonlocal tree
        args, kwargs = inputs.update(values).unflatten()
        leaves, tree = jax.tree_util.tree_flatten(fun(*args, **kwargs))
        with unseen():
            return list(map(_as_array, leaves))

    backward = wants_backward()
    if backward:  # the gradients of symbols that it reads besides its arguments would come both ways
        with unseen():
            program, flat = part.infer()
        backward = not any(map(is_linear, flat[: len(program.consts)]))
    results = run_twice(inputs.vals, function, ops, backward)
    return jax.tree_util.tree_unflatten(tree, results)


def _as_array(value: Any) -> Any:
    """Return what JAX would make of an argument or a result of a function under jit."""
    return value if isinstance(value, (jax.Array, jax.Ref)) else jax.numpy.asarray(value)


def _reported(reason: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is None:
            return original(self, *args, **kwargs)
        function = getattr(self, "fun", None)
        name = getattr(self, "fun_name", None) or getattr(function, "__name__", type(self).__name__)
        kind = "compiled" if reason is AHEAD else "partitioned"
        activation.state.report(f"inside of the {kind} {name}", reason)
        with unseen():
            return original(self, *args, **kwargs)

    return call
