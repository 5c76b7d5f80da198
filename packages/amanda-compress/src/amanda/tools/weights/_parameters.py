"""Parameters of models between executions: their identities, the parts that ops read, how values are written.

A part of a parameter is what `ParameterStore.locate` returns beside the identity; None for the whole
parameter in its own shape.  Stores of further frameworks are entry points of the group `amanda.parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import amanda
from amanda import interceptor
from amanda.backend import ParameterSlot, TreeSlot
from amanda.errors import AmandaError
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do, to_numpy
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import SEVERAL_WEIGHTS, InstalledEntries, backend_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda.tools.weights._weight_input import ParameterSlice

ValueUpdate = Callable[[Any], Any]
"""Function that returns new values of a part of a parameter, from its present ones."""
Undo = list[Callable[[], Any]]
"""Functions that write back the values that parameters had, in the order of the changes."""


class ParameterError(AmandaError, ValueError, module="amanda.tools.weights"):
    """A model without parameters, or a parameter that cannot be written."""


class StridedLayout(NamedTuple):
    """How a tensor lies in memory that it shares: extents and strides of its axes, and where it begins."""

    extents: Sequence[int]
    strides: Sequence[int]
    offset: int

    @classmethod
    def of(cls, tensor: Any) -> StridedLayout:
        """Return the layout of a tensor of PyTorch or MindSpore."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def end(self) -> int:
        """The position after the last element."""
        axes = zip(self.extents, self.strides, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in axes)


class StoredParameter:
    """A parameter of a model that can be read and written, wherever its values are.

    This class serves NumPy, and libraries whose `to_numpy`, and `assign(parameter, array)`, autoray knows.

    Args:
        identity: The number or name by which tools know it, see `ParameterStore.identity`.
        parameter: Object of the library that holds the values.
    """

    def __init__(self, identity: Any, parameter: Any) -> None:
        self.identity, self._parameter = identity, parameter

    def read(self) -> Any:
        """Return the values of the whole parameter, in its own shape and element type, without autograd."""
        return np.array(to_numpy(self._parameter))

    def write(self, values: Any) -> None:
        """Write values into the whole parameter."""
        if isinstance(self._parameter, np.ndarray):
            self._parameter[...] = values
            return
        do("assign", self._parameter, values, like=self._parameter)

    def change(self, update: ValueUpdate, part: Any = None, undo: Undo | None = None) -> None:
        """Write the values that `update` returns for the present values of a part.

        Args:
            update: Function of the present values that returns new ones.
            part: None, for all of the parameter; only subclasses know parts.
            undo: Receives a function that writes the present values back, before new ones are written.

        Raises:
            ParameterError: For a parameter that cannot be written.
        """
        # `undo` needs the old values until all parameters are written.
        old = self.read()
        new = update(old.copy())
        if undo is not None:
            undo.append(partial(self.write, old))
        self.write(new)


