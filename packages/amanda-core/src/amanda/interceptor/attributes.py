"""Attributes that a driver replaces while scopes are open, and paths of modules whose calls it encloses."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from amanda.interceptor import Enclosure, Site, codes
from amanda.interceptor.imports import when_imported
from amanda.interceptor.interrupts import undo
from amanda.interceptor.opid import BOUNDARY, digest

_MISSING = object()


class _ReplacedAttribute(NamedTuple):
    """An attribute that was set: its value before, and the value that the holder has stored for ours."""

    holder: Any
    name: str
    before: Any
    stored: Any


class Patches:
    """Changes that a driver makes to a framework while scopes are open, which `restore` undoes.

    They are attributes that are set, native stubs of sites, and other changes with a step that undoes each.
    """

    def __init__(self) -> None:
        self._replaced_attributes: list[_ReplacedAttribute] = []
        self._undo_steps: list[Callable[[], object]] = []
        self._placed_sites: list[Iterable[Site]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until `restore`.

        Does nothing if the program has wrapped a stand-in of an earlier scope there: that one serves again.

        Args:
            holder: Module or class.
            name: Name of the attribute.
            value: Stand-in for the attribute's value.
        """
        if self.wraps_earlier_stand_in(holder, name):
            return
        # Not `getattr`: an inherited attribute is deleted at the end, not set.
        before = vars(holder).get(name, _MISSING)
        # Recorded first, since an interrupt may come between setting and recording.
        self._replaced_attributes.append(_ReplacedAttribute(holder, name, before, value))
        with _sequence_slot_preserved(holder, name):
            setattr(holder, name, value)
        # A class may store another object than the one that was set.
        self._replaced_attributes[-1] = _ReplacedAttribute(holder, name, before, vars(holder).get(name))

    def replace(
        self, stand_ins: Mapping[Any, Any] | Iterable[tuple[Any, Any]], holders: Iterable[Any]
    ) -> None:
        """Set the stand-in of a target wherever a module or class has the target as an attribute.

        Args:
            stand_ins: Stand-ins by target, or pairs, for targets that are equal and not identical.
            holders: Modules and classes whose attributes are compared with the targets.
        """
        pairs = stand_ins.items() if isinstance(stand_ins, Mapping) else stand_ins
        stand_in_by_id = {id(target): stand_in for target, stand_in in pairs}
        for holder in holders:
            # All names, since programs import a target by any: `torch.add` is in three modules.
            for name in dir(holder):
                value = inspect.getattr_static(holder, name, None)
                if type(value).__name__ in ("staticmethod", "instancemethod"):  # the latter of pybind11
                    value = value.__func__
                if id(value) in stand_in_by_id:
                    self.set(holder, name, stand_in_by_id[id(value)])

    def place_stubs(self, sites: Iterable[Site]) -> None:
        """Place the native stubs of sites until `restore`.

        Args:
            sites: Sites, the same at each iteration.
        """
        # Recorded first, since an interrupt may come between placing and recording.
        self._placed_sites.append(sites)
        for site in sites:
            site.place()

    def track_module_calls(
        self,
        kind: type,
        place: Callable[[Any, Any], tuple[int, bool]] | None = None,
        through: Sequence[str] = ("__call__",),
    ) -> None:
        """Make each call of an object a region of the program: the ops in the call belong to the object.

        `restore` ends this, except that the code of the methods stays marked as a BOUNDARY.

        Args:
            kind: Class with a `__call__` of its own, written in Python.
            place: `path` of the `Enclosure`, for objects that are told apart by where they lie; None to tell
                them apart as objects.
            through: Names of the methods by which such a call reaches code of the user.

        Raises:
            TypeError: For a class without such a `__call__`, or without one of the methods in Python.
        """
        for name in through:
            code = getattr(getattr(kind, name, None), "__code__", None)
            if code is None or "__call__" not in vars(kind):
                raise TypeError(f"{kind.__name__} cannot be enclosed: it has no {name} of its own in Python")
            for region_code in (code, *_codes_of_inner_functions(code)):
                # Walks of call sites end here, so that an op does not depend on who calls the module.
                codes.add_code(region_code, BOUNDARY)
        call = vars(kind)["__call__"]
        self.set(kind, "__call__", Enclosure(call) if place is None else Enclosure(call, place))

    def reroute(self, function: types.FunctionType, stand_in_of: Callable[[Any], Callable[..., Any]]) -> None:
        """Lead the calls of a Python function to a stand-in until `restore`, wherever the program has it.

        The function gets code that calls the stand-in; as an object it stays what closures and tables hold.

        Args:
            function: Function whose calls are led to the stand-in.
            stand_in_of: Returns the stand-in, for a function with the original code.
        """
        code = function.__code__
        original = types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        calling_code, stand_in = _calling_code(code.co_freevars), stand_in_of(original)
        constants = tuple(
            stand_in if constant == _STAND_IN else constant for constant in calling_code.co_consts
        )
        # Recorded first, since an interrupt may come between setting and recording.
        self.on_restore(functools.partial(setattr, function, "__code__", code))
        function.__code__ = calling_code.replace(co_consts=constants)

    def on_new_subclass(self, base: Any, change: Callable[[type], object]) -> None:
        """Call `change` with each subclass, at any depth, that a program makes of a class until `restore`.

        Args:
            base: Class that programs derive from.
            change: Called with each subclass.
        """
        hook: Any = vars(base).get("__init_subclass__")

        def init_subclass(kind: Any, /, **kwargs: Any) -> None:
            """Call the hook of the class, or the next one of its bases; then `change`."""
            if hook is None:
                # The stand-in is not a method of a class, so it names the class after which the search for a
                # method begins.
                super(base, kind).__init_subclass__(**kwargs)
            else:
                hook.__get__(None, kind)(**kwargs)
            change(kind)

        self.set(base, "__init_subclass__", classmethod(init_subclass))

    def when_imported(self, module: str, callback: Callable[[], object]) -> None:
        """Call `callback` once the module has been imported, unless `restore` comes first.

        Args:
            module: Name of the module.
            callback: Called on the thread that imports the module; now if the module is imported already.
        """
        self._undo_steps.append(when_imported(module, callback))

    def on_restore(self, step: Callable[[], object]) -> None:
        """Call `step` as `restore` begins; a step that raises is called again by the next `restore`."""
        self._undo_steps.append(step)

    @staticmethod
    def wraps_earlier_stand_in(holder: Any, name: str) -> bool:
        """Return True if the attribute is a function of the program around a stand-in of an earlier scope.

        Args:
            holder: Module or class.
            name: Name of the attribute.
        """
        return _wraps(vars(holder).get(name), _outlived_stand_ins.get((holder, name)))

    def restore(self) -> None:
        """Undo every step, then every `set`, last first; then remove the stubs of sites.

        An attribute that the program has set meanwhile stays as the program has it.  If it is a function
        around our stand-in, the next `set` leaves it there.
        """
        undo(self._undo_steps)
        # Each entry is dropped after its attribute is back: an interrupt in between only repeats a step.
        while self._replaced_attributes:
            holder, name, before, stored = self._replaced_attributes[-1]
            is_ours = vars(holder).get(name, _MISSING) is stored
            if is_ours:
                with _sequence_slot_preserved(holder, name):
                    if before is not _MISSING:
                        setattr(holder, name, before)
                    else:
                        delattr(holder, name)
            # Else the program has set another value, or `set` was interrupted.  A function of the program may
            # go on calling ours: then the next scope reuses that.
            elif type(stored) is types.FunctionType:
                _outlived_stand_ins[holder, name] = stored
            self._replaced_attributes.pop()
        while self._placed_sites:
            for site in self._placed_sites[-1]:
                site.remove()
            self._placed_sites.pop()


