"""Places of ops: the regions around a call and the call sites between, of which its id is made."""

import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from amanda.interceptor.opid import (
    BOUNDARY,
    FRAMEWORK,
    MASK,
    ROOT_HASH,
    SITE_STEP,
    SKIPPED,
    WALK_LIMIT,
    WAY_LIMIT,
    mix,
)

MAX_SLOT_QUERIES = 8
"""How often an object that tells ops apart is asked for the slot in which it lies, if it lies in none."""
OCCURRENCE_CAP = 64
"""How many ops at one place, as in the rounds of a loop, have ids of their own; others share the last."""


class Region:
    """One enclosing call, or the root of a thread; counts tell repeats of a place apart."""

    def __init__(self, hash: int, parent: "Region | None" = None, subject: Any = None) -> None:
        self.hash = hash
        self.parent = parent
        self.subject = subject
        self.entry: types.FrameType | None = None
        self.tail: list[int] = []
        self.way: list[int] = []
        self.counts: dict[int, int] = {}
        self.ways: dict[int, dict[int, int]] = {}

    def occurrence(self, place: int) -> int:
        """Return which repeat of the place this is."""
        count = self.counts.get(place, 0)
        self.counts[place] = min(count + 1, OCCURRENCE_CAP)
        return min(count, OCCURRENCE_CAP - 1)

    def number_of_way(self, place: int, way: int) -> int:
        """Return which of the ways to the place this is: a loop comes by one."""
        ways = self.ways.setdefault(place, {})
        # Unbounded counts would be a leak in a program that makes ways by recursion.
        if way not in ways and len(ways) == OCCURRENCE_CAP:
            return OCCURRENCE_CAP - 1
        return ways.setdefault(way, len(ways))

    def forget_counts(self) -> None:
        """Count repeats from zero."""
        self.counts.clear()
        self.ways.clear()

    def copy(self, tail: list[int], way: list[int]) -> "Region":
        """The same place with the same counts, and call sites to add to those walked."""
        copied = Region(self.hash, self.parent, self.subject)
        copied.tail, copied.way = tail, way
        # Copies, because a replay counts from the same state each time.
        copied.counts = dict(self.counts)
        copied.ways = {place: dict(ways) for place, ways in self.ways.items()}
        return copied


class Failure:
    """A tool's exception since the last op of a thread began; it dies with the thread."""

    __slots__ = ("__weakref__", "error")
    of_threads: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.of_threads.add(self)


class Thread(threading.local):
    """State of one thread: its region, its suspension, the op that runs.

    suspension: which this thread holds while it intercepts nothing; left in C, so always left.
    """

    def __init__(self) -> None:
        self.suspension = threading.RLock()
        self.key: str | None = None
        self.root = Region(ROOT_HASH)
        self.top: Region | None = None
        self.failure = Failure()  # an object, so that `forget_failures` reaches those of all threads
        self.watch_seen = 0  # number of the last watch that was told of this thread

    def region(self) -> Region:
        """Return the place."""
        return self.top or self.root


Adopt = Callable[[Any, Any, int], tuple[int, bool]]


class NumberedSubject:
    """The ordinal of an object, and how often it is still asked whether it lies in a slot."""

    def __init__(self, ordinal: int, reference: Any, queries: int) -> None:
        self.ordinal, self.reference, self.slot_queries_left = ordinal, reference, queries

    def query_slot(self, subject: Any) -> None:
        """Take over the ordinal of what lay first in the same slot of the object that encloses the call."""
        owner = thread.top and thread.top.subject
        if owner is None or place_state.adopt is None:
            self.slot_queries_left -= 1
            return
        with thread.suspension:  # a driver looks for slots by getattr, which may run ops
            self.ordinal, settled = place_state.adopt(owner, subject, self.ordinal)
        self.slot_queries_left = 0 if settled else self.slot_queries_left - 1


FIRST_SWEEP = 64
"""Number of objects without weak references that leads to the first sweep of those that are dead."""
_REFERENCES_OF_DEAD = 2
"""References to a value of a dict that nothing else holds, as `sys.getrefcount` counts them, with its own."""


class PlaceState:
    """Facts of the process: kinds of code, types that tell ops apart, ordinals."""

    def __init__(self) -> None:
        self.describe: Callable[[types.CodeType], tuple[int, int, bytes]]
        self.on_death: Callable[[int], None]
        self.adopt: Adopt | None = None
        self.identity_types: tuple[type, ...] = ()
        self.leaf_type: type | None = None
        self.is_leaf: Callable[[Any], bool] = bool
        self.notes: dict[int, tuple[types.CodeType, tuple[int, int, memoryview]]] = {}
        self.named: dict[int, NumberedSubject] = {}
        self.ordinals = 0
        self.strong: dict[int, Any] = {}
        self.strong_limit = FIRST_SWEEP

    def note(self, code: types.CodeType) -> tuple[int, int, memoryview]:
        """Return what is said of code: hash, kind, first instructions."""
        entry = self.notes.get(id(code))  # by address: code of another file may be equal
        if entry is None:
            # Kept with the code object itself, so that its address is not used again.
            hash, kind, first = self.describe(code)
            entry = self.notes[id(code)] = code, (hash, kind, memoryview(first).cast("I"))
        return entry[1]

    def sweep(self) -> None:
        """Drop the objects that nothing but their ordinal holds, once there are twice as many as survived."""
        if len(self.strong) < self.strong_limit:
            return
        # A copy: a subject that dies may run code that asks for ordinals.
        for address in list(self.strong):
            if sys.getrefcount(self.strong[address]) <= _REFERENCES_OF_DEAD:
                self.strong.pop(address, None)
                gone = self.named.pop(address, None)
                if gone is not None:
                    self.on_death(gone.ordinal)
        self.strong_limit = max(FIRST_SWEEP, 2 * len(self.strong))


