"""Pickles of stand-ins, which replace callables while a scope is open: a pickle names the callable itself."""

import pickle
import pkgutil
import types
from typing import Any


def reduce_to_original(stand_in: Any, protocol: int) -> Any:
    """Return the result of `__reduce_ex__` for a stand-in: its callable by name, so pickles need no Amanda.

    Raises pickle.PicklingError where the callable is not found by its name, as pickle does.
    """
    original = stand_in.__wrapped__
    # A function reduces to its name for C code alone: its `__reduce_ex__` raises.
    reduction = original if isinstance(original, types.FunctionType) else original.__reduce_ex__(protocol)
    if isinstance(reduction, tuple):
        return reduction
    name = f"{original.__module__}:{original.__qualname__}"
    try:
        resolved = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pickle.PicklingError(f"Can't pickle {original!r}: there is nothing at {name}") from error
    # While a scope is open the name leads to the stand-in, after it to the callable: either unpickles right.
    if resolved is not stand_in and getattr(resolved, "__wrapped__", resolved) is not original:
        raise pickle.PicklingError(f"Can't pickle {original!r}: it's not the same object as {name}")
    return pkgutil.resolve_name, (name,)
