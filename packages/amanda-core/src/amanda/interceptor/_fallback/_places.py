"""Places of ops in the program: hashes of a call's region and call sites, of which the op's id is made.

The words are those of `amanda.interceptor.opid`. An ordinal is the number of an object in the order of first
use. A way is the hash of the call sites that lead to a place outside of modules.
"""

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
"""How often the slot of an object that distinguishes ops is looked up, if no slot holds the object."""
OCCURRENCE_CAP = 64
"""How many ops at one place, as in the rounds of a loop, have ids of their own; others share the last."""


class Region:
    """One enclosing call, such as a module's, or the root of a thread; counts repeats of places in it.

    subject: the enclosing object.  entry: frame of its caller.
    tail, way: in a replay, call sites that the snapshot has walked: those of the place, and of the way to it.
    counts: number of repeats by place.  ways: by place, the number of each way to it.
    """

    def __init__(self, hash: int, parent: "Region | None" = None, subject: Any = None) -> None:
        self.hash = hash
        self.parent = parent
        self.subject = subject
        self.entry: types.FrameType | None = None
        self.tail: list[int] = []
        self.way: list[int] = []
        self.counts: dict[int, int] = {}
        self.ways: dict[int, dict[int, int]] = {}

    def count_repeat(self, place: int) -> int:
        """Count a repeat of a place; return its number, from 0 up to the cap."""
        count = self.counts.get(place, 0)
        self.counts[place] = min(count + 1, OCCURRENCE_CAP)
        return min(count, OCCURRENCE_CAP - 1)

    def number_of_way(self, place: int, way: int) -> int:
        """Return the number of a way among those to a place, in the order of first uses.

        A way that is new takes the next number; beyond the cap all new ways share the last.
        """
        number_by_way = self.ways.setdefault(place, {})
        # Without a bound, the ways of a recursive program would be a leak.
        if way not in number_by_way and len(number_by_way) == OCCURRENCE_CAP:
            return OCCURRENCE_CAP - 1
        return number_by_way.setdefault(way, len(number_by_way))

    def forget_counts(self) -> None:
        """Set all counts of repeats to zero."""
        self.counts.clear()
        self.ways.clear()

    def copy(self, tail: list[int], way: list[int]) -> "Region":
        """Return a copy of the region with its counts, and with other call sites for a replay."""
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

    suspension: a lock that this thread holds while it intercepts nothing. It is released in C code, which no
    signal interrupts.
    key: canonical name of the op whose code runs; None outside of ops.
    root, top: region of the thread itself, and the innermost enclosing call; None outside of enclosing calls.
    """

    def __init__(self) -> None:
        self.suspension = threading.RLock()
        self.key: str | None = None
        self.root = Region(ROOT_HASH)
        self.top: Region | None = None
        self.failure = Failure()  # an object, so that `forget_failures` reaches those of all threads
        self.watch_seen = 0  # number of the last watch whose function was done with this thread

    def region(self) -> Region:
        """Return the innermost region; the root outside of enclosing calls."""
        return self.top or self.root


Adopt = Callable[[Any, Any, int], tuple[int, bool]]
"""Function that finds the ordinal of an object's slot, as in `configure`."""


class NumberedSubject:
    """The ordinal of an object, and how often its slot is still looked up."""

    def __init__(self, ordinal: int, reference: Any, queries: int) -> None:
        self.ordinal, self.reference, self.slot_queries_left = ordinal, reference, queries

    def update_ordinal_from_slot(self, subject: Any) -> None:
        """Set the ordinal to that of the first object in the same slot of the enclosing call's object.

        Does nothing but use up a look-up outside of enclosing calls, or where no driver finds slots.
        """
        owner = None if thread.top is None else thread.top.subject
        if owner is None or place_state.adopt is None:
            self.slot_queries_left -= 1
            return
        with thread.suspension:  # a driver looks for slots by getattr, which may run ops
            self.ordinal, is_final = place_state.adopt(owner, subject, self.ordinal)
        self.slot_queries_left = 0 if is_final else self.slot_queries_left - 1


FIRST_SWEEP = 64
"""Number of objects without weak references that leads to the first sweep of those that are dead."""
_REFERENCES_OF_DEAD = 2
"""References to a value of a dict that nothing else holds, as `sys.getrefcount` counts them, with its own."""


