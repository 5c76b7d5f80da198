"""Variables of TensorFlow, the forms (transposed, reshaped) that ops read, and what ops select of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda import interceptor
from amanda.tools.kit import leaves
from amanda.tools.mapping import (
    TENSORFLOW_PASSES,
    TENSORFLOW_READS,
)
from amanda.tools.weights._parameters import (
    ParameterError,
    ParameterStore,
    StoredParameter,
    Undo,
    ValueUpdate,
)

Array = NDArray[Any]
Form = tuple[Sequence[int], Sequence[int], Sequence[int]] | None
"""The form in which an op reads a variable: a transpose and a reshape after it.

The order of the variable's axes, the shape that the op reads, and the variable's own shape; None for the
variable as it is.
"""

_NAME = re.compile(r'ResourceHandle\(name="([^"]*?)(?:/\d+)?"')
"""In the text of a handle the name of the variable, which a number follows."""
_RESHAPING = frozenset({"Reshape", "Transpose"})
_PASSED = _RESHAPING | {"Identity", "ReadVariableOp", "Cast", "Enter", "RefEnter", "Switch"}


class Variables(ParameterStore):
    """Variables, from their handles; in a session's graph the tensors that make them."""

    def identity(self, parameter: Any) -> Any:
        """Return the ordinal of a variable; in a session's graph the graph's, with the variable's name."""
        # In a session's graph the name of the op identifies a variable, whichever Python object stands for
        # it.
        op = getattr(parameter, "op", None)
        return interceptor.ordinal(parameter) if op is None else (interceptor.ordinal(op.graph), op.name)

    def name(self, parameter: Any) -> str:
        """Return the path of a variable of Keras, the name of others; "" where the handle says none."""
        op = getattr(parameter, "op", None)
        if op is not None:
            return str(op.name)
        # An eager handle has no attribute with the name of its variable; its text has it.
        match = _NAME.search(str(parameter))
        return match[1] if match is not None else ""

    def locate(self, parameter: Any, weight: Any) -> tuple[Any, Form] | None:
        """Return the variable that a weight was read of, and its form; None where the form is not found."""
        # The ops between a variable and a symbol of a graph can be followed backwards; an eager tensor has no
        # record of them.
        is_symbol = getattr(weight, "op", None) is not None
        form = _form_in_graph(weight) if is_symbol else _form_of_value(parameter, weight)
        return None if form is NotImplemented else (self.identity(parameter), form)

    def read(self, parameter: Any, part: Form) -> Any:
        """Return the present value in a form, in eager mode."""
        # By the op that reads a handle: programs pass handles to ops, and not the objects of variables.
        return _apply_form(_read_variable(parameter).numpy(), part)

    def transfer(self, pieces: Sequence[tuple[Array, Form]], part: Form, whole: Any, fill: Any) -> Array:
        """Return the values of a variable in one form, from the values in another form.

        whole, fill: unused, since each form has all elements.
        """
        values, form = pieces[-1]
        return _apply_form(_invert_form(np.asarray(values), form), part)

    def parameters(self, model: Any) -> Iterator[TFVariable]:
        """Yield each variable of a model, a layer or a list; raise ParameterError where there are none."""
        # `weights` first: the `variables` of Keras also have the states of metrics and of random seeds.
        entries = next(
            (getattr(model, name) for name in ("weights", "variables") if hasattr(model, name)), model
        )
        try:
            variables = [_tf_variable(entry) for entry in entries]
        except (TypeError, AttributeError) as error:
            raise ParameterError(
                f"{type(model).__name__} has no variables; give a model, a layer, or a list of variables"
            ) from error
        for variable in variables:
            yield TFVariable(self.identity(_handle(variable)), variable)


