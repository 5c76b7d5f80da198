"""Variants of a function: its programs for a stack of tools, for each set of values that routines read.

Arrays that routines read are inputs of a program, and are read at each call.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, OpFacts, Reads, State
from amanda.graph import ReadPlace, ValueHistory
from jax._src import core, pjit
from jax._src.interpreters import partial_eval as pe
from jax.extend import source_info_util
from jax.extend.core import set_current_trace

from ._tensors import Arrays
from ._traces import ARRAYS, is_within_jit

_CONSTANT = (FunctionType, ModuleType, type)


class JaxReads(Reads):
    """Values that routines read; an array that is an input of a program may change, but not its type.

    inputs: keys of the places of such arrays.
    """

    opaque_packages: ClassVar[frozenset[str]] = frozenset({"amanda", "numpy", "jax", "jaxlib", "autoray"})

    def __init__(self) -> None:
        super().__init__()
        self.inputs: set[tuple[int, Any]] = set()
        self._copies: dict[tuple[int, Any], np.ndarray[Any, Any]] = {}

    def follow_routine(self, action: Action) -> None:
        """Record the values that an action's routine reads; copy NumPy's arrays, which may be written."""
        super().follow_routine(action)
        for place in self:
            if isinstance(place.value, np.ndarray) and place.key not in self._copies:
                self._copies[place.key] = place.value.copy()

    def are_unchanged(self) -> bool:
        """Return True if a program that was traced for these values is right for the present ones."""
        with interceptor.Suspension():
            return all(self._is_as_before(place) for place in self)

    def _is_as_before(self, place: ReadPlace) -> bool:
        """Return True if a place has the value that was read; for an input, an array of the same type.

        For an array of NumPy, equal numbers of the same element type.
        """
        value = place.read(place.holder, place.name)
        if place.key in self.inputs:
            return isinstance(value, ARRAYS) and jax.typeof(value) == jax.typeof(place.value)
        if place.key in self._copies:
            copy = self._copies[place.key]
            return isinstance(value, np.ndarray) and value.dtype == copy.dtype and np.array_equal(value, copy)
        return self.is_same(value, place.value)

    @property
    def has_guards(self) -> bool:
        """Return True if a call of the program has to check a value that is no function, module or class."""
        return any(not (isinstance(place.value, _CONSTANT) or callable(place.value)) for place in self)


def reads_of(action: Action) -> JaxReads:
    """Return the values that a routine reads now, and the names that it sets outside of itself."""
    reads = JaxReads()
    reads.follow_routine(action)
    reads.drop_changed_places(())  # looks at no value, only at names that the routine sets
    return reads


class Variant:
    """The programs of one function for one set of values that routines read.

    number: among the function's variants.  history: of the values.  trace: of the function, while traced.
    inputs: places that are read at each call, by the ids of constants that stand for them in the program.
    """

    def __init__(self, number: int, history: ValueHistory) -> None:
        self.number, self.history = number, history
        self.reads = JaxReads()
        self.trace: Any = None
        self.inputs: dict[int, ReadPlace] = {}
        self._constants: list[Any] = []  # kept alive, so that no other object gets their ids
        # With the arrays that each routine uses and that no name leads to.
        self._traced_routines: list[tuple[Action, list[Any]]] = []
        self._reports: dict[tuple[str, str], None] = {}

    @contextmanager
    def tracing(self, action: Action) -> Iterator["LiftedArrays"]:
        """Yield tensor operations with which a routine, run in this context, becomes part of the program.

        Records what the routine reads, and at the end the arrays that no name leads to.
        """
        lifted_arrays = LiftedArrays(self)
        with self.reads.record_tracing([action]):
            yield lifted_arrays
        self._traced_routines.append((action, lifted_arrays.held_arrays))

    def report(self, subject: str, reason: str) -> None:
        """Note a difference between the program and its routines, which is reported at each call."""
        self._reports[subject, reason] = None

    def report_entries(self) -> list[tuple[str, str]]:
        """Return the entries for the reports of scopes."""
        return [*self._reports, *self.reads.unfollowed_entries(self._traced_routines, "a program")]

    def lift(self, place: ReadPlace) -> Any:
        """Add an input to the traced program, for which a place is read at each call; return its symbol."""
        # Outside of the trace, so that the constant is an array, which a call can pass, and no symbol.
        with set_current_trace(core.eval_trace):
            constant = jax.numpy.array(place.value)  # a copy, whose `id` stands for this place alone
        self._constants.append(constant)
        self.inputs[id(constant)] = place
        self.reads.inputs.add(place.key)
        return self.trace.new_const(constant, source_info_util.current())


class LiftedArrays(Arrays):
    """Tensor operations for routines in a program; arrays that routines read become inputs of the program.

    held_arrays: arrays that routines use and that no name in their code leads to.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self.held_arrays: list[Any] = []

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Trace a routine, and insert its computation into the program."""
        return super().call_without_autodiff(
            partial(self._trace_routine, partial(func, **kwargs)), values, {}
        )

    def _trace_routine(self, func: Callable[..., Any], *values: Any) -> Any:
        """Trace a routine alone, then evaluate it in the program with its arrays as inputs."""
        # A trace of its own shows the arrays that the routine refers to: they are its constants.
        program, result_shapes = jax.make_jaxpr(func, return_shape=True)(*values)
        array_places = [place for place in self._variant.reads if isinstance(place.value, ARRAYS)]
        consts = [self._lift_constant(const, array_places) for const in program.consts]
        results = jax.core.eval_jaxpr(program.jaxpr, consts, *jax.tree_util.tree_leaves(values))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(result_shapes), results)

    def _lift_constant(self, const: Any, array_places: Sequence[ReadPlace]) -> Any:
        """Return the symbol of an array that one of the places has; another constant as it is.

        Such an array of JAX is added to `held_arrays`.
        """
        for place in array_places:
            if _is_same_array(const, place.value):
                return self._variant.lift(place)
        if isinstance(const, jax.Array):
            self.held_arrays.append(const)
        return const


def _is_same_array(const: Any, value: Any) -> bool:
    """Return True if a constant of a program is a value: JAX has its own objects for arrays of NumPy."""
    if const is value or not (isinstance(const, np.ndarray) and isinstance(value, np.ndarray)):
        return const is value
    return const.shape == value.shape and const.ctypes.data == value.ctypes.data


class FunctionVariants:
    """A user's function as JAX traces it for the tools of a stack, a variant for each set of values read.

    call: calls the function; JAX caches programs for the tools by it, not by the user's function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Create `call`, which refers to the function weakly, and notes the trace in the present variant."""
        reference = weakref.ref(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if (variant := _VARIANT.get()) is not None:
                variant.trace = core.trace_ctx.trace
            return reference()(*args, **kwargs)  # type: ignore[misc]

        del call.__wrapped__  # it would lead JAX to the user's function, and to its programs
        self.call = call
        self._history = ValueHistory(JaxReads)
        self._variants: list[Variant] = []

    @contextmanager
    def current_variant(self) -> Iterator[Variant]:
        """Yield the variant for the present values, with which JAX calls or traces the function.

        A new one if there is none. At the end the values that it reads are recorded in the history of all.
        """
        unchanged_variants = (variant for variant in self._variants if variant.reads.are_unchanged())
        variant = next(unchanged_variants, None)
        if variant is None:
            variant = Variant(len(self._variants), self._history)
            self._variants.append(variant)
        token = _VARIANT.set(variant)
        try:
            yield variant
        finally:
            _VARIANT.reset(token)
            self._history.record(variant.reads)


_VARIANT: ContextVar[Variant | None] = ContextVar("variant of the function that is traced", default=None)


def variant_for(action: Action) -> Variant | None:
    """Return the variant that is traced; None if there is none, or a routine has to run as Python.

    It has to if it sets attributes, or if what it reads changes often, which is reported.
    """
    variant = _VARIANT.get()
    # A routine that sets attributes of its tool must run at each execution, not once as it is traced.
    if variant is None or reads_of(action).names_written:
        return None
    volatile_name = variant.history.volatile_name(action)
    if volatile_name:
        why = f"what it reads changes often: {volatile_name}, so it runs as Python"
        variant.report(f"traceable {action}", why)
        return None
    return variant


def report_in_program(subject: str, reason: str, source: str = "") -> None:
    """Add an entry to the reports of each call of the program that is traced, or to the present report.

    source: for the present report alone.
    """
    variant = _VARIANT.get()
    if variant is None:
        State.current().report(subject, reason, source)
    else:
        variant.report(subject, reason)


def guard_reads(action: Action, facts: OpFacts) -> None:
    """Guard the traced program by the values that a routine in it reads, so that changes retrace it.

    Where that is not possible, report that changes have no effect. Outside of jit nothing is needed.
    """
    reads, variant = reads_of(action), _VARIANT.get()
    if not is_within_jit() or not (reads.has_guards or reads.names_written):
        return
    volatile_name = "" if variant is None else variant.history.volatile_name(action)
    if reads.names_written:
        why = f"it sets {', '.join(reads.names_written)}, as the function is traced"
    elif volatile_name:
        why = f"what it reads changes often: {volatile_name}"
    elif variant is None:
        why = "what it reads is not followed where a backward pass runs outside of jit"
    else:
        variant.reads.follow_routine(action)
        return
    reason = f"{why}; it stays as it was when the function was traced"
    report_in_program(f"{action} of {facts.name}", reason, facts.source)


class ProgramWithInputs(NamedTuple):
    """A program with inputs that are read at each call.

    params: of its jit.  places: for each constant, the place that is read, or None.
    """

    params: Any
    consts: Sequence[Any]
    places: Sequence[ReadPlace | None]

    def inputs(self) -> list[Any]:
        """Return the constants for a call: the present value of a place for each constant that has one."""
        return [
            constant if place is None else place.read(place.holder, place.name)
            for constant, place in zip(self.consts, self.places, strict=True)
        ]


def with_read_inputs(params: Any, inputs: Mapping[int, ReadPlace]) -> ProgramWithInputs | None:
    """Return a program whose constants are inputs, if any of them is read at each call; else None.

    params: JAX's for a jitted function; its `consts` are leading arguments already.
    inputs: places to be read, by the ids of constants.
    """
    consts, jaxpr = list(params.consts), params.params["jaxpr"]
    if any(id(constant) in inputs for constant in jaxpr.consts):
        # Constants within the program become leading arguments, which can be read anew at each call.
        jaxpr, inner_consts = pe.separate_consts(jaxpr)
        count = len(inner_consts)
        jit_params = dict(
            params.params, jaxpr=jaxpr,
            in_shardings=(pjit.UNSPECIFIED,) * count + params.params["in_shardings"],
            in_layouts=(None,) * count + params.params["in_layouts"],
            donated_invars=(False,) * count + params.params["donated_invars"],
        )  # fmt: skip
        consts = [*inner_consts, *consts]
        params = params._replace(params=jit_params, consts=consts)
    places = [inputs.get(id(constant)) for constant in consts]
    return ProgramWithInputs(params, consts, places) if any(places) else None
