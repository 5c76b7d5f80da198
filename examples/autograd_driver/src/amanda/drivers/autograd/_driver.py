"""The driver of autograd: its primitives, brought to Amanda as operators."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from itertools import pairwise
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd import core, differential_operators, tracer

from amanda.backend import Call, EagerDriver, Exercise, OpFacts, State, Trace, recomputed
from amanda.drivers.autograd import _boxes
from amanda.drivers.autograd._backward import Region, followed, is_running
from amanda.drivers.autograd._boxes import each, plain
from amanda.drivers.autograd._slots import SLOTS, Module, Slot
from amanda.errors import DriverError, MutationError
from amanda.interceptor import Detour, Site, Suspension, active

_WRITTEN = {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
"""NumPy's functions that write into their first argument and return None."""
_QUERIES = {"iscomplexobj", "isrealobj", "may_share_memory", "ndim", "result_type", "shape", "shares_memory", "size"}
"""NumPy's functions that read no elements."""


class _Argument(NamedTuple):
    """An input of a call: its name, its value, and where the call has it: index, keyword, or rest."""

    name: str
    value: Any
    place: int | str | slice


def _position(argument: tuple[Any, Any]) -> int:
    """Return the position of an argument: its index, or that of the first in the rest."""
    index: int = argument[0].start if isinstance(argument[0], slice) else argument[0]
    return index


class PrimitiveCall(Call):
    """A call bound to the primitive's signature; trailing defaults are left out."""

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._site, self._call = site, (args, kwargs)
        self.slots = tuple(value for value in args if type(value) is Slot)
        self._dispatched = {name: kwargs[name] for name in kwargs if name == "called_by_autograd_dispatcher"}
        arguments = list(_arguments(site.op.fun, args[len(self.slots) :], kwargs))
        if site.op.fun.__module__ == "autograd.numpy.numpy_wrapper":
            # `concatenate_args(axis, *arrays)` is `concatenate(arrays, axis)` to programs.
            arguments.sort(key=lambda argument: not isinstance(argument.place, slice))
        self.op = site.op
        self.names = [argument.name for argument in arguments]
        self.inputs = [argument.value for argument in arguments]
        self._places = [argument.place for argument in arguments]
        name = site.op.__name__
        self.targets = [i for i, name in enumerate(self.names) if name == "out" and self.inputs[i] is not None]
        self.mutable = [0] if name in _WRITTEN else self.targets

    def unreturned(self, outputs: Any) -> Sequence[int]:
        """Return the positions of what the primitive has written and not returned."""
        return [i for i in self.mutable if i not in self.targets]

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the primitive."""
        if inputs is self.inputs:
            return self._site.invoke(*self._call)
        args: list[Any] = []
        kwargs = dict(self._dispatched)
        placed = list(zip(self._places, inputs, strict=True))
        kwargs.update((place, value) for place, value in placed if isinstance(place, str))
        for place, value in sorted((pair for pair in placed if not isinstance(pair[0], str)), key=_position):
            args += value if isinstance(place, slice) else [value]
        return self._site.invoke((*self.slots, *args), kwargs)

    def attributes(self) -> dict[str, Any]:
        """Return the arguments that are not tensors, by name."""
        named = zip(self.names, self.inputs, strict=True)
        return {name: value for name, value in named if each(value, lambda tensor: True) is None}


@functools.lru_cache(4096)
def _parameters(function: Any) -> list[tuple[str, bool]]:
    """Return the names of a function's parameters, and whether each takes the rest of the positions."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [("args", True)]
    return [(p.name, p.kind is p.VAR_POSITIONAL) for p in parameters if p.kind is not p.VAR_KEYWORD]


