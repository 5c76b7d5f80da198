"""NumPy's functions as nodes: a traced routine computes what NumPy does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_models import model_of, node, random, run, tool

import amanda
from amanda.drivers.onnxruntime import instrument
from amanda.errors import NotTraceableError

X = random(4, 6)

SAME_SHAPE: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: (2 - x) * 3 / (x * x + 1) - -x,
    "powers": lambda x: abs(x) ** 0.5 + x**2 + np.square(x) + np.reciprocal(x),
    "rounding": lambda x: np.rint(x) + np.floor(x) + np.ceil(x) + np.trunc(x) + np.round(x * 3, 1),
    "integers": lambda x: ((x * 10).astype(np.int64) // 3 + (x * 10).astype(np.int64) % 4).astype(x.dtype),
    "remainder": lambda x: np.remainder(x, 0.7) + x // 0.3,
    "comparisons": lambda x: ((x > 0) & (x < 1) | ~(x != x) ^ (x >= 0.5)).astype(x.dtype),
    "bounds": lambda x: np.clip(x, -0.5, None) + x.clip(-1, 1) + np.maximum(x, 0) - np.minimum(0.5, x),
    "choice": lambda x: np.where(x > 0, x, 0.1 * x) + np.where(np.isfinite(x), x, 0),
    "transcendental": lambda x: np.exp(-x) + np.log(abs(x)) + np.sqrt(abs(x)) + np.tanh(x) + np.sin(x),
    "sums": lambda x: x - x.sum(1, keepdims=True) + np.mean(x, axis=0) + np.prod(x) + x.std(),
    "variance": lambda x: np.var(x, 1)[:, None] + x.var(axis=0) * x,
    "extremes": lambda x: x * x.max() - x.min(axis=0) + np.argmax(x, 1)[:, None] * 2 - np.argmin(x),
    "truth": lambda x: x * (x > 0).any(1, keepdims=True) * np.all(x < 5) + np.count_nonzero(x > 0),
    "norms": lambda x: x / np.linalg.norm(x, axis=1, keepdims=True) + np.linalg.norm(x, 1, axis=0),
    "order": lambda x: np.sort(x, axis=1) + np.argsort(x, axis=1) + np.partition(x, 2, axis=1)[:, 2:3] * 0,
    "cumulative": lambda x: np.cumsum(x, axis=1) + x.cumsum(0),
    "shapes": lambda x: x.T.reshape(4, 6) + np.swapaxes(x[None], 0, 1).squeeze(1) + np.moveaxis(x.T, 0, 1),
    "indices": lambda x: x[:, ::-1] + x[1] + x[..., -1:] + x[:, None, 2] + x[[0, 0, 2, 3]] + x[-3:, 1:][1, 0],
    "joining": lambda x: np.concatenate([x[:2], x[2:]]) + np.stack([x, x]).sum(0) + np.take(x, [3, 1], 0)[:1],
    "positions": lambda x: np.sort(x, 0) - np.argsort(x, 0) + np.sort(x, None)[:6] + np.partition(x, 2, 0)[2],
    "small integers": lambda x: x + np.cumsum((x * 100).astype(np.int8), 1) + (x * 100).astype(np.int8).sum(),
    "layouts": lambda x: np.ones_like(x, order="F") + x.flatten("C").reshape(4, 6) + np.ravel(x, "K")[:6],
    "filling": lambda x: np.zeros_like(x) + np.full_like(x, 3) * np.broadcast_to(x[0], (4, 6)),
    "products": lambda x: x @ (x.T @ x) + np.dot(x, np.eye(6, dtype=np.float32)),
    "constants": lambda x: np.arange(24, dtype=np.float32).reshape(4, 6) - x * np.float32(2),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_SHAPE)
def test_a_traced_routine_computes_what_numpy_does(name: str) -> None:
    function = SAME_SHAPE[name]
    identity = model_of([node("Identity", "x", "y")], {"x": [4, 6]}, ["y"])
    inserting = tool(lambda context: context.insert_after_op(amanda.traceable(function)))
    copy = instrument(identity, inserting)
    onnx.checker.check_model(copy, full_check=True)
    assert len(copy.graph.node) > 1
    expected = np.asarray(function(X), np.float32)
    np.testing.assert_allclose(run(copy, x=X)[0], expected, rtol=2e-5, atol=2e-5)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a branch": (lambda x: x if x.sum() > 0 else -x, "numpy.where chooses"),
    "a number": (lambda x: x * float(x.sum()), "Python number"),
    "a function": (lambda x: np.fft.fft(x).real, "numpy.fft has no counterpart"),
    "a mask": (lambda x: x[x > 0].sum() + x, "an index of bool"),
    "writing": (lambda x: x.__setitem__(0, 1), "Python number, or an array"),
    "an array for a maximum": (
        lambda x: x - np.max(x, axis=0, out=np.zeros(6, np.float32)),
        "numpy.max with out",
    ),
    "a type of a variance": (lambda x: x - np.var(x, dtype=np.float64), "numpy.var with dtype"),
    "another shape": (lambda x: x + np.zeros_like(x, shape=(6,)), "numpy.full_like with shape"),
    "order of columns": (lambda x: np.reshape(x, (4, 6), order="F"), "numpy.reshape with order='F'"),
    "a flat array by columns": (lambda x: x.ravel("F").reshape(4, 6), "numpy.ravel with order='F'"),
    "a norm of matrices": (lambda x: x / np.linalg.norm(x, 2), "numpy.linalg.norm of order 2 of matrices"),
    "a norm of pairs of axes": (lambda x: x / np.linalg.norm(x, 1, (0, 1)), "of order 1 of matrices"),
    "an array": (lambda x: np.asarray(x) * 2, "Python number, or an array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_counterpart_is_told(case: str) -> None:
    function, reason = REFUSED[case]
    identity = model_of([node("Identity", "x", "y")], {"x": [4, 6]}, ["y"])
    inserting = tool(lambda context: context.insert_after_op(amanda.traceable(function)))
    with pytest.raises(NotTraceableError, match=reason):
        instrument(identity, inserting)


def test_extents_that_are_not_known_are_no_numbers() -> None:
    model = model_of([node("Identity", "x", "y")], {"x": ["N", 6]}, ["y"])
    fine = tool(lambda context: context.insert_after_op(amanda.traceable(lambda x: x / x.shape[1])))
    np.testing.assert_allclose(run(instrument(model, fine), x=X)[0], X / 6, rtol=1e-6)
    sized = tool(lambda context: context.insert_after_op(amanda.traceable(lambda x: x / x.size)))
    with pytest.raises(NotTraceableError, match="the size of a value of shape"):
        instrument(model, sized)


@pytest.mark.parametrize("opset", [13, 15, 21])
def test_nodes_are_those_of_the_models_opset(opset: int) -> None:
    model = model_of([node("Identity", "x", "y")], {"x": [4, 6]}, ["y"], opset=opset)
    scaled = amanda.traceable(lambda x: (x / x.max(axis=1, keepdims=True)).reshape(4, 6) - x.mean(0))
    copy = instrument(model, tool(lambda context: context.insert_after_op(scaled)))
    onnx.checker.check_model(copy, full_check=True)
    np.testing.assert_allclose(run(copy, x=X)[0], scaled(X), rtol=1e-5, atol=1e-5)


def test_a_model_of_an_old_opset_is_told_to_be_converted() -> None:
    model = model_of([node("Identity", "x", "y")], {"x": [4, 6]}, ["y"], opset=11)
    doubled = tool(lambda context: context.insert_after_op(amanda.traceable(lambda x: x * 2)))
    with pytest.raises(NotTraceableError, match=r"opset 11.*convert_version"):
        instrument(model, doubled)
