"""Models with routines written into them, which run without Amanda: in memory, and as files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    ValueInfoProto,
    external_data_helper,
    inliner,
    numpy_helper,
)

import amanda
from amanda import interceptor
from amanda.backend import Artefact, GraphAnalysis, Inlining, Namespace, OpFacts, digest
from amanda.errors import ArtefactError, NotTraceableError
from amanda.options import File, checked

from ._computation import keeps_elements
from ._items import ComputedNode
from ._model import Model, read_proto, types_by_onnxruntime
from ._rewrite import ModelRewriting
from ._tensors import OnnxTensorOps
from ._values import bodies_of, names_read, rename_values, tensor_type


@checked(error=ArtefactError)
def instrument(model: ModelProto | File, *tools: amanda.Tool) -> ModelProto:
    """Return a copy of a model with the routines of tools written into it; it runs without Amanda.

    In any runtime the copy computes what `model` computes in a scope of the tools.  Traceable routines become
    nodes.  A routine on constants alone, such as weights, is called once, traceable or not, and its result is
    stored.  Inputs, outputs and other values keep their names; local functions are inlined.

    Args:
        model: A ModelProto or the path of a file; it stays as it is.
        *tools: Tools, in the order in which their routines run.

    Raises:
        NotTraceableError: If a routine cannot be written; it lists each, with the reason.
        ArtefactError: For a file whose external data lie outside of its folder.
    """
    source = model if isinstance(model, ModelProto) else _read_with_data(Path(model))
    copy = Model(source)
    copy.infer_types(types_by_onnxruntime)
    model_identity = digest("onnx", *(f"{node.op_type} {node.name}" for node in copy.proto.graph.node))
    with amanda.apply(*tools):
        activation = interceptor.active()
        assert activation is not None
        # Routines run here once, on constants, and must not be instrumented.
        with interceptor.Suspension():
            analysis = GraphAnalysis(activation.state, OnnxTensorOps())
            rewriting = ModelRewriting(
                analysis=analysis,
                namespace=namespace(),
                is_for_file=True,
                model=copy,
                identity=model_identity,
            )
            try:
                rewriting.run()
            finally:
                rewriting.analysis.release_symbols()
    if rewriting.refused:
        raise _not_traceable([_refusal(*refusal) for refusal in rewriting.refused])
    return write_model(source, rewriting) if rewriting.has_insertions else copy_model(source)


def _read_with_data(path: Path) -> ModelProto:
    proto = read_proto(path)
    external_data_helper.load_external_data_for_model(proto, str(path.parent))
    return proto


def namespace() -> Namespace:
    """Return the namespace `onnxruntime/<version>/graph`."""
    import onnxruntime

    return Namespace(f"onnxruntime/{onnxruntime.__version__}/graph")


def _not_traceable(refusals: Sequence[tuple[str, str, str, str, str]]) -> NotTraceableError:
    """Return the error that lists refused routines, each with op, path, tool and reason."""
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


ABOUT = "amanda"
LARGE = 1 << 30
"""Bytes of values above which a model is written with external data: protocol buffers end at 2 GB."""


class OnnxFile(Artefact):
    """An ONNX model, with its external data.

    Opsets, metadata, names of inputs and outputs, and nodes without routines are kept. The result of a
    routine on initializers is stored instead of these. Raises ArtefactError for a file that is no such model.
    """

    api = 2
    kind = "ONNX model"

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._source = read_proto(path)
            if not self._source.ir_version or not self._source.graph.output:
                raise ValueError("it has no graph")
            self._model = Model(self._source, str(path.parent))
        except OSError as error:
            reason = error.strerror or error
            raise ArtefactError(f"{error.filename or path} cannot be read: {reason}") from error
        except Exception as error:  # the errors of protocol buffers differ between their versions
            reason = str(error).partition("\n")[0]
            raise ArtefactError(f"{path} is not a complete ONNX model: {reason}") from error
        self._is_external = any(map(external_data_helper.uses_external_data, self._source.graph.initializer))
        self._model.infer_types(types_by_onnxruntime)
        self._instrumented: ModelProto | None = None

    def instrument(self, inlining: Inlining) -> None:
        """Rewrite the graph, its bodies and its local functions; hold no model if a routine was refused."""
        graph = self._model.proto.graph
        # The ids of ops must not depend on the file's path, nor on its weights.
        model_identity = digest("onnx", *(f"{node.op_type} {node.name}" for node in graph.node))
        file_namespace = Namespace(f"{namespace()}/static")
        rewriting = ModelRewriting(
            analysis=inlining.analysis(OnnxTensorOps()), namespace=file_namespace, is_for_file=True,
            model=self._model, identity=model_identity,
        )  # fmt: skip
        try:
            rewriting.run()
        finally:
            rewriting.analysis.release_symbols()
        inlining.record_rewriting(rewriting)
        self._instrumented = None if rewriting.refused else write_model(self._source, rewriting)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the model, with external data in one file if the source has external data, or large data.

        about: a description of the tools, which is added to those in the model's metadata.
        """
        assert self._instrumented is not None
        _append_description(self._instrumented, about)
        # The values are copied into the new file or its data file: a copy must not refer to the source's
        # folder.
        external_data_helper.load_external_data_for_model(self._instrumented, str(self._path.parent))
        size = sum(len(tensor.raw_data) for tensor in self._instrumented.graph.initializer)
        if not self._is_external and size < LARGE:
            onnx.save_model(self._instrumented, path)
            return
        onnx.save_model(
            self._instrumented, path, save_as_external_data=True, all_tensors_to_one_file=True,
            location=f"{path.name}.data",
        )  # fmt: skip


