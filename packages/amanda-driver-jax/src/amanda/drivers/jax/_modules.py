"""Models of Flax, Equinox and Keras: calls of modules are regions of the program, with paths in their models.

A weight is a slot of a model, or an argument of a jitted function: arrays come and go in it.
"""

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from itertools import count
from typing import Any

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Attributes, State, TensorMap, digest
from amanda.interceptor import Enclosure
from amanda.plan import spread
from jax._src import core

from ._primitives import ORIGINALS
from ._stacks import numbers_of, pass_on, slices_of
from ._traces import argument_name, argument_of, is_within_jit

BASES = (
    ("flax.nnx", "Module"), ("equinox", "Module"), ("flax.linen", "Module"),
    ("keras.src.layers.layer", "Layer"),
)  # fmt: skip
METHODS = frozenset({"__call__", "stateless_call"})
"""Methods that are calls of a module: Keras trains by the second one, which does not call the first."""


class Place:
    """A module that is called, by what stays of it: JAX makes modules anew in each function that it traces.

    name: path in the model.  root: of a model, its class.  number: of a model that JAX makes, how many of its
    class are called before it; None of one that the program made.  module: the one that is called now.
    """

    __slots__ = ("__weakref__", "module", "name", "number", "root")

    def __init__(self, name: str, root: str = "", number: int | None = None) -> None:
        self.name, self.root, self.number = name, root, number
        self.module: Any = None


class Places:
    """The places of modules: one for each model, and for each path in it."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
        self._kinds: dict[tuple[type, int], Place] = {}
        self._met: weakref.WeakKeyDictionary[Any, dict[type, list[Any]]] = weakref.WeakKeyDictionary()
        self._inner: weakref.WeakKeyDictionary[Place, dict[str, Place]] = weakref.WeakKeyDictionary()

    def of(self, module: Any, outer: Place | None) -> Place:
        """Return the place of a module in that whose call encloses its own."""
        if outer is None:
            return self._of_model(module)
        name = _name_within(outer.module, module) or f"({type(module).__name__})"
        places = self._inner.setdefault(outer, {})
        return places.setdefault(name, Place(name))

    def _of_model(self, module: Any) -> Place:
        kind = type(module)
        root = f"{kind.__module__}.{kind.__qualname__}"
        if vars(object)["__hash__"] is not getattr(kind, "__hash__", None) or _is_made_anew(module):
            number, met = self._number(kind, module), _met()
            of_program = (one for one in met if one.root == root and met[one] == number)
            return next(of_program, None) or self._kinds.setdefault((kind, number), Place("", root, number))
        place = self._models.setdefault(module, Place("", root))
        number_of(place)
        return place

    def _number(self, kind: type, module: Any) -> int:
        """Return how many models of a class were called before this one in the function that is traced.

        They are told apart by the first of their arrays that is an argument of the function.
        """
        first = next(filter(None, (_argument(one) for _, one in held_arrays(module))), None)
        trace = core.trace_ctx.trace if first is None or not is_within_jit() else first[1]
        if first is None or trace is core.eval_trace:
            return 0
        met = self._met.setdefault(trace, {}).setdefault(kind, [])
        if not any(one is first[0] for one in met):
            met.append(first[0])
        return next(i for i, one in enumerate(met) if one is first[0])


_MET: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Place, int]] = weakref.WeakKeyDictionary()
"""Numbers of the models that the program made, for each tool: JAX makes others of them, in the same order."""


def _met() -> weakref.WeakKeyDictionary[Place, int]:
    """Return the numbers of the models that the innermost tool has met."""
    stack = State.current().stack
    assert stack is not None
    return _MET.setdefault(stack.applied[-1], weakref.WeakKeyDictionary())


def number_of(place: Place) -> int:
    """Return the number of a model among those of its class: that of one which the program made stays."""
    if place.number is not None:
        return place.number
    met = _met()
    if place not in met:
        taken = {met[one] for one in met if one.root == place.root}
        met[place] = next(i for i in count() if i not in taken)
    return met[place]


def _argument(value: Any) -> tuple[Any, Any] | None:
    """Return what an array is told by, and its trace, if it is an argument of the function that is traced."""
    value = argument_of(value)
    if isinstance(value, jax.core.Tracer):
        return (value.val, value._trace) if argument_name(value) is not None else None
    return (value, core.trace_ctx.trace) if isinstance(value, jax.Array) else None


def _is_made_anew(module: Any) -> bool:
    """Return True for a module that holds symbols: a transformation has made it, for this call alone."""
    return is_within_jit() or any(isinstance(one, jax.core.Tracer) for _, one in held_arrays(module))


def held_arrays(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield each array that a model holds, or the symbol of one, with its path: "layers.0.kernel"."""
    if hasattr(model, "trainable_variables"):  # Keras has paths of its own
        yield from ((one.path.replace("/", "."), one.value) for one in model.weights)
        return
    if getattr(model, "scope", None) is not None:  # Linen keeps arrays outside of modules
        model = model.variables
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        yield _spelt(path).removesuffix(".value"), leaf