thread = Thread()
place_state = PlaceState()


def configure(
    describe: Callable[[types.CodeType], tuple[int, int, bytes]],
    on_death: Callable[[int], None],
    adopt: Adopt | None = None,
) -> None:
    """Set who describes code, and who hears of the death of an object that has an ordinal.

    adopt: is given the object that encloses a call, an argument and its ordinal; returns the ordinal of what
    lay in the same slot of the enclosing object first, and whether there is nothing more to ask.
    """
    place_state.describe = describe
    place_state.on_death = on_death
    place_state.adopt = adopt
    forget_code()


def forget_code() -> None:
    """Describe code again where its kind may have changed."""
    place_state.notes.clear()


def add_identity_type(kind: type) -> None:
    """Arguments of this type tell ops apart."""
    if kind not in place_state.identity_types:
        place_state.identity_types += (kind,)


def set_leaf_type(kind: type, is_leaf: Callable[[Any], bool]) -> None:
    """Set the type of tensors, and the test for leaves, that distinguish ops in a loop outside of modules."""
    place_state.leaf_type, place_state.is_leaf = kind, is_leaf


def ordinal(subject: Any) -> int:
    """Return the number of an object, in the order of first use; no two objects have the same.

    An object that cannot be held weakly is held until a sweep sees that nothing else holds it.
    """
    address = id(subject)
    if address not in place_state.named:
        # Defaults, because the module's globals may be gone when the last subjects die.
        def forget(
            _: Any, state: PlaceState = place_state, ends: Callable[[], bool] = sys.is_finalizing
        ) -> None:
            numbered = state.named.pop(address)
            if not ends():
                state.on_death(numbered.ordinal)

        reference = None
        try:
            reference = weakref.ref(subject, forget)
        except TypeError:
            place_state.sweep()
            place_state.strong[address] = subject
        place_state.ordinals += 1
        queries = MAX_SLOT_QUERIES if isinstance(subject, place_state.identity_types) else 0
        place_state.named[address] = NumberedSubject(place_state.ordinals, reference, queries)
    named = place_state.named[address]
    if named.slot_queries_left:
        named.query_slot(subject)
    return named.ordinal


def call_sites(region: Region, frame: types.FrameType | None) -> tuple[list[int], list[int]]:
    """The places of the calls that lead from a region to a frame, innermost first, and of the way there.

    The latter is empty but at the root, where the last place of the former is also the first of the way.
    """
    sites: list[int] = []
    way: list[int] = []
    rooted, most = region.hash == ROOT_HASH, WALK_LIMIT
    while frame is not None and frame is not region.entry:
        if len(sites) == WALK_LIMIT or len(way) > WAY_LIMIT or most == 0:
            break
        most -= bool(way)  # recursion of the program beyond the place is walked this far
        hash, kind, first = place_state.note(frame.f_code)
        # The frame of an enclosing call that no activation saw, as of one that began before the scope.
        if not rooted and kind & BOUNDARY:
            break
        if not kind & SKIPPED:
            word = frame.f_lasti // 2  # not the line: `f(x) + f(y)` are two places
            word = first[word] if word < len(first) else word
            site = (hash + (word + 1) * SITE_STEP) & MASK
            if not way:
                sites.append(site)
            if rooted and not kind & FRAMEWORK:
                way.append(site)
        frame = frame.f_back
    # A replay continues the walk that the snapshot had made.
    if not way:
        sites = (sites + region.tail)[:WALK_LIMIT]
    return sites, (way + region.way)[: WAY_LIMIT + 1]


def mix_leaf(way: int, value: Any) -> int:
    """A hash of a way that also tells apart which leaf that needs a gradient an op is given."""
    kind, leaf_type = type(value), place_state.leaf_type
    if leaf_type is None or not issubclass(kind, leaf_type) or issubclass(kind, place_state.identity_types):
        return way
    with thread.suspension:
        is_leaf = place_state.is_leaf(value)
    return mix(way, ordinal(value)) if is_leaf else way


def mix_identities(hash: int, value: Any) -> int:
    """The hash mixed with the ordinal of each argument, also in a list, whose type distinguishes ops."""
    # One level deep, as `torch.cat` takes its tensors; a deeper search would cost every call.
    for item in value if type(value) in (tuple, list) else (value,):
        if issubclass(type(item), place_state.identity_types):
            hash = mix(hash, ordinal(item))
    return hash


class Snapshot:
    """The place and the counts of repeats at one moment, for a later replay."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def replay(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it as if at the place of the snapshot."""
        region = self._region.copy(self._region.tail, self._region.way)
        region.entry = sys._getframe(1)
        outer, key = thread.top, thread.key
        # No op runs at the snapshot's place, though one may run here, such as a backward op.
        thread.top, thread.key = region, None
        try:
            return function(*args, **kwargs)
        finally:
            thread.top, thread.key = outer, key


def snapshot() -> Snapshot:
    """The present place, to be replayed."""
    region = thread.region()
    return Snapshot(region.copy(*call_sites(region, sys._getframe(1))))


def reset_root() -> None:
    """Count repeats outside enclosing calls from zero."""
    thread.root.forget_counts()


def subjects() -> list[Any]:
    """Objects of the enclosing calls, outermost first."""

    def subjects_outwards(region: Region | None) -> Iterator[Any]:
        while region is not None:
            if region.subject is not None:
                yield region.subject
            region = region.parent

    return list(subjects_outwards(thread.top))[::-1]