class ParameterStore:
    """The parameters of models of one framework; a subclass serves a framework that reads parts of them.

    This class knows parameters that ops read as a whole, of a library whose `to_numpy`, and
    `assign(parameter, array)`, autoray knows.
    """

    def identity(self, parameter: Any) -> Any:
        """Return a hashable value that tells a parameter from others as long as it lives.

        Args:
            parameter: As `context.get_variable` returns it: a parameter, or the handle of a variable.
        """
        # An ordinal is never given twice, unlike `id`, which a later parameter may get.
        return amanda.Tool.identity_of(parameter)

    def name(self, parameter: Any) -> str:
        """Return the name that the framework has given to a parameter; "" without one."""
        return ""

    def owner(self, tensor: Any) -> Any:
        """Return the parameter that a tensor is, or is a view of; None for a computed tensor."""
        return None

    def locate(self, parameter: Any, weight: Any) -> tuple[Any, Any] | None:
        """Return the identity of a parameter, and the part that a weight is of it; None if unknown.

        The base returns None for the part, which is all of the parameter.

        Args:
            parameter: As `context.get_variable` returns it.
            weight: The value that the op reads.
        """
        return self.identity(parameter), None

    def whole(self, parameter: Any) -> Any:
        """Return the part that is all of a parameter, where parts overlap; None where they do not."""
        return None

    def slices(self, parameter: Any) -> Sequence[Any]:
        """Return the parameters of a stack, which an op reads one at a time; () for what is not a stack."""
        return ()

    def current_slice(self, parameter: Any) -> Any:
        """Return the slice, of `slices`, that the running op reads; None where that is unknown."""
        return None

    def read(self, parameter: Any, part: Any) -> Any:
        """Return the present values of a part; here the parameter, or the tensor in a slot of a tree.

        Args:
            parameter: As `context.get_variable` returns it.
            part: Part of the parameter.
        """
        return parameter.tensor() if isinstance(parameter, TreeSlot) else parameter

    def overlaps(self, part: Any, other_part: Any, whole: Any) -> bool:
        """Return True if two parts have elements in common; here always, as parts are whole parameters.

        Args:
            part: Part of a parameter.
            other_part: Part of the same parameter.
            whole: The part that is all of the parameter.
        """
        return True

    def covers(self, part: Any, other_part: Any, whole: Any) -> bool:
        """Return True if a part has every element of another; here always, as parts are whole parameters.

        Args:
            part: Part of a parameter.
            other_part: Part of the same parameter.
            whole: The part that is all of the parameter.
        """
        return True

    def transfer(self, pieces: Sequence[tuple[Any, Any]], part: Any, whole: Any, fill: Any) -> Any:
        """Return the values of a part, from values of other parts; here those of the last piece.

        Args:
            pieces: Values, each with its part; of several that have an element the last one counts.
            part: Part whose values are returned.
            whole: The part that is all of the parameter.
            fill: Value of elements that no piece has.
        """
        return pieces[-1][0]

    def sum_repeats(self, gradient: Any, part: Any) -> Any:
        """Return the gradient of a part, summed over places that are one element; here as it is.

        Args:
            gradient: Gradient of the part, of its shape.
            part: Part of a parameter, in which an element may have several places.
        """
        return gradient

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        """Yield each parameter of a model, or each entry of a list of parameters.

        Raises ParameterError where there are none.
        """
        # Cells of MindSpore list parameters by `get_parameters`; other models by `parameters`.
        names = ("get_parameters", "parameters")
        getter = next((getattr(model, name) for name in names if callable(getattr(model, name, None))), None)
        try:
            parameters = list(model if getter is None else getter())
        except TypeError as error:
            raise ParameterError(
                f"{type(model).__name__} has no parameters; give a model or a list of parameters"
            ) from error
        for parameter in parameters:
            yield StoredParameter(self.identity(parameter), parameter)

    def write_all(self, model: Any, changes: Sequence[tuple[Any, Any, ValueUpdate]]) -> tuple[Any, int]:
        """Write parameters of a model; return the model with them, and how many parts were written.

        After an exception, also KeyboardInterrupt, the parameters have the values that they had.

        Args:
            model: A model, or a list of parameters; of those that it has several times each is written once.
            changes: The identity of a parameter, a part of it, and the function that returns its new values.
        """
        count = 0
        with self.undone_on_error() as undo:
            for parameter in {entry.identity: entry for entry in self.parameters(model)}.values():
                for identity, part, update in changes:
                    if identity == parameter.identity:
                        parameter.change(update, part, undo)
                        count += 1
        return model, count

    @staticmethod
    @contextmanager
    def undone_on_error() -> Iterator[Undo]:
        """Return a context with a list of functions that run, the last first, before an exception passes."""
        undo: Undo = []
        try:
            yield undo
        # KeyboardInterrupt too: a model that is half pruned is worse than none.
        except BaseException:
            for write_back in reversed(undo):
                # The rest has to be restored even if one parameter refuses, as it refused before.
                with suppress(ParameterError):  # of the one that cannot be written
                    write_back()
            raise


class StridedStore(ParameterStore):
    """Parameters of a framework whose ops read views: a part is a layout, None for the parameter's own."""

    def locate(self, parameter: Any, weight: Any) -> tuple[Any, StridedLayout | None]:
        """Return the parameter that a weight is or is a view of, and the layout of the view."""
        layout = StridedLayout.of(weight)
        return self.identity(parameter), None if layout == self.whole(parameter) else layout

    def whole(self, parameter: Any) -> StridedLayout:
        """Return the parameter's own layout; of a slot that of the tensor in it, in one sample of a batch."""
        return StridedLayout.of(tensor_of(parameter))


def tensor_of(parameter: Any) -> Any:
    """Return a parameter, or the tensor that lies in a slot now: of a batch the first sample.

    Raises ParameterError for a slot whose module is gone.
    """
    if not isinstance(parameter, ParameterSlot):
        return parameter
    slot: Any = parameter
    tensor = slot.tensor()
    if tensor is None:
        raise ParameterError(f"the module that had {slot.name} is gone")
    samples = tensors_of(tensor).samples(tensor)
    return tensor if samples is None else samples.first


Part = StridedLayout | None
"""A layout within a parameter; None for the parameter as it is."""


