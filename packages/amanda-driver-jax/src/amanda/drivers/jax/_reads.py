"""Values that routines in a program read beside their arguments."""

from types import FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np

from amanda import interceptor
from amanda.backend import Action, Reads
from amanda.graph import Reading
from jax._src import core

from ._traces import ARRAYS

_CONSTANT = (FunctionType, ModuleType, type)


class JaxReads(Reads):
    """Values that routines read; those of arrays that are inputs of a program may be others of that type."""

    opaque: ClassVar[frozenset[str]] = frozenset({"amanda", "numpy", "jax", "jaxlib", "autoray"})

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[tuple[int, Any], Reading] = {}
        self._copies: dict[tuple[int, Any], np.ndarray[Any, Any]] = {}

    def follow(self, action: Action) -> None:
        """Take up what an action's routine reads, and what is in arrays of NumPy, which may be written."""
        super().follow(action)
        for place in self:
            if isinstance(place.value, np.ndarray) and place.key not in self._copies:
                self._copies[place.key] = place.value.copy()

    def hold(self) -> bool:
        """Return True if a program that was traced for these values computes with those of now."""
        with interceptor.Suspension():
            return all(self._is_as_before(place) for place in self)

    def _is_as_before(self, place: Reading) -> bool:
        now = place.read(place.holder, place.name)
        if place.key in self.inputs:
            return isinstance(now, ARRAYS) and core.typeof(now) == core.typeof(place.value)
        if place.key in self._copies:
            copy = self._copies[place.key]
            return isinstance(now, np.ndarray) and now.dtype == copy.dtype and np.array_equal(now, copy)
        return now is place.value or self.is_same(now, place.value)

    @property
    def guards(self) -> bool:
        """True if a call of the program has to look at what was read."""
        return any(not (isinstance(one.value, _CONSTANT) or callable(one.value)) for one in self)


def reads_of(action: Action) -> JaxReads:
    """Return what a routine reads now, and what it sets beyond itself."""
    reads = JaxReads()
    reads.follow(action)
    reads.settle(())
    return reads


def is_pure(action: Action) -> bool:
    """Return True if a routine reads its arguments alone, and sets nothing."""
    reads = reads_of(action)
    return not reads.guards and not reads.written