def _spelt(path: Any) -> str:
    return dotted(jax.tree_util.keystr(path)).strip(".")


def dotted(name: str) -> str:
    """Spell JAX's name of a leaf with dots: "params['dense']['kernel']" is "params.dense.kernel"."""
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", name)


def enclose_modules(attributes: Attributes, places: Places) -> None:
    """Make each call of a module a region: the ops in it belong to the module."""
    call = Enclosure(_called, _place_within)

    def enclose(kind: type) -> None:
        if kind.__module__.startswith("equinox._"):  # functions under filter_jit and its like, bound methods
            return
        for name in METHODS & vars(kind).keys():
            attributes.set(kind, name, _enclosed(vars(kind)[name], places, call))

    def enclose_base(module: str, name: str) -> None:
        if module.startswith("keras.") and not _keras_runs_on_jax():
            return
        base = getattr(sys.modules[module], name)
        for kind in (base, *_heirs(base)):
            enclose(kind)
        attributes.set(base, "__init_subclass__", _followed(base, enclose))

    for module, name in BASES:
        attributes.when_imported(module, partial(enclose_base, module, name))


def _keras_runs_on_jax() -> bool:
    name: str = sys.modules["keras.src.backend.config"].backend()
    return name == "jax"


def _followed(base: Any, enclose: Callable[[type], None]) -> Any:
    """Return `__init_subclass__` of a base, which encloses the classes that the program makes from now on."""
    before: Any = vars(base).get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        if before is None:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            before.__get__(None, cls)(**kwargs)
        enclose(cls)

    return classmethod(init_subclass)


def _enclosed(original: Any, places: Places, call: Any) -> Any:
    if not callable(original):
        return original

    @wraps(original)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if interceptor.active() is None:
            return original(self, *args, **kwargs)
        outer = places_among(interceptor.subjects())
        if outer and outer[-1].module is self:  # it calls the method that it inherits
            return original(self, *args, **kwargs)
        place = places.of(self, outer[-1] if outer else None)
        before, place.module = place.module, self
        try:
            return call(place, original, self, args, kwargs)
        finally:
            place.module = before

    return called