class MindSporeParameters(StridedStore):
    """The parameters of MindSpore: a part is a layout in the parameter's memory."""

    def read(self, parameter: Any, part: Part) -> NDArray[Any]:
        """Return a part as an array."""
        array = parameter.asnumpy()
        return array if part is None else _view_in_layout(array.reshape(-1), part)

    def overlaps(self, part: Part, other_part: Part, whole: StridedLayout) -> bool:
        """Return True if two parts have elements in common."""
        return bool(self._shared_element_mask(part, other_part, whole).any())

    def covers(self, part: Part, other_part: Part, whole: StridedLayout) -> bool:
        """Return True if a part has every element of another."""
        return bool(self._shared_element_mask(part, other_part, whole).all())

    def _shared_element_mask(self, part: Part, other_part: Part, whole: StridedLayout) -> NDArray[Any]:
        """Return a mask of another part, True at elements that a part has too."""
        all_true = np.ones((part or whole).extents, bool)
        return self.transfer([(all_true, part)], other_part, whole, fill=False)

    def transfer(
        self, pieces: Sequence[tuple[Any, Any]], part: Part, whole: StridedLayout, fill: Any
    ) -> NDArray[Any]:
        """Return the values of a part, from values of other parts, `fill` where no piece has an element."""
        # Pieces are tensors where an op has read them, and arrays where they are state.
        arrays = [value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value) for value, _ in pieces]
        parameter_memory = np.full(int(np.prod(whole.extents)), fill, arrays[0].dtype)
        for array, (_, layout) in zip(arrays, pieces, strict=True):
            _view_in_layout(parameter_memory, layout or whole)[...] = array
        values: NDArray[Any] = _view_in_layout(parameter_memory, part or whole).copy()
        return values

    def parameters(self, model: Any) -> Iterator[MindSporeParameter]:
        """Yield each parameter of a cell, or each entry of a list."""
        for parameter in model.get_parameters() if hasattr(model, "get_parameters") else model:
            yield MindSporeParameter(self.identity(parameter), parameter)


class MindSporeParameter(StoredParameter):
    """A parameter of MindSpore."""

    def change(self, update: ValueUpdate, part: Part = None, undo: Undo | None = None) -> None:
        """Write the values that `update` returns for the present values of a part."""
        # A parameter of MindSpore cannot be written in part: the whole one is assigned again.
        old = self.read()
        memory = old.reshape(-1).copy()
        view = memory.reshape(old.shape) if part is None else _view_in_layout(memory, part)
        view[...] = update(view.copy())
        if undo is not None:
            undo.append(partial(self.write, old))
        self.write(memory.reshape(old.shape))


def _view_in_layout(memory: NDArray[Any], layout: StridedLayout) -> NDArray[Any]:
    """Return a view of a flat array in a layout."""
    # MindSpore counts strides in elements, NumPy in bytes.
    byte_strides = [stride * memory.itemsize for stride in layout.strides]
    return np.lib.stride_tricks.as_strided(memory[layout.offset :], layout.extents, byte_strides)


class Initializers(ParameterStore):
    """Initializers of an ONNX model, which are identified by its graph and their names."""

    def identity(self, parameter: Any) -> Any:
        """Return the graph and the name."""
        return parameter

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        """Raise ParameterError: a session of ONNX Runtime keeps its weights to itself."""
        raise ParameterError(
            f"{type(model).__name__} holds its weights for itself; amanda.drivers.onnxruntime.instrument "
            "writes a changed model"
        )


def parameter_store(of: Any, holder: Any = None) -> ParameterStore:
    """Return the store of the parameters of a framework.

    A distribution brings the store of a further library by an entry point of the group `amanda.parameters`.

    Args:
        of: A tensor, a parameter or a handle of one that names its `framework`; or the name of its library.
        holder: The parameter that a tensor is; its `framework` comes first, as several have NumPy's arrays.

    Raises:
        ParameterError: For a library whose entry point is broken.
    """
    if isinstance(of, str):
        return _store(of)
    return _store(getattr(holder, "framework", None) or getattr(of, "framework", None) or backend_of(of))


_INSTALLED = InstalledEntries("amanda.parameters", "parameter store", ParameterError)
"""Entry points: the name is that of a library, as autoray has it; the object a `ParameterStore`."""


@cache
def _store(library: str) -> ParameterStore:
    store = _INSTALLED.create(library, ParameterStore, "amanda.tools.weights.ParameterStore")
    return ParameterStore() if store is None else store


def axes_in_memory_order(layout: StridedLayout) -> tuple[int, ...]:
    """Return the axes from the slowest to the fastest in memory: the same order for all views of a part."""
    extents, strides, _ = layout
    # Axes of extent 1 have arbitrary strides, so that they go last.
    return tuple(sorted(range(len(extents)), key=lambda axis: (extents[axis] == 1, -strides[axis])))


