"""Callables that are intercepted (`Site`), and the stand-ins of methods and properties, in pure Python."""

import inspect
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, NamedTuple

from amanda.interceptor._copying import reduce_to_original
from amanda.interceptor._fallback._activations import ACTIVATION, Activation
from amanda.interceptor._fallback._places import (
    Failure,
    Region,
    call_sites,
    mix_identities,
    mix_leaf,
    ordinal,
    thread,
)
from amanda.interceptor._fallback._programs import Reader
from amanda.interceptor.opid import ROOT_HASH, mix

TRANSPARENT, IMPLEMENTATION, ONE_PLACE = 1, 2, 4

Handler = Callable[..., Any]


def active() -> Activation | None:
    """Return the activation in force here; None where nothing is intercepted, as in a suspension.

    On a thread without an activation it calls the function of `watch_outside`, until that returns True there.
    """
    if thread.suspension._is_owned():  # type: ignore[attr-defined]
        return None
    activation = ACTIVATION.get(None)
    if activation is not None and activation.active:
        return activation
    if thread.watch_seen != _watch.number:
        _notify_watcher()
    return None


class _Watch(NamedTuple):
    """The last watch of `watch_outside`."""

    number: int
    function: Callable[[], bool] | None


_watch = _Watch(0, None)


def _notify_watcher() -> None:
    """Call the function of the last watch on this thread; not again once it has returned True."""
    number, function = _watch
    with Suspension():
        if function is None or function():
            thread.watch_seen = number


def watch_outside(function: Callable[[], bool] | None) -> None:
    """Call a function on each thread that runs ops without an activation, until it returns True there.

    None ends the calls.
    """
    global _watch
    _watch = _Watch(_watch.number + 1, function)


def running() -> str | None:
    """Return the name of the op whose native code this thread runs; None outside of ops."""
    return thread.key


def failure() -> BaseException | None:
    """Return the exception of a tool that `keep_failure` has stored since this thread's last op began."""
    return thread.failure.error


def keep_failure(error: BaseException | None) -> None:
    """Store a tool's exception for this thread, since an operator may drop it; None removes it."""
    thread.failure.error = error


def forget_failures() -> None:
    """Remove the exceptions that are stored for any thread."""
    for failure in list(Failure.of_threads):
        failure.error = None


_python_calls = Counter[str]()  # by reason


def statistics() -> dict[str, Any]:
    """Return the numbers of calls of ops with routines in this process: all of them ran in Python."""
    return {"native": 0, "learned": 0, "python": dict(_python_calls)}


