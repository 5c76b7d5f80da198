"""ONNX models in files, of strangers too, and the nodes of their graphs with the bodies that these hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.files import file_beside
from amanda.tools.libraries import numpy as np
from amanda.tools.results import parsing

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto


# Bytes of initializers above which they are written beside a model: protocol buffers end at 2 GB.
_LARGE = 1 << 30


def read_onnx(
    path: str | PathLike[str], kind: type[AmandaError] = AmandaError, data: bool = True
) -> ModelProto:
    """Read an ONNX model; its external data from regular files in its folder alone.

    Args:
        path: File of the model.
        kind: Of the error.
        data: Whether external data are read, which else are checked alone.

    Returns:
        The model, with its external data unless `data` is False.

    Raises:
        FileError: Where the file cannot be read, and an error of the kind for another file, and where onnx is
            not installed.
    """
    try:
        import onnx
        from onnx import external_data_helper
    except ImportError as error:
        raise kind(f"{path} is read with onnx, which is not installed: pip install onnx") from error
    path = Path(path)
    with parsing(path, "ONNX model", kind):
        # External data are checked first: a crafted model could name any file of the machine.
        proto = onnx.load(path, load_external_data=False)
        for tensor in _tensors_in(proto):
            if external_data_helper.uses_external_data(tensor):
                place = external_data_helper.ExternalDataInfo(tensor).location
                file_beside(path, place, f"the data of {tensor.name}")
        if data:
            external_data_helper.load_external_data_for_model(proto, str(path.parent))
    return proto


def _tensors_in(message: Any) -> Iterator[TensorProto]:
    """Yield the tensors in a model: initializers, attributes, those of bodies, functions and sparse ones."""
    for field, value in message.ListFields():
        if field.message_type is None:  # a number or a text
            continue
        is_single = hasattr(value, "ListFields")
        for inner_message in [value] if is_single else value:
            if inner_message.DESCRIPTOR.name == "TensorProto":
                yield inner_message
            else:
                yield from _tensors_in(inner_message)


def save_onnx(model: ModelProto, path: Path, folder: Path | None = None, is_external: bool = False) -> int:
    """Write a model, with its data in one file beside it where these are large.

    Args:
        model: The model, whose data may be external: see `folder`; data that are written beside it leave it.
        path: File to write.
        folder: That of external data, which are read first.
        is_external: Data lie beside the model in any case.

    Returns:
        The bytes of the initializers.
    """
    import onnx
    from onnx import external_data_helper

    if folder is not None:
        external_data_helper.load_external_data_for_model(model, str(folder))
    size = sum(map(_size_in_bytes, model.graph.initializer))
    has_data_file = is_external or size >= _LARGE
    onnx.save_model(
        model,
        path,
        save_as_external_data=has_data_file,
        location=f"{path.name}.data" if has_data_file else None,
    )
    return size


def _size_in_bytes(tensor: TensorProto) -> int:
    """Return the bytes of the elements of a tensor, also where they lie in another file."""
    from onnx import helper

    return int(prod(tensor.dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)


def add_note(model: ModelProto, about: Mapping[str, Any]) -> None:
    """Add a note to the metadata of a model, after those of earlier tools.

    Args:
        model: Changed in place.
        about: The note, as JSON has it.
    """
    from onnx import helper

    metadata = {entry.key: entry.value for entry in model.metadata_props}
    # A model may pass through several tools, each of which adds a note.
    notes = [*json.loads(metadata.get("amanda", "[]")), about]
    helper.set_model_props(model, {**metadata, "amanda": json.dumps(notes)})


def opset_of(model: ModelProto) -> int:
    """Return the version of ONNX' own operators; 0 where the model names none."""
    return next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 0)


def inlined(model: ModelProto) -> ModelProto:
    """Return a model whose local functions are nodes of the graph; the model itself where it has none."""
    from onnx import inliner

    return inliner.inline_local_functions(model) if model.functions else model


# Protocol buffers are edited, not the graphs of onnx_ir: it drops sparse initializers, without which a model
# does not load, and training information.


def bodies_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs that a node holds."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def reads_of(node: NodeProto) -> Iterator[str]:
    """Yield the values of the graph around a node that the node reads, in its bodies too."""
    yield from filter(None, node.input)
    yield from captures_of(node)


