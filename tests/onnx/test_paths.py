"""What moves elements in an ONNX graph, as effective paths have it: as ONNX Runtime does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

import amanda
from amanda.tools.effective_path import EffectivePathTool
from amanda.tools.effective_path._frameworks import OpValues, _onnx_moves

DATA = np.arange(5 * 6 * 4).reshape(5, 6, 4)
MOVES: dict[str, tuple[str, list[list[int] | None], dict[str, Any], int]] = {
    "a slice": ("Slice", [[1, 0], [4, 9], [0, 1]], {}, 1),
    "a slice from the end": ("Slice", [[-1, -2], [-4, -100], [0, 2], [-1, -1]], {}, 1),
    "a slice of negative axes": ("Slice", [[-100], [3], [-1], [2]], {}, 1),
    "a slice of the first axes": ("Slice", [[1, 2], [3, 5]], {}, 1),
    "an empty slice": ("Slice", [[2], [-100], [0]], {}, 1),
    "padding": ("Pad", [[0, 1, 2, 1, 0, 0], [-1]], {}, 1),
    "padding of some axes": ("Pad", [[1, 2, 0, 1], [-1], [-1, 0]], {}, 1),
    "parts by sizes": ("Split", [[2, 3, 1]], {"axis": 1}, 3),
    "parts by their number": ("Split", [], {"axis": -1, "num_outputs": 2}, 2),
    "axes in reverse": ("Transpose", [], {}, 1),
    "axes in an order": ("Transpose", [], {"perm": [1, 2, 0]}, 1),
    "copies": ("Expand", [[2, 5, 6, 4]], {}, 1),
}
WORDS = {"Slice": "getitem", "Pad": "pad", "Split": "split", "Transpose": "permute", "Expand": "expand"}


@pytest.mark.parametrize("name", MOVES)
def test_elements_are_where_onnx_runtime_moves_them(name: str) -> None:
    kind, others, attributes, count = MOVES[name]
    inputs = [DATA, *(np.array(one) for one in others)]
    names, made = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(count)]
    if kind == "Pad":
        inputs[2] = inputs[2].reshape(())
    graph = helper.make_graph(
        [helper.make_node(kind, names, made, **attributes)],
        "move",
        [helper.make_tensor_value_info("x0", onnx.TensorProto.INT64, DATA.shape)],
        [helper.make_tensor_value_info(one, onnx.TensorProto.INT64, None) for one in made],
        [numpy_helper.from_array(one, f"x{i}") for i, one in enumerate(inputs) if i],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x0": DATA})
    outputs = [expected] if kind == "Split" else expected
    place = OpValues(WORDS[kind], attributes, None, None, None, _onnx_moves, str, False, inputs, outputs)
    found = place.rule_arguments()["move"](DATA)
    for one, other in zip(found if kind == "Split" else [found], expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_paths_lead_through_parts() -> None:
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 8), (4, 5)))
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2),
        helper.make_node("Tanh", ["b"], ["c"]),
        helper.make_node("Add", ["a", "c"], ["d"]),
        helper.make_node("Gemm", ["d", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "parts",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (3, 5))],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session, matrix = (
        onnxruntime.InferenceSession(model.SerializeToString()),
        torch.nn.Parameter(torch.from_numpy(weight)),
    )

    def program(x: torch.Tensor) -> Any:
        a, b = x.split(4, 1)
        return (a + torch.tanh(b)) @ matrix

    eager, graphs = EffectivePathTool(), EffectivePathTool()
    with amanda.apply(eager):
        program(torch.from_numpy(x))
    with amanda.apply(graphs):
        session.run(None, {"x": x})
    assert graphs.result.missing == {}
    for path, expected in zip(graphs.paths(), eager.paths(), strict=True):
        assert len(path.layers) == 2
        for mine, theirs in zip(path.layers.values(), expected.layers.values(), strict=True):
            assert mine.neurons.tolist() == theirs.neurons.tolist()
            assert mine.synapses.tolist() == theirs.synapses.tolist()
