"""The interceptor in pure Python: the same face, by replacing attributes.

Its limits: a callable that was imported by name before a scope opened is not intercepted, and
a call costs microseconds where the native interceptor takes nanoseconds.
"""

import inspect
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from amanda._opid import BOUNDARY, FRAMEWORK, MASK, ROOT_HASH, SITE_STEP, SKIPPED, WALK_LIMIT, mix

OCCURRENCE_CAP = 64
"""How many ops at one place, as in the rounds of a loop, have ids of their own; others share the last."""

TRANSPARENT, IMPLEMENTATION = 1, 2

Handler = Callable[..., Any]


class PlanTable:
    """Plans by op id."""

    def __init__(self) -> None:
        self._plans: dict[int, Any] = {}

    def get(self, op_id: int) -> Any:
        """The plan kept under an op id, or NotImplemented."""
        return self._plans.get(op_id, NotImplemented)

    def set(self, op_id: int, plan: Any) -> None:
        """Keep a plan; None means that nothing is inserted."""
        self._plans[op_id] = plan

    def discard(self, op_id: int) -> None:
        """Forget an op id."""
        self._plans.pop(op_id, None)

    def clear(self) -> None:
        """Forget every op id."""
        self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)


class Lock:
    """A reentrant lock; a process that forks finds it free in the child."""

    _forks = 0

    def __init__(self) -> None:
        self._made = Lock._forks
        self._lock = threading.RLock()

    def __enter__(self) -> "Lock":
        if self._made != Lock._forks:
            self._made = Lock._forks
            if not self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock = threading.RLock()
        self._lock.acquire()
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


class Memo:
    """An op's plans; what calls of it come to is nothing that Python could do faster."""

    def __init__(self, plans: dict[Any, Any], sized: bool = False) -> None:
        self.plans = plans

    def learn(self, key: int, program: "Program | None") -> None:
        """Learn nothing."""

    def forget(self) -> None:
        """Forget what was learned; the plans stay."""

    def __len__(self) -> int:
        return 0


class _NativeAlone:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"a {type(self).__name__} is for the native interceptor")


