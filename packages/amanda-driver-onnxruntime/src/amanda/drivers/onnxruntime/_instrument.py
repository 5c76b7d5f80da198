"""The function `instrument`, which writes routines into a model that then runs without Amanda."""

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

from ._model import Model, read_proto, types_by_onnxruntime
from ._model_writing import copy_model, write_model
from ._rewrite import ModelRewriting
from ._tensors import GraphTensors


@checked(error=ArtefactError)
def instrument(model: ModelProto | File, *tools: amanda.Tool) -> ModelProto:
    """Return a copy of a model with the routines of tools written into it; it runs without Amanda.

    In any runtime the copy computes what `model` computes in a scope of the tools.  Traceable routines become
    nodes.  A routine on constants alone, such as weights, is called once, traceable or not, and its result is
    stored.  Inputs, outputs and other values keep their names; local functions are inlined.

    Raises NotTraceableError, which lists each routine that cannot be written, with the reason, and
    ArtefactError for a file whose external data lie outside of its folder.
    """
    source = model if isinstance(model, ModelProto) else _read_with_data(Path(model))
    parsed = Model(source)
    parsed.infer_types(types_by_onnxruntime)
    identity = digest("onnx", *(f"{node.op_type} {node.name}" for node in parsed.proto.graph.node))
    with amanda.apply(*tools):
        activation = interceptor.active()
        assert activation is not None
        # Routines run here once, on constants, and must not be instrumented.
        with interceptor.Suspension():
            analysis = GraphAnalysis(activation.state, GraphTensors())
            rewriting = ModelRewriting(
                analysis=analysis, namespace=namespace(), written=True, model=parsed, identity=identity
            )
            try:
                rewriting.run()
            finally:
                rewriting.analysis.finish()
    if rewriting.refused:
        raise _not_traceable([_refusal(*refusal) for refusal in rewriting.refused])
    return write_model(source, rewriting) if rewriting.changed else copy_model(source)


def _read_with_data(path: Path) -> ModelProto:
    proto = read_proto(path)
    external_data_helper.load_external_data_for_model(proto, str(path.parent))
    return proto


def namespace() -> Namespace:
    """Return the namespace `onnxruntime/<version>/graph`."""
    import onnxruntime

    return Namespace(f"onnxruntime/{onnxruntime.__version__}/graph")


def _not_traceable(refusals: Sequence[tuple[str, str, str, str, str]]) -> NotTraceableError:
    """Return the error that lists the refused routines."""
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
