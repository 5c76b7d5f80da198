"""QuantizeLinear and DequantizeLinear nodes in a graph of ONNX, with integers as weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from amanda.tools.axes import Unfolding
from amanda.tools.libraries import ml_dtypes
from amanda.tools.libraries import numpy as np
from amanda.tools.onnx_graph import (
    bodies_of,
    names_in,
    remove_unread,
)
from amanda.tools.quantize._fake_quantize import (
    FloatGrid,
    Grid,
    Groups,
    QuantizeError,
    Scale,
    fake_quantize_fixed,
)
from amanda.tools.quantize._tool import QuantizeOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto


def element_type(grid: Grid) -> tuple[str, int]:
    """Return the name of the least type of ONNX that holds a grid, and its bits."""
    if isinstance(grid, FloatGrid):
        return {"float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2"}[grid.dtype], 8
    bits = next(bits for bits in (4, 8, 16) if grid.bits <= bits)
    return f"{'INT' if grid.low < 0 else 'UINT'}{bits}", bits


class StoredWeight(NamedTuple):
    """The integers of a weight, with scales and zero points in the shape that DequantizeLinear reads.

    axis: of the scales; None of one scale.  block: size of groups along the axis, 0 without groups.
    unfolding: from the weight to the rows of `codes`, of a weight in groups; None for codes in its own form.
    """

    codes: NDArray[Any]
    scale: NDArray[Any]
    zero_point: NDArray[Any]
    axis: int | None
    block: int = 0
    unfolding: Unfolding | None = None


def stored_weight(weight: NDArray[Any], scale: Scale, rounding: Any) -> StoredWeight:
    """Return the numbers of the grid that stand for a weight, as fake quantisation rounds it.

    Raises QuantizeError where scales differ along several axes.
    """
    # By the simulation itself, so that the file holds exactly the numbers that were simulated.
    dequantized = np.asarray(fake_quantize_fixed(weight, {None: scale}, rounding))
    if scale.groups is None:
        return _weight_stored_by_channel(dequantized, scale)
    return _weight_stored_in_groups(dequantized, scale, scale.groups)


def _weight_stored_by_channel(dequantized: NDArray[Any], scale: Scale) -> StoredWeight:
    """Return the stored form of a weight with one scale, or with a scale for each channel of one axis.

    Raises QuantizeError for scales along several axes.
    """
    scales, zero_points, grid, axes, _ = scale
    # An axis of extent 1 needs no scales, so that a depthwise weight with one multiplier is of one axis.
    scale_axes = [axis for axis in axes if dequantized.shape[axis] > 1] or list(axes[:1])
    if len(scale_axes) > 1:
        raise QuantizeError(
            f"a weight of shape {dequantized.shape} has scales along its axes {scale_axes}, and "
            "DequantizeLinear knows those of one axis; let per_channel be False"
        )
    if not scale_axes:
        numbers = dequantized / scales + zero_points
        return StoredWeight(_grid_numbers(numbers, grid), scales, zero_points, axis=None)
    (scale_axis,) = scale_axes
    broadcast_shape = [-1 if axis == scale_axis else 1 for axis in range(dequantized.ndim)]
    numbers = dequantized / scales.reshape(broadcast_shape) + zero_points.reshape(broadcast_shape)
    return StoredWeight(_grid_numbers(numbers, grid), scales, zero_points, axis=scale_axis)


def _weight_stored_in_groups(dequantized: NDArray[Any], scale: Scale, groups: Groups) -> StoredWeight:
    """Return the stored form of a weight with a scale for each group: a matrix, in blocks or by outputs."""
    scales, zero_points, grid, _, _ = scale
    group_rows = groups.split(dequantized) / scales[:, None] + zero_points[:, None]
    unfolding = Unfolding.of(dequantized.shape, groups.layout)
    # One group for each output: scales of one axis, without blocks.
    if groups.are_outputs:
        codes = _grid_numbers(group_rows, grid)
        return StoredWeight(codes, scales, zero_points, axis=0, unfolding=unfolding)
    outputs = prod(unfolding.canonical[: unfolding.outputs])
    matrix, scales, zero_points = (a.reshape(outputs, -1) for a in (group_rows, scales, zero_points))
    # A weight (inputs, outputs) is stored as it is, which saves the nodes that would transpose it.
    if unfolding.order == (1, 0):
        return StoredWeight(_grid_numbers(matrix.T, grid), scales.T, zero_points.T, axis=0, block=groups.size)
    return StoredWeight(_grid_numbers(matrix, grid), scales, zero_points, 1, groups.size, unfolding)


def _grid_numbers(numbers: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Return numbers of a grid in contiguous memory; near-integers are rounded, floating ones unchanged."""
    return np.ascontiguousarray(numbers if isinstance(grid, FloatGrid) else np.rint(numbers))


