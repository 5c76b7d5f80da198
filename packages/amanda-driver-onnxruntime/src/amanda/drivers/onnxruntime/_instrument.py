"""Routines written into a model, which then runs without Amanda."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, inliner, numpy_helper

import amanda
from amanda import interceptor
from amanda.backend import Namespace, OpFacts, digest
from amanda.errors import NotTraceableError

from ._model import Model
from ._names import renamed_nodes
from ._places import Compute
from ._rewrite import Rewriting
from ._types import types_by_onnxruntime


def instrument(model: ModelProto | str | Path, *tools: amanda.Tool) -> ModelProto:
    """A model that computes what `model` would in a scope of the tools, in any runtime, without Amanda.

    Traceable routines become nodes.  Routines that are given constants alone, such as weights, are called
    once, traceable or not, and what they give is written in the model.  Inputs, outputs and what is not
    touched keep their names; local functions are inlined.  `model` is left as it is.

    Raises NotTraceableError, which lists every routine that cannot be written, and why.
    """
    source = model if isinstance(model, ModelProto) else onnx.load(str(model))
    read = Model(source)
    read.infer_types(types_by_onnxruntime)
    identity = digest("onnx", *(f"{node.op_type} {node.name}" for node in read.proto.graph.node))
    with amanda.apply(*tools):
        activation = interceptor.active()
        assert activation is not None
        with interceptor.Suspension():
            rewriting = Rewriting(read, activation.state, namespace(), identity, written=True)
            try:
                rewriting.run()
            finally:
                rewriting.analysis.finish()
    if rewriting.refused:
        raise _not_traceable([_refusal(*one) for one in rewriting.refused])
    return written(source, rewriting) if rewriting.changed else _copied(source)


def namespace() -> Namespace:
    """`onnxruntime/<version>/graph`."""
    import onnxruntime

    return Namespace(f"onnxruntime/{onnxruntime.__version__}/graph")


def _not_traceable(refusals: Sequence[tuple[str, str, str, str, str]]) -> NotTraceableError:
    lines = [
        f"  {op} {path!r}: {routine} of {tool}: {reason}" for op, path, tool, routine, reason in refusals
    ]
    return NotTraceableError(
        f"{len(lines)} routines cannot be written into the model; mark pure tensor code "
        "@amanda.traceable, and apply other tools in a scope:\n" + "\n".join(lines),
        refusals,
    )


def _refusal(facts: OpFacts, action: Any, reason: str) -> tuple[str, str, str, str, str]:
    return facts.name, facts.op.name, type(action.tool).__name__, str(action), reason


def _copied(source: ModelProto) -> ModelProto:
    made = ModelProto()
    made.CopyFrom(source)
    return made


def written(source: ModelProto, rewriting: Rewriting) -> ModelProto:
    """The model that a rewriting came to, which names what `source` names."""
    made = inliner.inline_local_functions(source) if source.functions else _copied(source)
    graph = made.graph
    names, extra = _swapped(rewriting, [one.name for one in graph.output])
    nodes = [item.node for item in rewriting.items if isinstance(item, Compute)]
    del graph.node[:]
    graph.node.extend(renamed_nodes(nodes, names))
    graph.node.extend(extra)
    del graph.value_info[:]
    for name, array in rewriting.constants.items():
        graph.initializer.append(numpy_helper.from_array(array, names.get(name, name)))
    _drop_unread(graph)
    return made


def _swapped(rewriting: Rewriting, outputs: Sequence[str]) -> tuple[dict[str, str], list[onnx.NodeProto]]:
    """New names, so that the model's outputs keep theirs; nodes for outputs that share a value."""
    names: dict[str, str] = {}
    extra = []
    for output in outputs:
        now = rewriting.renamed.get(output, output)
        if now == output:
            continue
        names[output] = f"{rewriting.fresh('original')}/{output}"
        if now in names or now in rewriting.constants or now in outputs:
            extra.append(onnx.helper.make_node("Identity", [names.get(now, now)], [output]))
        else:
            names[now] = output
    return names, extra


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Leave out initializers that nothing reads any more."""
    from ._names import reads

    wanted = {name for node in graph.node for name in reads(node)}
    wanted |= {one.name for one in (*graph.output, *graph.input)}
    kept = [tensor for tensor in graph.initializer if tensor.name in wanted]
    if len(kept) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(kept)