class PlaceState:
    """State of the process: kinds of code, types that distinguish ops, ordinals.

    describe, on_death, adopt: functions that `configure` sets.
    descriptions: code objects with their hash, kind and first instructions, by address.
    numbered: ordinals of objects, by address.  last_ordinal: the ordinal of the newest of them.
    strong: those of the objects that cannot be referenced weakly; `strong_limit` of them lead to a sweep.
    """

    def __init__(self) -> None:
        self.describe: Callable[[types.CodeType], tuple[int, int, bytes]]
        self.on_death: Callable[[int], None]
        self.adopt: Adopt | None = None
        self.identity_types: tuple[type, ...] = ()
        self.leaf_type: type | None = None
        self.is_leaf: Callable[[Any], bool] = bool
        self.descriptions: dict[int, tuple[types.CodeType, tuple[int, int, memoryview]]] = {}
        self.numbered: dict[int, NumberedSubject] = {}
        self.last_ordinal = 0
        self.strong: dict[int, Any] = {}
        self.strong_limit = FIRST_SWEEP

    def description_of(self, code: types.CodeType) -> tuple[int, int, memoryview]:
        """Return hash, kind and first instructions of code, computed at its first call."""
        entry = self.descriptions.get(id(code))  # by address: code of another file may be equal
        if entry is None:
            hash, kind, first_words = self.describe(code)
            description = hash, kind, memoryview(first_words).cast("I")
            # With the code object itself, so that its address is not used again while the entry is here.
            self.descriptions[id(code)] = code, description
            return description
        _, description = entry
        return description

    def sweep_dead(self) -> None:
        """Drop the objects in `strong` that nothing else holds, if twice as many as after the last sweep.

        Calls `on_death` with the ordinal of each.
        """
        if len(self.strong) < self.strong_limit:
            return
        # A copy: a subject that dies may run code that asks for ordinals.
        for address in list(self.strong):
            if sys.getrefcount(self.strong[address]) <= _REFERENCES_OF_DEAD:
                self.strong.pop(address, None)
                numbered_subject = self.numbered.pop(address, None)
                if numbered_subject is not None:
                    self.on_death(numbered_subject.ordinal)
        self.strong_limit = max(FIRST_SWEEP, 2 * len(self.strong))


thread = Thread()
place_state = PlaceState()


def configure(
    describe: Callable[[types.CodeType], tuple[int, int, bytes]],
    on_death: Callable[[int], None],
    adopt: Adopt | None = None,
) -> None:
    """Set the functions of the other rooms that this one calls; drop cached descriptions of code.

    Args:
        describe: Returns hash, kind and first words of a code object.
        on_death: Called with the ordinal of an object that has died.
        adopt: Called with the object that encloses a call, an argument and its ordinal; returns the ordinal
            of the first object in the same slot of the enclosing object, and True if that is final; None for
            no slots.
    """
    place_state.describe = describe
    place_state.on_death = on_death
    place_state.adopt = adopt
    forget_code()


def forget_code() -> None:
    """Drop the cached descriptions of code, whose kinds may have changed."""
    place_state.descriptions.clear()


def add_identity_type(kind: type) -> None:
    """Make arguments of a type distinguish ops."""
    if kind not in place_state.identity_types:
        place_state.identity_types += (kind,)


def set_leaf_type(kind: type, is_leaf: Callable[[Any], bool]) -> None:
    """Set the type of tensors, and the test for leaves, that distinguish ops in a loop outside of modules.

    Args:
        kind: Type of tensors.
        is_leaf: Returns True for a leaf of autodiff that needs a gradient.
    """
    place_state.leaf_type, place_state.is_leaf = kind, is_leaf


