"""Modules of Flax, Equinox and Keras: their places in models, their calls around ops, and weights' slots.

A weight is a slot of a model, or an argument of a jitted function: arrays come and go in it.
"""

import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import cache, partial, wraps
from itertools import count
from typing import Any

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import (
    Patches,
    State,
    TreeSlot,
    TreeSlots,
    digest,
    path_among,
    path_of_call,
    type_as_path,
)
from amanda.interceptor import Enclosure
from amanda.plan import spread
from jax._src import core

from ._primitives import ORIGINALS
from ._stacks import copy_slice, slice_numbers, slices_of
from ._traces import argument_name, is_within_jit, outermost_value

BASES = (
    ("flax.nnx", "Module"), ("equinox", "Module"), ("flax.linen", "Module"),
    ("keras.src.layers.layer", "Layer"),
)  # fmt: skip
METHODS = frozenset({"__call__", "stateless_call"})
"""Methods that are calls of a module: Keras trains by the second one, which does not call the first."""


class ModulePlace:
    """Lasting identity of a module that is called: JAX makes new modules in each function that it traces.

    name: path in the model.  root: class of a model.  number: of a model that JAX makes, how many models of
    its class are called before it; None for a model that the program made.  module: is called now.
    """

    __slots__ = ("__weakref__", "module", "name", "number", "root")

    def __init__(self, name: str, root: str = "", number: int | None = None) -> None:
        self.name, self.root, self.number = name, root, number
        self.module: Any = None


