"""Fake quantisation in a graph of TensorFlow, in the form that its converter to TensorFlow Lite reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake import Scale
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize._op import QuantizedOp

if TYPE_CHECKING:
    from numpy.typing import NDArray

KERNELS = "TensorFlow Lite's kernels of integers read"


class QuantizedNode(NamedTuple):
    """A node of a function, its quantizers, and by position its weights on their grids."""

    place: QuantizedOp
    weights: dict[int, NDArray[Any]]


class Marked(NamedTuple):
    """A quantised tensor of an op.

    node: in the file, the name of a weight.  before: bytes of a weight.
    """

    place: QuantizedOp
    tensor: str
    scale: Scale
    node: str = ""
    before: int | None = None

    @property
    def layer(self) -> str:
        """Return the module of the op, or the source line."""
        place = next(self.place.rows())
        return place.module or place.source


class FakeQuantGraph:
    """A graph of constants and nodes into which fake quantisation is written, as the converter reads it.

    made: the tensors that were quantised.
    """

    def __init__(self, function: Any) -> None:
        self._inputs = [one.name for one in function.inputs]
        self._outputs = [one.name for one in function.outputs]
        self._definition, self._shapes = function.graph.as_graph_def(), function.graph.get_tensor_by_name
        self._nodes = {one.name: one for one in self._definition.node}
        self._known: dict[Any, str] = {}
        self.made: list[Marked] = []

    def quantise(self, name: str, found: QuantizedNode) -> None:
        """Put nodes of fake quantisation before a node."""
        node, place = self._nodes.get(name), found.place
        if node is None:
            raise QuantizeError(
                f"{place.name} is in a tf.function of its own, {name}, "
                "which the converter inlines under other names; leave the module out by amanda.tools.select"
            )
        scales = [(*key, one, one.scale()) for key, one in place.quantizers.items()]
        activations = [scale for *_, one, scale in scales if scale is not None and not one.is_weight]
        if (
            node.op in (*_PRODUCTS, "Einsum")
            and len(activations) > 1
            and any(map(lite_zero_point, activations))
        ):
            raise QuantizeError(
                f"{place.name} multiplies two activations, of which one has a zero point; TensorFlow Lite's "
                "XNNPACK computes such products wrongly: let symmetric_activations be True"
            )
        for position, item, quantizer, scale in scales:
            assert scale is not None
            if node.attr["T"].type != _float32():
                raise QuantizeError(f"{place.name} is in another type than float32; {KERNELS} float32")
            index = position + (item or 0)
            if quantizer.is_weight:
                self._write_weight(node, index, found.weights[position], place, scale)
            else:
                node.input[index] = self._activation(node.input[index], scale)
                self.made.append(Marked(place, quantizer.name, scale))

    def function(self) -> Any:
        """Return the graph as a function."""
        import tensorflow as tf

        def imported() -> None:
            tf.graph_util.import_graph_def(self._definition, name="")

        made = tf.compat.v1.wrap_function(imported, [])
        inputs, outputs = (
            [made.graph.as_graph_element(one) for one in names] for names in (self._inputs, self._outputs)
        )
        return made.prune(inputs, outputs)

    def _activation(self, value: str, scale: Scale) -> str:
        """Return the name of the value on its grid."""
        key = value, scale.scale.tobytes(), scale.zero_point.tobytes()
        if key not in self._known:
            name = f"{value.partition(':')[0]}/quantised/{len(self._known)}"
            self._known[key] = self._fake(name, value, scale)
        return self._known[key]

    def _write_weight(
        self, node: Any, index: int, value: NDArray[Any], place: QuantizedOp, scale: Scale
    ) -> None:
        """Replace a node's weight by constants with fake quantisation, stored as int8 by the converter."""
        axes, shape, name = scale.axes, value.shape, f"{node.name}/weight/quantised"
        self.made.append(Marked(place, "weight", scale, name, value.nbytes))
        if node.op in _PRODUCTS and axes and index == 1 and value.ndim == 2:
            of_input, of_weight = _PRODUCTS[node.op]
            if not node.attr[of_input].b:
                self._write_product(node, name, value.T if node.attr[of_weight].b else value, scale)
                return
        if axes and tuple(axes) != tuple(range(axes[0], len(shape))):
            raise QuantizeError(
                f"the weight of {place.name} has scales along its axes {list(axes)}, and its shape is "
                f"{shape}; TensorFlow's converter knows those of the last axis: let per_channel be False"
            )
        flat = value.reshape(*shape[: axes[0]], -1) if axes else value
        made = self._fake(name, self._constant(f"{name}/values", flat), scale)
        node.input[index] = made if flat.shape == shape else self._reshaped(f"{name}/whole", made, shape)

    def _write_product(self, node: Any, name: str, weight: NDArray[Any], scale: Scale) -> None:
        """Replace a product with a matrix of (inputs, outputs) by a convolution of 1x1.

        The converter transposes matrices, and refuses to do so where each output has a scale.
        """
        inputs, outputs = weight.shape
        x = self._reshaped(f"{name}/input", node.input[0], (-1, 1, 1, inputs))
        values = self._constant(f"{name}/values", weight.reshape(1, 1, inputs, outputs))
        made = self._node(
            "Conv2D", f"{name}/product", [x, self._fake(name, values, scale)], T=_float32(), strides=[1] * 4,
            padding=b"VALID",
        )  # fmt: skip
        shape = [-1 if size is None else size for size in self._shapes(f"{node.name}:0").shape]
        product, node.name = node.name, f"{node.name}/unread"
        self._reshaped(product, made, shape)

    def _fake(self, name: str, value: str, scale: Scale) -> str:
        ends = {"min": scale.grid.low, "max": scale.grid.high}
        held = [
            self._constant(f"{name}/{end}", np.float32((level - scale.zero_point) * scale.scale))
            for end, level in ends.items()
        ]
        kind = "FakeQuantWithMinMaxVars" + "PerChannel" * bool(scale.axes)
        return self._node(kind, name, [value, *held])

    def _reshaped(self, name: str, value: str, shape: Sequence[int]) -> str:
        target = self._constant(f"{name}/shape", np.array(shape, np.int32))
        return self._node("Reshape", name, [value, target], T=_float32())

    def _constant(self, name: str, array: NDArray[Any]) -> str:
        import tensorflow as tf

        held = tf.make_tensor_proto(array)
        return self._node("Const", name, [], dtype=held.dtype, value=held)

    def _node(self, op: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        import tensorflow as tf

        node = self._definition.node.add(op=op, name=name, input=inputs)
        for key, value in attributes.items():
            kinds = {int: "type", bytes: "s", list: "list"}
            field = kinds.get(type(value), "tensor")
            held = tf.compat.v1.AttrValue.ListValue(i=value) if field == "list" else value
            node.attr[key].CopyFrom(tf.compat.v1.AttrValue(**{field: held}))
        return name


_PRODUCTS = {"MatMul": ("transpose_a", "transpose_b"), "BatchMatMulV2": ("adj_x", "adj_y")}
"""Types of products, and their attributes that transpose the input and the weight."""


def _float32() -> int:
    import tensorflow as tf

    return int(tf.float32.as_datatype_enum)


def lite_zero_point(scale: Scale) -> int:
    """Return the zero point of an activation among signed integers."""
    return int(scale.zero_point) - scale.grid.low - 128