class Hook(_NativeAlone):
    """The routines of a program on a tuple of values that a framework calls it with."""

    def __call__(self, *values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Run them."""
        raise NotImplementedError


class Program(_NativeAlone):
    """Routines around an op, which native code runs."""

    def hook(self, reader: "Reader", go_on: Callable[..., Any], first: Any) -> Hook:
        """What runs the routines on a tuple of values that it is called with."""
        raise NotImplementedError


class Reader(_NativeAlone):
    """How native code reads tensors."""

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, sized: bool = False) -> int:
        """What decides what a call comes to, in 64 bits; 0 where that cannot be told."""
        raise NotImplementedError

    def version(self, value: Any) -> int | None:
        """What changes when a tensor, or one of a list, is written."""
        raise NotImplementedError


class Mark:
    """Which execution made backward ops, told by their numbers."""

    _alive = 0

    def __init__(self, trace: Any, begin: int, start: int, end: int, order: int = 0) -> None:
        self.trace = trace
        self.begin = begin
        self.start = start
        self.end = end
        self.order = order
        Mark._alive += 1

    def __del__(self) -> None:
        Mark._alive -= 1

    @staticmethod
    def alive() -> int:
        """How many marks there are."""
        return Mark._alive


class Graphs:
    """A framework's graphs of backward ops, read by the names of attributes."""

    def __init__(
        self, tensors: type, leaf: type, maker: str, base: str, next: str, notes: str, number: str, key: str,
        met: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self._tensors = tensors
        self._leaf = leaf
        self._maker = maker
        self._base = base
        self._next = next
        self._notes = notes
        self._number = number
        self._key = key
        self._met = met

    def mark(self, values: Any, mark: Mark, bases: bool = True) -> None:
        """Mark the ops that made these tensors, and what they are views of."""
        if isinstance(values, self._tensors):
            for tensor in (values, getattr(values, self._base) if bases else None):
                op = None if tensor is None else getattr(tensor, self._maker)
                if op is not None and mark.start <= getattr(op, self._number)() < mark.end:
                    getattr(op, self._notes).setdefault(self._key, mark)
                    self._meet(op)
        elif isinstance(values, (list, tuple)):
            for value in values:
                self.mark(value, mark, bases)

    def marked(self, ops: Iterable[Any]) -> list[tuple[Any, Mark, int]]:
        """Each op that leads on from these and comes from a known execution, its mark and its number."""
        waiting = deque(op for op in ops if op is not None)
        found: dict[int, Any] = {}
        edges: list[tuple[int, int]] = []
        marks: dict[int, Mark] = {}
        while waiting:
            op = waiting.popleft()
            if id(op) in found:
                continue
            found[id(op)] = op
            if type(op) is self._leaf:
                continue
            own = getattr(op, self._notes).get(self._key)
            if own is not None:
                marks[id(op)] = own
            self._meet(op)
            children = [child for child, *_ in getattr(op, self._next) if child is not None]
            edges += [(id(op), id(child)) for child in children]
            waiting += children
        self._spread(found, edges, marks)
        return [
            (op, marks[key], 0 if type(op) is self._leaf else getattr(op, self._number)())
            for key, op in found.items()
            if key in marks
        ]

    def leaving(self, trace: Any, writes: bool) -> Any:
        """For a program, whose executions leave this trace."""
        raise TypeError("programs are for the native interceptor")

    def _spread(self, found: dict[int, Any], edges: list[tuple[int, int]], marks: dict[int, Mark]) -> None:
        """Mark what lies inside an op; a leaf belongs to the op that used it first."""
        of_routines: dict[int, Mark] = {}
        spreading = True
        while spreading:
            spreading = False
            for parent, child in edges:
                mark = marks.get(parent) or of_routines.get(parent)
                if mark is None:
                    continue
                known = marks.get(child)
                if type(found[child]) is self._leaf:
                    if known is None or mark.start < known.start:
                        marks[child] = mark
                    continue
                number = getattr(found[child], self._number)()
                if known is None and mark.start <= number < mark.end:
                    marks[child] = mark
                    spreading = True
                elif child not in of_routines and mark.begin <= number < mark.start:
                    of_routines[child] = mark
                    spreading = True

    def _meet(self, op: Any) -> None:
        if id(op) // 16 % 61 == 0:
            self._met(op)


class Activation:
    """What is in force in an execution context."""

    def __init__(self, table: PlanTable | None, state: Any, active: bool = True, memos: bool = True) -> None:
        self.table = table
        self.state = state
        self.active = active


ACTIVATION: ContextVar[Activation] = ContextVar("amanda.activation")
"""What is in force in an execution context; `active()` is the way to ask for it."""


class Region:
    """One enclosing call, or the root of a thread; counts tell repeats of a place apart."""

    def __init__(self, hash: int, parent: "Region | None" = None, subject: Any = None) -> None:
        self.hash = hash
        self.parent = parent
        self.subject = subject
        self.entry: types.FrameType | None = None
        self.tail: list[int] = []
        self.counts: dict[int, int] = {}

    def occurrence(self, place: int) -> int:
        """Which repeat of the place this is."""
        seen = self.counts.get(place, 0)
        self.counts[place] = min(seen + 1, OCCURRENCE_CAP)
        return min(seen, OCCURRENCE_CAP - 1)

    def copy(self, tail: list[int]) -> "Region":
        """The same place with the same counts, and call sites to add to those walked."""
        copied = Region(self.hash, self.parent, self.subject)
        copied.tail = tail
        copied.counts = dict(self.counts)
        return copied


class _Thread(threading.local):
    def __init__(self) -> None:
        self.off = 0
        self.key: str | None = None
        self.root = Region(ROOT_HASH)
        self.top: Region | None = None
        self.failure: BaseException | None = None

    def region(self) -> Region:
        return self.top or self.root


class _House:
    """What is known of the process: kinds of code, types that tell ops apart, ordinals."""

    def __init__(self) -> None:
        self.describe: Callable[[types.CodeType], tuple[int, int, bytes]]
        self.on_death: Callable[[int], None]
        self.identity_types: tuple[type, ...] = ()
        self.notes: dict[int, tuple[types.CodeType, tuple[int, int, memoryview]]] = {}
        self.named: dict[int, tuple[int, Any]] = {}
        self.ordinals = 0

    def note(self, code: types.CodeType) -> tuple[int, int, memoryview]:
        known = self.notes.get(id(code))  # by address: code of another file may be equal
        if known is None:
            hash, kind, first = self.describe(code)
            known = self.notes[id(code)] = code, (hash, kind, memoryview(first).cast("I"))
        return known[1]


_thread = _Thread()
_house = _House()


def configure(
    describe: Callable[[types.CodeType], tuple[int, int, bytes]], on_death: Callable[[int], None]
) -> None:
    """Set who describes code and who hears of the death of an object that has an ordinal."""
    _house.describe = describe
    _house.on_death = on_death
    forget_code()


def forked() -> None:
    """Hear that this process is a forked child."""
    Lock._forks += 1


def forget_code() -> None:
    """Describe code again where its kind may have changed."""
    _house.notes.clear()


def add_identity_type(kind: type) -> None:
    """Arguments of this type tell ops apart."""
    if kind not in _house.identity_types:
        _house.identity_types += (kind,)


def ordinal(subject: Any) -> int:
    """Number of an object, in the order of first use; 0 where it cannot be held weakly."""
    address = id(subject)
    if address not in _house.named:

        def forget(_: Any) -> None:
            number, _reference = _house.named.pop(address)
            _house.on_death(number)

        try:
            reference = weakref.ref(subject, forget)
        except TypeError:
            return 0
        _house.ordinals += 1
        _house.named[address] = _house.ordinals, reference
    return _house.named[address][0]


def _call_sites(region: Region, frame: types.FrameType | None) -> list[int]:
    sites: list[int] = []
    rooted = region.hash == ROOT_HASH
    while frame is not None and frame is not region.entry and len(sites) < WALK_LIMIT:
        hash, kind, first = _house.note(frame.f_code)
        if not rooted and kind & BOUNDARY:
            break
        if not kind & SKIPPED:
            word = frame.f_lasti // 2
            word = first[word] if word < len(first) else word
            sites.append((hash + (word + 1) * SITE_STEP) & MASK)
            if rooted and not kind & FRAMEWORK:
                return sites
        frame = frame.f_back
    return (sites + region.tail)[:WALK_LIMIT]


def _mix_identities(hash: int, value: Any) -> int:
    for item in value if type(value) in (tuple, list) else (value,):
        if isinstance(item, _house.identity_types):
            hash = mix(hash, ordinal(item))
    return hash


def _identify(site: "Site", args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    region = _thread.region()
    place = mix(region.hash, site.hash)
    for call_site in _call_sites(region, sys._getframe(3)):
        place = mix(place, call_site)
    for value in (*args, *kwargs.values()):
        place = _mix_identities(place, value)
    return mix(place, region.occurrence(place)) or 1


def active() -> Activation | None:
    """The activation in force here; None where nothing is intercepted."""
    if _thread.off:
        return None
    activation = ACTIVATION.get(None)
    return activation if activation is not None and activation.active else None


def failure() -> BaseException | None:
    """What a tool raised on this thread since the last op began, if it was kept."""
    return _thread.failure


def keep_failure(error: BaseException | None) -> None:
    """Keep a tool's exception, which an operator may drop; None lets go of it."""
    _thread.failure = error


class Site:
    """One callable and who handles its calls."""

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
        """Let calls of the target pass the stub: the native interceptor alone can."""
        raise TypeError(f"without the native interceptor, {self.op!r} is detoured, not placed")

    def remove(self) -> None:
        """Leave the target as it was: it was never placed."""

    def invoke(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Call the target itself; what it calls in turn is intercepted."""
        off, _thread.off = _thread.off, 0
        try:
            return self.run(args, kwargs or {})
        finally:
            _thread.off = off

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the target with its canonical name as that of the running op."""
        key, _thread.key = _thread.key, None if self.flags & TRANSPARENT else self.key
        try:
            return self.original(*args, **kwargs)
        finally:
            _thread.key = key

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Bring one call to the handler, or past it."""
        activation = active()
        if activation is None or (_thread.key and (_thread.key == self.key or self.flags & IMPLEMENTATION)):
            return self.original(*args, **kwargs)
        _thread.failure = None
        result = self._intercepted(activation, args, kwargs)
        if result is NotImplemented and _thread.failure is not None:
            raise _thread.failure
        return result

    def _intercepted(self, activation: Activation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op_id = _identify(self, args, kwargs)
        plan = NotImplemented if activation.table is None else activation.table.get(op_id)
        if plan is None:
            return self.run(args, kwargs)
        _thread.off += 1
        try:
            known = None if plan is NotImplemented else plan
            return self.handler(activation.state, known, op_id, self, args, kwargs)
        finally:
            _thread.off -= 1


class _Wrapped:
    """A method that stands in for another and looks like it."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", "")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if isinstance(self.__wrapped__, types.ClassMethodDescriptorType):
            return types.MethodType(self, owner)
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a wrapped method says what its call does")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


class Detour(_Wrapped):
    """Takes the place of a Python callable, or of the reads of a property, and brings them to the site."""

    def __new__(cls, site: Site) -> "Detour":
        return super().__new__(_ReadDetour if inspect.isgetsetdescriptor(site.target) else cls)

    def __init__(self, site: Site) -> None:
        super().__init__(site.original)
        self._site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._site.dispatch(*args, **kwargs)


PathOf = Callable[[Any, Any], tuple[int, bool]]


class _ReadDetour(Detour):
    """Stands in for a property; writes go to it as ever."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._site.target if instance is None else self._site.dispatch(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        self._site.target.__set__(instance, value)

    def __delete__(self, instance: Any) -> None:
        self._site.target.__delete__(instance)


class Enclosure(_Wrapped):
    """A method whose calls are regions, to which the ops in them belong.

    path: 64 bits for where a subject lies in its owner, and whether it lies there to stay; without it,
    subjects are told apart by the order of their first use.
    """

    def __init__(self, function: Any, path: PathOf | None = None) -> None:
        super().__init__(function)
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args or active() is None:
            return self.__wrapped__(*args, **kwargs)
        outer = _thread.top
        region = self._region(_thread.region(), args[0])
        region.entry = sys._getframe(1)
        _thread.top = region
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            _thread.top = outer
            if outer is None:
                _thread.root.counts.clear()

    def _region(self, parent: Region, subject: Any) -> Region:
        if self._path is None or parent.hash == ROOT_HASH or parent.subject is None:
            place = mix(parent.hash, ordinal(subject))
        else:
            with Suspension():
                name, lasting = self._path(parent.subject, subject)
            if lasting:
                ordinal(subject), ordinal(parent.subject)
            place = mix(parent.hash, name)
        if parent.hash != ROOT_HASH:
            place = mix(place, parent.occurrence(place))
        return Region(place, parent, subject)


class Snapshot:
    """The place and the counts of repeats at one moment, for a later replay."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def replay(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it as if at the place of the snapshot."""
        region = self._region.copy(self._region.tail)
        region.entry = sys._getframe(1)
        outer, key = _thread.top, _thread.key
        _thread.top, _thread.key = region, None
        try:
            return function(*args, **kwargs)
        finally:
            _thread.top, _thread.key = outer, key


def snapshot() -> Snapshot:
    """The present place, to be replayed."""
    region = _thread.region()
    return Snapshot(region.copy(_call_sites(region, sys._getframe(1))))


def reset_root() -> None:
    """Count repeats outside enclosing calls from zero."""
    _thread.root.counts.clear()


def subjects() -> list[Any]:
    """Objects of the enclosing calls, outermost first."""

    def outwards(region: Region | None) -> Iterator[Any]:
        while region is not None:
            if region.subject is not None:
                yield region.subject
            region = region.parent

    return list(outwards(_thread.top))[::-1]


class Suspension:
    """Context in which this thread intercepts nothing."""

    def __enter__(self) -> "Suspension":
        _thread.off += 1
        return self

    def __exit__(self, *_: Any) -> None:
        _thread.off -= 1
