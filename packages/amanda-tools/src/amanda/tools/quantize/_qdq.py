"""ONNX files with QuantizeLinear and DequantizeLinear nodes: scales of a tool, integers as weights."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import amanda
from amanda.tools._libraries import ml_dtypes
from amanda.tools._libraries import numpy as np
from amanda.tools.quantize._fake import Scale, fake_quantize_for_good
from amanda.tools.quantize._grid import FloatGrid, Grid, QuantizeError
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._tool import QuantizeTool
from amanda.tools.quantize.weights._convert import ConvertResult

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

Key: TypeAlias = tuple[str, str, tuple[str, ...], tuple[str, ...]]

_NARROW = (
    "ONNX Runtime's kernel for products with weights of 4 bits rounds their inputs to 8 bits; a session with "
    'the entry session.qdq_matmulnbits_accuracy_level "1" leaves them as they are.'
)

_LARGE = 1 << 30
"""Bytes of a model above which its data are written beside it: protocol buffers end at 2 GB."""


class QuantizedInput(NamedTuple):
    """A quantised input of a node.

    tensor: "weight", or "input 0" by its position.  dtype: of the value.  value: of a weight, as it is read.
    """

    tensor: str
    scale: Scale
    dtype: str
    value: NDArray[Any] | None


class InputsTool(amanda.Tool):
    """Notes the quantised inputs of each node of a file, by their positions; writes nothing."""

    def __init__(self, quantize: QuantizeTool) -> None:
        super().__init__()
        self._quantize = quantize
        self.nodes: dict[Key, dict[int, QuantizedInput]] = {}
        self.depends_on(quantize)
        self.add_inst_for_op(self._note)

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> None:
        """Analyse a file; called by `amanda.instrument`."""
        analyse(self)

    def _note(self, context: amanda.OpContext) -> None:
        place = self._quantize.quantized_op(context)
        if place is None:
            return
        found = {}
        for (position, item), quantizer in place.quantizers.items():
            scale = quantizer.scale()
            if item is not None or scale is None:
                raise QuantizeError(
                    f"{quantizer.name} of {place.name} is a list, which has no nodes of its own; "
                    "leave its type out of `type`"
                )
            value = np.asarray(context.get_value(position)) if quantizer.is_weight else None
            dtype = str(context["dtype"](context.get_inputs()[position]))
            found[position] = QuantizedInput(quantizer.name, scale, dtype, value)
        key = key_of(context.get_op().node)
        if found and _told(self.nodes.setdefault(key, found)) != _told(found):
            raise QuantizeError(
                f"two nodes have the name of {place.name}, its inputs and its outputs, and other scales; "
                "give the nodes of the file names"
            )


def _told(found: Mapping[int, QuantizedInput]) -> Any:
    return {i: (one.scale.scale.tolist(), one.scale.zero_point.tolist()) for i, one in found.items()}


def key_of(node: NodeProto) -> Key:
    """Return type, name, inputs and outputs of a node."""
    return node.op_type, node.name, tuple(node.input), tuple(node.output)


def convert_file(
    source: Path, tool: Any, out: str | os.PathLike[str] | None, force: bool = False
) -> ConvertResult:
    """Write a copy of an ONNX file that computes with integers where `tool` simulates them."""
    target = _checked(source, tool, out, force)
    onnx = _onnx()
    model = _readied(onnx.load(source), tool.options)
    with tempfile.TemporaryDirectory(prefix="amanda") as folder:
        plain = Path(folder, source.name)
        _save(model, plain)
        found = InputsTool(tool)
        done = amanda.instrument(plain, found, out=Path(folder, "parts"))
    if waiting := tool.waiting_state():
        raise QuantizeError(f"no op of {source} has the scales of {', '.join(waiting[:4])}: of another model")
    if not found.nodes:
        raise QuantizeError(f"none of the {done.analysed} ops of {source} is quantised: {tool.options.types}")
    writer = QdqWriter(model, found.nodes, tool.options)
    writer.write()
    about = {"amanda-tools": version("amanda-tools"), "tools": ["quantize"], "model": source.name}
    told = {one.key: one.value for one in model.metadata_props}
    notes = json.dumps([*json.loads(told.get("amanda", "[]")), about])
    onnx.helper.set_model_props(model, {**told, "amanda": notes})
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        _save(model, Path(folder, target.name))
        # The data that belong to the file come before it, so that it never lacks them.
        for one in sorted(Path(folder).iterdir(), key=lambda one: one.name == target.name):
            one.replace(target.parent / one.name)
    left = dict(tool.result.left) | {one.what: one.reason for one in done.left}
    result = ConvertResult(target, writer.rows, _size(source), _size(target), left)
    if writer.has_narrow_products:
        result.remarks = [_NARROW]
    return result


def _checked(source: Path, tool: Any, out: Any, force: bool) -> Path:
    """Return the path to write to.  Raises QuantizeError for what cannot be read or written."""
    if source.suffix != ".onnx":
        raise QuantizeError(f"{source} is no ONNX file (.onnx); export the model to one")
    if not isinstance(tool, QuantizeTool):
        raise QuantizeError(
            f"a {type(tool).__name__} was given for {source}; give a QuantizeTool that has the scales of a "
            "session of the file"
        )
    if out is None or Path(out).suffix != ".onnx" or Path(out).resolve() == source.resolve():
        raise QuantizeError(f"out is {out!r}; give the path of another ONNX file (.onnx) to write")
    target = Path(out)
    if target.is_dir() or not target.parent.is_dir():
        why = "a folder is there" if target.is_dir() else f"there is no folder {target.parent}"
        raise QuantizeError(f"{target} cannot be written: {why}")
    if target.exists() and not force:
        raise QuantizeError(f"{target} is there already; force=True replaces it")
    return target


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise QuantizeError(
            "convert reads ONNX files with onnx and the driver: pip install amanda-driver-onnxruntime"
        ) from error
    return onnx


def _readied(model: ModelProto, options: Options) -> ModelProto:
    """Return a model without local functions, of a version of ONNX that has the types of the grids."""
    from onnx import inliner, version_converter

    found = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0)
    wanted = _opset(options)
    if model.functions:
        model = inliner.inline_local_functions(model)
    if found >= wanted:
        return model
    try:
        return version_converter.convert_version(model, wanted)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise QuantizeError(
            f"the model is of ONNX opset {found}, the nodes need opset {wanted}, and ONNX cannot convert it: "
            f"{reason}; export it with opset {wanted}"
        ) from error


def _opset(options: Options) -> int:
    """Return the first version of ONNX whose nodes have all grids of the options."""
    if options.group_size is not None:
        return 21
    given = (options.weight_bits, options.activation_bits)
    bits = [one for each in given for one in (each.values() if isinstance(each, Mapping) else [each])]
    numbers = [one for one in bits if isinstance(one, int)]
    if any(one <= 4 or one > 8 for one in numbers):
        return 21
    return 13 if len(numbers) == len([one for one in bits if one is not None]) else 19


def element_type(grid: Grid) -> tuple[str, int]:
    """Return the name of the least type of ONNX that holds a grid, and its bits."""
    if isinstance(grid, FloatGrid):
        return {"float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2"}[grid.dtype], 8
    bits = next(bits for bits in (4, 8, 16) if grid.bits <= bits)
    return f"{'INT' if grid.low < 0 else 'UINT'}{bits}", bits


class QdqWriter:
    """Puts nodes and integers into a model, in place.

    rows: of the result, one for each input that is quantised.
    has_narrow_products: True if a MatMul of floats reads weights of 4 bits.
    """

    def __init__(
        self, model: ModelProto, nodes: Mapping[Key, Mapping[int, QuantizedInput]], options: Options
    ) -> None:
        self._model, self._nodes, self._rounding = model, nodes, options.rounding
        self._taken = set(_names(model.graph))
        self.rows: list[tuple[Any, ...]] = []
        self.has_narrow_products = False

    def write(self) -> None:
        """Rewrite the graph and its bodies; leave out weights that nothing reads any more."""
        met = self._rewrite(self._model.graph)
        if missed := self._nodes.keys() - met:
            raise QuantizeError(f"{next(iter(missed))[:2]} is no node of the model that is written")
        _drop_unread(self._model.graph)

    def _rewrite(self, graph: GraphProto) -> set[Key]:
        from onnx import NodeProto

        made: dict[Any, str] = {}
        nodes, met = [], set()
        for node in graph.node:
            for body in _bodies(node):
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
        made[key] = given = self._name(f"{name}_dequantized")
        attributes: dict[str, Any] = {} if stored.axis is None else {"axis": stored.axis}
        if stored.block:
            attributes["block_size"] = stored.block
        nodes = [helper.make_node("DequantizeLinear", [codes, *scales], [given], given, **attributes)]
        if stored.codes.shape != shape:
            extents = np.array([shape[axis] for axis in stored.order], np.int64)
            target = self._held(graph, f"{name}_shape", extents, "INT64")
            made[key] = self._name(f"{name}_reshaped")
            nodes.append(helper.make_node("Reshape", [given, target], [made[key]], made[key]))
            if stored.order != tuple(range(len(shape))):
                given, made[key] = made[key], self._name(f"{name}_transposed")
                back = [stored.order.index(axis) for axis in range(len(shape))]
                nodes.append(helper.make_node("Transpose", [given], [made[key]], made[key], perm=back))
        return nodes, made[key], row

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
        graph.initializer.append(_tensor(new, np.asarray(array), kind))
        return new

    def _name(self, wanted: str) -> str:
        name, count = wanted, 0
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


class StoredWeight(NamedTuple):
    """The integers of a weight, with scales and zero points in the shape that DequantizeLinear reads.

    axis: of the scales; None of one scale.  block: size of groups along the axis, 0 without groups.
    order: axes of the weight in the order in which `codes` has them, where groups made rows of it.
    """

    codes: NDArray[Any]
    scale: NDArray[Any]
    zero_point: NDArray[Any]
    axis: int | None
    block: int
    order: tuple[int, ...]


def stored_weight(value: NDArray[Any], scale: Scale, rounding: Any) -> StoredWeight:
    """Return the numbers of the grid that stand for a weight, as fake quantisation rounds it.

    Raises QuantizeError where scales differ along several axes.
    """
    s, z, grid, axes, groups = scale
    order = tuple(range(value.ndim))
    fake = np.asarray(fake_quantize_for_good(value, {None: scale}, rounding))
    if groups is None:
        apart = [axis for axis in axes if value.shape[axis] > 1] or list(axes[:1])
        if len(apart) > 1:
            raise QuantizeError(
                f"a weight of shape {value.shape} has scales along its axes {apart}, and DequantizeLinear "
                "knows those of one axis; let per_channel be False"
            )
        axis = apart[0] if apart else None
        spread = [-1 if i == axis else 1 for i in order]
        codes = fake / s.reshape(spread if apart else ()) + z.reshape(spread if apart else ())
        return StoredWeight(_codes(codes, grid), s, z, axis, 0, order)
    rows = groups.split(fake) / s[:, None] + z[:, None]
    axes_in_order, count = groups.axes(value.ndim)
    outputs = prod(value.shape[axis] for axis in axes_in_order[:count])
    codes, s, z = (one.reshape(outputs, -1) for one in (rows, s, z))
    if value.ndim == 2 and axes_in_order == (1, 0):  # the inputs come first
        return StoredWeight(_codes(codes.T, grid), s.T, z.T, 0, groups.size, order)
    return StoredWeight(_codes(codes, grid), s, z, 1, groups.size, axes_in_order)


def _codes(numbers: NDArray[Any], grid: Grid) -> NDArray[Any]:
    return np.ascontiguousarray(numbers if isinstance(grid, FloatGrid) else np.rint(numbers))


def _tensor(name: str, array: NDArray[Any], kind: str) -> TensorProto:
    """Return an initializer of numbers that a type of ONNX holds."""
    from onnx import TensorProto

    if kind in ("INT4", "UINT4"):
        flat = np.append(array.astype(np.int8).reshape(-1), np.zeros(array.size % 2, np.int8)).view(np.uint8)
        raw = (flat[::2] & 15) | (flat[1::2] << 4)
    else:
        names = {"FLOAT": "float32", "FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2"}
        dtype = names.get(kind, kind.lower())
        raw = array.astype(getattr(ml_dtypes, dtype) if kind.startswith("FLOAT8") else dtype)
    return TensorProto(
        name=name, data_type=getattr(TensorProto, kind), dims=array.shape, raw_data=raw.tobytes()
    )


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _names(graph: GraphProto) -> Iterator[str]:
    yield from (one.name for one in (*graph.input, *graph.initializer, *graph.output))
    yield from (one.values.name for one in graph.sparse_initializer)
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)
        for body in _bodies(node):
            yield from _names(body)


def _drop_unread(graph: GraphProto, kept: Iterable[str] = ()) -> set[str]:
    """Leave out nodes and initializers whose values nothing reads; return names that are read."""
    del graph.value_info[:]
    read = {*kept, *(one.name for one in graph.output)}
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if node.op_type in _MOVES and read.isdisjoint(node.output):
            del graph.node[i]
            continue
        for body in _bodies(node):
            read |= _drop_unread(body)
        read.update(node.input)
    unread = {one.name for one in graph.initializer} - read
    for field in (graph.initializer, graph.input):
        for i in reversed(range(len(field))):
            if field[i].name in unread:
                del field[i]
    return read


_MOVES = {"Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast"}
"""Types of nodes by which weights reach their readers."""


def _save(model: ModelProto, path: Path) -> None:
    import onnx

    large = model.ByteSize() >= _LARGE
    onnx.save_model(model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None)


def _size(path: Path) -> int:
    """Return the bytes of a model and of its data."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    data = {
        entry.value for one in model.graph.initializer for entry in one.external_data
        if entry.key == "location"
    }  # fmt: skip
    return sum(one.stat().st_size for one in (path, *(path.parent / name for name in data)))
