"""Copies and pickles of what stands in for a callable: they are those of the callable."""

import pickle
import pkgutil
import types
from typing import Any


def reduced(stand_in: Any, protocol: int) -> Any:
    """Return what `__reduce_ex__` returns, so that a pickle names the callable and needs no Amanda.

    Raises pickle.PicklingError where the callable is not found by its name, as pickle does.
    """
    original = stand_in.__wrapped__
    told = original if isinstance(original, types.FunctionType) else original.__reduce_ex__(protocol)
    if isinstance(told, tuple):
        return told
    name = f"{original.__module__}:{original.__qualname__}"
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pickle.PicklingError(f"Can't pickle {original!r}: there is nothing at {name}") from error
    if found is not stand_in and getattr(found, "__wrapped__", found) is not original:
        raise pickle.PicklingError(f"Can't pickle {original!r}: it's not the same object as {name}")
    return pkgutil.resolve_name, (name,)