class Site:
    """One callable and the handler of its calls.

    Args:
        target: Callable of the framework.
        op: Operator that tools see.
        key: Canonical name of the op.
        hash: 64 bits of the name, for op ids.
        handler: Called instead of the target: `handler(state, call_cache, op_id, site, args, kwargs)`.
        flags: `TRANSPARENT`, `IMPLEMENTATION` and `ONE_PLACE`, in one number.
        reader: Reader of tensors, for native programs; None for no programs.
    """

    def __init__(
        self,
        target: Any,
        op: Any,
        key: str,
        hash: int,
        handler: Handler,
        flags: int = 0,
        reader: Reader | None = None,
    ) -> None:
        self.target = target
        self.op = op
        self.key = key
        self.hash = hash
        self.handler = handler
        self.flags = flags
        self.original = target.__get__ if inspect.isgetsetdescriptor(target) else target

    def place(self) -> None:
        """Raise TypeError: the native interceptor alone can make calls of the target pass a stub."""
        raise TypeError(f"without the native interceptor, {self.op!r} is detoured, not placed")

    def remove(self) -> None:
        """Do nothing: the target was never placed."""

    def invoke(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Call the target itself; ops within the call are intercepted, even if a suspension is in force.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call; None for none.
        """
        # A thread with a lock that nobody holds is not suspended.
        outer_suspension, thread.suspension = thread.suspension, RLock()
        try:
            return self.run(args, kwargs or {})
        finally:
            thread.suspension = outer_suspension

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the target with its canonical name as that of the running op; with none if it is TRANSPARENT.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        outer_key, thread.key = thread.key, None if self.flags & TRANSPARENT else self.key
        try:
            return self.original(*args, **kwargs)
        finally:
            thread.key = outer_key

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler; call the target where no activation is in force, and within an op's own code.

        A call within an op is a part of it if it has the op's name, or is of an IMPLEMENTATION.  An exception
        that `keep_failure` has stored is raised if the op returns NotImplemented.

        Args:
            *args: Positional arguments of the call.
            **kwargs: Keyword arguments of the call.
        """
        activation = active()
        is_part_of_op = thread.key and (thread.key == self.key or self.flags & IMPLEMENTATION)
        if activation is None or is_part_of_op:
            return self.original(*args, **kwargs)
        thread.failure.error = None  # that of an earlier op has been raised, or dropped for good
        result = self._call_handler(activation, args, kwargs)
        # An operator turns a TypeError from within it into NotImplemented: a tool's own is raised again.
        if result is NotImplemented and thread.failure.error is not None:
            raise thread.failure.error
        return result

    def _call_handler(self, activation: Activation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op with an empty plan; else count the call, and call the handler under a suspension."""
        table, state = activation.table, activation.state  # which may change meanwhile
        op_id = _op_id(self, args, kwargs)
        call_cache = NotImplemented if table is None else table.get(op_id)
        if call_cache is None:  # nothing is inserted: the op runs as outside of scopes
            return self.run(args, kwargs)
        _python_calls["pure Python"] += 1
        with thread.suspension:
            if call_cache is NotImplemented:  # the op has no entry: the handler analyses it
                call_cache = None
            return self.handler(state, call_cache, op_id, self, args, kwargs)


_DETOUR_DEPTH = 3
"""Index of the detour's frame, seen from `_op_id`: `_call_handler` and `dispatch` lie between."""


def _op_id(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the id of the op that a call is; count the call among the repeats of its place."""
    region = thread.region()
    place, way = mix(region.hash, site.hash), 0
    place_sites, way_sites = call_sites(region, sys._getframe(_DETOUR_DEPTH))
    for call_site in place_sites:
        place = mix(place, call_site)
    for call_site in way_sites[1:]:  # the first is the last of the place
        way = mix(way, call_site)
    is_at_root = region.hash == ROOT_HASH
    for value in () if site.flags & ONE_PLACE else (*args, *kwargs.values()):
        place = mix_identities(place, value)
        way = mix_leaf(way, value) if is_at_root else way
    # Outside of modules the ways to a place are told apart, elsewhere its repeats.
    number = region.number_of_way(place, way) if is_at_root else region.count_repeat(place)
    return mix(place, number) or 1  # 0 is not an id: native tables mark free cells by it


class _Wrapped:
    """A stand-in for a callable, which is compared, shown, copied and pickled like the callable."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", None)  # type: ignore[assignment]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A classmethod binds itself to the class; its stand-in is not a classmethod, and has to bind itself.
        if isinstance(self.__wrapped__, types.ClassMethodDescriptorType):
            return types.MethodType(self, owner)
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a wrapped method says what its call does")

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # of a stand-in whose `__init__` has not run
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: Any) -> bool:
        original = other.__wrapped__ if isinstance(other, _Wrapped) else other
        return bool(self.__wrapped__ == original)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_to_original(self, protocol)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # as functions are

    # A getter in C, since one in Python could be interrupted: CPython crashes if that happens as it changes a
    # class.
    __class__ = property(operator.attrgetter("__wrapped__.__class__"))


class Detour(_Wrapped):
    """Stand-in for a Python callable or a property, whose calls or reads it passes to the site."""

    def __new__(cls, site: Site) -> "Detour":
        return super().__new__(_ReadDetour if inspect.isgetsetdescriptor(site.target) else cls)

    def __init__(self, site: Site) -> None:
        super().__init__(site.original)
        self._site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._site.dispatch(*args, **kwargs)


PathOf = Callable[[Any, Any], tuple[int, bool]]


class _ReadDetour(Detour):
    """Stand-in for a property; writes go to the property itself."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._site.target if instance is None else self._site.dispatch(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        self._site.target.__set__(instance, value)

    def __delete__(self, instance: Any) -> None:
        self._site.target.__delete__(instance)


class Enclosure(_Wrapped):
    """Stand-in for a method, such as that of modules: each call is a region, to which the ops in it belong.

    The subject of a call is its first argument, such as a module.

    Args:
        function: The method.
        path: Returns, for the subject of the enclosing call and that of this one, 64 bits for the place of
            the latter in the former, and True if the place is lasting; None to distinguish subjects by
            ordinals.
    """

    def __init__(self, function: Any, path: PathOf | None = None) -> None:
        super().__init__(function)
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args or active() is None:
            return self.__wrapped__(*args, **kwargs)
        outer = thread.top
        region = self._region_of_call(thread.region(), args[0])
        region.entry = sys._getframe(1)
        thread.top = region
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            thread.top = outer
            # Outside of modules an iteration ends with its outermost call: the next has the same ids.
            if outer is None:
                thread.root.forget_counts()

    def _region_of_call(self, parent: Region, subject: Any) -> Region:
        """Return the region of a call of a subject; count it among the repeats in the enclosing region."""
        if self._path is None or parent.hash == ROOT_HASH or parent.subject is None:
            place = mix(parent.hash, ordinal(subject))
        else:
            with Suspension():
                path_hash, is_lasting = self._path(parent.subject, subject)
            # Both get their ordinals now, as in native code, since ordinals count first uses.
            if is_lasting:
                ordinal(subject)
                ordinal(parent.subject)
            place = mix(parent.hash, path_hash)
        # Not at the root, where the same module's call in the next iteration is the same place.
        if parent.hash != ROOT_HASH:
            place = mix(place, parent.count_repeat(place))
        return Region(place, parent, subject)


def Suspension() -> AbstractContextManager[Any]:
    """Return a context in which no calls of this thread are intercepted."""
    return thread.suspension
