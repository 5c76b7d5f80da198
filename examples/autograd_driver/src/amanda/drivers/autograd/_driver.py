"""The driver of autograd: its primitives, brought to Amanda as operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import numpy as np

import autograd.numpy as anp
from amanda.backend import (
    BoxedTensors,
    Call,
    EagerDriver,
    OpFacts,
    SelfTestProgram,
    SignatureCall,
    State,
    Trace,
    TreeSlot,
    code_within,
    path_among,
    path_of_call,
    recomputable,
    with_slots,
    without_slots,
)
from amanda.drivers.autograd import _boxes
from amanda.drivers.autograd._backward import followed, mark
from amanda.drivers.autograd._boxes import plain
from amanda.drivers.autograd._slots import Module, leaves, mark_parameters, slot_of
from amanda.interceptor import Detour, Site, Suspension
from autograd import core, differential_operators, tracer, wrap_util
from autograd.numpy.numpy_boxes import ArrayBox

_WRITTEN = {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
"""NumPy's functions that write into their first argument and return None."""
_QUERIES = {"isrealobj", "isscalar", "may_share_memory", "shares_memory", "size"}
"""NumPy's functions that read no elements."""


def _is_operator(primitive: Any) -> bool:
    """Return True for a primitive that is given tensors, and no container of them."""
    function = primitive.fun
    home = str(getattr(function, "__module__", None))
    if home.partition(".")[0] in ("numpy", "None"):
        # NumPy's other functions make arrays, draw random numbers, or set options.
        is_numeric = isinstance(function, np.ufunc) or type(function).__name__ == "_ArrayFunctionDispatcher"
        return is_numeric and primitive.__name__ not in _QUERIES
    return home not in ("autograd.core", "autograd.builtins", _boxes.__name__)


class PrimitiveCall(SignatureCall):
    """A call of a primitive."""

    keywords = ("called_by_autograd_dispatcher",)

    def __init__(self, driver: EagerDriver, site: Site, args: Any, kwargs: Any) -> None:
        super().__init__(driver, site, args, kwargs, site.op.fun)
        if site.op.__name__ == "concatenate_args":
            # `concatenate_args(axis, *args)` is `concatenate(arrays, axis)` to programs.
            self.names, self.inputs = self.names[::-1], self.inputs[::-1]
        if site.op.__name__ in _WRITTEN:
            self.written_positions = [0]


_PRIMITIVE = code_within(tracer.primitive, "f_wrapped")
_CHECKPOINT = code_within(differential_operators.checkpoint, "wrapped_grad")
_UNARY = code_within(wrap_util.unary_to_nary, "unary_f")
"""Code of the functions of one argument that `grad` and others make of those of the program."""
_recomputing: set[Callable[..., Any]] = set()
"""Functions of checkpoints that run."""


def _is_checkpoint(primitive: Any) -> bool:
    """Return True for a primitive that `checkpoint` has made of a function of the program."""
    closure = getattr(core.primitive_vjps.get(primitive), "__closure__", None) or ()
    return any(getattr(cell.cell_contents, "__code__", None) is _CHECKPOINT for cell in closure)


