"""The driver itself: which primitives it intercepts and how each bind reaches the core."""

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any

import jax
from amanda import interceptor
from amanda.backend import Action, Call, EagerDriver, Operation, OpFacts, State, Trace
from amanda.interceptor import IMPLEMENTATION, TRANSPARENT, Detour, Site
from amanda.plan import run_routine
from jax._src import core
from jax._src.interpreters import partial_eval as pe

from ._autodiff import Made, carried, follow_backward
from ._calls import CUSTOM, PrimitiveCall, custom_name, is_by_rule, rule_of, with_rule
from ._contexts import follow, key_of, leave, under, unseen
from ._evaluation import APART, caller_of_bind, evaluated, holds_routines, traced_anew, was_traced_apart
from ._host import raise_failures, run_later
from ._jit import IN_ONE, follow_jit
from ._loops import calls_in_condition, run_loop, run_mapped
from ._modules import CONVERSIONS, Places, enclose_modules, follow_conversion, path, places_among, variable_of
from ._primitives import ORIGINALS
from ._requirements import check
from ._stacks import follow_scans
from ._tensors import Arrays
from ._traces import INSERTION, TAP, is_staged, is_tangent, is_within_jit, note
from ._twins import run_twice, wants_backward
from ._variants import followed, guard, reads_of, report

PROGRAMS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "call", "core_closed_call", "scan", "while", "cond",
     "checkpoint", "remat", "remat2", "remat_opt", "compute_on", "custom_vjp_call_jaxpr", "custom_lin",
     "run_state", "eval_jaxpr", "linear_call", "custom_linear_solve", "shard_map", "custom_transpose_call",
     "custom_vmap_call", "xla_pmap", "amanda_tap", "amanda_straight", "amanda_call", "amanda_gate",
     "amanda_join", "name", "optimization_barrier"}
)  # fmt: skip
"""Primitives whose ops have been traced before they are bound, or that compute nothing: no ops themselves."""
_RUNS = ("api.py", "api_util.py", "core.py", "custom_derivatives.py", "interpreters/", "linear_util.py",
         "pjit.py", "profiler.py", "traceback_util.py", "util.py")  # fmt: skip
"""Code of JAX that traces functions, or runs them: in either way an op has the same place in the program."""


