"""Values that traceable routines read besides their arguments, and copies of graphs that depend on them."""

from __future__ import annotations

import dis
import enum
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from amanda import interceptor

if TYPE_CHECKING:
    from amanda.plan.action import Action

_CONTAINERS = (Mapping, list, tuple, Set, deque)
_FUNCTIONS = (FunctionType, MethodType, partial, property, staticmethod, classmethod, cached_property)
_MISSING = object()


class ReadPlace(NamedTuple):
    """A place that a routine reads: an attribute, global variable, closure cell or container, with its value.

    read: returns the present value of `name` in `holder`.  value: the value when the place was recorded.
    """

    read: Callable[[Any, Any], Any]
    holder: Any
    name: Any
    value: Any

    @property
    def key(self) -> tuple[int, Any]:
        """Return the identity of the place."""
        return id(self.holder), self.name


class Reads:
    """The places that routines read besides their arguments, with their values: attributes, globals, cells.

    The names come from the routines' code, and from functions of the same package that it calls.  A name
    stands for the attribute of this name of every object that the routines reach.  Attributes that routines
    set themselves are left out.  A driver's subclass adds the values of its framework.
    To follow a value is to record the places that it leads to.

    plain_types: types of values that are compared by equality; other values are compared by identity.
    opaque_packages: packages whose objects are not followed.
    implicit_methods: names of methods that expressions call implicitly, such as `__call__`.
    dynamic_types: types whose objects may have attributes that only `getattr` finds.
    names_written: names that the routines set, as far as their code shows.
    """

    plain_types: ClassVar[tuple[type, ...]] = (int, float, complex, bool, str, bytes, type(None), enum.Enum)
    # Their objects lead to all that is in the process.
    opaque_packages: ClassVar[frozenset[str]] = frozenset({"amanda", "numpy"})
    implicit_methods: ClassVar[tuple[str, ...]] = ("__call__", "__getitem__")
    dynamic_types: ClassVar[tuple[type, ...]] = ()

    def __init__(self) -> None:
        # Dicts without values are ordered sets here.
        self._place_by_key: dict[tuple[int, Any], ReadPlace] = {}
        # By id, with the objects, so that no id is given to another object meanwhile.
        self._visited: dict[int, Any] = {}
        self._holders: list[Any] = []  # objects with attributes to follow
        self._names_in_code: dict[str, None] = {}  # of attributes and globals in the code that was followed
        self._names_set_in_code: dict[str, None] = {}  # those of them that the code sets
        self._followed_attributes: set[tuple[int, str]] = set()  # by the holder's id and the name
        self._followed_packages: set[str] = set()  # whose functions, classes and modules are followed
        self._keys_set_by_routines: set[tuple[int, Any]] = set()  # of places
        self.names_written: dict[str, None] = {}

    @classmethod
    def is_same(cls, value: Any, before: Any) -> bool:
        """Return True if two values are the same object, or equal plain values.

        Args:
            value: Present value.
            before: Value at an earlier reading.
        """
        if value is before:
            return True
        # 1, 1.0 and True are equal, but a graph that was traced with one of them computes something else.
        if type(value) is not type(before):
            return False
        if isinstance(value, tuple):
            return len(value) == len(before) and all(map(cls.is_same, value, before))
        return isinstance(value, cls.plain_types) and bool(value == before)

    def follow_routine(self, action: Action) -> None:
        """Record the values that an action's routine reads."""
        # Functions of other packages are taken as they are: to follow these would lead through the whole
        # process.
        home_packages = {_home_package(action.func), _home_package(type(action.tool))}
        self._followed_packages |= home_packages - self.opaque_packages
        self.follow_value(action.func)
        for value in action.kwargs.values():
            self.follow_value(value)
        # What an attribute leads to may add holders and names, so repeat until no attribute is new.
        while new_attributes := self._attributes_to_follow():
            for holder, name in new_attributes:
                self._followed_attributes.add((id(holder), name))
                self._follow_attribute(holder, name)

    @contextmanager
    def record_tracing(self, actions: Iterable[Action]) -> Iterator[None]:
        """Return a context in which routines are traced; record what they read, without what they set."""
        for action in actions:
            self.follow_routine(action)
        # A place that changed before the tracing was not set by it.
        unchanged_places = [place for place in self if self._is_unchanged(place)]
        yield
        self.drop_changed_places(unchanged_places)

    def drop_changed_places(self, places: Iterable[ReadPlace] | None = None) -> None:
        """Drop places whose value has changed since it was read: the traced routines have set them.

        Their names are added to `names_written`, and those of attributes that the routines' code sets; the
        places are not recorded again.

        Args:
            places: Places to look at; None for all.
        """
        for name in self._names_set_in_code:
            attributes = (inspect.getattr_static(holder, name, _MISSING) for holder in self._holders)
            if any(attribute is not _MISSING for attribute in attributes):
                self.names_written[name] = None
        candidates = list(self) if places is None else places
        changed_places = [place for place in candidates if not self._is_unchanged(place)]
        for place in changed_places:
            self.names_written[self.name_of(place)] = None
            self._keys_set_by_routines.add(place.key)
            del self._place_by_key[place.key]

    def name_of(self, place: ReadPlace) -> str:
        """Return the name of a place; for contents of a container the name of the container."""
        if place.name is not None:
            return str(place.name)
        return next((self.name_of(outer) for outer in self if outer.value is place.holder), "a container")

    def are_unchanged(self) -> bool:
        """Return True if all values are unchanged.  This runs at each call of a graph."""
        if not self._place_by_key:
            return True
        with interceptor.Suspension():  # a property may call ops
            for read, holder, name, value in self._place_by_key.values():
                present_value = read(holder, name)
                # Identity first, since this runs at each call and most values are the same objects.
                if present_value is not value and not self.is_same(present_value, value):
                    return False
        return True

    def unfollowed_entries(
        self, traced: Sequence[tuple[Action, Sequence[Any]]], graph: str = "a graph"
    ) -> list[tuple[str, str]]:
        """Return entries for reports of scopes: names that routines set, and tensors no name leads to.

        Args:
            traced: Actions, with the tensors that their routines hold.
            graph: Word for the traced program.

        Returns:
            Pairs of a subject and a reason.
        """
        entries = []
        if self.names_written:
            tools = ", ".join(dict.fromkeys(type(action.tool).__name__ for action, _ in traced))
            reason = f"they set {', '.join(self.names_written)}; {graph} does not"
            entries.append((f"traceable routines of {tools}", reason))
        for action, held_tensors in traced:
            if any(tensor not in self for tensor in held_tensors):
                reason = "it holds a tensor that no name in its code leads to"
                entries.append((f"traceable {action}", f"{reason}: another in its place is not seen"))
        return entries

    def follows_attributes(self, value: Any) -> bool:
        """Return True if attributes of a value are to be followed; a driver's override adds other contents.

        An override calls `follow_value` with a value, or `record_attribute` for an attribute of a value.
        """
        return _home_package(type(value)) not in self.opaque_packages

    def follow_value(self, value: Any) -> None:
        """Follow a value: record the attributes, cells and elements that it leads to.

        Does nothing for plain values, and for functions, classes and modules of other packages.
        """
        if isinstance(value, self.plain_types) or id(value) in self._visited:
            return
        if isinstance(value, FunctionType):
            self.follow_value(getattr(value, "__wrapped__", None))  # the decorator may be of another package
        is_code = isinstance(value, (FunctionType, ModuleType, type))
        if is_code and _home_package(value) not in self._followed_packages:
            return
        self._visited[id(value)] = value
        if isinstance(value, FunctionType):
            self._follow_code(value)
        elif isinstance(value, _FUNCTIONS):
            for part in _functions_and_arguments(value):
                self.follow_value(part)
        elif isinstance(value, _CONTAINERS):
            for element in self._read_and_record(_contents, value, None) or ():
                self.follow_value(element)
        elif isinstance(value, (ModuleType, type)):
            self._holders.append(value)
        elif self.follows_attributes(value):
            self._holders.append(value)
            for name in self.implicit_methods:
                # Statically, since to ask the object may compute, or call ops.
                method = inspect.getattr_static(type(value), name, None)
                method = getattr(method, "__wrapped__", method)  # a driver may have put an `Enclosure` around
                if isinstance(method, FunctionType):
                    self.follow_value(method)

    def record_attribute(self, holder: Any, name: str) -> Any:
        """Record an attribute; return its value, None where there is none or each reading creates another.

        Args:
            holder: Object with the attribute.
            name: Name of the attribute.
        """
        return self._read_and_record(_attribute_or_missing, holder, name)

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._visited

    def __iter__(self) -> Iterator[ReadPlace]:
        return iter(self._place_by_key.values())

    def _is_unchanged(self, place: ReadPlace) -> bool:
        """Return True if a place has the value that was read earlier."""
        return self.is_same(place.read(place.holder, place.name), place.value)

    def _attributes_to_follow(self) -> list[tuple[Any, str]]:
        """Return pairs of an object and a name in the routines' code that have not been followed."""
        return [
            (holder, name)
            for holder in self._holders
            for name in self._names_in_code
            if (id(holder), name) not in self._followed_attributes
        ]

    def _follow_code(self, function: FunctionType) -> None:
        """Follow the globals, closure cells and defaults that a function's code reads; note all its names.

        A name that the code sets is not followed: its value is the routine's own.
        """
        names, names_set = names_in_code(function.__code__)
        self._names_set_in_code.update(dict.fromkeys(names_set))
        for name in names:
            self._names_in_code[name] = None
            if name in function.__globals__ and name not in names_set:
                self.follow_value(self._read_and_record(dict.get, function.__globals__, name))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name not in names_set:
                self.follow_value(self._read_and_record(_cell_contents, cell, name))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.follow_value(default)

    def _follow_attribute(self, holder: Any, name: str) -> None:
        """Follow an attribute of an object, unless routines set it themselves, or its name is `__special__`.

        If the object's class has a function or property there, its code is followed; else the present value
        is recorded and followed, also that of a property of another package.
        """
        is_special = name.startswith("__") and name.endswith("__")
        # A value that the routines set themselves changes at each call: it would forbid every copy.
        if name in self._names_set_in_code or is_special:
            return
        attribute = inspect.getattr_static(holder, name, _MISSING)
        is_in_instance = name in getattr(holder, "__dict__", ())
        is_foreign_property = (
            isinstance(attribute, property) and _home_package(attribute.fget) not in self._followed_packages
        )
        if isinstance(attribute, _FUNCTIONS) and not is_in_instance and not is_foreign_property:
            self.follow_value(attribute)
        elif attribute is not _MISSING or isinstance(holder, self.dynamic_types):
            self.follow_value(self.record_attribute(holder, name))

    def _read_and_record(self, read: Callable[[Any, Any], Any], holder: Any, name: Any) -> Any:
        """Read a place and record it with its value; return the value, None where there is none.

        A place that gives another value at each reading is not recorded, and None is returned; nor is a place
        recorded that the routines set.
        """
        place = ReadPlace(read, holder, name, read(holder, name))
        if not self._is_unchanged(place):  # a second reading gave another value
            return None
        if place.key not in self._keys_set_by_routines:
            self._place_by_key.setdefault(place.key, place)
        return None if place.value is _MISSING else place.value