class TFVariable(StoredParameter):
    """A variable of eager mode, or of the graph of a session."""

    def read(self) -> Array:
        """Return a copy of the whole variable's value; raise ParameterError for a graph without a session."""
        if not self._is_in_graph():
            return np.array(self._parameter.numpy())  # a copy: `numpy` may share the variable's memory
        value: Array = self._session().run(self._parameter)
        return value

    def change(self, update: ValueUpdate, part: Form = None, undo: Undo | None = None) -> None:
        """Write the values that `update` returns for the present values of a part.

        Raises ParameterError for a variable of a graph outside its session.
        """
        old = self.read()
        # Each form has every element of the variable, so that its inverse gives the whole value back.
        new = _invert_form(np.asarray(update(_apply_form(old.copy(), part))), part)
        if not self._is_in_graph():
            assign = self._parameter.assign
        else:
            session, initializer = self._session(), self._parameter.initializer

            # As Variable.load does, which needs the graph of the variable as the default one.
            def assign(value: Array) -> None:
                session.run(initializer, {initializer.inputs[1]: value})

        if undo is not None:
            undo.append(partial(assign, old))
        assign(new)

    def _is_in_graph(self) -> bool:
        return getattr(_handle(self._parameter), "op", None) is not None

    def _session(self) -> Any:
        """Return the default session; raise ParameterError without a session."""
        import tensorflow as tf

        session = tf.compat.v1.get_default_session()
        if session is None:
            raise ParameterError(
                f"{self._parameter.name} belongs to a session's graph; finalize within "
                "`with session.as_default():`"
            )
        return session


def _form_in_graph(weight: Any) -> Any:
    """Return the form in which a symbol of a graph has the elements of a variable, by the ops in between.

    None for the variable as it is; NotImplemented where no form is found.
    """
    import tensorflow as tf

    # Backwards from what the op reads to the variable, through ops that move elements without a change.
    moves, tensor = [], weight
    while tensor.op.type in _PASSED:
        if tensor.op.type in _RESHAPING:
            argument = tf.get_static_value(tensor.op.inputs[1])
            moves.append((tensor.op.type, tensor.shape.as_list() if argument is None else argument))
            start_shape = tensor.op.inputs[0].shape  # in the end of what the first executed move reads
        tensor = tensor.op.inputs[0]
    if not moves:
        return None
    # Arrays instead of algebra on shapes: a reshape between two transposes has no closed form.
    numbered = np.arange(start_shape.num_elements()).reshape(start_shape)
    # Numbered elements pass through the same moves as the variable, in their order of execution.
    moved = numbered
    for op_type, argument in reversed(moves):
        moved = moved.reshape(argument) if op_type == "Reshape" else moved.transpose(argument)
    return _find_form(numbered, moved)


def _form_of_value(holder: Any, weight: Any) -> Any:
    """Return the form that turns the present value of a variable into that of a weight, as `_find_form`."""
    import tensorflow as tf

    # Mixed precision casts variables at each read, so that values are compared in the type of the read.
    return _find_form(tf.cast(_read_variable(holder), weight.dtype).numpy(), weight.numpy())


def _read_variable(holder: Any) -> Any:
    import tensorflow as tf

    return tf.raw_ops.ReadVariableOp(resource=holder, dtype=holder._handle_data.shape_and_type[0].dtype)


def _find_form(value: Array, target: Array) -> Any:
    """Return the axes of the transpose, and the shapes after and before, by which a value equals a target.

    None if it equals the target as it is; NotImplemented if no form is found.
    """
    if value.size != target.size:
        return NotImplemented
    if value.shape == target.shape and _are_equal(value, target):
        return None
    # In eager mode nothing but the values tells through which transpose and reshape an op reads.
    for axes in permutations(range(value.ndim)):
        if _are_equal(value.transpose(axes).reshape(target.shape), target):
            return axes, target.shape, value.shape
    return NotImplemented


def _are_equal(value: Array, target: Array) -> bool:
    """Return True for equal arrays; weights of a training that failed are NaN."""
    return np.array_equal(value, target, equal_nan=value.dtype.kind == "f")


def _apply_form(value: Array, form: Form) -> Array:
    """Return the value of a variable transposed and reshaped to a form."""
    if form is None:
        return value
    axes, read_shape, _ = form
    read_value: Array = value.transpose(axes).reshape(read_shape)
    return read_value


def _invert_form(value: Array, form: Form) -> Array:
    """Return the value of a variable from its value in a form."""
    if form is None:
        return value
    axes, _, extents = form
    restored: Array = value.reshape([extents[axis] for axis in axes]).transpose(np.argsort(axes))
    return restored


def _handle(variable: Any) -> Any:
    return variable.handle if hasattr(variable, "handle") else variable.op.outputs[0]