def _append_description(model: ModelProto, about: Mapping[str, Any]) -> None:
    """Append a description of the tools to those in the model's metadata."""
    properties = {entry.key: entry.value for entry in model.metadata_props}
    descriptions = [*json.loads(properties.get(ABOUT, "[]")), about]
    onnx.helper.set_model_props(model, {**properties, ABOUT: json.dumps(descriptions)})


_INPUTS_ARE_APART = 4
"""IR version before which initializers are inputs of the graph."""


def write_model(source: ModelProto, rewriting: ModelRewriting) -> ModelProto:
    """Return the rewritten model, in which values of `source` keep their names.

    Local functions are inlined, and constants that nothing reads are left out.
    """
    # The source, not the rewriting's model, since that lacks the large values.
    model = inliner.inline_local_functions(source) if source.functions else copy_model(source)
    graph = model.graph
    equal_names = _equal_constants(rewriting, graph)
    new_name_by_name, identities = _rename_outputs(rewriting, equal_names, graph)
    nodes = [item.node for item in rewriting.items if isinstance(item, ComputedNode)]
    del graph.node[:]
    graph.node.extend(rename_values(nodes, new_name_by_name))
    graph.node.extend(identities)
    new_constants = {name: array for name, array in rewriting.constants.items() if name not in equal_names}
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in new_constants.items()
    )
    if model.ir_version < _INPUTS_ARE_APART:
        graph.input.extend(_value_info(name, array) for name, array in new_constants.items())
    drop_unread(graph, rewriting.model.overridable)
    return model


def copy_model(source: ModelProto) -> ModelProto:
    """Return a copy of a model."""
    model = ModelProto()
    model.CopyFrom(source)
    return model


def drop_unread(graph: GraphProto, retained: Iterable[str] = ()) -> None:
    """Delete unread constants, and the nodes that only rearrange unread constants, also in bodies.

    Types of values between nodes are deleted, too: runtimes infer them, and routines may change them.
    retained: names of initializers that stay even if nothing reads them.
    """
    del graph.value_info[:]
    read_names = {*retained, *(output.name for output in graph.output)}
    # In reverse order, a node that only an unread node reads is found unread, too.
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if _only_moves_constants(node) and read_names.isdisjoint(node.output):
            del graph.node[i]
            continue
        for body in bodies_of(node):
            drop_unread(body)
        read_names.update(names_read(node))
    unread_names = {tensor.name for tensor in graph.initializer} - read_names
    for field in (graph.initializer, graph.input):
        for i in reversed(range(len(field))):
            if field[i].name in unread_names:
                del field[i]
    for i in reversed(range(len(graph.sparse_initializer))):
        if graph.sparse_initializer[i].values.name not in read_names:
            del graph.sparse_initializer[i]


