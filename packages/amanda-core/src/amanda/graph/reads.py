"""Values that traceable routines read beside their arguments, so that graphs follow their changes."""

from __future__ import annotations

import dis
import enum
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from amanda import interceptor

if TYPE_CHECKING:
    from amanda.plan.action import Action

_CONTAINERS = (Mapping, list, tuple, Set, deque)
_FUNCTIONS = (FunctionType, MethodType, partial, property, staticmethod, classmethod, cached_property)
_MISSING = object()


class Reading(NamedTuple):
    """A place that a routine reads: `read(holder, name)` gives what is there; value: what was there."""

    read: Callable[[Any, Any], Any]
    holder: Any
    name: Any
    value: Any

    @property
    def key(self) -> tuple[int, Any]:
        """Tells it from other places."""
        return id(self.holder), self.name


class Reads:
    """Values that routines read, as they are now: attributes, variables of modules and enclosing functions.

    Their code says which names they read; it is followed into functions of the same package.  A name stands
    for the attribute of that name of all that they reach.  What they set themselves is left out.  A driver's
    subclass says what values of its framework are.

    plain: types of values that are told apart by what they are, others by which object they are.
    opaque: packages whose objects are not looked into.
    called: names of the methods that expressions lead to, such as a call of an object.
    dynamic: types whose objects may have attributes that only reading them shows.
    written: names of what the routines set, as far as is known.
    """

    plain: ClassVar[tuple[type, ...]] = (int, float, complex, bool, str, bytes, type(None), enum.Enum)
    opaque: ClassVar[frozenset[str]] = frozenset({"amanda", "numpy"})
    called: ClassVar[tuple[str, ...]] = ("__call__", "__getitem__")
    dynamic: ClassVar[tuple[type, ...]] = ()

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], Reading] = {}
        self._reached: dict[int, Any] = {}
        self._holders: list[Any] = []
        self._names: dict[str, None] = {}
        self._stored: dict[str, None] = {}
        self._looked: set[tuple[int, str]] = set()
        self._homes: set[str] = set()
        self._left_out: set[tuple[int, Any]] = set()
        self.written: dict[str, None] = {}

    @classmethod
    def is_same(cls, value: Any, before: Any) -> bool:
        """Return True if two are the same object, or plain values that are equal."""
        if value is before:
            return True
        if type(value) is not type(before):
            return False
        if isinstance(value, tuple):
            return len(value) == len(before) and all(map(cls.is_same, value, before))
        return isinstance(value, cls.plain) and bool(value == before)

    def follow(self, action: Action) -> None:
        """Take up what an action's routine reads."""
        self._homes |= {_package(action.func), _package(type(action.tool))} - self.opaque
        self.reach(action.func)
        for value in action.kwargs.values():
            self.reach(value)
        while pairs := [pair for pair in self._pairs() if (id(pair[0]), pair[1]) not in self._looked]:
            for holder, name in pairs:
                self._looked.add((id(holder), name))
                self._look(holder, name)

    @contextmanager
    def tracing(self, actions: Iterable[Action]) -> Iterator[None]:
        """Context in which routines are traced: what they read is taken up, without what they set."""
        for action in actions:
            self.follow(action)
        steady = [place for place in self if self._holds(place)]
        yield
        self.settle(steady)

    def settle(self, among: Iterable[Reading] | None = None) -> None:
        """Leave out what has changed since it was read: routines that were traced have set it."""
        for name in self._stored:
            if any(inspect.getattr_static(one, name, _MISSING) is not _MISSING for one in self._holders):
                self.written[name] = None
        for place in [one for one in (self if among is None else among) if not self._holds(one)]:
            self.written[self.name_of(place)] = None
            self._left_out.add(place.key)
            del self._places[place.key]

    def name_of(self, place: Reading) -> str:
        """The name of what is at a place, or of the container whose contents are."""
        if place.name is not None:
            return str(place.name)
        return next((self.name_of(one) for one in self if one.value is place.holder), "a container")

    def hold(self) -> bool:
        """Return True if all is as it was.  It runs at each call of a graph."""
        if not self._places:
            return True
        with interceptor.Suspension():  # a property may compute
            for read, holder, name, value in self._places.values():
                now = read(holder, name)
                if now is not value and not self.is_same(now, value):
                    return False
        return True

    def unfollowed(
        self, traced: Sequence[tuple[Action, Sequence[Any]]], graph: str = "a graph"
    ) -> list[tuple[str, str]]:
        """Return what graphs do not follow, and why, for the reports of scopes.

        traced: actions, with the tensors that their routines hold.  graph: what the routines are in.
        """
        entries = []
        if self.written:
            tools = ", ".join(dict.fromkeys(type(action.tool).__name__ for action, _ in traced))
            entries.append(
                (f"traceable routines of {tools}", f"they set {', '.join(self.written)}; {graph} does not")
            )
        entries += [
            (
                f"traceable {action}",
                "it holds a tensor that no name in its code leads to: another in its place is not seen",
            )
            for action, tensors in traced
            if any(tensor not in self for tensor in tensors)
        ]
        return entries

    def look_into(self, value: Any) -> bool:
        """Return True if a value has attributes that routines read; a driver takes up what else it holds.

        `reach` takes up one value, and `read` an attribute of one.
        """
        return _package(type(value)) not in self.opaque

    def reach(self, value: Any) -> None:
        """Take up a value, and what it leads to."""
        if isinstance(value, self.plain) or id(value) in self._reached:
            return
        if isinstance(value, FunctionType):
            self.reach(getattr(value, "__wrapped__", None))  # what a decorator of another package is around
        if isinstance(value, (FunctionType, ModuleType, type)) and _package(value) not in self._homes:
            return
        self._reached[id(value)] = value
        if isinstance(value, FunctionType):
            self._follow_code(value)
        elif isinstance(value, _FUNCTIONS):
            for part in _parts(value):
                self.reach(part)
        elif isinstance(value, _CONTAINERS):
            for one in self._reading(_contents, value, None) or ():
                self.reach(one)
        elif isinstance(value, (ModuleType, type)):
            self._holders.append(value)
        elif self.look_into(value):
            self._holders.append(value)
            for name in self.called:
                called = inspect.getattr_static(type(value), name, None)
                called = getattr(called, "__wrapped__", called)  # within the `Enclosure` of a driver
                self.reach(called if isinstance(called, FunctionType) else None)

    def read(self, holder: Any, name: str) -> Any:
        """Take up an attribute; what it is, if it is kept there."""
        return self._reading(_attribute, holder, name)

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._reached

    def __iter__(self) -> Iterator[Reading]:
        return iter(self._places.values())

    def _holds(self, place: Reading) -> bool:
        return self.is_same(place.read(place.holder, place.name), place.value)

    def _pairs(self) -> Iterator[tuple[Any, str]]:
        return ((holder, name) for holder in self._holders for name in self._names)

    def _follow_code(self, function: FunctionType) -> None:
        names, stored = names_of(function.__code__)
        self._stored.update(dict.fromkeys(stored))
        for name in names:
            self._names[name] = None
            if name in function.__globals__ and name not in stored:
                self.reach(self._reading(dict.get, function.__globals__, name))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name not in stored:
                self.reach(self._reading(_in_cell, cell, name))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.reach(default)

    def _look(self, holder: Any, name: str) -> None:
        if name in self._stored or (name.startswith("__") and name.endswith("__")):
            return
        found = inspect.getattr_static(holder, name, _MISSING)
        is_own = name in getattr(holder, "__dict__", ())
        is_elsewhere = isinstance(found, property) and _package(found.fget) not in self._homes
        if isinstance(found, _FUNCTIONS) and not is_own and not is_elsewhere:
            self.reach(found)
        elif found is not _MISSING or isinstance(holder, self.dynamic):
            self.reach(self.read(holder, name))

    def _reading(self, read: Callable[[Any, Any], Any], holder: Any, name: Any) -> Any:
        """Return what is at a place; None where nothing is, or what is made anew at each reading."""
        place = Reading(read, holder, name, read(holder, name))
        if not self._holds(place):
            return None
        if place.key not in self._left_out:
            self._places.setdefault(place.key, place)
        return None if place.value is _MISSING else place.value


