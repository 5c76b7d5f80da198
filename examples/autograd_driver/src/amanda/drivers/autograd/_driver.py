"""The driver of autograd: its primitives, brought to Amanda as operators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import numpy as np

import autograd.numpy as anp
from amanda.backend import Call, EagerDriver, OpFacts, SelfTestProgram, State, Trace, recomputable
from amanda.drivers.autograd import _boxes
from amanda.drivers.autograd._backward import Region, followed
from amanda.drivers.autograd._boxes import each, plain
from amanda.drivers.autograd._slots import Module, Slot, leaves, mark_parameters, slot_of
from amanda.errors import DriverError
from amanda.interceptor import Detour, Site, Suspension, active
from autograd import core, differential_operators, tracer
from autograd.tracer import getval

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


_signature = functools.lru_cache(4096)(inspect.signature)


class PrimitiveCall(Call):
    """A call bound to the primitive's signature; trailing defaults are left out."""

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self._site, self._call = site.op, site, (args, kwargs)
        self.slots = tuple(value for value in args if type(value) is Slot)
        self._signature = _signature(site.op.fun)
        named = {name: value for name, value in kwargs.items() if name != "called_by_autograd_dispatcher"}
        arguments = self._signature.bind(*args[len(self.slots) :], **named).arguments
        # `concatenate_args(axis, *args)` is `concatenate(arrays, axis)` to programs.
        self.names = list(arguments)[:: -1 if site.op.__name__ == "concatenate_args" else 1]
        self.inputs = [arguments[name] for name in self.names]
        self.target_positions = [self.names.index("out")] if arguments.get("out") is not None else []
        self.written_positions = [0] if site.op.__name__ in _WRITTEN else self.target_positions

    def unreturned_positions(self, outputs: Any) -> Sequence[int]:
        return [i for i in self.written_positions if i not in self.target_positions]

    def invoke(self, inputs: list[Any]) -> Any:
        if inputs is self.inputs:
            return self._site.invoke(*self._call)
        args, kwargs = list(self.slots), dict(self._call[1])
        values = dict(zip(self.names, inputs, strict=True))
        for name, parameter in self._signature.parameters.items():
            # autograd differentiates positional arguments alone: each stays in its form.
            if parameter.kind is parameter.VAR_POSITIONAL:
                args += values.get(name, ())
            elif name in kwargs:
                kwargs[name] = values[name]
            elif name in values and parameter.kind is not parameter.VAR_KEYWORD:
                args.append(values[name])
        return self._site.invoke(tuple(args), kwargs)

    def attributes(self) -> dict[str, Any]:
        named = zip(self.names, self.inputs, strict=True)
        return {name: value for name, value in named if each(value, id) is None}


def _stub(f_raw: Any, f_wrapped: Any, is_ufunc: Any) -> Any:
    """Return a function whose code fits into a primitive: it has the same variables around it."""

    def stub(*args: Any, **kwargs: Any) -> Any:
        nonlocal f_raw, is_ufunc
        return f_wrapped.stand_in(*args, **kwargs)

    return stub.__code__


def _code_within(function: Any, name: str) -> Any:
    """Return the code of a function that is defined within another; None without one."""
    codes = (code for code in function.__code__.co_consts if isinstance(code, CodeType))
    return next((code for code in codes if code.co_name == name), None)


_STUB = _stub(None, None, None)
_DECORATOR_STUB = (lambda f_raw: primitive.stand_in(f_raw)).__code__  # type: ignore[name-defined] # noqa: F821
"""Code of a stand-in of the decorator `primitive`, in whose module the name is defined."""
_PRIMITIVE = _code_within(tracer.primitive, "f_wrapped")
_CHECKPOINT = _code_within(differential_operators.checkpoint, "wrapped_grad")
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
        while (code := getattr(function, "__code__", None)) and code.co_name == "unary_f":
            # `grad` and others make functions of one argument.
            function = function.__closure__[code.co_freevars.index("fun")].cell_contents
        # Arguments of a checkpoint are activations.
        if all(function is not run for run in _recomputing):
            mark_parameters(x, function)
        return trace(start_node, fun, x)

    return traced


