"""QuantizeLinear and DequantizeLinear nodes in a graph of ONNX, with integers as weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from amanda.tools.libraries import numpy as np
from amanda.tools.onnx_graph import bodies_of, names_in, remove_unread
from amanda.tools.quantize._fake import Scale
from amanda.tools.quantize._grid import FloatGrid, Grid, QuantizeError
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._stored_weight import element_type, initializer, stored_weight

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto

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
    """Puts nodes and integers into a model, in place.

    rows: of the result, one for each input that is quantised.
    has_narrow_products: True if a MatMul of floats reads weights of 4 bits.
    """

    def __init__(
        self, model: ModelProto, nodes: Mapping[Key, Mapping[int, QuantizedInput]], options: Options
    ) -> None:
        self._model, self._nodes, self._rounding = model, nodes, options.rounding
        self._taken = set(names_in(model.graph))
        self.rows: list[tuple[Any, ...]] = []
        self.has_narrow_products = False

    def write(self) -> None:
        """Rewrite the graph and its bodies; leave out weights that nothing reads any more."""
        met = self._rewrite(self._model.graph)
        if missed := self._nodes.keys() - met:
            raise QuantizeError(f"{next(iter(missed))[:2]} is no node of the model that is written")
        remove_unread(self._model.graph)

    def _rewrite(self, graph: GraphProto) -> set[Key]:
        from onnx import NodeProto

        made: dict[Any, str] = {}
        nodes, met = [], set()
        for node in graph.node:
            for body in bodies_of(node):
                met |= self._rewrite(body)
            key = key_of(node)
            found = self._nodes.get(key, {})
            for position, one in found.items():
                met.add(key)
                if one.dtype != "float32":
                    raise QuantizeError(
                        f"{one.tensor} of {node.op_type} {node.name} is {one.dtype}; convert writes "
                        "nodes for float32"
                    )
                write = self._activation if one.value is None else self._weight
                new, name, row = write(graph, node.input[position], one, made)
                nodes += new
                self.rows.append((node.name or node.op_type, *row))
                node.input[position] = name
            narrow = len(found) == 1 and all(element_type(one.scale.grid)[1] == 4 for one in found.values())
            self.has_narrow_products |= node.op_type == "MatMul" and narrow
            copy = NodeProto()
            copy.CopyFrom(node)
            nodes.append(copy)
        del graph.node[:]
        graph.node.extend(nodes)
        return met

    def _activation(
        self, graph: GraphProto, name: str, one: QuantizedInput, made: dict[Any, str]
    ) -> tuple[list[NodeProto], str, tuple[Any, ...]]:
        """Return nodes, the name of the value that they make, and the row."""
        from onnx import helper

        scale, zero_point, grid, _, _ = one.scale
        if isinstance(grid, FloatGrid):
            raise QuantizeError(
                f"{one.tensor}, which reads {name}, is in {grid.dtype}: ONNX Runtime puts kernels of "
                "integers in the place of such nodes, and refuses the file; let activation_bits be a number"
            )
        kind, bits = element_type(grid)
        row = f"{one.tensor}, {kind.lower()}", grid.bits, None, None, None
        key = name, scale.tobytes(), zero_point.tobytes(), grid
        if key in made:
            return [], made[key], row
        held = self._scales(graph, name, scale, zero_point, grid)
        nodes = []
        given = name
        if grid.high - grid.low + 1 < 1 << bits:
            ends = [(end - zero_point) * scale for end in (grid.low, grid.high)]
            clip = [self._held(graph, f"{name}_end", np.float32(end), "FLOAT") for end in ends]
            given = self._name(f"{name}_clipped")
            nodes.append(helper.make_node("Clip", [name, *clip], [given], given))
        quantized, made[key] = self._name(f"{name}_quantized"), self._name(f"{name}_dequantized")
        nodes.append(helper.make_node("QuantizeLinear", [given, *held], [quantized], quantized))
        nodes.append(helper.make_node("DequantizeLinear", [quantized, *held], [made[key]], made[key]))
        return nodes, made[key], row

    def _weight(
        self, graph: GraphProto, name: str, one: QuantizedInput, made: dict[Any, str]
    ) -> tuple[list[NodeProto], str, tuple[Any, ...]]:
        """Return nodes, the name of the value that they make, and the row."""
        from onnx import helper

        assert one.value is not None
        stored = stored_weight(one.value, one.scale, self._rounding)
        grid, shape = one.scale.grid, one.value.shape
        kind, bits = element_type(grid)
        size = one.scale.groups.size if one.scale.groups else prod(shape) // max(one.scale.scale.size, 1)
        held = stored.codes, stored.scale, stored.zero_point
        key = sha256(b"".join(one.tobytes() for one in held)).digest(), kind, shape, stored.axis
        told = f"{one.tensor}, {kind.lower()}", grid.bits, size
        if key in made:
            return [], made[key], (*told, None, None)
        after = sum(-(-array.size * bits // 8) for array in (stored.codes, stored.zero_point))
        row = *told, one.value.nbytes, after + stored.scale.nbytes
        codes = self._held(graph, f"{name}_quantized", stored.codes, kind)
        scales = self._scales(graph, name, stored.scale, stored.zero_point, grid)
        given = self._name(f"{name}_dequantized")
        attributes: dict[str, Any] = {} if stored.axis is None else {"axis": stored.axis}
        if stored.block:
            attributes["block_size"] = stored.block
        nodes = [helper.make_node("DequantizeLinear", [codes, *scales], [given], given, **attributes)]
        way = stored.way
        if way is not None and stored.codes.shape != way.turned:
            given = self._reshaped(graph, nodes, name, given, way.turned)
        if way is not None and way.order != tuple(range(len(way.order))):
            given, before = self._name(f"{name}_transposed"), given
            nodes.append(helper.make_node("Transpose", [before], [given], given, perm=way.back))
        if way is not None and way.split != shape:
            given = self._reshaped(graph, nodes, name, given, shape)
        made[key] = given
        return nodes, given, row

    def _reshaped(
        self, graph: GraphProto, nodes: list[NodeProto], name: str, given: str, shape: Sequence[int]
    ) -> str:
        """Add a node that reshapes a value; return the name of its result."""
        from onnx import helper

        target = self._held(graph, f"{name}_shape", np.array(shape, np.int64), "INT64")
        made = self._name(f"{name}_reshaped")
        nodes.append(helper.make_node("Reshape", [given, target], [made], made))
        return made

    def _scales(
        self, graph: GraphProto, name: str, scale: NDArray[Any], zero_point: NDArray[Any], grid: Grid
    ) -> list[str]:
        kind, _ = element_type(grid)
        return [
            self._held(graph, f"{name}_scale", np.asarray(scale, np.float32), "FLOAT"),
            self._held(graph, f"{name}_zero_point", np.rint(zero_point), kind),
        ]

    def _held(self, graph: GraphProto, name: str, array: Any, kind: str) -> str:
        """Put an array into a graph, and return its name there."""
        new = self._name(name)
        graph.initializer.append(initializer(new, np.asarray(array), kind))
        return new

    def _name(self, wanted: str) -> str:
        name, count = wanted, 0
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name
