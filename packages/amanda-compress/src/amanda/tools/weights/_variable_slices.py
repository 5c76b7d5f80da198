"""Slices of TensorFlow's variables that the data may choose: which one an op reads is known as it runs."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import ref

import amanda
from amanda.tools.kit import leaves
from amanda.tools.mapping import TENSORFLOW_PASSES, TENSORFLOW_READS

_PASSES = TENSORFLOW_PASSES | {"Squeeze", "ExpandDims"}
_SELECTS = frozenset({
    "StridedSlice", "Slice", "Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd", "Split",
    "SplitV", "Unpack",
})  # fmt: skip
"""Types that give elements of an input that other inputs choose."""
_VALUE_AT = {"Split": 1}
_FIXED = frozenset({"Split", "SplitV", "Unpack"})  # the program says which of the parts it takes


class Slices:
    """Tensors that ops have selected out of variables.

    In eager mode a routine follows each execution; a graph tells by itself, and which are always the same.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, bool]] = {}

    def follow(self, context: amanda.OpContext) -> None:
        """Record the elements of a variable that an op selects; call this in a forward analysis routine."""
        name = context.get_op_type()
        if name not in _SELECTS | _PASSES or not context.namespace.matches("tensorflow/*/eager"):
            return
        inputs = context.get_inputs()
        held = name in _SELECTS and any(context.get_variable(i) is not None for i in range(len(inputs)))
        made = [known for one in inputs if (known := self._known(one)) is not None]
        if held or made:
            chosen = name in _SELECTS - _FIXED or any(chosen for _, chosen in made)
            context.insert_after_op(self._note, chosen=chosen)

    def reads(self, context: amanda.OpContext, index: int, chosen: bool) -> bool:
        """Return True if an input of an op was selected out of a variable.

        chosen: whether the data have to choose it, as indices may in eager mode.
        """
        value = context.get_inputs()[index]
        known = self._known(value)
        return (known[1] or not chosen) if known is not None else _is_selected(value, chosen)

    def _known(self, value: Any) -> tuple[Any, bool] | None:
        known = self._made.get(id(value))
        return known if known is not None and known[0]() is value else None

    def _note(self, *made: Any, chosen: bool) -> None:
        for tensor in leaves(made):
            self._made[id(tensor)] = ref(tensor, partial(self._forget, id(tensor))), chosen

    def _forget(self, key: int, _: Any) -> None:
        self._made.pop(key, None)


def _is_selected(symbol: Any, chosen: bool) -> bool:
    """Return True if a symbol of a graph was selected out of a variable; with `chosen`, by the data."""
    selects = False
    while True:
        try:
            op = symbol.op
        except AttributeError:  # an eager tensor has none
            return False
        if op.type in TENSORFLOW_READS or (op.inputs and _is_handle(op.inputs[0])):
            return selects or op.type in _SELECTS
        if op.type not in _SELECTS | _PASSES or not op.inputs:
            return False
        at = _VALUE_AT.get(op.type, 0)
        if op.type in _SELECTS and not selects:
            selects = not (chosen and _is_constant([one for i, one in enumerate(op.inputs) if i != at]))
        symbol = op.inputs[at]


def _is_handle(symbol: Any) -> bool:
    return str(getattr(symbol.dtype, "name", "")) == "resource"


def _is_constant(symbols: Any) -> bool:
    import tensorflow as tf

    return all(tf.get_static_value(one) is not None for one in symbols)
