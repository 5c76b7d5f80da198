"""What a function computes under tools that change nothing, against what it computes alone."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import amanda

from ._samples import Sample


class Difference(NamedTuple):
    """A call that computes otherwise under a tool.  by: an exception, or the largest relative difference."""

    sample: Sample
    mode: str
    tool: str
    by: str

    def __str__(self) -> str:
        shown = [str(jax.tree_util.tree_map(_shown, one))[:40] for one in self.sample.args]
        return f"{self.sample.name}({', '.join(shown)}) {self.mode} under {self.tool}: {self.by}"


def _shown(value: Any) -> Any:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else value


def _echo(*values: Any) -> Any:
    return values if len(values) != 1 else values[0]


def _equal(*values: Any) -> Any:
    made = tuple(jax.tree_util.tree_map(_copy, one) for one in values)
    return made if len(made) != 1 else made[0]


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value if value.dtype == jax.dtypes.float0 else jnp.where(True, value, value)
    return value


def _tool(routine: Callable[..., Any] | None) -> amanda.Tool:
    tool = amanda.Tool()

    def forward(context: amanda.OpContext) -> None:
        context.get_inputs()
        if routine is not None:
            context.insert_before_op(routine)
            context.insert_after_op(routine)

    def backward(context: amanda.OpContext) -> None:
        context.get_grad_outputs()
        if routine is not None:
            context.insert_before_backward_op(routine)
            context.insert_after_backward_op(routine)

    tool.add_inst_for_op(forward)
    tool.add_inst_for_op(backward, backward=True)
    return tool


TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "look": partial(_tool, None),
    "echo": lambda: _tool(_echo),
    "equal": lambda: _tool(_equal),
    "traceable": lambda: _tool(amanda.traceable(_equal)),
}


def modes(sample: Sample) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield how a function may be called: as it is, under jit, its gradient, mapped over."""
    leaves, tree = jax.tree_util.tree_flatten(sample.args)
    places = [i for i, one in enumerate(leaves) if isinstance(one, jax.Array)]
    arrays = [leaves[i] for i in places]

    def call(*arrays: Any) -> Any:
        given = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            given[place] = array
        return sample.function(*jax.tree_util.tree_unflatten(tree, given))

    yield "eager", lambda: call(*arrays)
    yield "jit", lambda: jax.jit(call)(*arrays)
    real = [i for i, one in enumerate(arrays) if jnp.issubdtype(one.dtype, jnp.floating)]
    if real:

        def loss(*chosen: Any) -> Any:
            given = list(arrays)
            for i, one in zip(real, chosen, strict=True):
                given[i] = one
            found = [
                one
                for one in jax.tree_util.tree_leaves(call(*given))
                if jnp.issubdtype(one.dtype, jnp.inexact)
            ]
            return sum(jnp.real(one * jnp.cos(one)).sum() for one in found)

        yield "grad", lambda: jax.grad(loss, tuple(range(len(real))))(*(arrays[i] for i in real))
    if arrays:
        yield "vmap", lambda: jax.vmap(call)(*(jnp.stack([one, one]) for one in arrays))


def differences(sample: Sample, counts: dict[str, int]) -> Iterator[Difference]:
    """Yield where a function computes otherwise.  counts: calls by "mode tool", and those with other bits."""
    for mode, run in modes(sample):
        try:
            bare = _leaves(run)
        except Exception:  # JAX refuses the mode
            continue
        for name, make in TOOLS.items():
            counts[f"{mode} {name}"] = counts.get(f"{mode} {name}", 0) + 1
            try:
                with amanda.apply(make()):
                    found = _leaves(run)
            except Exception as error:
                message = str(error).strip().splitlines() or [""]
                yield Difference(sample, mode, name, f"{type(error).__name__}: {message[0][:160]}")
                continue
            by = _difference(bare, found)
            if by is None:
                continue
            key = f"{mode} {name}: other bits"
            counts[key] = counts.get(key, 0) + 1
            if (
                name == "look" or not by < 1e-4
            ):  # with routines XLA fuses otherwise, which changes last digits
                yield Difference(sample, mode, name, f"{by:.1e}")


def _leaves(run: Callable[[], Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_numbers(one) for one in jax.tree_util.tree_leaves(run()) if not callable(one)]


def _numbers(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def _difference(bare: list[Any], found: list[Any]) -> float | None:
    """Return None for equal bits, else the largest difference relative to the largest magnitude."""
    if [(one.shape, one.dtype) for one in bare] != [(one.shape, one.dtype) for one in found]:
        return np.inf
    if all(one.tobytes() == other.tobytes() for one, other in zip(bare, found, strict=True)):
        return None
    by = 0.0
    for one, other in zip(bare, found, strict=True):
        if not np.issubdtype(one.dtype, np.inexact) and one.dtype.kind != "V":
            by = max(by, 0.0 if np.array_equal(one, other) else np.inf)
            continue
        one, other = (
            np.asarray(x, np.complex128 if x.dtype.kind == "c" else np.float64) for x in (one, other)
        )
        if not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return np.inf
        finite = np.isfinite(one)
        scale = max(np.abs(one[finite]).max(initial=0), 1e-2)  # terms of about 1 may cancel out
        by = max(by, float(np.abs(one[finite] - other[finite]).max(initial=0) / scale))
    return by
