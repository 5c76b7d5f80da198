"""Protected ops of an ONNX file: which part each op is in, and what no public part may hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from amanda.tools.partition._channel import ProtectError
from amanda.tools.partition._cut import PartitionError, Stages
from amanda.tools.partition._onnx_facts import FileTool
from amanda.tools.partition._onnx_graph import FileGraph
from amanda.tools.select import Selection


def levels(
    tool: FileTool, selection: Selection, text: str, folder: Path
) -> tuple[Stages, list[str], list[str]]:
    """Return the part of each op, the kind of each part, and what has to be said of them.

    Parts are public and protected by turns, as few as can be; a public op that needs nothing of protected
    ones is in the first.  Raises PartitionError where nothing is selected, and ProtectError where a public
    part would hold a protected initializer.  folder: where external data lie.
    """
    graph = tool.graph
    chosen = [tool.facts(i).selected for i in range(len(graph.ops))]
    if not any(chosen):
        why = "; ".join(selection.unmatched()) or "the ops that it fits compute with constants alone"
        raise PartitionError(f"protect={text!r} selects no op of the file: {why}")
    found: list[int] = []
    for op, is_protected in zip(graph.ops, chosen, strict=True):
        made_by = [graph.made_by[name] for name in op.reads if name in graph.made_by]
        least = max((found[i] for i in made_by), default=0)
        found.append(least + (least % 2 != is_protected))
    used = sorted(set(found))
    kinds = ["protected" if level % 2 else "public" for level in used]
    stages = np.array([used.index(level) for level in found])
    held = _protected(tool, chosen)
    shared = list(_checked(tool, chosen, held, folder))
    remarks = []
    if shared:
        remarks.append(f"In public and protected parts, as extents or one number: {', '.join(shared)}.")
    return stages, kinds, remarks


def _protected(tool: FileTool, chosen: list[bool]) -> set[str]:
    """Return the initializers, and the values made of them alone, that protected ops read or compute."""
    graph = tool.graph
    read = [name for op, is_in in zip(graph.ops, chosen, strict=True) if is_in for name in op.reads]
    for op in graph.constants.values():
        facts = tool.ops.get(op.makes[0])
        read += op.makes if facts is not None and facts.selected else ()
    return {
        name for name in graph.with_constants(read)
        if name in graph.initializers or name in graph.sparse or name in graph.constants
    }  # fmt: skip


def _checked(tool: FileTool, chosen: list[bool], held: set[str], folder: Path) -> Iterator[str]:
    """Yield what public ops may read as well; raise ProtectError for what they may not."""
    graph = tool.graph
    public: dict[str, str] = {}
    for op, is_in in zip(graph.ops, chosen, strict=True):
        if not is_in:
            public |= dict.fromkeys(graph.with_constants(op.reads), f"{op}, which is not selected,")
    passed = [name for name in graph.outputs if name not in graph.made_by]
    public |= dict.fromkeys(graph.with_constants(passed), "an output of the model")
    copies = {_content(graph, name, folder): name for name in held if not _is_open(graph, name, folder)}
    copies.pop(b"", None)
    for name, reader in public.items():
        if name in held and _is_open(graph, name, folder):
            yield name
        elif name in held:
            raise ProtectError(
                f"{reader} reads {name}, which protected ops read: select this op too, or leave out the ops "
                "that read it"
            )
        elif (same := copies.get(_content(graph, name, folder))) is not None:
            raise ProtectError(
                f"{reader} reads {name}, which has the same values as {same}, which is protected: select "
                "this op too, or leave out the ops that read it"
            )


def _is_open(graph: FileGraph, name: str, folder: Path) -> bool:
    """Return True for extents, single numbers and arrays of one number: exporters share these between ops."""
    tensor = graph.tensor(name)
    if tensor is None:
        op = graph.constants.get(name)
        return op is not None and bool(op.reads) and all(_is_open(graph, one, folder) for one in op.reads)
    is_extents = tensor.data_type in (TensorProto.INT64, TensorProto.BOOL) and len(tensor.dims) <= 1
    return is_extents or not _content(graph, name, folder)


def _content(graph: FileGraph, name: str, folder: Path) -> bytes:
    """Return the values of a constant as bytes; none where they are computed, or one number repeated."""
    tensor = graph.tensor(name)
    if tensor is None:
        return b""
    if tensor.data_type == TensorProto.STRING:
        return b"\0".join(tensor.string_data)
    array: NDArray[np.generic] = numpy_helper.to_array(tensor, str(folder))
    told = array.tobytes()
    return b"" if told == told[: array.itemsize] * array.size else told