@lru_cache(maxsize=1024)
def names_of(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of attributes and variables of modules in some code, and of what it sets beyond itself."""
    names, stored = list(code.co_names), []
    for instruction in dis.get_instructions(code):
        kind, _, what = instruction.opname.partition("_")
        if kind not in ("STORE", "DELETE"):
            continue
        if what in ("ATTR", "GLOBAL") or (what == "DEREF" and instruction.argval in code.co_freevars):
            stored.append(instruction.argval)
    names += [one for one in code.co_consts if isinstance(one, str) and one.isidentifier()]  # for getattr
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += names_of(inner)[0]
            stored += names_of(inner)[1]
    return tuple(names), tuple(stored)


def _attribute(holder: Any, name: Any) -> Any:
    try:
        return getattr(holder, name, _MISSING)
    except Exception:  # of a descriptor
        return _MISSING


def _in_cell(cell: Any, _: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _contents(container: Any, _: None) -> tuple[Any, ...]:
    if isinstance(container, Mapping):
        return (*container.keys(), *container.values())
    return tuple(container)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, cached_property):
        return [value.func]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value.__func__, *([value.__self__] if isinstance(value, MethodType) else [])]


def _package(value: Any) -> str:
    """The outermost package of what defines a function or a class, or of a module; or Amanda's tools."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    outer, _, inner = str(name or "").partition(".")
    within = inner.partition(".")[0]
    return f"{outer}.{within}" if outer == "amanda" and within in ("testing", "tools") else outer