class SharedState:
    """Keys of the state of parameters' parts, and that state; the same whichever op reads a part first.

    Where the parameter has a path in the model, path and part are the key; else the op that first read any of
    its parts stands for the path.
    """

    def __init__(self) -> None:
        self._first_readers: dict[Hashable, amanda.OpContext] = {}  # by identity, of parameters read in part
        self._parameters_by_reader: dict[amanda.OpContext, list[Hashable]] = {}
        self._lines_by_parameter: dict[Hashable, list[Hashable]] = {}  # by reader and identity
        self._states: dict[Hashable, Any] = {}  # by reader, identity, form and line

    def state_of(
        self,
        context: amanda.OpContext,
        part: ParameterSlice | None,
        make: Callable[[amanda.OpContext, str], Any],
        line: Hashable = None,
    ) -> Any:
        """Return the state of a part of a parameter, which its first reader makes.

        Args:
            context: Context of an op that reads the part.
            part: Slice that the op reads; None for a value that was computed or selected, of which there is
                no state.
            make: Function of the first reader's context and a suffix, see `key_for`, that returns the state.
            line: Identifies the line of the program that runs the op, where lines that read one part have
                separate states: the second line's suffix is "~1".  None: the lines share the state.

        Returns:
            The state; None without a part.
        """
        if part is None or part.form is None:  # computed, or selected by indices
            return None
        identity, form = interceptor.ordinal(part.holder), part.form
        reader, suffix = self.key_for(context, identity, form, StridedLayout.of(part.holder))
        if line is not None:
            lines = self._lines_by_parameter.setdefault((reader, identity), [])
            if line not in lines:
                lines.append(line)
            line_number = lines.index(line)
            suffix += f"~{line_number}" if line_number else ""
        key = reader, identity, form, line
        if key not in self._states:
            self._states[key] = make(reader, suffix)
        return self._states[key]

    def key_for(
        self,
        context: amanda.OpContext,
        identity: Hashable,
        part: StridedLayout | None,
        whole: StridedLayout,
        is_named: bool = False,
    ) -> tuple[amanda.OpContext, str]:
        """Return the op under which a parameter's state is saved, and a suffix for names of state there.

        The op is the first reader of any part of the parameter; `context` itself where all of it is read.

        Args:
            context: Context of an op that reads the parameter.
            identity: Of the parameter.
            is_named: True if names of state have the path of the parameter.
            part: Layout of what is read, None for all of it.
            whole: The parameter's own layout.
        """
        # A transposed view of all elements is not a part: its state has the path of the parameter itself.
        is_part = part is not None and prod(part.extents) < prod(whole.extents)
        # Ops of a loop may read the parts in any order, so that the first reader of any part stands for all
        # of them.
        reader = self._first_readers.setdefault(identity, context) if is_part else context
        parameters = self._parameters_by_reader.setdefault(reader, [])
        if identity not in parameters:
            parameters.append(identity)
        # An op that reads several unnamed parameters needs a number for each; the order of first reads is
        # the same in another process.
        number = 0 if is_named else parameters.index(identity)
        offset = f"@{part.offset}" if is_part and part is not None else ""
        return reader, offset + (f"#{number}" if number else "")


def parameter_sizes(context: amanda.OpContext) -> Iterator[tuple[Hashable, int]]:
    """Yield identity and number of elements of each parameter that an op reads as weight.

    Nothing for computed weights, and after the values of the op's first execution have been freed.
    """
    try:
        inputs = context.get_inputs()
    except AmandaError:  # freed
        return
    reads_several = context["type"] in SEVERAL_WEIGHTS or context["type"] == "einsum"
    positions = range(len(inputs)) if reads_several else [context["weight_index"]]
    for position in positions:
        if position is None or position >= len(inputs):
            continue
        value = inputs[position]
        if isinstance(value, (list, tuple)):
            holders = [parameter_store(tensor).owner(tensor) for tensor in value]
        else:
            holders = [context.get_variable(position)]
        for holder in holders:
            size = None if holder is None else _parameter_size(context, holder, value)
            if size is not None:
                yield parameter_store(holder).identity(holder), size


def einsum_parameters(context: amanda.OpContext) -> list[Any]:
    """Return the parameters that an einsum of PyTorch reads, whole or in part."""
    operands = [
        operand
        for value in context.get_inputs()
        if isinstance(value, (list, tuple))  # the operands are one list
        for operand in value
    ]
    owners = [parameter_store(operand).owner(operand) for operand in operands]
    return [owner for owner in owners if owner is not None]


def _parameter_size(context: amanda.OpContext, holder: Any, value: Any) -> int | None:
    """Return the elements of a holder, or of the value where the holder is a handle; None if unknown."""
    for candidate in (holder, value):
        extents: Sequence[int] | None = (
            None if isinstance(candidate, (list, tuple)) else context["shape"](candidate)
        )
        if extents and None not in extents:
            return prod(extents)
    return None


def describe_op(context: amanda.OpContext) -> str:
    """Return the type of an op and its module, or the line that calls it outside of modules."""
    return f"{context['type']} of {context.get_scope() or context.get_source()}"