def ordinal(subject: Any) -> int:
    """Return the number of an object, in the order of first use; no two objects have the same.

    Objects that lie in one slot after each other are an exception: they get the number of the first.
    An object that cannot be referenced weakly lives until a sweep sees that nothing else holds it.
    """
    address = id(subject)
    if address not in place_state.numbered:
        # Defaults, because the module's globals may be gone when the last subjects die.
        def forget(
            dead_reference: Any,
            state: PlaceState = place_state,
            is_finalizing: Callable[[], bool] = sys.is_finalizing,
        ) -> None:
            """Drop the number of the dead object, and report the death unless Python is ending."""
            numbered_subject = state.numbered.pop(address)
            if not is_finalizing():
                state.on_death(numbered_subject.ordinal)

        reference = None
        try:
            reference = weakref.ref(subject, forget)
        except TypeError:  # the type allows no weak references
            place_state.sweep_dead()
            place_state.strong[address] = subject
        place_state.last_ordinal += 1
        slot_queries = MAX_SLOT_QUERIES if isinstance(subject, place_state.identity_types) else 0
        place_state.numbered[address] = NumberedSubject(place_state.last_ordinal, reference, slot_queries)
    numbered_subject = place_state.numbered[address]
    if numbered_subject.slot_queries_left:
        numbered_subject.update_ordinal_from_slot(subject)
    return numbered_subject.ordinal


def call_sites(region: Region, frame: types.FrameType | None) -> tuple[list[int], list[int]]:
    """Return the call sites from a frame out to a region, and those of the way to the place; innermost first.

    Only at the root is there a way: the sites of the program's frames. The first of these ends the place, so
    it is in both lists.
    """
    place_sites: list[int] = []
    way_sites: list[int] = []
    is_at_root, frames_left = region.hash == ROOT_HASH, WALK_LIMIT
    while frame is not None and frame is not region.entry:
        if len(place_sites) == WALK_LIMIT or len(way_sites) > WAY_LIMIT or frames_left == 0:
            break
        if way_sites:
            frames_left -= 1  # beyond the place, frames that add no site count as well
        hash, kind, first_words = place_state.description_of(frame.f_code)
        # The frame of an enclosing call that no activation saw, as of one that began before the scope.
        if not is_at_root and kind & BOUNDARY:
            break
        if not kind & SKIPPED:
            word = frame.f_lasti // 2  # not the line: `f(x) + f(y)` are two places
            first_word = first_words[word] if word < len(first_words) else word
            site = (hash + (first_word + 1) * SITE_STEP) & MASK
            if not way_sites:
                place_sites.append(site)
            if is_at_root and not kind & FRAMEWORK:
                way_sites.append(site)
        frame = frame.f_back
    # A replay continues the walk of the snapshot.
    if not way_sites:
        place_sites = (place_sites + region.tail)[:WALK_LIMIT]
    return place_sites, (way_sites + region.way)[: WAY_LIMIT + 1]


def mix_leaf(way: int, value: Any) -> int:
    """Return the hash of a way mixed with the ordinal of an argument that is a leaf which needs a gradient.

    Returns the way itself for any other value, and for types that `mix_identities` takes.
    """
    value_type, leaf_type = type(value), place_state.leaf_type
    if leaf_type is None or not issubclass(value_type, leaf_type):
        return way
    if issubclass(value_type, place_state.identity_types):
        return way
    with thread.suspension:
        is_leaf = place_state.is_leaf(value)
    return mix(way, ordinal(value)) if is_leaf else way


def mix_identities(hash: int, value: Any) -> int:
    """Return a hash mixed with the ordinals of an argument, or of a list's elements, of identity types."""
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
        """Call a function as if at the place of the snapshot, with the counts of that moment.

        Args:
            function: Function to call.
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.
        """
        region = self._region.copy(self._region.tail, self._region.way)
        region.entry = sys._getframe(1)
        outer_region, outer_key = thread.top, thread.key
        # No op runs at the snapshot's place, though one may run here, such as a backward op.
        thread.top, thread.key = region, None
        try:
            return function(*args, **kwargs)
        finally:
            thread.top, thread.key = outer_region, outer_key


def snapshot() -> Snapshot:
    """Return a snapshot of the present place, to be replayed."""
    region = thread.region()
    return Snapshot(region.copy(*call_sites(region, sys._getframe(1))))


def reset_root() -> None:
    """Set the counts of repeats outside of enclosing calls to zero, but not within a Suspension."""
    if not thread.suspension._is_owned():  # type: ignore[attr-defined]
        thread.root.forget_counts()


def subjects() -> list[Any]:
    """Return the objects of the enclosing calls, outermost first."""

    def subjects_outwards(region: Region | None) -> Iterator[Any]:
        """Yield the subjects of a region and of those around it."""
        while region is not None:
            if region.subject is not None:
                yield region.subject
            region = region.parent

    return list(subjects_outwards(thread.top))[::-1]