class AutogradDriver(EagerDriver):
    """autograd, whose primitives are the operators."""

    api = 1
    framework = "autograd"
    modes = ("eager",)
    newest_tested = "1.9"
    identity_types = (Slot,)

    def attach(self) -> None:
        """Give every primitive other code; follow new primitives, traces and backward passes.

        Programs import primitives by name, and tables of derivatives have them as keys. So a primitive stays
        the object that it is, and its code is changed.
        """
        if _PRIMITIVE is None or _PRIMITIVE.co_freevars != _STUB.co_freevars:
            raise DriverError("this version of autograd has primitives whose code the driver does not know")
        self._rerouted: list[tuple[Any, CodeType]] = []
        self.patches.on_restore(self._restore)
        for primitive in {*tracer.trace_primitives_map.values(), *core.primitive_vjps}:
            self._intercept(primitive)
        self._reroute(tracer.primitive, _DECORATOR_STUB, self._followed)
        passes = {core.backward_pass: followed(self, core.backward_pass), core.trace: _noted(core.trace)}
        self.patches.replace(passes, [core])
        self.patches.track_module_calls(Module)

    def _followed(self, decorator: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function: (
            decorator(function) if function in _recomputing else self._intercept(decorator(function))
        )

    def _reroute(self, function: Any, stub: CodeType, stand_in_of: Callable[[Any], Any]) -> None:
        """Give a function the code of a stub, which calls the stand-in, until `_restore`.

        stand_in_of: returns the stand-in, for a function with the original code.
        """
        original = FunctionType(function.__code__, tracer.__dict__, None, None, function.__closure__)
        original.__kwdefaults__ = function.__kwdefaults__
        function.stand_in = stand_in_of(original)
        self._rerouted.append((function, function.__code__))
        function.__code__ = stub

    def _restore(self) -> None:
        """Give functions their own code."""
        while self._rerouted:
            function, code = self._rerouted[-1]
            function.__code__ = code
            vars(function).pop("stand_in", None)
            self._rerouted.pop()

    def _intercept(self, primitive: Any) -> Any:
        """Bring the calls of a primitive to the tools; return the primitive."""
        if getattr(primitive, "__code__", None) is _PRIMITIVE:
            self._reroute(primitive, _STUB, functools.partial(functools.partial, self._first_call, primitive))
        return primitive

    def _first_call(self, primitive: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Choose what is called instead of a primitive, now that it has its derivative; call it."""
        if _is_checkpoint(primitive):
            primitive.stand_in = _checkpointed(primitive.fun, original)
        else:
            primitive.stand_in = self._operator(primitive, original) if _is_operator(primitive) else original
        return primitive.stand_in(*args, **kwargs)

    def _operator(self, primitive: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a primitive as an operator, with its parameters before the arguments.

        Parameters enter the id of an op. They lie in boxes, where the interceptor does not see them.
        """

        def invoke(*args: Any, **kwargs: Any) -> Any:
            # For each trace that has boxes among the arguments the primitive calls itself without them.
            with Suspension():
                return original(*(value for value in args if type(value) is not Slot), **kwargs)

        key = f"{getattr(primitive.fun, '__module__', '')}.{primitive.__name__}"
        detour = Detour(self.site(invoke, primitive, key))

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            slots = [slot for value in args if (slot := slot_of(value))] if active() else ()
            return detour(*slots, *args, **kwargs)

        return stand_in

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return PrimitiveCall(site, args, kwargs)

    def identity_values(self, call: Call) -> list[Any]:
        return list(call.slots) if isinstance(call, PrimitiveCall) else []

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
        pairs = pairwise(subjects)
        paths = (path for outer, inner in pairs for path, part in leaves(outer, Module) if part is inner)
        facts.scope = ".".join(path for path in paths if path)
        facts.variable_of, facts.path_of = slot_of, lambda slot: slot.path or None
        return facts

    def is_tensor(self, value: Any) -> bool:
        return _boxes.is_tensor(value)

    def unwrap_for_analysis(self, values: list[Any]) -> list[Any]:
        return [plain(value) for value in values]

    def without_autodiff(self) -> AbstractContextManager[Any]:
        # Autodiff records what is in boxes, and isolated routines get arrays.
        return nullcontext()

    def call_without_autodiff(self, func: Any, values: Sequence[Any], kwargs: Any) -> Any:
        """Call a routine with arrays; return the values themselves for arrays that it hands back."""
        arrays = [plain(value) for value in values]
        boxes = {id(array): value for array, value in zip(arrays, values, strict=True)}
        boxes |= {id(getval(x)): x for value in values if type(value) in (list, tuple) for x in value}
        result = func(*arrays, **kwargs)
        if type(result) in (list, tuple) and id(result) not in boxes:
            return type(result)(boxes.get(id(value), value) for value in result)
        return boxes.get(id(result), result)

    def version(self, value: Any) -> Any:
        # NumPy counts no writes.
        return each(value, lambda array: hash(array.tobytes()))

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        return tuple(each(value, lambda array: (np.result_type(array), np.ndim(array))) for value in inputs)

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(each(value, np.shape) for value in inputs)

    def straight_through(self, original: Any, value: Any) -> Any:
        with Suspension():
            return _boxes.straight_through(original, value)

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        np.copyto(target, self.straight_through(target, plain(value)))

    def detach_value(self, value: Any) -> Any:
        return plain(value)

    def differentiable_copy(self, value: Any) -> Any:
        return self.straight_through(value, plain(value)) if self.is_tensor(value) else value

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        needs = tuple(len(list(_boxes.nodes(value))) for value in inputs)
        return needs if any(needs) else None

    def capture_backward_ops(self) -> Region:
        return Region()

    def note_op_inputs(self, capture: Region, inputs: Sequence[Any]) -> None:
        capture.begin(inputs)

    def attach_trace(self, trace: Trace, nodes: Region, values: list[Any]) -> None:
        nodes.mark(self, trace, values)

    def self_test_program(self) -> SelfTestProgram:
        return SelfTestProgram(_run_tanh, "tanh", "tanh")


def _run_tanh() -> list[float]:
    """Return tanh of two numbers, and its gradient."""
    vjp, value = core.make_vjp(anp.tanh, np.array([0.5, -0.25]))
    return [*value.tolist(), *vjp(np.ones(2)).tolist()]