@lru_cache(maxsize=1024)
def names_in_code(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of attributes and globals in code, and the names that it sets outside of its frame.

    Those of functions defined in the code are among them, and strings that may be the names of attributes.
    """
    names, names_set = list(code.co_names), []
    for instruction in dis.get_instructions(code):
        # The name of an instruction is a verb and what it is about: STORE_ATTR, DELETE_GLOBAL, STORE_DEREF.
        verb, _, variable_kind = instruction.opname.partition("_")
        if verb not in ("STORE", "DELETE"):
            continue
        is_of_enclosing_function = variable_kind == "DEREF" and instruction.argval in code.co_freevars
        if variable_kind in ("ATTR", "GLOBAL") or is_of_enclosing_function:
            names_set.append(instruction.argval)
    # A string constant may be the name that code passes to getattr.
    names += [text for text in code.co_consts if isinstance(text, str) and text.isidentifier()]
    for inner_code in code.co_consts:
        if isinstance(inner_code, CodeType):
            inner_names, inner_names_set = names_in_code(inner_code)
            names += inner_names
            names_set += inner_names_set
    return tuple(names), tuple(names_set)


def _attribute_or_missing(holder: Any, name: Any) -> Any:
    """Return an attribute; `_MISSING` where there is none, or where reading it raises."""
    try:
        return getattr(holder, name, _MISSING)
    except Exception:  # raised by a descriptor
        return _MISSING


def _cell_contents(cell: Any, _: str) -> Any:
    """Return the contents of a closure's cell; `_MISSING` where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return _MISSING


def _contents(container: Any, _: None) -> tuple[Any, ...]:
    """Return the elements of a container; the keys, and after them the values, of a mapping."""
    if isinstance(container, Mapping):
        return (*container.keys(), *container.values())
    return tuple(container)


def _functions_and_arguments(value: Any) -> list[Any]:
    """Return the functions and arguments that a method, property or partial function consists of."""
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, cached_property):
        return [value.func]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    return [value.__func__]