def initializer(name: str, array: NDArray[Any], kind: str) -> TensorProto:
    """Return an initializer with numbers in an element type of ONNX.

    kind: name of the element type, such as "UINT8", which has to hold the numbers; of those with 4 bits two
    lie in a byte.
    """
    from onnx import TensorProto

    if kind in ("INT4", "UINT4"):
        flat = np.append(array.astype(np.int8).reshape(-1), np.zeros(array.size % 2, np.int8)).view(np.uint8)
        # Two numbers in a byte, the first one low.
        raw = (flat[::2] & 15) | (flat[1::2] << 4)
    else:
        dtype_names = {"FLOAT": "float32", "FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2"}
        dtype = dtype_names.get(kind, kind.lower())
        raw = array.astype(getattr(ml_dtypes, dtype) if kind.startswith("FLOAT8") else dtype)
    return TensorProto(
        name=name, data_type=getattr(TensorProto, kind), dims=array.shape, raw_data=raw.tobytes()
    )


NodeKey: TypeAlias = tuple[str, str, tuple[str, ...], tuple[str, ...]]
"""Type, name, inputs and outputs of a node: names alone need not be unique in a file."""


class QuantizedInput(NamedTuple):
    """A quantised input of a node.

    tensor: "weight", or "input 0" by its position.  dtype: of the value.  value: of a weight, as it is read.
    """

    tensor: str
    scale: Scale
    dtype: str
    value: NDArray[Any] | None


def node_key(node: NodeProto) -> NodeKey:
    """Return what identifies a node in a file, also in a copy of the file."""
    return node.op_type, node.name, tuple(node.input), tuple(node.output)


class RowTail(NamedTuple):
    """A row of the result after the name of the layer: a quantised tensor of a node.

    group_size: numbers that share a scale.  before, after: bytes of a weight, the second with its scales;
    None for an activation, and for a weight that an earlier row counts.
    """

    tensor: str
    bits: int
    group_size: int | None = None
    before: int | None = None
    after: int | None = None


