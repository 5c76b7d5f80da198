"""Operations computed on other inputs by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda

X = np.arange(6, dtype=np.float32).reshape(1, 6)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("ExpandDims", lambda x: tf.expand_dims(x, 0)),
        ("Squeeze", lambda x: tf.squeeze(x, [0])),
        ("Sum", lambda x: tf.reduce_sum(x, 1, keepdims=True)),
        ("Split", lambda x: tf.split(x, 3, axis=1)[1]),
        ("SelectV2", lambda x: tf.where(x > 2, x, -x)),
    ],
)
def test_ops_whose_arguments_python_calls_otherwise_are_computed(
    kind: str, function: Callable[[Any], Any]
) -> None:
    class Same(amanda.Tool):
        replaced = 0

        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == kind:
                context.replace_op(self.compute)

        def compute(self, *inputs: Any, original: Any) -> Any:
            self.replaced += 1
            return original(*inputs)

    traced = tf.function(function)
    expected = traced(tf.constant(X))
    tool = Same()
    with amanda.apply(tool):
        result = traced(tf.constant(X))
    assert tool.replaced == 1
    np.testing.assert_array_equal(result, expected)
