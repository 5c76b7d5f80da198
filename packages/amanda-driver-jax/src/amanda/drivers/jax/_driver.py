"""The driver of JAX: `Primitive.bind` is intercepted, and each bind of an op becomes a call for the core."""

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, Call, EagerDriver, Operation, OpFacts, SelfTestProgram, State, Trace
from amanda.interceptor import IMPLEMENTATION, TRANSPARENT, Detour, Site
from amanda.plan import run_routine
from jax._src import core
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive

from ._autodiff import TappedExecution, instrument_backward, run_and_carry_symbols
from ._calls import (
    CUSTOM_RULE_PRIMITIVES,
    PrimitiveCall,
    custom_name,
    custom_op_name,
    is_called_by_own_rule,
    params_with_rule_caller,
)
from ._contexts import cache_key_of, set_cache_key, unset_cache_key, with_cache_key, without_tools
from ._evaluation import (
    TRACED_APART,
    caller_of_bind,
    calls_in_condition,
    evaluated_program,
    holds_routines,
    retracing_function,
    run_loop,
    run_mapped,
    was_traced_apart,
)
from ._host import insert_callback, raise_failures_of_programs
from ._jit import VALUES_AND_TANGENTS, instrument_jit
from ._modules import (
    CONVERSIONS,
    ModulePlaces,
    enclose_modules,
    module_path,
    places_among,
    record_conversion,
    variable_of,
)
from ._primitives import ORIGINALS
from ._requirements import NEWEST_TESTED, PRIVATE_NAMES
from ._stacks import record_scans
from ._tensors import Arrays
from ._traces import INSERTION, TAP, add_note, is_on_tangents, is_staged, is_within_jit
from ._twins import run_twice, wants_backward
from ._variants import guard_reads, reads_of, report_in_program, variant_for

PROGRAMS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "call", "core_closed_call", "scan", "while", "cond",
     "checkpoint", "remat", "remat2", "remat_opt", "compute_on", "custom_vjp_call_jaxpr", "custom_lin",
     "run_state", "eval_jaxpr", "linear_call", "custom_linear_solve", "shard_map", "custom_transpose_call",
     "custom_vmap_call", "xla_pmap", "amanda_tap", "amanda_straight", "amanda_call", "amanda_gate",
     "amanda_join", "name", "optimization_barrier"}
)  # fmt: skip
"""Primitives whose ops have been traced before they are bound, or that compute nothing: no ops themselves."""
_TRACING_CODE = (
    "api.py", "api_util.py", "core.py", "custom_derivatives.py", "interpreters/", "linear_util.py",
    "pjit.py", "profiler.py", "traceback_util.py", "util.py",
)  # fmt: skip
"""Code of JAX that traces or runs functions; left out of places, so that an op has one place either way."""