class ModulePlaces:
    """The places of modules: one for each model, and for each path in it.

    A model that JAX made for a trace has the place of the program's model that came at the same number.
    """

    def __init__(self) -> None:
        self._place_by_model: weakref.WeakKeyDictionary[Any, ModulePlace] = weakref.WeakKeyDictionary()
        self._place_by_number: dict[tuple[type, int], ModulePlace] = {}
        # By trace and class: the array by which a model is known, in the order of the models' first calls.
        self._first_arrays: weakref.WeakKeyDictionary[Any, dict[type, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._places_within: weakref.WeakKeyDictionary[ModulePlace, dict[str, ModulePlace]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, module: Any, outer: ModulePlace | None) -> ModulePlace:
        """Return the place of a module in `outer`, whose call encloses its call; None there for a model."""
        if outer is None:
            return self._of_model(module)
        name = _name_within(outer.module, module) or type_as_path(module)
        places = self._places_within.setdefault(outer, {})
        return places.setdefault(name, ModulePlace(name))

    def _of_model(self, module: Any) -> ModulePlace:
        """Return the place of a model; JAX's copies of a model have the place of the program's model.

        A model of the program gets its number at its first call.
        """
        kind = type(module)
        root = f"{kind.__module__}.{kind.__qualname__}"
        hashes_by_identity = vars(object)["__hash__"] is getattr(kind, "__hash__", None)
        if hashes_by_identity and not _is_made_by_jax(module):
            place = self._place_by_model.setdefault(module, ModulePlace("", root))
            model_number(place)  # numbered at its first call, in the order in which JAX's copies come
            return place
        # A module that hashes by value, or that JAX made, is not a lasting key: its class and number are.
        number, numbers = self._number_in_trace(kind, module), _model_numbers()
        for place in numbers:
            if place.root == root and numbers[place] == number:
                return place  # of the program's model
        return self._place_by_number.setdefault((kind, number), ModulePlace("", root, number))

    def _number_in_trace(self, kind: type, module: Any) -> int:
        """Return how many models of a class were called before this one in the function that is traced.

        Models differ in the first of their arrays that is an argument of the function; that of a new model
        is recorded. 0 without such an array, and where nothing is traced.
        """
        arguments = (_argument_variable(array) for _, array in held_arrays(module))
        first_argument = next((argument for argument in arguments if argument is not None), None)
        if first_argument is None:
            return 0
        first_array, trace = first_argument
        if not is_within_jit():
            trace = core.trace_ctx.trace
        if trace is core.eval_trace:
            return 0
        # By trace, since each trace has symbols of its own, and JAX makes the copies of models anew in each.
        first_arrays = self._first_arrays.setdefault(trace, {}).setdefault(kind, [])
        for number, array in enumerate(first_arrays):
            if array is first_array:
                return number
        first_arrays.append(first_array)
        return len(first_arrays) - 1


_NUMBERS_BY_TOOL: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[ModulePlace, int]] = (
    weakref.WeakKeyDictionary()
)
"""Numbers of the program's models, for each tool; JAX makes copies of the models in the same order."""


def _model_numbers() -> weakref.WeakKeyDictionary[ModulePlace, int]:
    """Return the numbers of the models that the innermost tool has seen."""
    stack = State.current().stack
    assert stack is not None
    return _NUMBERS_BY_TOOL.setdefault(stack.applied[-1], weakref.WeakKeyDictionary())


def model_number(place: ModulePlace) -> int:
    """Return the number of a model among those of its class; a model without one gets the first free one."""
    if place.number is not None:
        return place.number
    numbers = _model_numbers()
    if place not in numbers:
        used_numbers = {numbers[other_place] for other_place in numbers if other_place.root == place.root}
        numbers[place] = next(number for number in count() if number not in used_numbers)
    return numbers[place]


def _argument_variable(value: Any) -> tuple[Any, Any] | None:
    """Return variable and trace of a symbol that is an argument, or an array and the trace; else None."""
    value = outermost_value(value)
    if isinstance(value, jax.core.Tracer):
        return (value.val, value._trace) if argument_name(value) is not None else None
    return (value, core.trace_ctx.trace) if isinstance(value, jax.Array) else None


def _is_made_by_jax(module: Any) -> bool:
    """Return True for a module that holds symbols, which a transformation has made for this call alone."""
    return is_within_jit() or any(isinstance(array, jax.core.Tracer) for _, array in held_arrays(module))


def held_arrays(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield each array, or symbol of an array, of a model with its path: "layers.0.kernel"."""
    if hasattr(model, "trainable_variables"):  # Keras has paths of its own
        yield from ((variable.path.replace("/", "."), variable.value) for variable in model.weights)
        return
    if getattr(model, "scope", None) is not None:  # Linen keeps arrays outside of modules
        model = model.variables
    # Modules of nnx and Equinox, and variables of Linen, are pytrees; nnx' paths end with `.value`.
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        yield _dotted_path(path).removesuffix(".value"), leaf


def _dotted_path(path: Any) -> str:
    return dotted(jax.tree_util.keystr(path)).strip(".")


def dotted(name: str) -> str:
    """Spell JAX's name of a leaf with dots: "params['dense']['kernel']" is "params.dense.kernel"."""
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", name)


def enclose_modules(patches: Patches, places: ModulePlaces) -> None:
    """Patch the classes of modules so that each call is a region: the ops in it belong to the module."""
    call_in_region = Enclosure(_call_method, _hash_in_caller)

    def patch_class(kind: type) -> None:
        """Make the calls of a class's own methods regions; leave Equinox' wrappers of functions alone."""
        if kind.__module__.startswith("equinox._"):  # functions under filter_jit and its like, bound methods
            return
        for name in METHODS & vars(kind).keys():
            patches.set(kind, name, _enclose_method(vars(kind)[name], places, call_in_region))

    def patch_base(module: str, name: str) -> None:
        """Patch a base with its present and future subclasses; leave Keras alone on other backends."""
        if module.startswith("keras.") and not _is_keras_on_jax():
            return
        base = getattr(sys.modules[module], name)
        for kind in (base, *_all_subclasses(base)):
            patch_class(kind)
        patches.on_new_subclass(base, patch_class)

    for module, name in BASES:
        patches.when_imported(module, partial(patch_base, module, name))


def _is_keras_on_jax() -> bool:
    name: str = sys.modules["keras.src.backend.config"].backend()
    return name == "jax"


def _enclose_method(original: Any, places: ModulePlaces, call_in_region: Any) -> Any:
    """Wrap a method so that its calls are regions of the module's place; an inherited call within is none."""
    if not callable(original):
        return original

    @wraps(original)
    def run_in_region(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method in a region of its module's place, which refers to the module meanwhile."""
        if interceptor.active() is None:
            return original(self, *args, **kwargs)
        outer_places = places_among(interceptor.subjects())
        if outer_places and outer_places[-1].module is self:  # it calls the method that it inherits
            return original(self, *args, **kwargs)
        place = places.of(self, outer_places[-1] if outer_places else None)
        # Set back at the end: a module may be called within itself, or be a copy for another trace.
        outer_module, place.module = place.module, self
        try:
            return call_in_region(place, original, self, args, kwargs)
        finally:
            place.module = outer_module

    return run_in_region


def _call_method(place: ModulePlace, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
    return original(module, *args, **kwargs)


def _hash_in_caller(outer: ModulePlace, inner: ModulePlace) -> tuple[int, bool]:
    return digest(inner.name), True


def places_among(subjects: Sequence[Any]) -> list[ModulePlace]:
    """Return the enclosing modules of JAX; modules of other frameworks may enclose these."""
    return [subject for subject in subjects if type(subject) is ModulePlace]


def module_path(subjects: Sequence[ModulePlace]) -> str:
    """Return the path of the last module in the first: "layers.0.conv"."""
    return path_of_call(subjects, lambda outer, inner: inner.name)


def _all_subclasses(kind: type) -> Iterator[type]:
    """Yield the subclasses of a class at any depth; a class twice where two paths lead to it."""
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        yield subclass
        yield from _all_subclasses(subclass)


def _name_within(outer: Any, inner: Any) -> str:
    """Return the path of a module in another module; "" if the other module does not hold it."""
    name = getattr(inner, "name", None)
    is_linen_module = getattr(inner, "scope", None) is not None
    # Modules of Linen and Keras know their names.
    if isinstance(name, str) and (is_linen_module or hasattr(inner, "trainable_variables")):
        return name
    leaves, _ = jax.tree_util.tree_flatten_with_path(outer, is_leaf=lambda leaf: leaf is inner)
    return path_among(((_dotted_path(path), leaf) for path, leaf in leaves), inner)


CONVERSIONS = frozenset({"convert_element_type", "copy", "copy_p"})
"""Primitives whose result is the same weight, in another element type."""


_SLOTS = TreeSlots("jax")
"""Slots of weights, also by arrays or symbols into which a weight is converted.

Their root is the class of the model, with its number unless it is the first; "" for arguments of a function.
"""


class WeightStack(TreeSlot):
    """A slot with several weights in one array: each slice of the array is a weight.

    axes: of the array, along which it is sliced, the outermost first.  extents: of these axes.
    """

    __slots__ = ("axes", "extents")

    def __init__(self, whole: TreeSlot, extents: tuple[int, ...], axes: tuple[int, ...]) -> None:
        super().__init__(whole.framework, whole.root, whole.path)
        self.extents, self.axes = extents, axes

    def parts(self) -> "list[WeightSlice]":
        """Return the slots of all slices."""
        return [part_of(self, numbers) for numbers in np.ndindex(self.extents)]

    def current(self) -> "WeightSlice | None":
        """Return the slot of the slice that the op reads whose routine runs; None outside of routines."""
        numbers = slice_numbers(self)
        return None if numbers is None else part_of(self, numbers)


class WeightSlice(TreeSlot):
    """The slot of one slice of a stack: "layers.kernel[0]"."""

    __slots__ = ("numbers", "stack")

    def __init__(self, stack: WeightStack, numbers: tuple[int, ...]) -> None:
        path = stack.path + "".join(f"[{number}]" for number in numbers)
        super().__init__(stack.framework, stack.root, path)
        self.stack, self.numbers = stack, numbers

    def place(self) -> tuple[Any, ...]:
        """Return the index of the slice in the array, such as (0, :, 2)."""
        index: list[Any] = []
        for number, axis in zip(self.numbers, self.stack.axes, strict=True):
            # An axis counts among those that the slices before have left whole, not those of the array.
            whole_axes = [i for i, entry in enumerate(index) if isinstance(entry, slice)]
            while len(whole_axes) <= axis:
                whole_axes.append(len(index))
                index.append(slice(None))
            index[whole_axes[axis]] = number
        return tuple(index)


@cache
def stack_of(whole: TreeSlot, extents: tuple[int, ...], axes: tuple[int, ...]) -> WeightStack:
    """Return the stack in a slot; there is one object for each."""
    return WeightStack(whole, extents, axes)


@cache
def part_of(stack: WeightStack, numbers: tuple[int, ...]) -> WeightSlice:
    """Return the slot of a slice; there is one object for each."""
    return WeightSlice(stack, numbers)


def record_conversion(value: Any, result: Any, subjects: Sequence[ModulePlace]) -> None:
    """Record slot and slice of a value that is a weight for its conversion to another element type."""
    slot = variable_of(value, subjects)
    if slot is not None:
        _SLOTS[ORIGINALS.of(result)] = slot
        copy_slice(result, value)


def variable_of(value: Any, subjects: Sequence[ModulePlace]) -> TreeSlot | None:
    """Return the slot of an array of the model that is called; None for other arrays.

    Outside of models, leaves of a function's arguments have slots.  An array of which a scan reads a slice
    at each round, or a mapped function a slice for each row, has a stack as its slot.
    """
    value_slot = _slot_of_whole(value, subjects)
    array, slices = slices_of(value)
    if not slices or isinstance(value_slot, WeightStack):
        return value_slot
    array_slot = _slot_of_whole(array, subjects) or value_slot
    if array_slot is None or isinstance(array_slot, WeightStack):
        return array_slot
    return stack_of(
        array_slot,
        tuple(array_slice.size for array_slice in slices),
        tuple(array_slice.axis for array_slice in slices),
    )


def stacks_of(values: Sequence[Any], subjects: Sequence[ModulePlace]) -> dict[WeightStack, list[Any]]:
    """Return the stacks of which an op reads slices, each with symbols of the slice's numbers."""
    numbers_by_stack = {}
    for value in spread(values):
        _, slices = slices_of(value)
        stack = variable_of(value, subjects) if slices else None
        if isinstance(stack, WeightStack):
            numbers_by_stack[stack] = [array_slice.number for array_slice in slices]
    return numbers_by_stack


def _slot_of_whole(value: Any, subjects: Sequence[ModulePlace]) -> TreeSlot | None:
    """Return the slot that an array fills, or filled before a conversion, whatever it is a slice of."""
    value = ORIGINALS.of(value)
    converted_slot = _SLOTS.get(value)
    if converted_slot is not None:
        return converted_slot
    path, argument = _path_in_model(value, subjects), dotted(argument_name(value) or "")
    if path:
        root, number = subjects[0].root, model_number(subjects[0])
        return _SLOTS.at(f"{root} {number}" if number else root, path)
    # Only leaves of trees have dots: an argument that is one array may be anything.
    if subjects or "." not in argument:
        return None
    return _SLOTS.at("", argument)


def _path_in_model(array: Any, subjects: Sequence[ModulePlace]) -> str:
    """Return the path of an array in the outermost module that is called; "" if it is not in there."""
    model = subjects[0].module if subjects else None
    if model is None or not isinstance(array, (jax.Array, jax.core.Tracer)):
        return ""
    return path_among(((path, ORIGINALS.of(leaf)) for path, leaf in held_arrays(model)), array)