def _home_package(value: Any) -> str:
    """Return the top-level package of a function, class or module, "" where it is unknown.

    For Amanda's tools it is "amanda.tools", for its test suite "amanda.testing".
    """
    module_name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    package, _, path_in_package = str(module_name or "").partition(".")
    subpackage = path_in_package.partition(".")[0]
    # `amanda` itself is opaque, but the options of tools have to be followed.
    has_tools = package == "amanda" and subpackage in ("testing", "tools")
    return f"{package}.{subpackage}" if has_tools else package


CopyT = TypeVar("CopyT")

_MAX_VALUES = 8
"""Number of distinct values after which a guard stops building copies, and number of cached copies."""
_MAX_COPIES = 32
"""Number of copies after which every changed value is volatile: few values, but many combinations."""


class ValueHistory:
    """The values that routines have read at each place for copies of a graph: many make a place volatile.

    Args:
        reads: The driver's class of reads.
        limit: Number of distinct values after which a place is volatile; graphs are not rebuilt for a
            volatile place.
    """

    def __init__(self, reads: type[Reads], limit: int = _MAX_VALUES) -> None:
        self.limit = limit
        self.reads_type = reads
        self._values_by_place: dict[tuple[int, Any], list[Any]] = {}
        self._holders: dict[int, Any] = {}  # keeps their ids from being reused

    def record(self, reads: Reads) -> None:
        """Record the values that the routines of a graph have read, at most `limit` at each place.

        The objects that hold them are kept alive.
        """
        for place in reads:
            self._holders[id(place.holder)] = place.holder
            values = self._values_by_place.setdefault(place.key, [])
            is_new = not any(reads.is_same(place.value, earlier_value) for earlier_value in values)
            if is_new and len(values) < self.limit:
                values.append(place.value)

    def volatile_name(self, action: Action) -> str:
        """Return the name of a volatile value that an action reads; "" where there is none."""
        volatile_keys = {key for key, values in self._values_by_place.items() if len(values) >= self.limit}
        if not volatile_keys:
            return ""
        reads_of_action = self.reads_type()
        reads_of_action.follow_routine(action)
        names = (reads_of_action.name_of(place) for place in reads_of_action if place.key in volatile_keys)
        return next(names, "")


