"""Routines written into a model, which then runs without Amanda."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto, external_data_helper

import amanda
from amanda import interceptor
from amanda.backend import GraphAnalysis, Namespace, OpFacts, digest
from amanda.errors import ArtefactError, NotTraceableError
from amanda.options import File, checked

from ._model import Model, read_proto
from ._rewrite import ModelRewriting
from ._tensors import GraphTensors
from ._types import types_by_onnxruntime
from ._written import copied, written


@checked(error=ArtefactError)
def instrument(model: ModelProto | File, *tools: amanda.Tool) -> ModelProto:
    """A model that computes what `model` would in a scope of the tools, in any runtime, without Amanda.

    Traceable routines become nodes.  Routines that are given constants alone, such as weights, are called
    once, traceable or not, and what they give is written in the model.  Inputs, outputs and what is not
    touched keep their names; local functions are inlined.  `model` is left as it is.

    Raises NotTraceableError, which lists every routine that cannot be written, and why, and ArtefactError for
    a file whose external data lie outside of its folder.
    """
    source = model if isinstance(model, ModelProto) else _read(Path(model))
    read = Model(source)
    read.infer_types(types_by_onnxruntime)
    identity = digest("onnx", *(f"{node.op_type} {node.name}" for node in read.proto.graph.node))
    with amanda.apply(*tools):
        activation = interceptor.active()
        assert activation is not None
        with interceptor.Suspension():
            analysis = GraphAnalysis(activation.state, GraphTensors())
            rewriting = ModelRewriting(
                analysis=analysis, namespace=namespace(), written=True, model=read, identity=identity
            )
            try:
                rewriting.run()
            finally:
                rewriting.analysis.finish()
    if rewriting.refused:
        raise _not_traceable([_refusal(*one) for one in rewriting.refused])
    return written(source, rewriting) if rewriting.changed else copied(source)


def _read(path: Path) -> ModelProto:
    proto = read_proto(path)
    external_data_helper.load_external_data_for_model(proto, str(path.parent))
    return proto


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
