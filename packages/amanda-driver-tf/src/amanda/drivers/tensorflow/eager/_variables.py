"""Variables, which enter the ids of ops: found by their handles and by the tensors read from them."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from amanda import interceptor

READS = frozenset({"ReadVariableOp", "Identity", "Cast", "Reshape", "Transpose"})
"""Ops whose result is the value of a variable, cast or rearranged, if their first input is."""


class Variable:
    """A variable among the arguments of a call."""

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, handle: Any, forget: Callable[[Any], None]) -> None:
        # An eager handle is freed with its variable; the id of a freed handle is not used again.
        self._handle = weakref.ref(handle, forget)

    @property
    def handle(self) -> Any:
        """The variable's handle while it lives, else None."""
        return self._handle()


class VariableTable:
    """The variables that ops have used.

    read: by the id of a living tensor, the tensor and the variable that it was read from.
    """

    def __init__(self) -> None:
        self._by_handle: dict[int, Variable] = {}
        self.read: dict[int, tuple[Any, Variable]] = {}
        interceptor.add_identity_type(Variable)

    def variable_of(self, tensor: Any) -> Variable | None:
        """Return the variable that a tensor is the handle of or was read from; None for other tensors."""
        key = tensor._id
        if key in self.read:
            return self.read[key][1]
        if tensor._datatype_enum() != _RESOURCE:
            return None
        if key not in self._by_handle:
            self._by_handle[key] = Variable(tensor, partial(self._forget, key))
        return self._by_handle[key]

    def _forget(self, key: int, _: Any) -> None:
        self._by_handle.pop(key, None)

    def record_read(self, tensor: Any, variable: Variable) -> None:
        """Record the variable that a tensor was read from, until the tensor dies."""
        key = tensor._id
        self.read[key] = weakref.ref(tensor, lambda _: self.read.pop(key, None)), variable


_RESOURCE = 20  # DT_RESOURCE
variables = VariableTable()
