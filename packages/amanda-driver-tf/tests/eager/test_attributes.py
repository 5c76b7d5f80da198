"""Attributes that are None: they stand for the op's default."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

import amanda
from amanda.drivers.tensorflow.eager._schema import Schema

X = tf.constant(np.random.default_rng(0).random((1, 4, 4, 1)), tf.float32)
KERNEL = tf.ones([2, 2, 1, 1])
OF_NUMPY = np.int64(1)
"""TensorFlow's fast path takes no integer of NumPy in a list, and falls back to Python."""

CALLS: dict[str, Callable[[], Any]] = {
    "Conv2D": lambda: tf.raw_ops.Conv2D(
        input=X, filter=KERNEL, strides=[1, OF_NUMPY, 1, 1], padding="VALID", use_cudnn_on_gpu=None,
        explicit_paddings=None, data_format=None, dilations=None,
    ),
    "MaxPool": lambda: tf.raw_ops.MaxPool(
        input=X, ksize=[1, OF_NUMPY, 1, 1], strides=[1, 1, 1, 1], padding="VALID", data_format=None
    ),
    "LRN": lambda: tf.raw_ops.LRN(input=X, depth_radius=OF_NUMPY, bias=None, alpha=None, beta=None),
    "Sum": lambda: tf.raw_ops.Sum(input=X, axis=[0], keep_dims=None),
    "ArgMax": lambda: tf.raw_ops.ArgMax(input=X, dimension=1, output_type=None),
    "Squeeze": lambda: tf.raw_ops.Squeeze(input=X, axis=None),
    "convolution": lambda: tf.nn.convolution(X, KERNEL, strides=OF_NUMPY, padding="VALID", dilations=2),
}  # fmt: skip


class Attributes(amanda.Tool):
    """Records the attributes of ops by type, and inserts routines if asked to."""

    def __init__(self, inserts: bool) -> None:
        super().__init__()
        self.attributes_by_type: dict[str, dict[str, Any]] = {}
        self.inserts = inserts
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.attributes_by_type[context.get_op_type()] = context.get_attrs()
        if self.inserts:
            context.insert_before_op(lambda *inputs: None)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if self.inserts:
            context.insert_before_backward_op(lambda *gradients: None)


@pytest.mark.parametrize("inserts", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_op_with_none_for_a_default_computes_what_it_computes_alone(name: str, inserts: bool) -> None:
    def step() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = CALLS[name]()
        return y, tape.gradient(y, X) if y.dtype.is_floating else None

    expected, tool = step(), Attributes(inserts)
    with amanda.apply(tool):
        results = step()
    assert all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True) if b is not None)
    assert not any(
        value is None for attributes in tool.attributes_by_type.values() for value in attributes.values()
    )


def test_defaults_are_those_of_the_python_functions() -> None:
    different = set()
    for name in dir(tf.raw_ops):
        op_def = op_def_registry.get(name)
        parameters = {} if op_def is None else signature(getattr(tf.raw_ops, name)).parameters
        schema = None if op_def is None else Schema(op_def)
        for attribute in () if op_def is None else op_def.attr:
            if attribute.HasField("default_value") and attribute.name in parameters:
                assert schema is not None
                value = schema.with_defaults((attribute.name, None))[attribute.name]
                if not _equal(value, parameters[attribute.name].default):
                    different.add(name)
    # Python says True for one attribute of these, and the registry False.
    assert different <= {"SdcaOptimizer", "SdcaOptimizerV2"}


def _equal(value: Any, default: Any) -> bool:
    """Compare values; the registry's floats are of 32 bits, and lists of the functions may be tuples."""
    values = value if isinstance(value, list) else [value]
    if any(isinstance(value, float) for value in values):
        return np.allclose(value, default)
    return bool(value == (list(default) if isinstance(default, tuple) else default))
