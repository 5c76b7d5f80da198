"""Arguments of ops of JAX, in the names that all frameworks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda.tools.effective_path._frameworks import OpValues


def word(context: amanda.OpContext) -> str:
    """Return the key of an op's rule: a product over axes of any order is an einsum."""
    kind: str = context["type"]
    return "einsum" if context.get_op_type() == "dot_general" and kind != "linear" else kind


def attributes(context: amanda.OpContext) -> Mapping[str, Any]:
    """Return the parameters of a primitive, of a product its equation, too."""
    found = context.get_attrs()
    if context.get_op_type() != "dot_general":
        return found
    ranks = [len(one.shape) for one in context.get_inputs()]
    return {**found, "equation": _equation(ranks, *found["dimension_numbers"])}


def _equation(ranks: Sequence[int], contracted: Sequence[Any], batch: Sequence[Any]) -> str:
    letters = iter(ascii_letters)
    names = [[""] * rank for rank in ranks]
    shared = []
    for left, right in (*zip(*batch, strict=True), *zip(*contracted, strict=True)):
        names[0][left] = names[1][right] = next(letters)
        shared.append(names[0][left])
    own = []
    for axes in names:
        free = [i for i, one in enumerate(axes) if not one]
        for i in free:
            axes[i] = next(letters)
        own += [axes[i] for i in free]
    result = [*shared[: len(batch[0])], *own]
    return f"{','.join(map(''.join, names))}->{''.join(result)}"


def moves(op: OpValues) -> Mapping[str, Callable[[NDArray[Any]], Any]]:
    """Return the moves of JAX, by the parameters of the primitive."""
    given = op.attributes

    def broadcast(a: NDArray[Any]) -> NDArray[Any]:
        extents = [1] * len(given["shape"])
        for axis, size in zip(given["broadcast_dimensions"], a.shape, strict=True):
            extents[axis] = size
        return np.broadcast_to(a.reshape(extents), given["shape"])

    def cut(a: NDArray[Any]) -> NDArray[Any]:
        if "start_indices" not in given:
            raise NotImplementedError("a gather, or a slice from a computed index")
        steps = given["strides"] or [None] * a.ndim
        return a[tuple(map(slice, given["start_indices"], given["limit_indices"], steps))]

    def padded(a: NDArray[Any]) -> NDArray[Any]:
        pairs = [(low, high) for low, high, _ in given["padding_config"]]
        if any(inner for *_, inner in given["padding_config"]) or min(map(min, pairs), default=0) < 0:
            raise NotImplementedError(f"a pad by {given['padding_config']}")
        return np.pad(a, pairs, constant_values=-1)

    return {
        "permute": lambda a: a.transpose(given["permutation"]), "expand": broadcast, "getitem": cut,
        "pad": padded, "flip": lambda a: np.flip(a, given["dimensions"]),
    }  # fmt: skip