class JaxDriver(Arrays, EagerDriver):
    """The driver of JAX: ops are binds of primitives, eager or while a function is traced."""

    api = 2
    framework = "jax"
    packages = ("jaxlib", "flax", "equinox", "optax")
    modes = ("eager",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES
    has_symbolic_tensors = True

    def __init__(self) -> None:
        # By the op's name, too: functions of JAX with rules, such as `jax.nn.relu`, share a primitive.
        self._detours: dict[tuple[Primitive, str], Detour] = {}
        self._primitives: dict[Site, Primitive] = {}
        self._places = ModulePlaces()
        # A site for rules alone: what a rule binds are ops at the place of the rule's call.
        self._rule_site = self.site(_call_rule, Operation("custom_vjp_call"), "forward rules", TRANSPARENT)

    def register_framework(self) -> None:
        """Mark the code of JAX, and leave code that calls functions out of the places of ops."""
        super().register_framework()
        self.skip_code(*(f"{Path(core.__file__).parent}/{path}" for path in _TRACING_CODE))

    def attach(self) -> None:
        """Intercept binds of primitives, trace functions anew for tools, and instrument backward passes."""
        # Every op of JAX, eager or traced, comes through `bind`.
        self.patches.set(Primitive, "bind", self._intercept_binds(Primitive.bind))
        instrument_jit(self.patches)
        instrument_backward(self.patches)
        raise_failures_of_programs(self.patches)
        enclose_modules(self.patches, self._places)
        record_scans(self.patches)
        self.patches.on_restore(unset_cache_key)
        # The arrays that are held for the next ops of a scope would only take memory after it.
        self.patches.on_restore(ORIGINALS.clear)
        set_cache_key()

    def self_test_program(self) -> SelfTestProgram:
        """Return a program of one op, a product, and its transpose."""
        return SelfTestProgram(_run_self_test, "mul", "mul")

    def on_state_change(self) -> None:
        """Trace on this thread for the tools that are in force now."""
        set_cache_key()

    def _intercept_binds(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Primitive.bind`: ops go to the tools; parts of ops, programs and tangents go to JAX."""

        def bind(primitive: Primitive, *args: Any, **params: Any) -> Any:
            """Bind an op through its detour, all else by JAX; trace programs anew whose ops were not seen.

            A program that cannot be traced anew is reported. Mapped functions run under jit; loops whose
            condition calls Python run in another form.
            """
            activation = interceptor.active()
            if activation is None:
                return original(primitive, *args, **params)
            # JAX evaluates a program op by op in a frame of its own; tools saw the ops when they were traced.
            caller = caller_of_bind(sys._getframe(1))
            program = evaluated_program(caller)
            if program is not None and holds_routines(program):
                add_note(INSERTION)
                add_note(TAP)
                with without_tools():
                    return original(primitive, *args, **params)
            # A program that was traced without the tools is traced anew, or reported.
            if primitive.name in PROGRAMS and not is_on_tangents(args) and was_traced_apart(caller, params):
                run_retraced = retracing_function(primitive.name, params)
                if run_retraced is not None:
                    return run_retraced(*args)
                activation.state.report(f"inside of {primitive.name}", TRACED_APART)
            if primitive.name == "shard_map" and not is_on_tangents(args):
                if isinstance(core.trace_ctx.trace, pe.DynamicJaxprTrace):
                    return original(primitive, *args, **params)  # it traces what it maps as it is bound
                return run_mapped(partial(original, primitive), args, params)
            # Ops of programs were seen as they were traced; writes to references, and tangents, are not ops.
            if primitive.name in PROGRAMS or primitive.ref_primitive or is_on_tangents(args):
                with without_tools():
                    if calls_in_condition(primitive.name, params):
                        return run_loop(*args, **params)
                    return original(primitive, *args, **params)
            if is_called_by_own_rule(primitive.name, args, params):
                return self._bind_with_rules(original, primitive, *args, **params)
            return self._bind_op(original, primitive, args, params)

        return bind

    def _bind_op(
        self, original: Callable[..., Any], primitive: Primitive, args: Sequence[Any],
        params: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Bind an op through its detour, which is made at the first bind; return its outputs.

        An eager op runs twice, also as JAX runs it, if a tool has backward routines. Records the slot of a
        weight for its conversion.
        """
        op_name, has_rules = primitive.name, primitive.name in CUSTOM_RULE_PRIMITIVES
        if has_rules:
            op_name = custom_op_name(primitive.name, params)
        detour = self._detours.get((primitive, op_name))
        if detour is None:
            detour = self._detours[primitive, op_name] = self._make_detour(original, primitive, op_name)
        run_for_tools = partial(_bind_for_tools, detour, params)
        # Eager gradients are JAX's to the bit only if JAX's op runs too, beside the tapped one.
        if is_within_jit() or has_rules or not wants_backward():
            outputs = run_for_tools(args)
        else:
            outputs = _bind_twice(original, primitive, args, params, run_for_tools)
        if op_name in CONVERSIONS:
            record_conversion(args[0], outputs, places_among(interceptor.subjects()))
        return outputs

    def _make_detour(self, original: Callable[..., Any], primitive: Primitive, op_name: str) -> Detour:
        """Return a detour through which binds of a primitive become calls of a new site, noted for `bind`."""
        target: Any = partial(_bind_suspended, original, primitive)
        flags = IMPLEMENTATION
        if op_name in CUSTOM_RULE_PRIMITIVES:  # a function of the user, which calls ops of the program
            target, flags = partial(self._bind_with_rules, original, primitive), IMPLEMENTATION | TRANSPARENT
        site = self.site(target, Operation(op_name), op_name, flags)
        self._primitives[site] = primitive
        return Detour(site)

    def _bind_with_rules(
        self, original: Callable[..., Any], primitive: Primitive, *args: Any, **params: Any
    ) -> Any:
        """Bind a function with rules for its derivatives, whose rule runs for the tools; note that."""
        if primitive.name == "custom_vjp_call":
            note, call_rule = TAP, self._call_forward_rule
        else:
            note = f"ops of the rule of {custom_name(params)}"
            call_rule = partial(_call_tangent_rule, note)
        add_note(note)
        # `_bind_for_tools` has set the key without tools, as for other ops; this one's functions are traced.
        with with_cache_key(cache_key_of(State.current())):
            return original(primitive, *args, **params_with_rule_caller(primitive.name, params, call_rule))

    def _call_forward_rule(self, rule: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a rule of the user's for the tools, also while ops of JAX are suspended."""
        with with_cache_key(cache_key_of(State.current())):
            return self._rule_site.invoke((rule, args))

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call of a primitive."""
        return PrimitiveCall(site, self._primitives[site], args, kwargs)

    def trace_routine(
        self, action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], autodiff: bool,
        shapes: Hashable,
    ) -> list[Any] | None:  # fmt: skip
        """Insert a routine into the traced program; return the values after it.

        None if the routine is to be called now: with arrays, or with symbols, so that its ops are traced.
        A routine in autodiff is, and guards the program by what it reads. A traceable one that needs values
        becomes a callback, as do all that are not traceable.
        """
        has_symbols = is_staged()
        if action.differentiable or autodiff:
            add_note(INSERTION)
            if has_symbols:
                guard_reads(action, facts)
            return None
        if not has_symbols:
            return None
        add_note(INSERTION)
        if action.traceable and not action.takes_run:
            reads = reads_of(action)
            is_pure = not reads.has_guards and not reads.names_written  # no change of a value matters
            if not is_within_jit() or (is_pure and not isinstance(action.func, MethodType)):
                return None
            variant = variant_for(action)
            if variant is None and is_pure:
                return None
            if variant is not None:
                # A routine that needs values, as `if x > 0` does, cannot be traced: it runs as Python below.
                with suppress(jax.errors.ConcretizationTypeError), variant.tracing(action) as lifted:
                    return run_routine(lifted, action, values, facts, run, autodiff=False, shapes=shapes)
        return insert_callback(action, values, facts, run, shapes)

    def note_replacement(self, action: Action, facts: OpFacts) -> None:
        """Guard the program by the values that a replacement in it reads."""
        add_note(INSERTION)
        guard_reads(action, facts)

    def unwrap_for_analysis(self, values: list[Any]) -> list[Any]:
        """Return the values without the tracers of derivatives: arrays, or symbols of the program."""
        original_of = ORIGINALS.of
        return [
            list(map(original_of, value)) if isinstance(value, list) else original_of(value)
            for value in values
        ]

    def capture_backward_ops(self) -> TappedExecution:
        """Return a context in which the op is tapped."""
        return TappedExecution(self)

    def note_op_inputs(self, execution: TappedExecution, inputs: Sequence[Any]) -> None:
        """Tap the op's inputs."""
        assert isinstance(inputs, list)
        execution.tap_inputs(inputs)

    def attach_trace(self, trace: Trace, execution: TappedExecution, values: list[Any]) -> None:
        """Attach the trace to the tapped execution."""
        execution.attach(trace)

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op, with the calling module and the slots of weights that it reads."""
        facts = super().describe(call, subjects)
        facts.scope = module_path(places_among(subjects))
        facts.variable_of, facts.path_of = _weight_slot_of, attrgetter("path")
        return facts


def _weight_slot_of(value: Any) -> Any:
    """Return the slot of a weight: an array of a model, or an argument of the traced function."""
    return variable_of(value, places_among(interceptor.subjects()))


def _call_rule(rule: Callable[..., Any], args: Sequence[Any]) -> Any:
    return rule(*args)


def _call_tangent_rule(ops: str, rule: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a rule for tangents; report its ops if the function was traced before its derivative is taken."""
    if interceptor.active() is None:
        report_in_program(ops, VALUES_AND_TANGENTS)
    return rule(*args)


def _bind_for_tools(detour: Detour, params: dict[str, Any], args: Sequence[Any]) -> Any:
    """Bind an op through its detour; what JAX traces for the op itself is not for the tools."""
    with with_cache_key():
        return run_and_carry_symbols(detour, args, params)


def _bind_twice(
    original: Callable[..., Any], primitive: Primitive, args: Sequence[Any], params: dict[str, Any],
    run_for_tools: Callable[[Sequence[Any]], Any],
) -> Any:  # fmt: skip
    """Bind an op as JAX does and, by `run_for_tools`, through its detour; return one of the two outputs."""
    has_list = primitive.multiple_results

    def run_untapped() -> list[Any]:
        with without_tools():
            outputs = original(primitive, *args, **params)
        return list(outputs) if has_list else [outputs]

    def run_tapped(inputs: Sequence[Any]) -> list[Any]:
        outputs = run_for_tools(inputs)
        return list(outputs) if has_list else [outputs]

    outputs = run_twice(args, run_untapped, run_tapped, tools_see_backward=True)
    return outputs if has_list else outputs[0]


def _bind_suspended(original: Callable[..., Any], primitive: Primitive, *args: Any, **params: Any) -> Any:
    """Bind a primitive while nothing is intercepted, since binds inside it are parts of the op."""
    with interceptor.Suspension():
        return original(primitive, *args, **params)


def _run_self_test() -> list[float]:
    """Compute a product and its gradient, eagerly even while a function is traced; return their numbers."""
    with jax.ensure_compile_time_eval():
        x, factors, ones = (np.array(values, np.float32) for values in ([0.5, -0.25], [3, 3], [1, 1]))
        product, transpose = jax.vjp(lambda x: jax.lax.mul(x, factors), x)
        (gradient,) = transpose(ones)
        return [*product.tolist(), *gradient.tolist()]
