"""A residual network as an ONNX model, with random weights."""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class Residual:
    """The layers of a ResNet with bottlenecks, made node by node.

    depths: blocks of each stage.  width: channels of the first stage.  size: of the square image.
    """

    def __init__(self, depths: tuple[int, ...], width: int, size: int) -> None:
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.size, self._random = size, np.random.default_rng(0)
        x = self._relu(self._convolution("x", 3, width, 7, 2))
        x = self._node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                x, channels = self._block(x, channels, width << stage, stride)
        x = self._node("Flatten", [self._node("GlobalAveragePool", [x])])
        self._node("Gemm", [x, self._weight(1000, channels), self._weight(1000)], transB=1)

    def model(self) -> bytes:
        """Return the model, serialised."""
        graph = helper.make_graph(
            self.nodes,
            "residual",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, self.size, self.size])],
            [onnx.ValueInfoProto(name=self.nodes[-1].output[0])],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items()],
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        return bytes(made.SerializeToString())

    def _block(self, x: str, channels: int, width: int, stride: int) -> tuple[str, int]:
        inner = self._relu(self._convolution(x, channels, width, 1, 1))
        inner = self._relu(self._convolution(inner, width, width, 3, stride))
        inner = self._convolution(inner, width, 4 * width, 1, 1)
        if channels != 4 * width:
            x = self._convolution(x, channels, 4 * width, 1, stride)
        return self._relu(self._node("Add", [inner, x])), 4 * width

    def _convolution(self, x: str, given: int, made: int, kernel: int, stride: int) -> str:
        weight = self._weight(made, given, kernel, kernel)
        pads = [kernel // 2] * 4
        y = self._node("Conv", [x, weight], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)
        ones, zeros = self._weight(made, value=1.0), self._weight(made, value=0.0)
        return self._node("BatchNormalization", [y, ones, zeros, zeros, ones])

    def _relu(self, x: str) -> str:
        return self._node("Relu", [x])

    def _weight(self, *shape: int, value: float | None = None) -> str:
        name = f"w{len(self.weights)}"
        made = self._random.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) if value is None else None
        self.weights[name] = np.asarray(np.full(shape, value) if made is None else made, np.float32)
        return name

    def _node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        name = f"/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name