def _arguments(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[_Argument]:
    """Yield the arguments of a call in the order of the function's signature."""
    rest = {name: value for name, value in kwargs.items() if name != "called_by_autograd_dispatcher"}
    for index, (name, is_rest) in enumerate(_parameters(function)):
        if is_rest:
            yield _Argument(name, list(args[index:]), slice(index, None))
        elif index < len(args):
            yield _Argument(name, args[index], index)
        elif name in rest:
            yield _Argument(name, rest.pop(name), name)
    for name, value in rest.items():
        yield _Argument(name, value, name)


def _stub(f_raw: Any, f_wrapped: Any, is_ufunc: Any) -> Callable[..., Any]:
    """Return the function whose code takes the place of a primitive's, with the same variables around."""

    def stub(*args: Any, **kwargs: Any) -> Any:
        # Code fits a function only if it has as many variables around it as the function's own.
        nonlocal f_raw, is_ufunc
        return f_wrapped._stand_in(*args, **kwargs)

    return stub


_STUB = _stub(None, None, None).__code__
_KEY = "_stand_in"


def _code_within(function: Any, name: str) -> CodeType:
    """Return the code of a function that is defined within another; raise DriverError without one."""
    for constant in function.__code__.co_consts:
        if isinstance(constant, CodeType) and constant.co_name == name:
            return constant
    raise DriverError(f"autograd {_version()} has no {function.__name__}.{name}")


def _version() -> str:
    """Return the version of autograd that is installed."""
    return metadata.version("autograd")


def _home(function: Any) -> str:
    """Return the package of a function; "None" if unknown."""
    return str(getattr(function, "__module__", None)).partition(".")[0]


class _Opened(threading.local):
    """The primitive of the program whose function runs on a thread: what it calls is part of one op."""

    name = ""

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the program that a primitive runs."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self.name = self.name, function.__name__
            try:
                return function(*args, **kwargs)
            finally:
                self.name = outer

        return run

    def report(self, primitive: Any) -> None:
        """Report a primitive that is called within one of the program."""
        if self.name and not is_running():
            State.current().report(f"{primitive.__name__} in {self.name}", "a primitive runs as one op")


_opened = _Opened()


def _is_operator(primitive: Any) -> bool:
    """Return True for a primitive that reads or writes elements of tensors that it is given."""
    function, name = primitive.fun, primitive.__name__
    home = _home(function)
    if home == "autograd" and function.__module__ in ("autograd.core", "autograd.builtins"):
        return False  # the framework's own: sums of gradients, and elements of lists and dicts
    if home in ("numpy", "None") or name in _QUERIES:
        # NumPy's other functions make arrays, draw random numbers, or set options.
        is_numeric = isinstance(function, np.ufunc) or type(function).__name__ == "_ArrayFunctionDispatcher"
        return is_numeric and name not in _QUERIES
    return home != "amanda"


def _differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program's function in one that `grad` and others have made of it, of one argument."""
    code = getattr(function, "__code__", None)
    while code is not None and code.co_name == "unary_f" and "fun" in code.co_freevars:
        function = function.__closure__[code.co_freevars.index("fun")].cell_contents  # type: ignore[attr-defined]
        code = getattr(function, "__code__", None)
    return function


_recomputed: set[Callable[..., Any]] = set()
"""Functions of checkpoints that run; their arguments are activations."""


def _noting(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Return `trace`, which runs what is differentiated, with the arrays of its argument as parameters."""

    @functools.wraps(trace)
    def traced(start_node: Any, fun: Callable[..., Any], x: Any) -> Any:
        function = _differentiated(fun)
        if function not in _recomputed:
            SLOTS.add(x, function)
        return trace(start_node, fun, x)

    return traced


class AutogradDriver(EagerDriver):
    """autograd, whose primitives are the operators."""

    api = 1
    framework = "autograd"
    modes = ("eager",)
    newest_tested = "1.9"
    identity_types = (Slot,)

    def __init__(self) -> None:
        self._original = _code_within(tracer.primitive, "f_wrapped")
        self._checkpointed = _code_within(differential_operators.checkpoint, "wrapped_grad")
        if self._original.co_freevars != _STUB.co_freevars:
            raise DriverError(f"primitives of autograd {_version()} have variables {self._original.co_freevars}")

    def introduce(self) -> None:
        """Mark the code that is not the user's."""
        super().introduce()
        self.skip(_STUB)

    # ---- attaching ----

    def attach(self) -> None:
        """Give every primitive other code; follow new primitives, traces and backward passes.

        Programs import primitives by name and keep them in tables of derivatives, by identity. So the functions
        stay what they are, wherever they are, and their code is changed.
        """
        self._changed: list[Any] = []
        self.attributes.on_restore(self._give_back)
        for primitive in {*tracer.trace_primitives_map.values(), *core.primitive_vjps}:
            self._intercept(primitive)
        functions = {
            core.backward_pass: followed(self, core.backward_pass),
            core.trace: _noting(core.trace),
            tracer.primitive: self._following(tracer.primitive),
        }
        names = ("autograd", "autograd.")
        modules = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(names[1])]
        self.attributes.replace(functions, [*modules])
        self.attributes.enclose(Module)

    def _intercept(self, primitive: Any) -> None:
        """Bring the calls of a primitive to the tools."""
        if getattr(primitive, "__code__", None) is not self._original:
            return
        function, *others = primitive.__closure__
        if isinstance(primitive.fun, FunctionType) and _home(primitive.fun) not in ("autograd", "numpy", "scipy"):
            function = CellType(_opened.within(primitive.fun))
        closure = (function, *others)
        original = FunctionType(self._original, primitive.__globals__, primitive.__name__, None, closure)
        original.__kwdefaults__ = primitive.__kwdefaults__

        def first_call(*args: Any, **kwargs: Any) -> Any:
            # A checkpoint gets its gradient after `primitive` has made it.
            primitive._stand_in = self._stand_in(primitive, original)
            return primitive._stand_in(*args, **kwargs)

        primitive._stand_in = first_call
        self._changed.append(primitive)
        primitive.__code__ = _STUB

    def _stand_in(self, primitive: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that is called instead of a primitive."""
        if self._is_checkpoint(primitive):
            return original if primitive.fun in _recomputed else _recomputing(primitive.fun, original)
        return self._operator(primitive, original) if _is_operator(primitive) else original

    def _give_back(self) -> None:
        """Give primitives their own code."""
        while self._changed:
            primitive = self._changed[-1]
            primitive.__code__ = self._original
            vars(primitive).pop(_KEY, None)
            self._changed.pop()

    def _operator(self, primitive: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a primitive as an operator, with the parameters among its arguments."""

        def invoke(*args: Any, **kwargs: Any) -> Any:
            # For each trace that has boxes among the arguments the primitive calls itself without them.
            with Suspension():
                return original(*(value for value in args if type(value) is not Slot), **kwargs)

        function = primitive.fun
        qualname = getattr(function, "__qualname__", primitive.__name__)
        detour = Detour(self.site(invoke, primitive, f"{getattr(function, '__module__', None)}.{qualname}"))

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if active() is None:
                _opened.report(primitive)
                return detour(*args, **kwargs)
            # Parameters enter the id of an op. They lie in boxes, where the interceptor does not see them.
            return detour(*SLOTS.of(args), *args, **kwargs)

        return stand_in

    def _following(self, primitive: Callable[..., Any]) -> Callable[..., Any]:
        """Return the decorator `primitive`, whose primitives are intercepted at once."""

        @functools.wraps(primitive)
        def decorator(function: Any) -> Any:
            made = primitive(function)
            self._intercept(made)
            return made

        return decorator

    def _is_checkpoint(self, primitive: Any) -> bool:
        """Return True for a primitive that `checkpoint` has made of a function of the program."""
        closure = getattr(core.primitive_vjps.get(primitive), "__closure__", None) or ()
        return any(getattr(cell.cell_contents, "__code__", None) is self._checkpointed for cell in closure)

    # ---- calls ----

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its inputs in the order of the primitive's signature."""
        return PrimitiveCall(site, args, kwargs)

    def identities(self, call: Call) -> list[Any]:
        """Return the parameters that tell the call's op from others at its place."""
        return list(call.slots) if isinstance(call, PrimitiveCall) else []

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """A primitive's result as a list, and how to put it back into its form."""
        with Suspension():
            return _boxes.elements(outputs)

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Facts of a call's op; `scope`: path of the last module within the first."""
        facts = super().describe(call, subjects)
        paths = (path for outer, inner in pairwise(subjects) for path, part in outer.modules() if part is inner)
        facts.scope = ".".join(path for path in paths if path)
        facts.variable_of, facts.path_of = SLOTS.get, lambda slot: slot.path or None
        return facts

    def unwrapped(self, values: list[Any]) -> list[Any]:
        """Return values without boxes."""
        return [plain(value) for value in values]

    # ---- tensors ----

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor."""
        return _boxes.is_tensor(value)

    def isolated(self) -> AbstractContextManager[Any]:
        """Context in which autodiff records nothing: it records what is in boxes, and routines get none."""
        return nullcontext()

    def call_isolated(self, func: Any, values: Sequence[Any], kwargs: Any) -> Any:
        """Call a routine with arrays; return the values themselves for arrays that it hands back."""
        arrays = [_guarded(plain(value)) for value in values]
        return _handed_back(_call_guarded(func, arrays, kwargs), arrays, values)

    def call_observer(self, func: Any, values: Sequence[Any], kwargs: Any) -> Any:
        """Call a routine that changes no value, with arrays."""
        return _call_guarded(func, [_guarded(plain(value)) for value in values], kwargs)

    def version(self, value: Any) -> Any:
        """Return None: NumPy counts no writes."""
        return None

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype, rank and device of each tensor."""
        return tuple(each(value, lambda x: (np.result_type(plain(x)), np.ndim(plain(x)))) for value in inputs)

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each input: a tuple for a tensor, a tuple of shapes for a list, else None."""
        return tuple(each(value, lambda x: np.shape(plain(x))) for value in inputs)

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value`, cast to the type of `original`, with the identity as the way back of its gradient."""
        with Suspension():
            return _boxes.straight_through(original, value)

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Copy a value into the user's array, of which autodiff knows nothing."""
        np.copyto(target, _boxes.fitting(target, value))

    def storable(self, value: Any) -> Any:
        """A value for later, without the graph that it hangs in."""
        return plain(value)

    def copied(self, value: Any) -> Any:
        """A copy of a tensor that autodiff knows."""
        return self.straight_through(value, plain(value)) if self.is_tensor(value) else value

    def same(self, first: Any, second: Any) -> bool:
        """Return True if two tensors have the same class, dtype, shape and bits."""
        a, b = plain(first), plain(second)
        is_alike = type(first) is type(second) and type(a) is type(b) and np.result_type(a) == np.result_type(b)
        return is_alike and np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()

    # ---- the backward pass ----

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors need a gradient; None where autodiff records nothing."""
        needs = tuple(sum(1 for _ in _boxes.nodes(value)) for value in inputs)
        return needs if any(needs) else None

    def tracing(self) -> Region:
        """Context that finds the backward ops of a primitive between its inputs and its results."""
        return Region()

    def begin(self, nodes: Region, inputs: Sequence[Any]) -> None:
        """Note the inputs of a primitive."""
        nodes.begin(inputs)

    def attach_trace(self, trace: Trace, nodes: Region, values: list[Any]) -> None:
        """Leave the trace with those backward ops, for the backward pass to find."""
        nodes.mark(self, trace, values)

    def exercise(self) -> Exercise:
        """Return a program of one op and its backward op."""
        return Exercise(_run_tanh, "tanh", "tanh")


def _guarded(value: Any) -> Any:
    """Return a view of an array, or views of those in a list, into which nothing can be written."""
    if type(value) in (list, tuple):
        return type(value)(map(_guarded, value))
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def _call_guarded(func: Any, arrays: Sequence[Any], kwargs: Any) -> Any:
    """Call a routine with arrays into which nothing can be written."""
    try:
        return func(*arrays, **kwargs)
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise MutationError(f"{func} wrote into an array that it was given; return a new value") from error


def _handed_back(result: Any, arrays: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return a routine's result with the values whose arrays it hands back, also within lists."""
    for array, value in zip(arrays, values, strict=True):
        if result is array:
            return value
        if type(array) in (list, tuple) and any(result is part for part in array):
            return next(whole for part, whole in zip(array, value, strict=True) if result is part)
    if type(result) in (list, tuple):
        return type(result)(_handed_back(part, arrays, values) for part in result)
    return result


def _recomputing(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint whose second run of a function is its first run again.

    autograd computes the gradients of a checkpoint by a second run.
    """

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        run = recomputed(function)
        if run is function:
            return original(*args, **kwargs)
        again = differential_operators.checkpoint(run)
        _recomputed.add(run)
        try:
            return again(*args, **kwargs)
        finally:
            _recomputed.discard(run)
            # Each call has a primitive of its own, in tables that would keep it.
            tracer.trace_primitives_map.pop(run, None)
            core.primitive_vjps.pop(again, None)

    return checkpoint


def _run_tanh() -> list[float]:
    """Return tanh of two numbers, and its gradient."""
    vjp, value = core.make_vjp(anp.tanh, np.array([0.5, -0.25]))
    return [*value.tolist(), *vjp(np.ones(2)).tolist()]