class GuardedCopies(Generic[CopyT]):
    """Copies of one graph: one for each set of values that its traceable routines have read.

    history: the values of all copies.
    """

    def __init__(self, reads: type[Reads]) -> None:
        self.history = ValueHistory(reads)
        self._copy_count = 0
        self._entries: tuple[tuple[Reads, CopyT], ...] = ()
        self._last_entry: tuple[Reads, CopyT] | None = None

    def find(self) -> CopyT | None:
        """Return the copy for the present values; None where there is none yet."""
        # The last copy is tried first: values rarely change from call to call.
        last_entry = self._last_entry
        entries = self._entries if last_entry is None else (last_entry, *self._entries)
        for entry in entries:
            reads, copy = entry
            if reads.are_unchanged():
                self._last_entry = entry
                return copy
        return None

    def add(self, copy: CopyT, reads: Reads) -> None:
        """Store a copy with the values that its routines have read; drop the oldest copy of too many.

        After many copies two values make a place volatile.  Call this under the driver's lock.

        Args:
            copy: Copy of the graph.
            reads: Values that its routines have read.
        """
        self.history.record(reads)
        # A tuple is replaced as a whole, so that `find` needs no lock.
        self._entries = ((reads, copy), *self._entries)[:_MAX_VALUES]
        self._copy_count += 1
        if self._copy_count == _MAX_COPIES:
            # From now on every place that has had two values is volatile.
            self.history.limit = 2
