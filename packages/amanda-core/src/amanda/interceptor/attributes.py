"""Replace attributes of modules and classes for a while."""

import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from amanda.interceptor import Enclosure, codes
from amanda.interceptor.imports import when_imported
from amanda.interceptor.interrupts import undo
from amanda.interceptor.opid import BOUNDARY

_MISSING = object()


class Attributes:
    """Attributes of a framework that are set for a while, and other changes that are undone with them."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []
        self._steps: list[Callable[[], object]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until `restore`.

        Where the program has wrapped an earlier stand-in, in a scope that is closed, that one serves again.
        """
        if self.serves_again(holder, name):
            return
        # Not `getattr`: an inherited attribute is deleted at the end, not set.
        before = vars(holder).get(name, _MISSING)
        self._before.append((holder, name, before, value))
        with _as_much_a_sequence(holder, name):
            setattr(holder, name, value)
        self._before[-1] = (holder, name, before, vars(holder).get(name))  # as the holder keeps it

    def replace(self, stand_ins: Mapping[Any, Any], holders: Iterable[Any]) -> None:
        """Set the stand-in of a target wherever a module or class has the target as an attribute.

        stand_ins: by target.  holders: the modules and classes.
        """
        by_target = {id(target): stand_in for target, stand_in in stand_ins.items()}
        for holder in holders:
            # Programs import a target by any name: `torch.add` is in three modules, and stays one target.
            for name in dir(holder):
                value = inspect.getattr_static(holder, name, None)
                if type(value).__name__ in ("staticmethod", "instancemethod"):  # the latter of pybind11
                    value = value.__func__
                if id(value) in by_target:
                    self.set(holder, name, by_target[id(value)])

    def enclose(
        self,
        kind: type,
        place: Callable[[Any, Any], tuple[int, bool]] | None = None,
        through: Sequence[str] = ("__call__",),
    ) -> None:
        """Make each call of an object a region of the program: the ops in the call belong to the object.

        place: the second argument of an `Enclosure`, for objects that are told apart by where they lie.
        through: names of the methods by which such a call reaches code of the user.
        """
        for name in through:
            code = getattr(kind, name).__code__
            for region_code in (
                code,
                *(inner for inner in code.co_consts if isinstance(inner, types.CodeType)),
            ):
                # Walks of call sites end here, so that an op does not depend on who calls the module.
                codes.add_code(region_code, BOUNDARY)
        call = vars(kind)["__call__"]
        self.set(kind, "__call__", Enclosure(call) if place is None else Enclosure(call, place))

    def when_imported(self, module: str, callback: Callable[[], object]) -> None:
        """Call `callback` once the module has been imported, unless `restore` comes first."""
        self._steps.append(when_imported(module, callback))

    def on_restore(self, step: Callable[[], object]) -> None:
        """Call `step` as `restore` begins; a step that raises is called again by the next `restore`."""
        self._steps.append(step)

    @staticmethod
    def serves_again(holder: Any, name: str) -> bool:
        """Return whether the program has wrapped a stand-in that was there in an earlier scope."""
        return _wraps(_outlived.get((holder, name)), vars(holder).get(name))

    def restore(self) -> None:
        """Undo every step, then every `set`, last first.

        An attribute that the program has set meanwhile is the program's.
        """
        undo(self._steps)
        # Each entry is dropped after its attribute is back: an interrupt in between only repeats a step.
        while self._before:
            holder, name, value, ours = self._before[-1]
            if vars(holder).get(name, _MISSING) is not ours:  # or `set` was interrupted
                # The program wrapped our function and will go on calling it: the next scope reuses that one.
                if type(ours) is types.FunctionType:
                    _outlived[holder, name] = ours
                self._before.pop()
                continue
            with _as_much_a_sequence(holder, name):
                if value is not _MISSING:
                    setattr(holder, name, value)
                else:
                    delattr(holder, name)
            self._before.pop()


_outlived: weakref.WeakValueDictionary[tuple[Any, str], Any] = weakref.WeakValueDictionary()
"""Stand-ins in whose place the program has put something, by holder and name."""


def _wraps(stand_in: Any, value: Any) -> bool:
    """Return whether a function has a stand-in in its closure, or in what it wraps."""
    referents = [value]
    for _ in range(_DEPTH if stand_in is not None else 0):
        referents = [referent for referent in gc.get_referents(*referents) if isinstance(referent, _WRAPPING)]
        if any(referent is stand_in for referent in referents):
            return True
    return False


_DEPTH = 8
_WRAPPING = (types.FunctionType, types.MethodType, types.CellType, functools.partial, dict, tuple)
_SEQUENCE_SLOTS = {"__getitem__": 3, "__setitem__": 5}
"""Places in PySequenceMethods that CPython fills when a class gets such an attribute, and never empties."""
_HEAP_TYPE = 1 << 9  # a class whose attributes can be set


@contextmanager
def _as_much_a_sequence(holder: Any, name: str) -> Iterator[None]:
    """Leave a class, and its heirs, as much a sequence as it is: native code asks the slot."""
    place = _SEQUENCE_SLOTS.get(name)
    made_in_python = isinstance(holder, type) and holder.__flags__ & _HEAP_TYPE
    if place is None or not made_in_python or sys.implementation.name != "cpython":
        yield
        return
    # PySequence_Check asks this slot, and torch, numpy and json treat a sequence otherwise.
    function = _sequence_slot(holder, place).value
    try:
        yield
    finally:
        for heir in _heirs(holder, name):
            _sequence_slot(heir, place).value = function


def _sequence_slot(holder: type, place: int) -> Any:
    import ctypes

    word = ctypes.sizeof(ctypes.c_void_p)
    # tp_as_sequence is the eleventh pointer after the head of a type object, in all versions we run on.
    methods = ctypes.c_void_p.from_address(id(holder) + object.__basicsize__ + 11 * word).value or 0
    return ctypes.c_void_p.from_address(methods + place * word)


def _heirs(holder: type, name: str) -> Iterator[type]:
    """A class and those below it that have no attribute of that name of their own."""
    yield holder
    heirs: list[type] = type.__subclasses__(holder)
    for heir in heirs:
        if name not in vars(heir):
            yield from _heirs(heir, name)