def _called(place: Place, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
    return original(module, *args, **kwargs)


def _place_within(outer: Place, inner: Place) -> tuple[int, bool]:
    return digest(inner.name), True


def places_among(subjects: Sequence[Any]) -> list[Place]:
    """Return the enclosing modules of JAX; modules of other frameworks may enclose these."""
    return [one for one in subjects if type(one) is Place]


def path(subjects: Sequence[Place]) -> str:
    """Return the path of the last module in the first: "layers.0.conv"."""
    return ".".join(one.name for one in subjects[1:] if one.name)


def _heirs(kind: type) -> Iterator[type]:
    heirs: list[type] = type.__subclasses__(kind)
    for heir in heirs:
        yield heir
        yield from _heirs(heir)


def _name_within(outer: Any, inner: Any) -> str:
    """Return the path of a module among what another holds; "" where it is not held."""
    name = getattr(inner, "name", None)
    if isinstance(name, str) and (
        getattr(inner, "scope", None) is not None or hasattr(inner, "trainable_variables")
    ):  # Linen's and Keras' modules know their names
        return name
    leaves, _ = jax.tree_util.tree_flatten_with_path(outer, is_leaf=lambda one: one is inner)
    return next((_spelt(path) for path, one in leaves if one is inner), "")


CONVERSIONS = frozenset({"convert_element_type", "copy", "copy_p"})
"""Primitives whose result is the same weight, in another element type."""


class Slot:
    """The place of a weight in a model, or in the arguments of a function: it stays from call to call.

    root: class of the model, with its number if it is not the first of it; "" for arguments.
    path: "layers.0.kernel", "params.dense.kernel".
    framework: for tools, which ask it of tensors.
    """

    __slots__ = ("__weakref__", "path", "root")
    framework = "jax"

    def __init__(self, root: str, path: str) -> None:
        self.root, self.path = root, path

    def __repr__(self) -> str:
        return f"<weight {self.path}{' of ' * bool(self.root)}{self.root}>"


@cache
def slot(root: str, path: str) -> Slot:
    """Return the slot of a path; there is one object for each."""
    return Slot(root, path)


class Stack(Slot):
    """A slot of several weights in one array: each slice of it is a weight.

    extents, axes: of the array, along which it is sliced, the outermost first.
    """

    __slots__ = ("axes", "extents")

    def __init__(self, whole: Slot, extents: tuple[int, ...], axes: tuple[int, ...]) -> None:
        super().__init__(whole.root, whole.path)
        self.extents, self.axes = extents, axes

    def parts(self) -> "list[Part]":
        """Return the slots of all slices."""
        return [part_of(self, numbers) for numbers in np.ndindex(self.extents)]

    def current(self) -> "Part | None":
        """Return the slot of the slice that is read by the op whose routine runs; None outside of that."""
        numbers = numbers_of(self)
        return None if numbers is None else part_of(self, numbers)


class Part(Slot):
    """The slot of one slice of a stack: "layers.kernel[0]"."""

    __slots__ = ("numbers", "stack")

    def __init__(self, stack: Stack, numbers: tuple[int, ...]) -> None:
        super().__init__(stack.root, stack.path + "".join(f"[{one}]" for one in numbers))
        self.stack, self.numbers = stack, numbers

    def place(self) -> tuple[Any, ...]:
        """Return the index of the slice in the array."""
        index: list[Any] = []
        for number, axis in zip(self.numbers, self.stack.axes, strict=True):
            free = [i for i, one in enumerate(index) if isinstance(one, slice)]
            while len(free) <= axis:
                free.append(len(index))
                index.append(slice(None))
            index[free[axis]] = number
        return tuple(index)


@cache
def stack_of(whole: Slot, extents: tuple[int, ...], axes: tuple[int, ...]) -> Stack:
    """Return the stack in a slot; there is one object for each."""
    return Stack(whole, extents, axes)


@cache
def part_of(stack: Stack, numbers: tuple[int, ...]) -> Part:
    """Return the slot of a slice; there is one object for each."""
    return Part(stack, numbers)


_CONVERTED: TensorMap[Slot] = TensorMap()
"""Weights in another element type, by the arrays or symbols that have it."""


def follow_conversion(value: Any, made: Any, subjects: Sequence[Place]) -> None:
    """Record that an array was made of another, which may be a weight."""
    found = variable_of(value, subjects)
    if found is not None:
        _CONVERTED[ORIGINALS.of(made)] = found
        pass_on(made, value)


def variable_of(value: Any, subjects: Sequence[Place]) -> Slot | None:
    """Return the slot of an array that the model holds which is called; None for others.

    Outside of models it is the slot of a leaf of an argument.  That of an array of which one slice is read at
    each round, or for each row, is a stack.
    """
    own = _whole_slot(value, subjects)
    array, parts = slices_of(value)
    if not parts or isinstance(own, Stack):
        return own
    whole = _whole_slot(array, subjects) or own
    if whole is None or isinstance(whole, Stack):
        return whole
    return stack_of(whole, tuple(one.size for one in parts), tuple(one.axis for one in parts))


def stacks_of(values: Sequence[Any], subjects: Sequence[Place]) -> dict[Stack, list[Any]]:
    """Return the stacks among what an op reads, with the symbols of the numbers of the slices."""
    found = {}
    for value in spread(values):
        _, parts = slices_of(value)
        stack = variable_of(value, subjects) if parts else None
        if isinstance(stack, Stack):
            found[stack] = [one.number for one in parts]
    return found


def _whole_slot(value: Any, subjects: Sequence[Place]) -> Slot | None:
    value = ORIGINALS.of(value)
    found = _CONVERTED.get(value)
    if found is not None:
        return found
    path, argument = _path(value, subjects), dotted(argument_name(value) or "")
    if path is not None:
        root, number = subjects[0].root, number_of(subjects[0])
        return slot(f"{root} {number}" if number else root, path)
    if subjects or "." not in argument:  # an argument that is one array may be anything
        return None
    return slot("", argument)


def _path(array: Any, subjects: Sequence[Place]) -> str | None:
    model = subjects[0].module if subjects else None
    if model is None or not isinstance(array, (jax.Array, jax.core.Tracer)):
        return None
    return next((path for path, leaf in held_arrays(model) if ORIGINALS.of(leaf) is array), None)
