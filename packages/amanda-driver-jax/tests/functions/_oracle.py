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
        arguments = [str(jax.tree_util.tree_map(_describe, arg))[:40] for arg in self.sample.args]
        return f"{self.sample.name}({', '.join(arguments)}) {self.mode} under {self.tool}: {self.by}"


def _describe(value: Any) -> Any:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else value


def _echo(*values: Any) -> Any:
    return values if len(values) != 1 else values[0]


def _equal(*values: Any) -> Any:
    copies = tuple(jax.tree_util.tree_map(_copy, value) for value in values)
    return copies if len(copies) != 1 else copies[0]


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
    places = [i for i, array in enumerate(leaves) if isinstance(array, jax.Array)]
    arrays = [leaves[i] for i in places]

    def call(*arrays: Any) -> Any:
        values = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            values[place] = array
        return sample.function(*jax.tree_util.tree_unflatten(tree, values))

    yield "eager", lambda: call(*arrays)
    yield "jit", lambda: jax.jit(call)(*arrays)
    real = [i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
    if real:

        def loss(*real_arrays: Any) -> Any:
            values = list(arrays)
            for i, array in zip(real, real_arrays, strict=True):
                values[i] = array
            outputs = [
                output
                for output in jax.tree_util.tree_leaves(call(*values))
                if jnp.issubdtype(output.dtype, jnp.inexact)
            ]
            return sum(jnp.real(output * jnp.cos(output)).sum() for output in outputs)

        yield "grad", lambda: jax.grad(loss, tuple(range(len(real))))(*(arrays[i] for i in real))
    if arrays:
        yield "vmap", lambda: jax.vmap(call)(*(jnp.stack([array, array]) for array in arrays))


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
                    results = _leaves(run)
            except Exception as error:
                message = str(error).strip().splitlines() or [""]
                yield Difference(sample, mode, name, f"{type(error).__name__}: {message[0][:160]}")
                continue
            by = _difference(bare, results)
            if by is None:
                continue
            key = f"{mode} {name}: other bits"
            counts[key] = counts.get(key, 0) + 1
            # With routines XLA fuses otherwise, which changes last digits; near a pole, all digits.
            if name == "look" or not (by < 1e-4 or by <= 2 * _effect_of_fusing(run, bare)):
                yield Difference(sample, mode, name, f"{by:.1e}")


def _effect_of_fusing(run: Callable[[], Any], bare: list[Any]) -> float:
    """Return the difference that a call makes without a tool where XLA compiles each operator by itself."""
    with jax.disable_jit():
        return _difference(bare, _leaves(run)) or 0.0


def _leaves(run: Callable[[], Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_numbers(leaf) for leaf in jax.tree_util.tree_leaves(run()) if not callable(leaf)]


def _numbers(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def _difference(bare: list[Any], results: list[Any]) -> float | None:
    """Return None for equal bits, else the largest difference relative to the largest magnitude."""
    if [(expected.shape, expected.dtype) for expected in bare] != [
        (expected.shape, expected.dtype) for expected in results
    ]:
        return np.inf
    if all(expected.tobytes() == result.tobytes() for expected, result in zip(bare, results, strict=True)):
        return None
    by = 0.0
    for expected, result in zip(bare, results, strict=True):
        if not np.issubdtype(expected.dtype, np.inexact) and expected.dtype.kind != "V":
            by = max(by, 0.0 if np.array_equal(expected, result) else np.inf)
            continue
        expected, result = (
            np.asarray(x, np.complex128 if x.dtype.kind == "c" else np.float64) for x in (expected, result)
        )
        if not np.array_equal(np.isfinite(expected), np.isfinite(result)):
            return np.inf
        finite = np.isfinite(expected)
        scale = max(np.abs(expected[finite]).max(initial=0), 1e-2)  # terms of about 1 may cancel out
        by = max(by, float(np.abs(expected[finite] - result[finite]).max(initial=0) / scale))
    return by
