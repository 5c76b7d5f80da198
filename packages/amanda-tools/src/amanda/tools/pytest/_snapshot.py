"""A graph as text that changes when the graph does, and not when lines of the program move."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda.tools.trace import Graph, Op, Position, Tensor


def listing(graph: Graph, backward: bool = True) -> str:
    """Return a line for each op: what it makes, its type, what it reads and its module.

    Tensors from outside have their names or shapes, others the op that made them and how far back that is, so
    that one op more changes the lines about it alone.
    """
    ops = [op for op in graph.ops if backward or op.phase == "forward"]
    numbers = {op.index: number for number, op in enumerate(ops)}
    return "".join(f"{_op_line(graph, op, numbers)}\n" for op in ops)


def _op_line(graph: Graph, op: Op, numbers: dict[int, int]) -> str:
    outputs = ", ".join(str(tensor) for tensor in graph.outputs(op)) or "nothing"
    last = max((i for i, position in enumerate(op.inputs) if position is not None), default=-1)
    inputs = ", ".join(
        _input_text(graph, position, numbers[op.index], numbers) for position in op.inputs[: last + 1]
    )
    name = f"{op.type}{'_' if op.in_place else ''}"
    return f"{name}({inputs}) -> {outputs}" + (f"  # {op.module}" if op.module else "")


def _input_text(graph: Graph, position: Position, reader: int, numbers: dict[int, int]) -> str:
    if isinstance(position, tuple):
        return f"[{', '.join(_input_text(graph, element, reader, numbers) for element in position)}]"
    return "_" if position is None else _tensor_text(graph, graph.tensors[position], reader, numbers)


def _tensor_text(graph: Graph, tensor: Tensor, reader: int, numbers: dict[int, int]) -> str:
    if tensor.producer is None or tensor.producer not in numbers:
        return tensor.name or f"{tensor.kind} {tensor}"
    op = graph.ops[tensor.producer]
    output = f".{op.makes.index(tensor.index)}" if len(op.makes) > 1 else ""
    return f"{op.type}{output}@-{reader - numbers[op.index]}"
