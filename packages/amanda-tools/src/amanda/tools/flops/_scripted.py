"""Calls that may run once more on tensors without data, since they compute and have no other effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import amanda

_OF_VALUES = frozenset(
    f"prim::{name}"
    for name in """
    BroadcastSizes CallFunction CallMethod Constant DictConstruct GetAttr If ListConstruct ListUnpack Loop
    NumToTensor RaiseException TupleConstruct TupleIndex TupleSlice TupleUnpack Uninitialized Closure
    abs device dtype id isinstance layout max min ndim rangelist requires_grad shape unchecked_cast
    unchecked_unwrap_optional is_cuda is_meta is_nested is_sparse is_quantized
    """.split()
)
"""Nodes of TorchScript that make values of values, and run blocks."""
_OF_METADATA = frozenset(
    "aten::__is__ aten::__isnot__ aten::dim aten::is_contiguous aten::is_floating_point aten::len "
    "aten::numel aten::size aten::stride".split()
)
"""Operators of TorchScript alone that read no data of tensors."""
_CONTAINERS = ("prim::ListConstruct", "prim::DictConstruct")


def may_run_again(context: amanda.OpContext) -> bool:
    """Return True if an op is an operator of ATen, or a graph of TorchScript of such."""
    graph = getattr(getattr(context.get_op(), "_function", None), "inlined_graph", None)
    if graph is not None:
        return all(map(_is_safe, _nodes(graph)))
    return _is_dispatched(f"aten::{context.get_op_type()}")


def _is_dispatched(name: str) -> bool:
    """Return True for an operator that reaches tensors through the dispatcher, where modes act, alone."""
    import torch

    operator = getattr(torch.ops.aten, name.partition("::")[2], None)
    overloads = [] if operator is None else operator.overloads()
    names = [name if one == "default" else f"{name}.{one}" for one in overloads]
    return any(map(torch._C._dispatch_has_kernel, names))


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _is_safe(node: Any) -> bool:
    import torch

    kind = node.kind()
    if kind in _OF_VALUES:
        return True
    if not kind.startswith("aten::"):
        return False
    schema = torch._C.parse_schema(node.schema())
    written = [i for i, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]
    name = f"{schema.name}.{schema.overload_name}".rstrip(".")
    if torch._C._dispatch_has_kernel(name):
        # A tensor is written where it has no data; a generator is the program's.
        return all(_is_of_tensors(schema.arguments[i]) for i in written)
    if written:  # a list, or a dict, which may be a module's
        inputs = list(node.inputs())
        return all(inputs[i].node().kind() in _CONTAINERS for i in written)
    reads_data = any("Tensor" in str(one.type) for one in schema.arguments)
    makes_tensors = any("Tensor" in str(one.type) for one in schema.returns)
    return bool(schema.returns) and (kind in _OF_METADATA or not (reads_data or makes_tensors))


def _is_of_tensors(argument: Any) -> bool:
    return "Tensor" in str(argument.type)