def _checkpointed(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint whose second run of a function, for gradients, is its first run again."""

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        run = recomputable(function)
        if run is function:
            return original(*args, **kwargs)
        _recomputing.add(run)
        again = differential_operators.checkpoint(run)
        try:
            return again(*args, **kwargs)
        finally:
            # Each call has a primitive of its own, which autograd's tables would keep.
            _recomputing.discard(run)
            del tracer.trace_primitives_map[run], core.primitive_vjps[again]

    return checkpoint


def _noted(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return `trace`, which runs what is differentiated, with the arrays of its argument as parameters."""

    @functools.wraps(trace)
    def traced(start_node: Any, fun: Any, x: Any) -> Any:
        function = fun
        while getattr(function, "__code__", None) is _UNARY:
            function = function.__closure__[_UNARY.co_freevars.index("fun")].cell_contents
        # Arguments of a checkpoint are activations.
        if all(function is not run for run in _recomputing):
            mark_parameters(x, function)
        return trace(start_node, fun, x)

    return traced


class AutogradDriver(BoxedTensors, EagerDriver):
    """autograd, whose primitives are the operators."""

    api = 2
    framework = "autograd"
    modes = ("eager",)
    newest_tested = "1.9"
    call_type = PrimitiveCall
    identity_types = (TreeSlot,)

    def attach(self) -> None:
        """Reroute every primitive; follow new primitives, traces and backward passes.

        Programs import primitives by name, and tables of derivatives have them as keys: each has to stay the
        object that it is.
        """
        for primitive in {*tracer.trace_primitives_map.values(), *core.primitive_vjps}:
            self._intercept(primitive)
        self.patches.reroute(tracer.primitive, self._followed)
        passes = {core.backward_pass: followed(self, core.backward_pass), core.trace: _noted(core.trace)}
        self.patches.replace(passes, [core])
        self.patches.track_module_calls(Module)

    def _followed(self, decorator: Callable[..., Any]) -> Callable[..., Any]:
        """Return the decorator of primitives, so that calls of new ones come to the tools, too."""
        return lambda function: (
            decorator(function) if function in _recomputing else self._intercept(decorator(function))
        )

    def _intercept(self, primitive: Any) -> Any:
        """Bring the calls of a primitive to the tools; return the primitive."""
        if getattr(primitive, "__code__", None) is _PRIMITIVE:
            self.patches.reroute(primitive, functools.partial(self._stand_in, primitive))
        return primitive

    def _stand_in(self, primitive: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called instead of a primitive: chosen by its derivative, which comes after it."""

        @functools.cache
        def choice() -> Callable[..., Any]:
            if _is_checkpoint(primitive):
                return _checkpointed(primitive.fun, original)
            return self._operator(primitive, original) if _is_operator(primitive) else original

        return lambda *args, **kwargs: choice()(*args, **kwargs)

    def _operator(self, primitive: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a primitive as an operator, whose id its parameters enter."""

        def invoke(*args: Any, **kwargs: Any) -> Any:
            # For each trace that has boxes among the arguments the primitive calls itself without them.
            with Suspension():
                return original(*args, **kwargs)

        key = f"{getattr(primitive.fun, '__module__', '')}.{primitive.__name__}"
        # Parameters lie in boxes, where the interceptor does not see them.
        return with_slots(Detour(self.site(without_slots(invoke), primitive, key)), slot_of)

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        with Suspension():
            return _boxes.elements(outputs)

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op; report a primitive of the program that calls others."""
        facts = super().describe(call, subjects)
        function = call.op.fun
        names = function.__code__.co_names if isinstance(function, FunctionType) else ()
        if any(function.__globals__.get(name) is anp for name in names):
            State.current().report(call.op.__name__, "the primitives that it calls are part of it")
        facts.scope = path_of_call(subjects, lambda outer, inner: path_among(leaves(outer, Module), inner))
        facts.variable_of, facts.path_of = slot_of, lambda slot: slot.path or None
        return facts

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, (np.ndarray, np.generic, ArrayBox))

    def unboxed(self, value: Any) -> Any:
        return plain(value)

    def version(self, value: Any) -> Any:
        # NumPy counts no writes.
        return self.read_each(value, lambda array: hash(plain(array).tobytes()))

    def straight_through(self, original: Any, value: Any) -> Any:
        with Suspension():
            return _boxes.straight_through(original, value)

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        np.copyto(target, self.straight_through(target, plain(value)))

    def differentiable_copy(self, value: Any) -> Any:
        return self.straight_through(value, plain(value)) if self.is_tensor(value) else value

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        needs = tuple(len(list(_boxes.nodes(value))) for value in inputs)
        return needs if any(needs) else None

    def capture_backward_ops(self) -> nullcontext[list[Any]]:
        return nullcontext([])

    def note_op_inputs(self, nodes: Any, inputs: Sequence[Any]) -> None:
        nodes.enter_result[:] = [list(_boxes.nodes(value)) for value in inputs]

    def attach_trace(self, trace: Trace, nodes: list[Any], values: list[Any]) -> None:
        mark(trace, nodes, values)

    def self_test_program(self) -> SelfTestProgram:
        return SelfTestProgram(_run_tanh, "tanh", "tanh")


def _run_tanh() -> list[float]:
    """Return tanh of two numbers, and its gradient."""
    vjp, value = core.make_vjp(anp.tanh, np.array([0.5, -0.25]))
    return [*value.tolist(), *vjp(np.ones(2)).tolist()]