_outlived_stand_ins: weakref.WeakValueDictionary[tuple[Any, str], Any] = weakref.WeakValueDictionary()
"""Stand-ins in whose place the program has put something, by holder and name."""


_STAND_IN = 0.5
"""Constant of code in whose place a stand-in is put."""


@functools.cache
def _calling_code(free_variables: Sequence[str]) -> types.CodeType:
    """Return code that calls the constant `_STAND_IN`, for a function with these free variables."""
    # Compiled and not only renamed: a reader of a frame's variables trusts that code has made its cells.
    names = ", ".join(free_variables)
    source = f"""
def enclosing({names}):
    def call(*call_args, **call_kwargs):
        {f"nonlocal {names}" if names else ""}
        return ({_STAND_IN}).__call__(*call_args, **call_kwargs)
"""
    (code_of_enclosing,) = _codes_of_inner_functions(compile(source, __file__, "exec"))
    (code_of_call,) = _codes_of_inner_functions(code_of_enclosing)
    return code_of_call


def _codes_of_inner_functions(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _wraps(function: Any, stand_in: Any) -> bool:
    """Return True if a function has a stand-in in its closure, or in that of a function that it wraps.

    False where `stand_in` is None.
    """
    if stand_in is None:
        return False
    referents = [function]
    for _ in range(_WRAPPING_DEPTH):
        referents = [referent for referent in gc.get_referents(*referents) if isinstance(referent, _WRAPPING)]
        if any(referent is stand_in for referent in referents):
            return True
    return False


_WRAPPING_DEPTH = 8  # of references: a wrapper in a closure takes three, over its tuple and its cell
_WRAPPING = (types.FunctionType, types.MethodType, types.CellType, functools.partial, dict, tuple)
_SEQUENCE_SLOTS = {"__getitem__": 3, "__setitem__": 5}
"""Indices in PySequenceMethods that CPython fills when a class gets such an attribute, and never empties."""
_HEAP_TYPE = 1 << 9  # a class whose attributes can be set


@contextmanager
def _sequence_slot_preserved(holder: Any, name: str) -> Iterator[None]:
    """Return a context in which an attribute is set without making a class, or its subclasses, sequences.

    CPython fills a slot of the class when it gets `__getitem__` or `__setitem__`; the slot is put back.
    """
    slot_index = _SEQUENCE_SLOTS.get(name)
    is_python_class = isinstance(holder, type) and holder.__flags__ & _HEAP_TYPE
    if slot_index is None or not is_python_class or sys.implementation.name != "cpython":
        yield
        return
    # PySequence_Check asks this slot, and torch, numpy and json treat a sequence otherwise.
    function_address = _sequence_slot(holder, slot_index).value
    try:
        yield
    finally:
        for inheriting_class in _inheriting_classes(holder, name):
            _sequence_slot(inheriting_class, slot_index).value = function_address


_TP_AS_SEQUENCE = 11
"""Index of the pointer after the head of a type object, in all versions that we run on."""


def _sequence_slot(holder: type, index: int) -> Any:
    """Return the pointer at an index of a class's PySequenceMethods; its `value` may be set."""
    import ctypes

    pointer_size = ctypes.sizeof(ctypes.c_void_p)
    address_after_head = id(holder) + object.__basicsize__
    tp_as_sequence = ctypes.c_void_p.from_address(address_after_head + _TP_AS_SEQUENCE * pointer_size)
    return ctypes.c_void_p.from_address((tp_as_sequence.value or 0) + index * pointer_size)


def _inheriting_classes(holder: type, name: str) -> Iterator[type]:
    """Yield a class, and its subclasses that inherit the attribute from it."""
    yield holder
    subclasses: list[type] = type.__subclasses__(holder)
    for subclass in subclasses:
        if name not in vars(subclass):
            yield from _inheriting_classes(subclass, name)


def path_of_call(subjects: Sequence[Any], path_within: Callable[[Any, Any], str]) -> str:
    """Return the path from the first of the modules whose calls are under way to the last: "layer1.conv".

    Args:
        subjects: Modules whose calls are under way, the outermost first.
        path_within: Returns the path of the second module in the first.
    """
    parts = [path_within(outer, inner) for outer, inner in pairwise(subjects) if inner is not outer]
    return ".".join(part for part in parts if part)


def type_as_path(module: Any) -> str:
    """Return the path of a module that its caller does not hold: its type, "(Dense)"."""
    return f"({type(module).__name__})"


def place_by_path(path_within: Callable[[Any, Any], str]) -> Callable[[Any, Any], tuple[int, bool]]:
    """Return the `place` of `Patches.track_module_calls` for modules that are told apart by their paths.

    Args:
        path_within: Returns the path of the second module in the first, or `type_as_path` of the second.
    """

    def place(outer: Any, inner: Any) -> tuple[int, bool]:
        """Return the hash of a module's path in its caller, and True if the caller holds the module."""
        path = path_within(outer, inner)
        is_type_as_path = path.startswith("(")
        return digest(path), not is_type_as_path

    return place
