"""The values at a side of an operation: its inputs or outputs, as symbols and by the refs that name them now.

A routine that changes a value gives it another ref, which the readers of the value read from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from amanda.backend import Side

from ._nodes import Edge, input_sizes, op_def, output_sizes, references

if TYPE_CHECKING:
    from ._body import Body
    from ._gradients import GradientEdges


class OpSide(Side):
    """The inputs of an operation (`ahead`), or its outputs.

    layout: name and length of each value; by default each tensor is a value.
    references: True for each value that is a reference to a variable, which may have no value.
    op_refs: refs of the outputs of the operation, or of its replacement.
    """

    def __init__(
        self,
        op: tf.Operation,
        ahead: bool,
        refs: Sequence[str],
        tensors: Sequence[Any],
        layout: Sequence[tuple[str, int | None]] = (),
        references: Sequence[bool] = (),
    ) -> None:
        sizes = [size for _, size in layout]
        lengths = [1 if size is None else size for size in sizes]
        # A function that is called by its name has no OpDef, so its layout is empty.
        if sum(lengths) != len(tensors):
            sizes, references = [None] * len(tensors), ()
        flags = [flag for flag, length in zip(references, lengths, strict=False) for _ in range(length)]
        super().__init__(refs, tensors, sizes, [i for i, flag in enumerate(flags) if flag])
        self.op = op
        self.ahead = ahead
        self.op_refs = self.original_refs


def op_side(side: Side) -> OpSide:
    """Return a side as an OpSide, for the type checker."""
    assert isinstance(side, OpSide)
    return side


_OPAQUE = (tf.resource, tf.variant)


def is_plain(tensor: Any) -> bool:
    """Return True if Python can return a tensor: it is neither a handle nor a reference."""
    return tensor.dtype not in _OPAQUE and not tensor.dtype._is_ref_dtype


def dtype_enum(tensor: Any) -> int:
    """Return the enum of a tensor's dtype in protocol buffers."""
    number: int = tensor.dtype.base_dtype.as_datatype_enum
    return number


def estimated_nbytes(tensor: Any) -> int:
    """Return the memory of a tensor, with 32 for each unknown dimension; 1 MiB for an unknown rank."""
    if tensor.shape.rank is None:
        return 1 << 20
    nbytes = max(tensor.dtype.size, 1)
    for size in tensor.shape.as_list():
        nbytes *= 32 if size is None else size
    return int(nbytes)


def inputs_of(op: tf.Operation, node: Any) -> list[Any]:
    """Return the symbolic inputs that a NodeDef of an operation has."""
    return list(op.inputs)[: sum(not text.startswith("^") for text in node.input)]


def outputs_of(op: tf.Operation, node: Any) -> list[Any]:
    """Return the symbolic outputs that a NodeDef of an operation has; all if it calls a function by name."""
    output_count = sum(1 if size is None else size for _, size in output_sizes(node))
    return list(op.outputs)[:output_count] if op_def(node.op) is not None else list(op.outputs)


def grouped_outputs(op: tf.Operation, node: Any) -> list[Any]:
    """Return the symbolic outputs that a NodeDef of an operation has, each a tensor or a list."""
    return group_tensors(outputs_of(op, node), output_sizes(node))


def group_tensors(flat: Sequence[Any], layout: Sequence[tuple[str, int | None]]) -> list[Any]:
    """Return flat tensors as values, each a tensor or a list.

    layout: name and length of each value; None as the length of a single tensor.  The tensors are returned
    as they are if their number is another, as for a function that is called by its name.
    """
    if sum(1 if size is None else size for _, size in layout) != len(flat):
        return list(flat)
    tensors = iter(flat)
    return [next(tensors) if size is None else [next(tensors) for _ in range(size)] for _, size in layout]


