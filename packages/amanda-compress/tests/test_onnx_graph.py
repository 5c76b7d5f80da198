"""What tools that edit ONNX models share: what nodes read in bodies, what nothing reads, files with data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from amanda.errors import ToolError
from amanda.tools.onnx_graph import (
    add_note,
    constant_of,
    names_in,
    opset_of,
    read_in,
    read_onnx,
    reads_of,
    remove_unread,
    save_onnx,
    set_attribute,
)


def tensor(name: str, count: int = 3) -> TensorProto:
    return numpy_helper.from_array(np.arange(count, dtype=np.float32), name)


def graph_of(nodes: list[Any], outputs: str, held: list[TensorProto]) -> GraphProto:
    ends = [onnx.ValueInfoProto(name=name) for name in outputs.split()]
    return helper.make_graph(nodes, "g", [], ends, held)


def branching() -> ModelProto:
    """An `If` in an `If`, whose innermost body reads `deep`, and `own`, which is an initializer of it."""
    leaf = graph_of([helper.make_node("Add", ["deep", "own"], ["a"])], "a", [tensor("own"), tensor("idle")])
    body = graph_of([helper.make_node("If", ["c"], ["b"], then_branch=leaf, else_branch=leaf)], "b", [])
    nodes = [
        helper.make_node("Identity", ["moved"], ["deep"]),
        helper.make_node("Transpose", ["unread"], ["turned"]),
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
    ]
    graph = graph_of(nodes, "y", [tensor("moved"), tensor("unread"), tensor("kept")])
    graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    graph.sparse_initializer.append(
        helper.make_sparse_tensor(tensor("thin", 1), helper.make_tensor("at", 7, [1], [0]), [4])
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_nodes_read_what_their_bodies_read_of_the_graphs_around() -> None:
    graph = branching().graph
    assert set(reads_of(graph.node[2])) == {"c", "deep"}
    assert read_in(graph) == {"y", "moved", "unread", "c", "deep"}
    assert {"own", "a", "b", "thin", "turned"} <= set(names_in(graph))


def test_unread_constants_leave_graphs_and_bodies_with_the_nodes_that_move_them() -> None:
    graph = branching().graph
    remove_unread(graph, kept=["kept"])
    assert [node.op_type for node in graph.node] == ["Identity", "If"]
    assert [tensor.name for tensor in graph.initializer] == ["moved", "kept"]
    assert not graph.sparse_initializer
    inner = graph.node[1].attribute[0].g.node[0].attribute[0].g
    assert [tensor.name for tensor in inner.initializer] == ["own"]


def test_unread_nodes_of_other_domains_stay() -> None:
    node = helper.make_node("Identity", ["x"], ["z"], domain="com.example")
    graph = graph_of([node], "y", [tensor("y")])
    remove_unread(graph)
    assert len(graph.node) == 1


@pytest.mark.parametrize(
    ("attribute", "value", "dtype"),
    [("value_float", 1.5, "float32"), ("value_floats", [1.0, 2.0], "float32"), ("value_int", 3, "int64"),
     ("value_ints", [4, 5], "int64"), ("value", tensor("other"), "float32")],
)  # fmt: skip
def test_constants_are_tensors_under_the_name_of_the_node_s_output(
    attribute: str, value: Any, dtype: str
) -> None:
    constant = constant_of(helper.make_node("Constant", [], ["c"], **{attribute: value}))
    assert constant is not None
    assert constant.name == "c"
    array = numpy_helper.to_array(constant)
    assert array.dtype == dtype
    expected = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.array(value)
    np.testing.assert_array_equal(array, expected)


def test_texts_and_other_nodes_are_no_constants() -> None:
    assert constant_of(helper.make_node("Constant", [], ["c"], value_string="text")) is None
    assert constant_of(helper.make_node("Identity", ["x"], ["c"])) is None


def test_data_lie_beside_a_model_where_they_did(tmp_path: Path) -> None:
    graph = graph_of([helper.make_node("Identity", ["w"], ["y"])], "y", [tensor("w", 1000)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    assert save_onnx(model, tmp_path / "whole.onnx") == 4000
    assert not (tmp_path / "whole.onnx.data").exists()
    save_onnx(model, tmp_path / "a.onnx", is_external=True)
    assert (tmp_path / "a.onnx.data").stat().st_size == 4000
    light = read_onnx(tmp_path / "a.onnx", data=False)
    assert not light.graph.initializer[0].raw_data
    save_onnx(light, tmp_path / "b.onnx", folder=tmp_path)
    array = numpy_helper.to_array(read_onnx(tmp_path / "b.onnx").graph.initializer[0])
    np.testing.assert_array_equal(array, np.arange(1000))


def test_notes_and_opsets_and_attributes() -> None:
    model = branching()
    assert (opset_of(model), opset_of(ModelProto())) == (18, 0)
    for number in range(2):
        add_note(model, {"part": number})
    (metadata,) = model.metadata_props
    assert json.loads(metadata.value) == [{"part": 0}, {"part": 1}]
    node = helper.make_node("Split", ["x"], ["y"], axis=1)
    set_attribute(node, "axis", 2)
    assert [(attribute.name, attribute.i) for attribute in node.attribute] == [("axis", 2)]


def test_error_without_onnx_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ToolError, match=r"model\.onnx is read with onnx, .*: pip install onnx"):
        read_onnx("model.onnx", ToolError)
