"""A weight of the model: the parameter, or its part, that ops read; its state, and its row in a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import amanda
from amanda.errors import AmandaError, did_you_mean
from amanda.tools.axes import canonical, canonical_extents, restored
from amanda.tools.kit import Samples, tensors_of
from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.results import Column, Result, count_of, not_met, shortened
from amanda.tools.select import as_remarks
from amanda.tools.weights._parameters import ParameterStore, axes_in_memory_order

if TYPE_CHECKING:
    from amanda.tools.weights._tool import WeightTool


Array = Any
"""An array of NumPy, or a tensor of PyTorch."""
Present = Callable[[], Any]
"""Returns the present value of a weight."""

NEVER = -1
"""`Weight.updated` as long as its state is not made."""


class WeightError(AmandaError, ValueError, module="amanda.tools.weights"):
    """A weight, a model or an option that a tool which changes weights cannot serve."""


def why_unsupported(context: amanda.OpContext, value: Any) -> str | None:
    """Return why a value cannot be a weight of the tool; None if it can."""
    extents = context["shape"](value)
    if extents is None or None in extents or len(extents) < 2:
        return f"its shape is {extents}"
    if 0 in extents:
        return "it has no elements"
    if not str(context["dtype"](value)).startswith(("float", "bfloat")):
        return f"its type is {context['dtype'](value)}"
    if context.is_static() and not _is_in_file(context, context["weight_index"]):
        return "it is computed when the model runs"
    return None


def _is_in_file(context: amanda.OpContext, index: int) -> bool:
    """Return True if an input of an op of a file is a constant."""
    try:
        return context.get_value(index) is not context.get_inputs()[index]
    except AmandaError:
        return False


class WeightView:
    """The weight that an op reads through a transform, or another form of a parameter that holds weights."""

    def __init__(self) -> None:
        self._tensors: dict[Any, dict[str, Any]] = {}  # casts of state by name, see `tensors_like`

    @property
    def is_ready(self) -> bool:
        """True once there is state by which the value is transformed."""
        raise NotImplementedError

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Return state by name; elementwise state has the shape of the value that is read."""
        raise NotImplementedError

    def numbers(self, names: Iterable[str]) -> dict[str, Any]:
        """Return state by name, as `arrays`, in arrays of NumPy."""
        return {name: tensors_of(array).to_numpy(array) for name, array in self.arrays(names).items()}

    def whole_weights(self, value: Any) -> Iterator[tuple[Weight, Present]]:
        """Yield the weights that the form has as a whole, each with a function that gives its value."""
        raise NotImplementedError

    def read_by(self, tool: WeightTool[Any], value: Any) -> Any:
        """Call `on_read` for each weight within; return what the op reads instead, None for no change.

        Args:
            tool: Tool that changes the weights.
            value: The value that the op reads.
        """
        samples = tensors_of(value).samples(value)
        if samples is not None:
            return self._read_wrapped(tool, value, samples)
        for weight, present in self.whole_weights(value):
            tool.on_read(weight, present)
        return self.transformed(tool, value) if self.is_ready else None

    def _read_wrapped(self, tool: WeightTool[Any], value: Any, samples: Samples) -> Any:
        """Do as `read_by` with a value that a function transform has wrapped: a weight of all samples.

        What a batch has in the place of the weight, such as the weights that each task of a vmap has adapted,
        is transformed alike, and changes no state.
        """
        # State that is computed within a transform would be of this call alone.
        with samples.outside():
            if not samples.sizes:  # no batch: the samples share the weight
                for weight, present in self.whole_weights(samples.data):
                    tool.on_read(weight, present)
            state = self.tensors_like(samples.first, tool.state_names) if self.is_ready else None
        return None if state is None else self._transform(tool, value, state)

    def _transform(self, tool: WeightTool[Any], value: Any, state: Mapping[str, Any]) -> Any:
        """Return what `transform` of a tool returns for a value and state; None for no change."""
        return tool.transform(value, **state)

    def gradients(self, gradient: Any) -> Iterator[tuple[Weight, Any]]:
        """Yield the weights, each with its part of the gradient of the value; nothing of selected rows."""
        return iter(())

    def transformed(self, tool: WeightTool[Any], value: Any) -> Any:
        """Return what the op reads instead of a value; None for no change.

        Args:
            tool: Tool that changes the weights.
            value: The value that the op reads.
        """
        return self._transform(tool, value, self.tensors_like(value, tool.state_names))

    def transformed_gradient(self, tool: WeightTool[Any], gradient: Any) -> Any:
        """Return the gradient of the value; None for no change.

        Args:
            tool: Tool that changes the weights.
            gradient: Gradient of the transformed value.
        """
        assert tool.transform_gradient is not None
        return tool.transform_gradient(gradient, **self.tensors_like(gradient, tool.state_names))

    def tensors_like(self, value: Any, names: Iterable[str]) -> Mapping[str, Any]:
        """Return state by name, cast for a value, and cached until it changes.

        Args:
            value: Tensor whose element type and device the state gets.
            names: Names of the state.
        """
        tensors, names = tensors_of(value), tuple(names)
        # Element type and device: mixed precision and several devices read one weight in several forms.
        key = tensors, names, *tensors.kind(value)
        state = self._tensors.get(key)
        if state is None:
            state = {name: tensors.cast(array, value) for name, array in self.arrays(names).items()}
            self._tensors[key] = state
        return state