def _only_moves_constants(node: NodeProto) -> bool:
    return keeps_elements(node) or (node.domain in ("", "ai.onnx") and node.op_type == "Constant")


def _equal_constants(rewriting: ModelRewriting, graph: GraphProto) -> dict[str, str]:
    """Return, by a routine's constant, the name of an equal initializer or earlier constant, if any.

    Initializers that a run may override, or whose names a body has too, are left out.
    """
    # Digests of all weights would take long, so only those with the layout of a new constant are compared.
    layouts = {_dtype_and_shape(array) for array in rewriting.constants.values()}
    # A default may be overridden at run time, and a name in a body may hide the constant.
    excluded_names = rewriting.model.overridable | set(_inner_names(graph))
    array_by_initializer = {}
    for tensor in graph.initializer:
        if tensor.name not in excluded_names:
            array = rewriting.model.constants[tensor.name]
            if _dtype_and_shape(array) in layouts:
                array_by_initializer[tensor.name] = array
    first_name_by_content: dict[Any, str] = {}
    equal_name_by_name = {}
    for name, array in (array_by_initializer | rewriting.constants).items():
        first_name = first_name_by_content.setdefault((_dtype_and_shape(array), _digest(array)), name)
        if first_name != name and name not in array_by_initializer:
            equal_name_by_name[name] = first_name
    return equal_name_by_name


def _dtype_and_shape(array: Any) -> tuple[str, tuple[int, ...]]:
    return np.asarray(array).dtype.name, np.shape(array)


def _digest(array: Any) -> bytes:
    """Return bytes that are equal for arrays with equal values, of one dtype and shape."""
    values = np.ascontiguousarray(array)
    # Strings are objects, whose memory has addresses.
    if values.dtype.kind == "O":
        return repr(values.tolist()).encode()
    return hashlib.blake2b(values.view(np.uint8).data if values.size else b"").digest()


def _inner_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of values in bodies, which may hide values outside."""
    for node in graph.node:
        for body in bodies_of(node):
            yield from (entry.name for entry in (*body.input, *body.initializer))
            yield from (name for inner_node in body.node for name in inner_node.output)
            yield from _inner_names(body)


def _rename_outputs(
    rewriting: ModelRewriting, equal_names: Mapping[str, str], graph: GraphProto
) -> tuple[dict[str, str], list[NodeProto]]:
    """Return new names of values by the present ones, so that outputs keep their names, and Identity nodes.

    An Identity gives an output its name where no node that computes the output's value can take the name.
    equal_names: by a constant's name, the name of an equal constant that is stored instead.
    """
    outputs = [value.name for value in graph.output]
    # By an output whose value routines have changed, the name of the changed value.
    present_names = {name: rewriting.renamed.get(name, name) for name in outputs}
    changed_outputs = {output: name for output, name in present_names.items() if name != output}
    # The node that computes the original value gives up the output's name.
    new_name_by_name = {name: f"{rewriting.new_name('original')}/{name}" for name in changed_outputs}
    for name, equal_name in equal_names.items():
        new_name_by_name[name] = new_name_by_name.get(equal_name, equal_name)
    nodes = [item.node for item in rewriting.items if isinstance(item, ComputedNode)]
    computed_names = {name for node in nodes for name in node.output}
    identities = []
    for output, name in changed_outputs.items():
        # A value that is an output itself, or has taken a name already, cannot take this one.
        if name in computed_names and name not in new_name_by_name and name not in outputs:
            new_name_by_name[name] = output
        else:
            source_name = new_name_by_name.get(name, name)
            identities.append(onnx.helper.make_node("Identity", [source_name], [output]))
    return new_name_by_name, identities


def _value_info(name: str, array: Any) -> ValueInfoProto:
    return ValueInfoProto(name=name, type=tensor_type(np.asarray(array).dtype, np.shape(array)))