class JaxDriver(Arrays, EagerDriver):
    """JAX, eager and under jit."""

    api = 1
    framework = "jax"
    packages = ("jaxlib", "flax", "equinox", "optax")
    modes = ("eager",)
    has_symbols = True

    def __init__(self) -> None:
        self._detours: dict[tuple[core.Primitive, str], Detour] = {}
        self._primitives: dict[Site, core.Primitive] = {}
        self._places = Places()
        self._rules = self.site(_call_rule, Operation("custom_vjp_call"), "forward rules", TRANSPARENT)

    def introduce(self) -> None:
        """Mark the code of JAX, and leave out of places what calls functions for it."""
        super().introduce()
        self.skip(*(f"{Path(core.__file__).parent}/{one}" for one in _RUNS))

    def attach(self) -> None:
        """Bring every bind to the tools, trace functions anew for them, and follow backward passes."""
        check()
        self.attributes.set(core.Primitive, "bind", self._bind(core.Primitive.bind))
        follow_jit(self.attributes)
        follow_backward(self.attributes)
        raise_failures(self.attributes)
        enclose_modules(self.attributes, self._places)
        follow_scans(self.attributes)
        self.attributes.on_restore(leave)
        self.attributes.on_restore(ORIGINALS.clear)
        follow()

    def switched(self) -> None:
        """Trace on this thread for the tools that are in force now."""
        follow()

    def _bind(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def bind(primitive: core.Primitive, *args: Any, **params: Any) -> Any:
            activation = interceptor.active()
            if activation is None:
                return original(primitive, *args, **params)
            caller = caller_of_bind(sys._getframe(1))
            program = evaluated(caller)
            if program is not None and holds_routines(program):  # its ops were the tools' as it was traced
                note(INSERTION)
                note(TAP)
                with unseen():
                    return original(primitive, *args, **params)
            if primitive.name in PROGRAMS and not is_tangent(args) and was_traced_apart(caller, params):
                run_anew = traced_anew(primitive.name, params)
                if run_anew is not None:
                    return run_anew(*args)
                activation.state.report(f"inside of {primitive.name}", APART)
            if primitive.name == "shard_map" and not is_tangent(args):
                if isinstance(core.trace_ctx.trace, pe.DynamicJaxprTrace):
                    return original(primitive, *args, **params)  # it traces what it maps as it is bound
                return run_mapped(partial(original, primitive), args, params)
            if primitive.name in PROGRAMS or primitive.ref_primitive or is_tangent(args):
                with unseen():
                    if calls_in_condition(primitive.name, params):
                        return run_loop(*args, **params)
                    return original(primitive, *args, **params)
            if is_by_rule(primitive.name, args, params):
                return self._call_custom(original, primitive, *args, **params)
            name = primitive.name if primitive.name not in CUSTOM else rule_of(primitive.name, params)
            detour = self._detours.get((primitive, name))
            if detour is None:
                detour = self._detours[primitive, name] = self._detour(original, primitive, name)
            run = partial(_carried, detour, params)
            if is_within_jit() or primitive.name in CUSTOM or not wants_backward():
                made = run(args)
            else:
                made = _run_twice(original, primitive, args, params, run)
            if name in CONVERSIONS:
                follow_conversion(args[0], made, places_among(interceptor.subjects()))
            return made

        return bind

    def _detour(self, original: Callable[..., Any], primitive: core.Primitive, name: str) -> Detour:
        target: Any = partial(_call, original, primitive)
        flags = IMPLEMENTATION
        if name in CUSTOM:  # it runs functions of the user, which are traced for the tools
            target, flags = partial(self._call_custom, original, primitive), IMPLEMENTATION | TRANSPARENT
        site = self.site(target, Operation(name), name, flags)
        self._primitives[site] = primitive
        return Detour(site)

    def _call_custom(
        self, original: Callable[..., Any], primitive: core.Primitive, *args: Any, **params: Any
    ) -> Any:
        if primitive.name == "custom_vjp_call":
            run = self._call_forward_rule
            note(TAP)
        else:
            ops = f"ops of the rule of {custom_name(params)}"
            run = partial(_call_tangent_rule, ops)
            note(ops)
        with under(key_of(State.current())):
            return original(primitive, *args, **with_rule(primitive.name, params, run))

    def _call_forward_rule(self, rule: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a rule for the tools, in which its ops are the user's, also where JAX's own are suspended."""
        with under(key_of(State.current())):
            return self._rules.invoke((rule, args))

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call of a primitive."""
        return PrimitiveCall(site, self._primitives[site], args, kwargs)

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Outputs as a list; those of a primitive with several results are one."""
        if isinstance(outputs, (list, tuple)):
            return list(outputs), list
        return [outputs], lambda values: values[0]

    def run_later(
        self, action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], autodiff: bool,
        shapes: Hashable,
    ) -> list[Any] | None:  # fmt: skip
        """Put a routine in Python into the program that is traced; None where it is called now."""
        staged = is_staged()
        if action.differentiable or autodiff:
            note(INSERTION)
            if staged:
                guard(action, facts)
            return None
        if not staged:
            return None
        note(INSERTION)
        if action.traceable and not action.takes_run:
            reads = reads_of(action)
            pure = not reads.guards and not reads.written
            if not is_within_jit() or (pure and not isinstance(action.func, MethodType)):
                return None
            variant = followed(action)
            if variant is None and pure:
                return None
            if variant is not None:
                with suppress(jax.errors.ConcretizationTypeError), variant.tracing(action) as lifted:
                    return run_routine(lifted, action, values, facts, run, False, shapes=shapes)
        return run_later(action, values, facts, run, shapes)

    def note_replacement(self, action: Action, facts: OpFacts) -> None:
        """Trace the program anew when what a replacement in it reads changes."""
        note(INSERTION)
        guard(action, facts)

    def shown(self, values: list[Any]) -> list[Any]:
        """Values without what derivatives are computed by: arrays, or the program's own symbols."""
        own = ORIGINALS.of
        return [list(map(own, one)) if isinstance(one, list) else own(one) for one in values]

    def tracing(self) -> Made:
        """Context whose op is tapped."""
        return Made(self)

    def begin(self, made: Made, inputs: Sequence[Any]) -> None:
        """Tap the op's inputs."""
        assert isinstance(inputs, list)
        made.tap_inputs(inputs)

    def attach_trace(self, trace: Trace, made: Made, values: list[Any]) -> None:
        """Leave the trace with the taps."""
        made.attach(trace)

    def variable_of(self, value: Any) -> Any:
        """The array that a model holds, or the argument of the function that is traced."""
        return variable_of(value, places_among(interceptor.subjects()))

    def path_of(self, subjects: Sequence[Any]) -> Callable[[Any], str | None]:
        """Paths of weights in the outermost module, or in the arguments of a function."""
        return attrgetter("path")

    def scope_name(self, subjects: Sequence[Any]) -> str:
        """Path of the calling module."""
        return path(places_among(subjects))


def _call_rule(rule: Callable[..., Any], args: Sequence[Any]) -> Any:
    return rule(*args)


def _call_tangent_rule(ops: str, rule: Callable[..., Any], args: Sequence[Any]) -> Any:
    if interceptor.active() is None:  # the function was traced before its derivative is taken
        report(ops, IN_ONE)
    return rule(*args)


def _carried(detour: Detour, params: dict[str, Any], args: Sequence[Any]) -> Any:
    with under():
        return carried(detour, args, params)


def _run_twice(
    original: Callable[..., Any], primitive: core.Primitive, args: Sequence[Any], params: dict[str, Any],
    run: Callable[[Sequence[Any]], Any],
) -> Any:  # fmt: skip
    """Run an op as JAX has it and, by `run`, for the tools."""
    several = primitive.multiple_results

    def bare() -> list[Any]:
        with unseen():
            results = original(primitive, *args, **params)
        return list(results) if several else [results]

    results = run_twice(args, bare, lambda values: list(run(values)) if several else [run(values)], True)
    return results if several else results[0]


def _call(original: Callable[..., Any], primitive: core.Primitive, *args: Any, **params: Any) -> Any:
    with interceptor.Suspension():
        return original(primitive, *args, **params)