class PresentRefs:
    """The refs, such as "x:1", that the nodes of a body read after redirections to changed values.

    current_refs: by the ref of a tensor that all readers read elsewhere, the ref that they read instead.
    forward_names: by the name of a gradient operation's node, that of its forward operation in this body.
    redirected: refs of redirected inputs, by the node's name and flat position.
    gradient_reads: by an operation and a tensor that it reads or computes, the ref that its gradient
    operations read instead.
    gradient_reads_by_input: likewise by position, for a tensor that is several inputs of the operation.
    returned: refs that the body returns instead of a tensor, where its other readers do not change.
    """

    def __init__(
        self,
        body: Body,
        current_refs: Mapping[Any, Any],
        forward_names: Mapping[str, str],
        gradient_edges: GradientEdges,
    ) -> None:
        self.current_refs = current_refs
        self.forward_names = forward_names
        self.redirected: dict[tuple[str, int], str] = {}
        self.gradient_reads: dict[tuple[str, Edge], str] = {}
        self.gradient_reads_by_input: dict[tuple[str, Edge], dict[int, str]] = {}
        self.returned: dict[Edge, str] = {}
        self._body = body
        self._gradient_edges = gradient_edges
        self._gradient_op_by_name = {
            body.node_name(op): op for ops in gradient_edges.backward_ops.values() for op in ops
        }
        self._vanilla_inputs_by_node: dict[str, list[Edge]] = {}

    def sides(self, op: tf.Operation) -> tuple[OpSide, OpSide]:
        """Return the inputs and outputs of an operation."""
        node = self._node(op)
        outputs = outputs_of(op, node)
        refs = [self._body.syntax.write(Edge(node.name, i)) for i in range(len(outputs))]
        layout, by_reference = output_sizes(node), references(node, outputs=True)
        return self.inputs(op), OpSide(
            op, ahead=False, refs=refs, tensors=outputs, layout=layout, references=by_reference
        )

    def inputs(self, op: tf.Operation) -> OpSide:
        """Return the inputs of an operation."""
        node = self._node(op)
        return OpSide(
            op, ahead=True, refs=self.of_node(node), tensors=inputs_of(op, node), layout=input_sizes(node),
            references=references(node),
        )  # fmt: skip

    def redirect(self, op: tf.Operation, index: int, ref: str) -> None:
        """Make an input of an operation, by its position, read `ref`."""
        self.redirected[self._body.node_name(op), index] = ref

    def of_node(self, node: Any) -> list[str]:
        """Return the refs of all inputs of a node."""
        return [self._of_node_input(node.name, i, edge) for i, edge in enumerate(self.vanilla_inputs(node))]

    def of_input(self, op: tf.Operation, index: int) -> str:
        """Return the ref of an input of an operation, by its position."""
        node = self._node(op)
        return self._of_node_input(node.name, index, self.vanilla_inputs(node)[index])

    def of_tensor(self, tensor: Any) -> str:
        """Return the ref of a tensor."""
        return self._of_edge(self.edge_of(tensor))

    def of_result(self, edge: Edge) -> str:
        """Return the ref of a tensor that the body returns."""
        return self.returned.get(edge) or self._of_edge(edge)

    def edge_of(self, tensor: Any) -> Edge:
        """Return the node that computes a tensor, and the index of the tensor among its outputs."""
        return Edge(self._body.node_name(tensor.op), tensor.value_index)

    def vanilla_inputs(self, node: Any) -> list[Edge]:
        """Return the tensors that a node's inputs named before any edit."""
        edges = self._vanilla_inputs_by_node.get(node.name)
        if edges is None:
            parse = self._body.syntax.parse
            edges = [parse(text) for text in node.input if not text.startswith("^")]
            self._vanilla_inputs_by_node[node.name] = edges
        return edges

    def _of_node_input(self, name: str, index: int, edge: Edge) -> str:
        """Return the ref of an input of the node `name`.  edge: what the input named before any edit."""
        redirected_ref = self.redirected.get((name, index))
        if redirected_ref is not None:
            return redirected_ref
        forward_name = self.forward_names.get(name)
        if forward_name is None or (forward_name, edge) not in self.gradient_reads:
            return self._of_edge(edge)
        ref_by_position = self.gradient_reads_by_input.get((forward_name, edge))
        if ref_by_position is None:
            return self.gradient_reads[forward_name, edge]
        gradient_op = self._gradient_op_by_name[name]
        position = self._gradient_edges.forward_position_read(gradient_op, index, list(ref_by_position))
        return ref_by_position[position]

    def _of_edge(self, edge: Edge) -> str:
        ref = self._body.syntax.write(edge)
        return str(self.current_refs.get(ref, ref))

    def _node(self, op: tf.Operation) -> Any:
        return self._body.nodes[self._body.node_name(op)]
