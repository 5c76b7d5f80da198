"""Models with routines written into them: constants once, nothing that is not read, the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnx_models import model_of, node, random, run, session_of, tool

import amanda
from amanda.drivers.onnxruntime import instrument
from amanda.tools.prune import PruneTool

WEIGHT, X = random(48, 48), random(4, 48, seed=3)
FEW = 400
"""Bytes that a copy may be larger: names, and the note of what was done."""


def constant(name: str) -> Any:
    return helper.make_node("Constant", [], [name], name, value=numpy_helper.from_array(WEIGHT, name))


def products(inputs: str, *nodes: Any, ir_version: int = 9, **weights: Any) -> ModelProto:
    """A product with each of these factors in turn."""
    names = inputs.split()
    values = ["x", *(f"h{i}" for i in range(len(names) - 1)), "y"]
    product_nodes = [
        node("MatMul", f"{a} {w}", b, f"/{b}") for a, w, b in zip(values[:-1], names, values[1:], strict=True)
    ]
    model = model_of([*nodes, *product_nodes], {"x": [4, 48]}, ["y"], weights)
    model.ir_version = ir_version
    return model


def with_an_initializer_as_input() -> ModelProto:
    model = products("w w", w=WEIGHT, ir_version=3)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, WEIGHT.shape))
    return model


MODELS: dict[str, Callable[[], ModelProto]] = {
    "one reader": lambda: products("w", w=WEIGHT),
    "several readers": lambda: products("w w w", w=WEIGHT),
    "equal initializers": lambda: products("w v", w=WEIGHT, v=WEIGHT),
    "a node": lambda: products("w w", constant("w")),
    "nodes that move it": lambda: products(
        "t t", node("Transpose", "w", "m", "/m"), node("Identity", "m", "t", "/t"), w=WEIGHT
    ),
    "an input of an old file": with_an_initializer_as_input,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_pruned_file_is_no_larger_and_gives_what_the_running_tool_gives(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    onnx.save(model, tmp_path / "model.onnx")
    amanda.instrument(tmp_path / "model.onnx", PruneTool(), out=tmp_path / "pruned.onnx")
    copy = onnx.load(tmp_path / "pruned.onnx")
    onnx.checker.check_model(copy, full_check=True)
    with amanda.apply(PruneTool()):
        (expected,) = session_of(model).run(None, {"x": X})
    np.testing.assert_array_equal(run(copy, x=X)[0], expected)
    assert {item.op_type for item in copy.graph.node} == {"MatMul"}
    (stored,) = copy.graph.initializer
    assert np.count_nonzero(numpy_helper.to_array(stored)) == WEIGHT.size // 2
    sizes = [(tmp_path / f"{name}.onnx").stat().st_size for name in ("model", "pruned")]
    assert sizes[1] <= sizes[0] + FEW
    assert [argument.name for argument in session_of(copy).get_inputs()] == ["x"]


def test_a_weight_that_others_read_as_well_stays_for_them() -> None:
    model = products("w s", node("Add", "w w", "s", "/s"), w=WEIGHT)
    copy = instrument(model, PruneTool())
    with amanda.apply(PruneTool()):
        (expected,) = session_of(model).run(None, {"x": X})
    np.testing.assert_array_equal(run(copy, x=X)[0], expected)
    assert [tensor.name for tensor in copy.graph.initializer][:1] == ["w"]
    assert len(copy.graph.initializer) == 2


def test_a_default_of_an_input_stays_and_its_mask_is_stored_once(tmp_path: Path) -> None:
    model = products("w w", w=WEIGHT)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, WEIGHT.shape))
    onnx.save(model, tmp_path / "model.onnx")
    amanda.instrument(tmp_path / "model.onnx", PruneTool(), out=tmp_path / "pruned.onnx")
    copy = onnx.load(tmp_path / "pruned.onnx")
    session = session_of(model)
    with amanda.apply(PruneTool()):
        (expected,) = session.run(None, {"x": X})
    np.testing.assert_array_equal(run(copy, x=X)[0], expected)
    assert [argument.name for argument in session_of(copy).get_overridable_initializers()] == ["w"]
    assert len(copy.graph.initializer) == 2


def branching() -> ModelProto:
    """x by w in one branch, by an equal constant of its own in the other."""
    then = helper.make_graph([node("MatMul", "x w", "t")], "then", [], [ValueInfoProto(name="t")])
    nodes = [constant("v"), node("MatMul", "x v", "e")]
    otherwise = helper.make_graph(nodes, "else", [], [ValueInfoProto(name="e")])
    choice = node("If", "go", "y", "choose", then_branch=then, else_branch=otherwise)
    return model_of([choice], {"x": [4, 48], "go": []}, ["y"], {"w": WEIGHT}, types={"go": TensorProto.BOOL})


def test_constants_of_bodies_that_nothing_reads_are_left_out() -> None:
    copy = instrument(branching(), PruneTool())
    onnx.checker.check_model(copy, full_check=True)
    assert copy.ByteSize() < WEIGHT.nbytes * 1.1
    for go in (True, False):
        (result,) = run(copy, x=X, go=np.array(go))
        np.testing.assert_array_equal(result, run(instrument(products("w", w=WEIGHT), PruneTool()), x=X)[0])


def test_outputs_that_a_routine_swaps_are_swapped_in_the_file_too() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    model = model_of([node("Split", "x", "a b", axis=1, num_outputs=2)], {"x": [2, 4]}, ["a", "b"])
    swapping = tool(lambda c: c.insert_after_op(amanda.traceable(lambda parts: parts[::-1])), "Split")
    with amanda.apply(swapping):
        running = session_of(model).run(None, {"x": x})
    for outputs in (running, run(instrument(model, swapping), x=x)):
        np.testing.assert_array_equal(outputs[0], x[:, 2:])
        np.testing.assert_array_equal(outputs[1], x[:, :2])


@pytest.mark.parametrize("type", ["Neg", "Abs"])
def test_a_traceable_identity_removes_the_op(type: str) -> None:
    model = model_of([node("Neg", "x", "y"), node("Abs", "y", "z")], {"x": [4, 48]}, ["y", "z"])
    removing = tool(lambda c: c.replace_op(amanda.traceable(lambda value: value)), type)
    with amanda.apply(removing):
        running = session_of(model).run(None, {"x": X})
    first = X if type == "Neg" else -X
    for outputs in (running, run(instrument(model, removing), x=X)):
        np.testing.assert_array_equal(outputs[0], first)
        np.testing.assert_array_equal(outputs[1], abs(X) if type == "Neg" else -X)