def captures_of(node: NodeProto) -> Iterator[str]:
    """Yield the values of the graph around a node that the bodies of the node read."""
    for body in bodies_of(node):
        local_names = {value.name for value in (*body.input, *body.initializer)}
        local_names |= {value.values.name for value in body.sparse_initializer}
        for inner in body.node:
            yield from (name for name in reads_of(inner) if name not in local_names)
            # In the order of the nodes: what an earlier one made is not read from outside.
            local_names.update(inner.output)
        yield from (value.name for value in body.output if value.name not in local_names)


def read_in(graph: GraphProto) -> set[str]:
    """Return the names of the outputs of a graph, and of the values that its nodes read."""
    return {value.name for value in graph.output}.union(*map(reads_of, graph.node))


def names_in(graph: GraphProto) -> Iterator[str]:
    """Yield the names, some several times or "", of the values and nodes of a graph and of its bodies."""
    yield from (value.name for value in (*graph.input, *graph.initializer, *graph.output))
    yield from (value.values.name for value in graph.sparse_initializer)
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)
        for body in bodies_of(node):
            yield from names_in(body)


def first_output_of(node: NodeProto) -> str:
    """Return the first value that a node makes, by which the node is known: no other node makes the value."""
    return next(filter(None, node.output), "")


def constant_of(node: NodeProto) -> TensorProto | None:
    """Return what a Constant node makes, under its name; None for sparse values, texts and other nodes."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    # Another domain may have a Constant of its own.
    if not _is_standard(node) or node.op_type != "Constant" or len(node.attribute) != 1:
        return None
    (attribute,) = node.attribute
    tensor = TensorProto()
    if attribute.name == "value":
        tensor.CopyFrom(attribute.t)
    elif attribute.name in _NUMBERS:
        array = np.array(helper.get_attribute_value(attribute), _NUMBERS[attribute.name])
        tensor = numpy_helper.from_array(array)
    else:
        return None
    tensor.name = node.output[0]
    return tensor


_NUMBERS = {"value_float": "f4", "value_floats": "f4", "value_int": "i8", "value_ints": "i8"}


def remove_unread(graph: GraphProto, kept: Iterable[str] = ()) -> None:
    """Remove initializers that nothing reads, and nodes that only move them; in bodies too.

    Types of values between nodes are removed as well: runtimes infer them, and edits may change them.

    Args:
        graph: Changed in place.
        kept: Names of initializers that stay, read or not.
    """
    del graph.value_info[:]
    read = {*kept, *(value.name for value in graph.output)}
    # From the end, so that the readers of a node are known when it is met.
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if _is_standard(node) and node.op_type in _MOVES and read.isdisjoint(node.output):
            del graph.node[i]
            continue
        for body in bodies_of(node):
            remove_unread(body)
        read.update(reads_of(node))
    unread = {value.name for value in graph.initializer} - read
    # Before version 4 of its format every initializer was an input as well.
    for field in (graph.initializer, graph.input):
        for i in reversed(range(len(field))):
            if field[i].name in unread:
                del field[i]
    for i in reversed(range(len(graph.sparse_initializer))):
        if graph.sparse_initializer[i].values.name not in read:
            del graph.sparse_initializer[i]


# Types of nodes by which weights reach their readers.
_MOVES = {"Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast"}


def _is_standard(node: NodeProto) -> bool:
    """Return True for an operator that ONNX defines."""
    return node.domain in ("", "ai.onnx")


def attribute_of(node: NodeProto, name: str, default: Any) -> Any:
    """Return the value of an attribute.

    Args:
        node: A node of an ONNX graph.
        name: Name of the attribute.
        default: Value for a node without the attribute.
    """
    from onnx import helper

    attribute = next((attribute for attribute in node.attribute if attribute.name == name), None)
    return default if attribute is None else helper.get_attribute_value(attribute)


def remove_attribute(node: NodeProto, name: str) -> None:
    """Remove an attribute, if there is one of this name.

    Args:
        node: Changed in place.
        name: Name of the attribute.
    """
    for attribute in [attribute for attribute in node.attribute if attribute.name == name]:
        node.attribute.remove(attribute)


def set_attribute(node: NodeProto, name: str, value: int | Sequence[int]) -> None:
    """Set an attribute, which replaces one of the same name.

    Args:
        node: Changed in place.
        name: Name of the attribute.
        value: An integer, or several.
    """
    from onnx import helper

    remove_attribute(node, name)
    node.attribute.append(helper.make_attribute(name, value))
