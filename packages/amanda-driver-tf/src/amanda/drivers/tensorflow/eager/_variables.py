"""Variables, as what tells ops apart: by their handles, and by the tensors that were read of them."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from amanda import interceptor

READS = frozenset({"ReadVariableOp", "Identity", "Cast", "Reshape", "Transpose"})
"""Ops whose result is what a variable holds, in another form maybe, if their first input is."""


class Variable:
    """Stands for a variable among the arguments of a call."""

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, handle: Any, forget: Callable[[Any], None]) -> None:
        self._handle = weakref.ref(handle, forget)

    @property
    def handle(self) -> Any:
        """Its handle, as long as that lives."""
        return self._handle()


class Variables:
    """The variables whose handles were met.

    read: by the ids of living tensors, what they were read of.
    """

    def __init__(self) -> None:
        self._by_handle: dict[int, Variable] = {}
        self.read: dict[int, tuple[Any, Variable]] = {}
        interceptor.add_identity_type(Variable)

    def known(self, tensor: Any) -> Variable | None:
        """The variable that a tensor is the handle of, or was read of."""
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

    def know(self, tensor: Any, variable: Variable) -> None:
        """Keep that a tensor was read of a variable, as long as it lives."""
        key = tensor._id
        self.read[key] = weakref.ref(tensor, lambda _: self.read.pop(key, None)), variable


_RESOURCE = 20  # DT_RESOURCE
variables = Variables()
