"""ONNX models that tools edit: files with their external data, bodies of control flow, what nodes read.

model = read_onnx("model.onnx")
for node in model.graph.node:
    print(node.op_type, list(reads_of(node)))
remove_unread(model.graph)
save_onnx(model, Path("smaller.onnx"))
"""

from amanda.tools.onnx_graph._graph import (
    add_note,
    attribute_of,
    bodies_of,
    captures_of,
    constant_of,
    first_output_of,
    inlined,
    names_in,
    opset_of,
    read_in,
    read_onnx,
    reads_of,
    remove_attribute,
    remove_unread,
    save_onnx,
    set_attribute,
)

__all__ = [
    "add_note", "attribute_of", "bodies_of", "captures_of", "constant_of", "first_output_of",
    "inlined", "names_in", "opset_of", "read_in", "read_onnx", "reads_of", "remove_attribute",
    "remove_unread", "save_onnx", "set_attribute",
]  # fmt: skip