class Weight(WeightView):
    """A weight that one or more ops read.

    path: of the parameter in the model, as the model is trained: "layer1.0.conv1.weight"; else the name that
    the framework gave it, "sequential/dense/kernel"; "" for a weight that is computed, and without a name.
    module, type, source: of the op that read it first.  shape: as that op reads it.  layout: its axes, as
    `weight_layout` of StandardMapping; None where they have no fixed meaning.
    holder: identity of the parameter or variable; None for a weight that is computed at each call.
    part: the part of the parameter that is read; None for all of it.
    number: its place in the order in which weights were met.  readers: ids of the ops that read it.
    whole: see `ParameterStore.whole`.  keep: returns state of a name, as loaded or from a function.
    is_loaded: True if its state was loaded, until a tool that asks sets it to False.
    """

    is_loaded = False

    def __init__(
        self,
        context: amanda.OpContext,
        value: Any,
        layout: str | None,
        store: ParameterStore,
        location: tuple[Any, Any] | None,
        whole: Any,
        number: int,
        keep: Callable[[str, Callable[[], Any]], Any],
        error: type[AmandaError],
        path: str = "",
        # A weak reference, since tools outlive models.
        holder: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()
        self.path, self.module, self.type = path, context.get_scope(), context["type"]
        self.source, self.layout, self.number = context.get_source(), layout, number
        self.shape = tuple(context["shape"](value))
        self.dtype: str = context["dtype"](value)
        self.holder: Any
        self.part: Any
        self.holder, self.part = (None, None) if location is None else location
        self.readers: set[int] = set()
        self.is_skipped = False
        self.change_count = 0
        self.state: list[Array] = []
        # _xp: operations on tensors of the library of the value.
        self._xp, self.store, self._holder = tensors_of(value), store, holder
        # Axes of a view from slowest to fastest in memory; None for a whole parameter and a computed weight.
        # A transposed view lies in memory as the parameter does: state in that order fits every reader.
        self._memory_order = None if self.part is None or whole is None else axes_in_memory_order(self.part)
        self._keep, self._error, self._whole = keep, error, whole
        self._arrays: dict[str, Array] = {}
        self.fills: dict[str, Any] = {}  # first values of elementwise state, by name
        self._updated = NEVER

    @property
    def name(self) -> str:
        """Name for people: its path, or the module or line of the op that reads it."""
        return self.path or self.module or self.source

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """Its shape as `canonical` gives it: outputs, inputs, window."""
        return canonical_extents(self.shape, self.layout)

    def canonical(self, value: Any) -> Any:
        """Return a value of the weight with its axes in the order of outputs, inputs, window."""
        return canonical(value, self.layout)

    def restored(self, array: Any) -> Any:
        """Return an array in the order of `canonical` in the weight's own layout."""
        return restored(array, self.layout, self.shape)

    def plain(self, value: Any) -> Array:
        """Return a value as an array to compute with, in float32 or wider, without autograd."""
        return self._xp.plain(value)

    def like(self, array: Any, reference: Array) -> Array:
        """Return an array on the device of another, in its own element type.

        Args:
            array: Array of any library.
            reference: Array whose library and device the result has.
        """
        return self._xp.beside(array, reference)

    def to_numpy(self, array: Array) -> Any:
        """Return an array of NumPy."""
        return tensors_of(array).to_numpy(array)

    def read(self) -> Any:
        """Return the present value of the parameter's part.

        Raises WeightError for a weight that nothing holds, and for one of a file.
        """
        holder = self._holder()
        if holder is None:
            raise self._error(f"nothing that runs holds the weight of {self.name}")
        # Reading may run ops, as for a tensor in shards; tools are not to see these.
        with amanda.disabled():
            return self.store.read(holder, self.part)

    def keep(self, name: str, start: Any) -> Array:
        """Return state of the weight: what was loaded, or a copy of `start`.

        For `WeightTool.on_weight`, and only there.  Raises the tool's error for state of another shape that
        was loaded.

        Args:
            name: Name under which `state_dict` has the state.
            start: First value.
        """
        array = self._keep(name, lambda: self._xp.copy(start))
        # Lists of numbers are a start too, as in the example of WeightTool.
        extents = tuple(start.shape) if hasattr(start, "shape") else np.shape(start)
        if tuple(array.shape) != extents:
            raise self._error(
                f"the {name} that was loaded for {self.name} is of shape {tuple(array.shape)}, not {extents}"
            )
        self._arrays[name] = array
        self.state.append(array)
        return array

    def keep_elements(self, name: str, fill: Any, dtype: str) -> Array:
        """Return state of each element, of the shape of the weight.

        It is kept in the order in which the elements lie in memory, so that it holds for each form of the
        parameter.  Raises the tool's error for state of another shape that was loaded.

        Args:
            name: Name under which `state_dict` has the state.
            fill: First value of each element.
            dtype: Element type, such as "float32".
        """
        array = self.keep(name, np.full(self._saved_extents(), fill, dtype))
        if self._memory_order is not None:
            # A view, so that writing into the transposed state writes into the array of `state_dict`.
            inverse_order = sorted(range(len(self._memory_order)), key=self._memory_order.__getitem__)
            in_memory_order = array.reshape([self.shape[axis] for axis in self._memory_order])
            array = do("transpose", in_memory_order, inverse_order)
        self._arrays[name], self.fills[name] = array, fill
        return array

    def end_setup(self) -> None:
        """Keep for which step the state was made, set `is_loaded`, and let go of the first reader."""
        # An array and not a number, because the state of a tool consists of arrays in every framework.
        self._updated_state = self.keep("updated", np.full(1, NEVER))
        # A plain number beside the array: reads of each execution compare it, and an array on a GPU would
        # have to be waited for.
        self._updated = int(self._updated_state[0])
        self.is_loaded = self._updated != NEVER
        # The closure holds the context of an op, and with it the tensors of the op's first execution.
        del self._keep

    def _saved_extents(self) -> tuple[int, ...]:
        """Return the shape in which elementwise state is saved: axes in memory order, or the parameter's."""
        if self._memory_order is None:
            return self.shape
        parameter_extents, _, _ = self._whole
        has_axes_in_memory_order = axes_in_memory_order(self._whole) == tuple(range(len(parameter_extents)))
        # A reshaped view of all elements has the parameter's own shape in files, so that a mask fits the
        # parameter.
        if self.size == prod(parameter_extents) and has_axes_in_memory_order:
            return tuple(parameter_extents)
        return tuple(self.shape[axis] for axis in self._memory_order)

    def get(self, name: str) -> Array | None:
        """Return state by name; None where there is none."""
        return self._arrays.get(name)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Write state in place, since `state_dict` and views of other forms hold the array.

        Raises WeightError for a name that `keep` has not created.
        """
        if name not in self._arrays:
            missing = f"{self.name} has no state {name!r}, which weight.keep creates in on_weight"
            raise WeightError(f"{missing}; {did_you_mean(name, self._arrays)}")
        self._arrays[name][...] = self._xp.beside(value, self._arrays[name])
        # Casts of the former state are outdated.
        self._tensors.clear()
        self.change_count += 1

    @property
    def updated(self) -> int:
        """The step for which its state was made; -1 as long as it is not."""
        return self._updated

    @updated.setter
    def updated(self, step: int) -> None:
        self._updated_state[...] = self._updated = step

    def expire(self) -> None:
        """Mark the state as outdated, so that it is made anew at the next read."""
        self.updated = NEVER

    @property
    def is_ready(self) -> bool:
        """True once its state is made."""
        return not self.is_skipped and self._updated != NEVER

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Return state by name, as far as it is kept."""
        return {name: self._arrays[name] for name in names if name in self._arrays}

    def whole_weights(self, value: Any) -> Iterator[tuple[Weight, Present]]:
        """Yield the weight itself, with a function that gives the value."""
        yield self, lambda: value

    def read_by(self, tool: WeightTool[Any], value: Any) -> Any:
        """Call `on_read`; return what the op reads instead, None for no change."""
        samples = self._xp.samples(value)
        if samples is not None:
            return self._read_wrapped(tool, value, samples)
        tool.on_read(self, lambda: value)
        if self._updated == NEVER or self.is_skipped:
            return None
        # Hot path, at each execution: the same as `transformed` with one call less.
        if tool.elementwise:
            return tool.transform(value, **self.tensors_like(value, tool.state_names))
        return self.transformed(tool, value)

    def gradients(self, gradient: Any) -> Iterator[tuple[Weight, Any]]:
        """Yield the weight itself, with the whole gradient."""
        yield self, gradient

    def _transform(self, tool: WeightTool[Any], value: Any, state: Mapping[str, Any]) -> Any:
        """Return what `transform` of a tool returns for a value and state; None for no change."""
        if tool.elementwise:
            return tool.transform(value, **state)
        result = tool.transform(self.canonical(value), **state)
        return None if result is None else self.restored(result)

    def transformed_gradient(self, tool: WeightTool[Any], gradient: Any) -> Any:
        """Return the gradient of the weight; None for no change."""
        if tool.elementwise:
            return super().transformed_gradient(tool, gradient)
        result = super().transformed_gradient(tool, self.canonical(gradient))
        return None if result is None else self.restored(result)


class WeightResult(Result):
    """The weights that a tool changes, in the order of their first reads; a subclass adds columns.

    elements: number of elements of these weights.
    left: reasons why selected weights are unchanged, by type and module of the op.
    elements_left: number of elements of those weights that are parameters.
    waiting: names of loaded state that belongs to no weight read so far.
    model: the model that `finalize` wrote; None in other results.
    """

    model: Any = None
    name: ClassVar[str] = "weights"
    title = "Changed weights"
    state: ClassVar[tuple[str, str]] = ("state", "")
    """Display name of the state of weights, and the text that names of that state contain."""
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=44)),
        Column("source", show=partial(shortened, width=32)), Column("shape"), Column("layout"),
        Column("weights", show="{:,}".format, total=True),
        Column("parameter", show=partial(shortened, width=32)),
    )  # fmt: skip

    def __init__(self, tool: WeightTool[Any]) -> None:
        weights = tool.weights
        self._rows = [self.row(weight) for weight in weights]
        self.elements: int = sum(weight.size for weight in weights)
        self.left = dict(weights.reasons)
        self.elements_left: int = sum(weights.skipped_elements.values())
        waiting = tool.waiting_state() if self._rows else []
        self.waiting = tuple(name for name in waiting if self.state[1] in name)
        self.remarks = as_remarks(tool.unmatched())
        self._empty_reason = weights.empty_reason

    def row(self, weight: Weight) -> tuple[Any, ...]:
        """Return the values of the columns for a weight."""
        shape = "x".join(map(str, weight.shape))
        return (
            "forward", weight.type, weight.module, weight.source, shape, weight.layout or "", weight.size,
            weight.path,
        )  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each weight."""
        return self._rows

    def _facts(self) -> Mapping[str, Any]:
        """Return totals, and reasons for skipped weights."""
        return {
            "tensors": len(self._rows), "elements": self.elements, "left": self.left,
            "elements_left": self.elements_left,
        }  # fmt: skip

    @property
    def counted(self) -> str:
        """The number of weights and of their elements, in words."""
        count = len(self._rows)
        return f"{count_of(count, 'weight')} ({self.elements:,} elements)"

    @property
    def _leading(self) -> int:
        """Number of notes at the top: totals, and elements of skipped weights."""
        return 1 + bool(self.elements_left)

    def notes(self) -> Sequence[str]:
        """Return totals, and sentences on skipped weights, see `notes_on_skipped`."""
        notes = [f"Changed {self.counted}."]
        if self.elements_left:
            notes.append(f"Skipped weights have {self.elements_left:,} elements.")
        return notes + self.notes_on_skipped()

    def notes_on_skipped(self) -> list[str]:
        """Return sentences on a lack of weights, on loaded state of no weight, and on each skipped weight."""
        empty_notes = [f"{self._empty_reason}."] if self._empty_reason else []
        skipped_notes = [f"Skipped {place}: {why}." for place, why in self.left.items()]
        return [*empty_notes, *not_met(self.state[0], self.waiting), *skipped_notes]
