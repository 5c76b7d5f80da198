"""Values that traceable routines read beside their arguments, which a program would keep as they were."""

from types import FunctionType, ModuleType
from typing import ClassVar

from amanda.backend import Action, Reads

_CONSTANT = (FunctionType, ModuleType, type)


class JaxReads(Reads):
    """Values that routines read; functions and modules stay what they are."""

    opaque: ClassVar[frozenset[str]] = frozenset({"amanda", "numpy", "jax", "jaxlib", "autoray"})


def is_pure(action: Action) -> bool:
    """Return True if a traceable routine reads its arguments alone, so that a program may have it in it.

    Nothing runs in Python at a call of a compiled program that could tell that another value is there.
    """
    reads = JaxReads()
    reads.follow(action)
    return all(isinstance(place.value, _CONSTANT) or callable(place.value) for place in reads)