def _tf_variable(variable: Any) -> Any:
    """Return TensorFlow's variable behind one of Keras."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


_FOLLOWED = TENSORFLOW_PASSES | {"Squeeze", "ExpandDims"}
_SELECTIONS = frozenset({
    "StridedSlice", "Slice", "Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd", "Split",
    "SplitV", "Unpack",
})  # fmt: skip
"""Types of ops that select elements of an input by other inputs."""
_VALUE_POSITIONS = {"Split": 1}
_FIXED_SELECTIONS = frozenset({"Split", "SplitV", "Unpack"})  # the program says which of the parts it takes


class VariableSlices:
    """Tensors that ops have selected out of variables.

    In eager mode a routine records each execution.  In a graph the ops between variable and symbol show the
    selection, and whether its indices are constant.
    """

    def __init__(self) -> None:
        # By id of a tensor: a weak reference of it, and True for a choice by data.
        self._selections: dict[int, tuple[Any, bool]] = {}

    def follow(self, context: amanda.OpContext) -> None:
        """Insert a routine that records what an eager op selects of a variable; for the forward pass."""
        name = context.get_forward_op_type()
        if name not in _SELECTIONS | _FOLLOWED or not context.namespace.matches("tensorflow/*/eager"):
            return
        inputs = context.get_inputs()
        selects_of_variable = name in _SELECTIONS and any(
            context.get_variable(i) is not None for i in range(len(inputs))
        )
        earlier_selections = [
            selection for selection in map(self._selection_of, inputs) if selection is not None
        ]
        if selects_of_variable or earlier_selections:
            # A selection by data of a fixed one, or the other way round, is one by data.
            is_by_data = name in _SELECTIONS - _FIXED_SELECTIONS
            is_by_data = is_by_data or any(was_by_data for _, was_by_data in earlier_selections)
            context.insert_after_op(self._record_selection, is_by_data=is_by_data)

    def is_selection(self, context: amanda.OpContext, index: int, must_be_by_data: bool) -> bool:
        """Return True if an input of an op was selected out of a variable.

        must_be_by_data: True to count only selections by indices that the data choose.
        """
        value = context.get_inputs()[index]
        selection = self._selection_of(value)
        if selection is None:
            return _is_selected_in_graph(value, must_be_by_data)
        _, is_by_data = selection
        return is_by_data or not must_be_by_data

    def _selection_of(self, value: Any) -> tuple[Any, bool] | None:
        """Return a weak reference of a selected tensor, and True for a choice by data; else None."""
        selection = self._selections.get(id(value))
        # A new tensor may have the id of a freed one before its callback ran.
        return selection if selection is not None and selection[0]() is value else None

    def _record_selection(self, *outputs: Any, is_by_data: bool) -> None:
        """Record the outputs of an op as selections, until they are freed."""
        for tensor in leaves(outputs):
            # Eager tensors of TensorFlow are not hashable, so that no WeakKeyDictionary holds them.
            self._selections[id(tensor)] = ref(tensor, partial(self._forget, id(tensor))), is_by_data

    def _forget(self, key: int, _: Any) -> None:
        self._selections.pop(key, None)


def _is_selected_in_graph(symbol: Any, must_be_by_data: bool) -> bool:
    """Return True if a symbol of a graph was selected out of a variable; False for an eager tensor.

    must_be_by_data: True to count only selections by indices that the data choose.
    """
    # Backwards from the symbol to the variable, past ops that select elements or pass all of them on.
    is_selected = False
    while True:
        try:
            op = symbol.op
        except AttributeError:  # an eager tensor has none
            return False
        if op.type in TENSORFLOW_READS or (op.inputs and _is_handle(op.inputs[0])):
            # The op that reads the variable may itself select, such as ResourceGather.
            return is_selected or op.type in _SELECTIONS
        if op.type not in _SELECTIONS | _FOLLOWED or not op.inputs:
            return False
        # The other inputs are indices and sizes: constants always select the same elements, which is a part
        # and no choice by data.
        position = _VALUE_POSITIONS.get(op.type, 0)
        if op.type in _SELECTIONS:
            indices = [value for i, value in enumerate(op.inputs) if i != position]
            is_selected = is_selected or not must_be_by_data or not _is_constant(indices)
        symbol = op.inputs[position]


def _is_handle(symbol: Any) -> bool:
    return str(getattr(symbol.dtype, "name", "")) == "resource"


def _is_constant(symbols: Any) -> bool:
    import tensorflow as tf

    return all(tf.get_static_value(symbol) is not None for symbol in symbols)
