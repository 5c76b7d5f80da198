"""Weights: arrays that the outermost module holds, or arguments of the jitted function that is traced."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax

from ._modules import Place
from ._traces import argument_name, primal


class Argument:
    """An argument of a jitted function, or a leaf of one: it holds a weight from one call to the next.

    path: "params.dense.kernel".
    """

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<argument {self.path}>"


@cache
def _argument(path: str) -> Argument:
    return Argument(path)


def variable_of(value: Any, subjects: Sequence[Place]) -> Any:
    """Return what holds a value: an argument where code is traced, an array that a model holds; None."""
    name = argument_name(value)
    if name is not None:
        path = dotted(name)
        return _argument(path) if "." in path else None  # an argument that is one array may be anything
    value = primal(value)
    return value if isinstance(value, jax.Array) and _path(value, subjects) is not None else None


def path_of(subjects: Sequence[Place]) -> Callable[[Any], str | None]:
    """Return what gives the path of a weight in the outermost module, or in the arguments of a function."""
    first = subjects[:1]
    return lambda variable: variable.path if isinstance(variable, Argument) else _path(variable, first)


def dotted(name: str) -> str:
    """Spell JAX's name of a leaf with dots: "params['dense']['kernel']" is "params.dense.kernel"."""
    return re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", name)


def _path(array: Any, subjects: Sequence[Place]) -> str | None:
    model = subjects[0].module if subjects else None
    if model is None or isinstance(array, jax.core.Tracer):
        return None
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    found = next((path for path, leaf in leaves if leaf is array), None)
    if found is None:
        return None
    return dotted(jax.tree_util.keystr(found).lstrip(".")).removesuffix(".value")