class QdqWriter:
    """Insert quantisation nodes and integer weights into a model, in place.

    rows: of the result, one for each input that is quantised.
    has_narrow_products: True if a MatMul of floats reads weights of 4 bits.
    """

    def __init__(
        self,
        model: ModelProto,
        nodes: Mapping[NodeKey, Mapping[int, QuantizedInput]],
        options: QuantizeOptions,
    ) -> None:
        self._model, self._nodes, self._rounding = model, nodes, options.rounding
        self._used_names = set(names_in(model.graph))
        self.rows: list[tuple[Any, ...]] = []
        self.has_narrow_products = False

    def write(self) -> None:
        """Rewrite the graph and its bodies; leave out weights that nothing reads any more.

        Raises QuantizeError for a key of `nodes` that no node has, and as `_quantize_inputs` does.
        """
        rewritten_keys = self._rewrite_graph(self._model.graph)
        # A scale that finds no node would be lost silently.
        if missing_keys := self._nodes.keys() - rewritten_keys:
            op_type, name, _, _ = next(iter(missing_keys))
            raise QuantizeError(f"{(op_type, name)} is no node of the model that is written")
        remove_unread(self._model.graph)

    def _rewrite_graph(self, graph: GraphProto) -> set[NodeKey]:
        """Rewrite the nodes of a graph and of its bodies; return the keys of the rewritten nodes."""
        from onnx import NodeProto

        # Names of dequantised values in this graph, by content: a value is written once.
        dequantized_names: dict[Any, str] = {}
        nodes, rewritten_keys = [], set()
        for node in graph.node:
            # Bodies of If and Loop read values of the graph around them.
            for body in bodies_of(node):
                rewritten_keys |= self._rewrite_graph(body)
            key = node_key(node)
            inputs = self._nodes.get(key, {})
            if inputs:
                rewritten_keys.add(key)
                nodes += self._quantize_inputs(graph, node, inputs, dequantized_names)
            # A node of a repeated field dies with the field, which is cleared below.
            node_copy = NodeProto()
            node_copy.CopyFrom(node)
            nodes.append(node_copy)
        del graph.node[:]
        graph.node.extend(nodes)
        return rewritten_keys

    def _quantize_inputs(
        self,
        graph: GraphProto,
        node: NodeProto,
        inputs: Mapping[int, QuantizedInput],
        dequantized_names: dict[Any, str],
    ) -> list[NodeProto]:
        """Make a node read quantised inputs; return the new nodes that compute them, and append result rows.

        Sets `has_narrow_products`.  Raises QuantizeError for an input of another type than float32.
        """
        nodes: list[NodeProto] = []
        for position, operand in inputs.items():
            if operand.dtype != "float32":
                raise QuantizeError(
                    f"{operand.tensor} of {node.op_type} {node.name} is {operand.dtype}; convert "
                    "writes nodes for float32"
                )
            quantize = self._quantize_activation if operand.value is None else self._quantize_weight
            new_nodes, name, row = quantize(graph, node.input[position], operand, dequantized_names)
            nodes += new_nodes
            self.rows.append((node.name or node.op_type, *row))
            node.input[position] = name
        # With one quantised input the other factor of the product is of floats.
        has_narrow_factor = len(inputs) == 1 and all(
            element_type(operand.scale.grid)[1] == 4 for operand in inputs.values()
        )
        self.has_narrow_products |= node.op_type == "MatMul" and has_narrow_factor
        return nodes

    def _quantize_activation(
        self, graph: GraphProto, name: str, operand: QuantizedInput, dequantized_names: dict[Any, str]
    ) -> tuple[list[NodeProto], str, RowTail]:
        """Add scale and zero point to a graph, and create nodes that clip, quantise and dequantise.

        Returns the nodes, the name of the last one's output, and a row for the result.  No nodes where an
        earlier input has the same value in the same grid: then the output is that of the earlier nodes.
        No Clip for a grid that fills its type.  Raises QuantizeError for a floating grid.
        """
        from onnx import helper

        scale, zero_point, grid = operand.scale.scale, operand.scale.zero_point, operand.scale.grid
        if isinstance(grid, FloatGrid):
            raise QuantizeError(
                f"{operand.tensor}, which reads {name}, is in {grid.dtype}: ONNX Runtime puts kernels of "
                "integers in the place of such nodes, and refuses the file; let activation_bits be a number"
            )
        kind, bits = element_type(grid)
        row = RowTail(f"{operand.tensor}, {kind.lower()}", grid.bits)
        key = name, scale.tobytes(), zero_point.tobytes(), grid
        # Nodes that read one value in one grid share its quantisation.
        if key in dequantized_names:
            return [], dequantized_names[key], row
        scale_names = self._add_scales(graph, name, scale, zero_point, grid)
        nodes = []
        value_name = name
        # ONNX has 4, 8 and 16 bits: a narrower grid needs a Clip, as QuantizeLinear uses all integers.
        level_count = grid.high - grid.low + 1
        if level_count < 2**bits:
            ends = [(end - zero_point) * scale for end in (grid.low, grid.high)]
            end_names = [
                self._add_initializer(graph, f"{name}_end", np.float32(end), "FLOAT") for end in ends
            ]
            value_name = self._unique_name(f"{name}_clipped")
            nodes.append(helper.make_node("Clip", [name, *end_names], [value_name], value_name))
        quantized = self._unique_name(f"{name}_quantized")
        dequantized = dequantized_names[key] = self._unique_name(f"{name}_dequantized")
        nodes += [
            helper.make_node("QuantizeLinear", [value_name, *scale_names], [quantized], quantized),
            helper.make_node("DequantizeLinear", [quantized, *scale_names], [dequantized], dequantized),
        ]
        return nodes, dequantized, row

    def _quantize_weight(
        self, graph: GraphProto, name: str, operand: QuantizedInput, dequantized_names: dict[Any, str]
    ) -> tuple[list[NodeProto], str, RowTail]:
        """Add integers of a weight to a graph; return nodes that dequantise them, and their output.

        Returns the nodes, the name of the last one's output, and a row for the result.  No nodes where an
        earlier weight has the same integers and scales: then the output is that of the earlier nodes.
        """
        from onnx import helper

        assert operand.value is not None
        stored = stored_weight(operand.value, operand.scale, self._rounding)
        grid, shape = operand.scale.grid, operand.value.shape
        kind, bits = element_type(grid)
        groups = operand.scale.groups
        # Without groups, of all elements that share a scale.
        group_size = groups.size if groups else prod(shape) // max(operand.scale.scale.size, 1)
        row = RowTail(f"{operand.tensor}, {kind.lower()}", grid.bits, group_size)
        arrays = stored.codes, stored.scale, stored.zero_point
        # By content: exporters write one initializer under several names, and a file should hold it once.
        key = sha256(b"".join(array.tobytes() for array in arrays)).digest(), kind, shape, stored.axis
        if key in dequantized_names:
            return [], dequantized_names[key], row
        # A last integer of 4 bits fills half a byte.
        integer_bytes = sum(ceil(array.size * bits / 8) for array in (stored.codes, stored.zero_point))
        row = row._replace(before=operand.value.nbytes, after=integer_bytes + stored.scale.nbytes)
        codes = self._add_initializer(graph, f"{name}_quantized", stored.codes, kind)
        scales = self._add_scales(graph, name, stored.scale, stored.zero_point, grid)
        value_name = self._unique_name(f"{name}_dequantized")
        attributes: dict[str, Any] = {} if stored.axis is None else {"axis": stored.axis}
        if stored.block:
            attributes["block_size"] = stored.block
        nodes = [
            helper.make_node("DequantizeLinear", [codes, *scales], [value_name], value_name, **attributes)
        ]
        if stored.unfolding is not None:
            value_name = self._undo_unfolding(graph, nodes, name, value_name, stored, shape)
        dequantized_names[key] = value_name
        return nodes, value_name, row

    def _undo_unfolding(
        self, graph: GraphProto, nodes: list[NodeProto], name: str, value_name: str, stored: StoredWeight,
        shape: Sequence[int],
    ) -> str:  # fmt: skip
        """Append nodes that bring a matrix of groups into the shape of its weight; return the output's name.

        Steps that change nothing have no node.
        """
        from onnx import helper

        unfolding = stored.unfolding
        assert unfolding is not None
        inverse_order = unfolding.inverse_order
        if stored.codes.shape != unfolding.transposed:
            value_name = self._append_reshape(graph, nodes, name, value_name, unfolding.transposed)
        if inverse_order != tuple(range(len(inverse_order))):
            input_name, value_name = value_name, self._unique_name(f"{name}_transposed")
            nodes.append(
                helper.make_node("Transpose", [input_name], [value_name], value_name, perm=inverse_order)
            )
        if unfolding.split != shape:  # the axis of inputs is split into groups
            value_name = self._append_reshape(graph, nodes, name, value_name, shape)
        return value_name

    def _append_reshape(
        self, graph: GraphProto, nodes: list[NodeProto], name: str, value_name: str, shape: Sequence[int]
    ) -> str:
        """Append a node that reshapes a value; return its output's name, which begins with `name`."""
        from onnx import helper

        shape_name = self._add_initializer(graph, f"{name}_shape", np.array(shape, np.int64), "INT64")
        result_name = self._unique_name(f"{name}_reshaped")
        nodes.append(helper.make_node("Reshape", [value_name, shape_name], [result_name], result_name))
        return result_name

    def _add_scales(
        self, graph: GraphProto, name: str, scale: NDArray[Any], zero_point: NDArray[Any], grid: Grid
    ) -> list[str]:
        """Add scale and zero point to a graph; return their names."""
        kind, _ = element_type(grid)
        return [
            self._add_initializer(graph, f"{name}_scale", np.asarray(scale, np.float32), "FLOAT"),
            self._add_initializer(graph, f"{name}_zero_point", np.rint(zero_point), kind),
        ]

    def _add_initializer(self, graph: GraphProto, name: str, array: Any, kind: str) -> str:
        """Add an array to the initializers of a graph; return its name, which begins with `name`."""
        new_name = self._unique_name(name)
        graph.initializer.append(initializer(new_name, np.asarray(array), kind))
        return new_name

    def _unique_name(self, base: str) -> str:
        """Return a name that begins with `base` and is new in the model; mark it as used."""
        name, count = base, 0
        while name in self._used_names:
            count += 1
            name = f"{base}_{count}"
        self._used_names.add(name)
        return name
