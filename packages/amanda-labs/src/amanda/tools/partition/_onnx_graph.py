"""The outermost graph of an ONNX model: ops to put into parts, and constants that go with their readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from amanda.errors import ArtefactError
from amanda.tools.onnx_graph import bodies_of, constant_of, inlined, read_onnx, reads_of

_INPUTS_ARE_APART = 4
"""IR version before which initializers are inputs of the graph."""
_RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


@dataclass(frozen=True)
class FileOp:
    """A node that stages are made of.

    number: its position in the file.  reads: values of the graph that it reads, in its bodies too.
    """

    number: int
    node: NodeProto
    reads: tuple[str, ...]

    @property
    def makes(self) -> tuple[str, ...]:
        """Return the names of the values that it makes."""
        return tuple(name for name in self.node.output if name)

    def __str__(self) -> str:
        """Return type and name."""
        return f"{self.node.op_type} {self.node.name or self.makes[0]}"


class FileGraph:
    """A model whose external data stay in their files.

    ops: nodes that compute with inputs of the model, in the order of the file.  constants: the other nodes,
    by the values that they make of initializers alone; each part that reads such a value has them.
    """

    def __init__(self, path: Path) -> None:
        self.proto: ModelProto = inlined(read_onnx(path, ArtefactError, data=False))
        graph = self.proto.graph
        self.initializers = {one.name: one for one in graph.initializer}
        self.sparse = {one.values.name: one for one in graph.sparse_initializer}
        held, given = {*self.initializers, *self.sparse}, {one.name for one in graph.input}
        self.inputs = {
            one.name: one for one in graph.input
            if self.proto.ir_version >= _INPUTS_ARE_APART or one.name not in held
        }  # fmt: skip
        self.declared = {one.name: one for one in graph.input if one.name not in self.inputs}
        self.outputs: dict[str, ValueInfoProto] = {one.name: one for one in graph.output}
        self.constants: dict[str, FileOp] = {}
        self.ops: list[FileOp] = []
        fixed = held - (given & self.inputs.keys())
        for number, node in enumerate(graph.node):
            op = FileOp(number, node, tuple(dict.fromkeys(reads_of(node))))
            if (
                fixed.issuperset(op.reads)
                and node.op_type not in _RANDOM
                and next(bodies_of(node), None) is None
            ):
                self.constants |= dict.fromkeys(op.makes, op)
                fixed.update(op.makes)
            else:
                self.ops.append(op)

    @cached_property
    def made_by(self) -> dict[str, int]:
        """Return the position of the op that makes each value."""
        return {name: i for i, op in enumerate(self.ops) for name in op.makes}

    @cached_property
    def read_by(self) -> dict[str, list[int]]:
        """Return the positions of the ops that read each value, also by way of constants."""
        found: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in self.with_constants(op.reads):
                found.setdefault(name, []).append(i)
        return found

    def with_constants(self, names: Iterable[str]) -> list[str]:
        """Return values, and those that they are made of where they are constants."""
        found: dict[str, None] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = None
                waiting += self.constants[name].reads if name in self.constants else ()
        return list(found)

    def tensor(self, name: str) -> TensorProto | None:
        """Return what an initializer or a Constant node holds; None of other values, and of sparse ones."""
        if name in self.initializers:
            held: TensorProto = self.initializers[name]
            return held
        return constant_of(self.constants[name].node) if name in self.constants else None

    @property
    def is_external(self) -> bool:
        """Return True if values of initializers lie in other files."""
        return any(one.data_location == TensorProto.EXTERNAL for one in self.initializers.values())

    def shapes(self) -> tuple[dict[str, tuple[int | None, ...]], list[str]]:
        """Return the shapes that values have where each extent that inputs leave open is 1, and those inputs.

        Values whose shapes are not known have none.
        """
        model = ModelProto()
        model.CopyFrom(self.proto)
        del model.graph.value_info[:]
        opened = [one.name for one in model.graph.input if one.name in self.inputs and _close(one, 1)]
        for output in model.graph.output:
            _close(output, None)
        with suppress(Exception):  # what a model says of itself may contradict what is inferred
            model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        return dict(_shapes(model.graph)), opened


def _close(value: ValueInfoProto, extent: int | None) -> bool:
    """Give open extents this one, None for an open one without a name; return True if there were some."""
    tensor = value.type.tensor_type
    extents = (
        [one for one in tensor.shape.dim if not one.HasField("dim_value")] if tensor.HasField("shape") else []
    )
    for one in extents:
        one.Clear()
        if extent is not None:
            one.dim_value = extent
    return bool(extents)


def _shapes(graph: GraphProto) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    for one in (*graph.value_info, *graph.output, *graph.input):
        if one.type.HasField("tensor_type") and one.type.tensor_type.HasField("shape"):
            extents = one.type.tensor_type.shape.dim
            yield one.name, tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in extents)
    for tensor in graph.initializer:
        yield tensor.name, tuple(tensor.dims)
    for node in graph.node:
        for body in bodies_of(node):
            yield from _shapes(body)
