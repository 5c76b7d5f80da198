"""Counting, FLOPs and pruning of one network: the numbers that they tell on the other frameworks."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from portable import IMAGES, KERNEL, KERNEL_BIAS, MATRIX, MATRIX_BIAS, assert_numbers, measured


class Network(nn.Cell):
    """The network, in MindSpore."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Parameter(Tensor(KERNEL.transpose(3, 2, 0, 1).copy()), name="kernel")
        self.kernel_bias = Parameter(Tensor(KERNEL_BIAS), name="kernel_bias")
        self.matrix = Parameter(Tensor(MATRIX.T.copy()), name="matrix")
        self.matrix_bias = Parameter(Tensor(MATRIX_BIAS), name="matrix_bias")

    def construct(self, x: Any) -> Any:
        x = ops.relu(ops.conv2d(x, self.kernel, self.kernel_bias, pad_mode="pad", padding=1))
        x = ops.max_pool2d(x, 2, 2).permute(0, 2, 3, 1).reshape(len(IMAGES), -1)
        return ops.dense(x, self.matrix, self.matrix_bias)


def test_on_mindspore() -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    model, images = Network(), Tensor(IMAGES.transpose(0, 3, 1, 2).copy())
    assert_numbers(measured(lambda: np.asarray(model(images).asnumpy())))
