"""QuantizeLinear and DequantizeLinear nodes in a graph of ONNX, with integers as weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from amanda.tools.axes import Unfolding
from amanda.tools.libraries import ml_dtypes
from amanda.tools.libraries import numpy as np
from amanda.tools.onnx_graph import (
    bodies_of,
    names_in,
    remove_unread,
)
from amanda.tools.quantize._fake_quantize import FloatGrid, Grid, QuantizeError, Scale, fake_quantize_fixed
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
    block: int
    unfolding: Unfolding | None = None


def stored_weight(value: NDArray[Any], scale: Scale, rounding: Any) -> StoredWeight:
    """Return the numbers of the grid that stand for a weight, as fake quantisation rounds it.

    Raises QuantizeError where scales differ along several axes.
    """
    s, z, grid, axes, groups = scale
    # By the simulation itself, so that the file holds exactly the numbers that were simulated.
    fake = np.asarray(fake_quantize_fixed(value, {None: scale}, rounding))
    if groups is None:
        # An axis of extent 1 needs no scales, so that a depthwise weight with one multiplier is of one axis.
        scale_axes = [axis for axis in axes if value.shape[axis] > 1] or list(axes[:1])
        if len(scale_axes) > 1:
            raise QuantizeError(
                f"a weight of shape {value.shape} has scales along its axes {scale_axes}, and "
                "DequantizeLinear knows those of one axis; let per_channel be False"
            )
        axis = scale_axes[0] if scale_axes else None
        extents = [-1 if i == axis else 1 for i in range(value.ndim)]
        codes = fake / s.reshape(extents if scale_axes else ()) + z.reshape(extents if scale_axes else ())
        return StoredWeight(_codes(codes, grid), s, z, axis, 0)
    rows = groups.split(fake) / s[:, None] + z[:, None]
    unfolding = Unfolding.of(value.shape, groups.layout)
    if groups.are_outputs:
        return StoredWeight(_codes(rows, grid), s, z, 0, 0, unfolding)
    outputs = prod(unfolding.canonical[: unfolding.outputs])
    codes, s, z = (array.reshape(outputs, -1) for array in (rows, s, z))
    if unfolding.order == (1, 0):  # the inputs come first
        return StoredWeight(_codes(codes.T, grid), s.T, z.T, 0, groups.size)
    return StoredWeight(_codes(codes, grid), s, z, 1, groups.size, unfolding)


def _codes(numbers: NDArray[Any], grid: Grid) -> NDArray[Any]:
    """Return numbers of a grid in contiguous memory; near-integers are rounded, floating ones unchanged."""
    return np.ascontiguousarray(numbers if isinstance(grid, FloatGrid) else np.rint(numbers))


def initializer(name: str, array: NDArray[Any], kind: str) -> TensorProto:
    """Return an initializer of numbers that a type of ONNX holds."""
    from onnx import TensorProto

    if kind in ("INT4", "UINT4"):
        flat = np.append(array.astype(np.int8).reshape(-1), np.zeros(array.size % 2, np.int8)).view(np.uint8)
        # Two numbers in a byte, the first one low.
        raw = (flat[::2] & 15) | (flat[1::2] << 4)
    else:
        names = {"FLOAT": "float32", "FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2"}
        dtype = names.get(kind, kind.lower())
        raw = array.astype(getattr(ml_dtypes, dtype) if kind.startswith("FLOAT8") else dtype)
    return TensorProto(
        name=name, data_type=getattr(TensorProto, kind), dims=array.shape, raw_data=raw.tobytes()
    )


Key: TypeAlias = tuple[str, str, tuple[str, ...], tuple[str, ...]]


class QuantizedInput(NamedTuple):
    """A quantised input of a node.

    tensor: "weight", or "input 0" by its position.  dtype: of the value.  value: of a weight, as it is read.
    """

    tensor: str
    scale: Scale
    dtype: str
    value: NDArray[Any] | None


def key_of(node: NodeProto) -> Key:
    """Return type, name, inputs and outputs of a node."""
    return node.op_type, node.name, tuple(node.input), tuple(node.output)


class QdqWriter:
    """Insert quantisation nodes and integer weights into a model, in place.

    rows: of the result, one for each input that is quantised.
    has_narrow_products: True if a MatMul of floats reads weights of 4 bits.
    """

    def __init__(
        self, model: ModelProto, nodes: Mapping[Key, Mapping[int, QuantizedInput]], options: QuantizeOptions
    ) -> None:
        self._model, self._nodes, self._rounding = model, nodes, options.rounding
        self._used_names = set(names_in(model.graph))
        self.rows: list[tuple[Any, ...]] = []
        self.has_narrow_products = False

    def write(self) -> None:
        """Rewrite the graph and its bodies; leave out weights that nothing reads any more."""
        rewritten = self._rewrite(self._model.graph)
        # A scale that finds no node would be lost silently.
        if missing_keys := self._nodes.keys() - rewritten:
            raise QuantizeError(f"{next(iter(missing_keys))[:2]} is no node of the model that is written")
        remove_unread(self._model.graph)

    def _rewrite(self, graph: GraphProto) -> set[Key]:
        """Rewrite the nodes of a graph and of its bodies; return the keys of the rewritten nodes."""
        from onnx import NodeProto

        written_values: dict[Any, str] = {}
        nodes, rewritten = [], set()
        for node in graph.node:
            # Bodies of If and Loop read values of the graph around them.
            for body in bodies_of(node):
                rewritten |= self._rewrite(body)
            key = key_of(node)
            inputs = self._nodes.get(key, {})
            for position, operand in inputs.items():
                rewritten.add(key)
                if operand.dtype != "float32":
                    raise QuantizeError(
                        f"{operand.tensor} of {node.op_type} {node.name} is {operand.dtype}; convert "
                        "writes nodes for float32"
                    )
                write = self._quantize_activation if operand.value is None else self._quantize_weight
                new_nodes, name, row = write(graph, node.input[position], operand, written_values)
                nodes += new_nodes
                self.rows.append((node.name or node.op_type, *row))
                node.input[position] = name
            # With one quantised input the other factor of the product is of floats.
            is_narrow = len(inputs) == 1 and all(
                element_type(operand.scale.grid)[1] == 4 for operand in inputs.values()
            )
            self.has_narrow_products |= node.op_type == "MatMul" and is_narrow
            # A node of a repeated field dies with the field, which is cleared below.
            copy = NodeProto()
            copy.CopyFrom(node)
            nodes.append(copy)
        del graph.node[:]
        graph.node.extend(nodes)
        return rewritten

    def _quantize_activation(
        self, graph: GraphProto, name: str, operand: QuantizedInput, written_values: dict[Any, str]
    ) -> tuple[list[NodeProto], str, tuple[Any, ...]]:
        """Return nodes that quantise and dequantise, the name of their result, and a row for the result.

        No nodes where an earlier input has the same value in the same grid.
        """
        from onnx import helper

        scale, zero_point, grid, _, _ = operand.scale
        if isinstance(grid, FloatGrid):
            raise QuantizeError(
                f"{operand.tensor}, which reads {name}, is in {grid.dtype}: ONNX Runtime puts kernels of "
                "integers in the place of such nodes, and refuses the file; let activation_bits be a number"
            )
        kind, bits = element_type(grid)
        row = f"{operand.tensor}, {kind.lower()}", grid.bits, None, None, None
        key = name, scale.tobytes(), zero_point.tobytes(), grid
        # Nodes that read one value in one grid share its quantisation.
        if key in written_values:
            return [], written_values[key], row
        scale_names = self._add_scales(graph, name, scale, zero_point, grid)
        nodes = []
        value_name = name
        # ONNX has 4, 8 and 16 bits: a narrower grid needs a Clip, as QuantizeLinear uses all integers.
        if grid.high - grid.low + 1 < 1 << bits:
            ends = [(end - zero_point) * scale for end in (grid.low, grid.high)]
            clip = [self._add_initializer(graph, f"{name}_end", np.float32(end), "FLOAT") for end in ends]
            value_name = self._unique_name(f"{name}_clipped")
            nodes.append(helper.make_node("Clip", [name, *clip], [value_name], value_name))
        quantized, written_values[key] = (
            self._unique_name(f"{name}_quantized"),
            self._unique_name(f"{name}_dequantized"),
        )
        nodes.append(helper.make_node("QuantizeLinear", [value_name, *scale_names], [quantized], quantized))
        nodes.append(
            helper.make_node(
                "DequantizeLinear", [quantized, *scale_names], [written_values[key]], written_values[key]
            )
        )
        return nodes, written_values[key], row

    def _quantize_weight(
        self, graph: GraphProto, name: str, operand: QuantizedInput, written_values: dict[Any, str]
    ) -> tuple[list[NodeProto], str, tuple[Any, ...]]:
        """Return nodes that dequantise integers, the name of their result, and a row for the result.

        No nodes where an earlier weight has the same integers and scales.
        """
        from onnx import helper

        assert operand.value is not None
        stored = stored_weight(operand.value, operand.scale, self._rounding)
        grid, shape = operand.scale.grid, operand.value.shape
        kind, bits = element_type(grid)
        size = (
            operand.scale.groups.size
            if operand.scale.groups
            else prod(shape) // max(operand.scale.scale.size, 1)
        )
        arrays = stored.codes, stored.scale, stored.zero_point
        # By content: exporters write one initializer under several names, and a file should hold it once.
        key = sha256(b"".join(array.tobytes() for array in arrays)).digest(), kind, shape, stored.axis
        row_start = f"{operand.tensor}, {kind.lower()}", grid.bits, size
        if key in written_values:
            return [], written_values[key], (*row_start, None, None)
        byte_count = sum(-(-array.size * bits // 8) for array in (stored.codes, stored.zero_point))
        row = *row_start, operand.value.nbytes, byte_count + stored.scale.nbytes
        codes = self._add_initializer(graph, f"{name}_quantized", stored.codes, kind)
        scales = self._add_scales(graph, name, stored.scale, stored.zero_point, grid)
        value_name = self._unique_name(f"{name}_dequantized")
        attributes: dict[str, Any] = {} if stored.axis is None else {"axis": stored.axis}
        if stored.block:
            attributes["block_size"] = stored.block
        nodes = [
            helper.make_node("DequantizeLinear", [codes, *scales], [value_name], value_name, **attributes)
        ]
        unfolding = stored.unfolding
        if unfolding is not None and stored.codes.shape != unfolding.turned:
            value_name = self._add_reshape(graph, nodes, name, value_name, unfolding.turned)
        if unfolding is not None and unfolding.order != tuple(range(len(unfolding.order))):
            value_name, input_name = self._unique_name(f"{name}_transposed"), value_name
            nodes.append(
                helper.make_node("Transpose", [input_name], [value_name], value_name, perm=unfolding.back)
            )
        if unfolding is not None and unfolding.split != shape:
            value_name = self._add_reshape(graph, nodes, name, value_name, shape)
        written_values[key] = value_name
        return nodes, value_name, row

    def _add_reshape(
        self, graph: GraphProto, nodes: list[NodeProto], name: str, value_name: str, shape: Sequence[int]
    ) -> str:
        """Add a node that reshapes a value; return the name of its result."""
        from onnx import helper

        target = self._add_initializer(graph, f"{name}_shape", np.array(shape, np.int64), "INT64")
        result_name = self._unique_name(f"{name}_reshaped")
        nodes.append(helper.make_node("Reshape", [value_name, target], [result_name], result_name))
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
        """Put an array into a graph, and return its name there."""
        new_name = self._unique_name(name)
        graph.initializer.append(initializer(new_name, np.asarray(array), kind))
        return new_name

    def _unique_name(self, base: str) -> str:
        """Return a new name in the model that begins with `base`."""
        name, count = base, 0
        while name in self._used_names:
            count += 1
            name = f"{base}_{count}"
        self._used_names.add(name)
        return name
