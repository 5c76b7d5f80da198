"""Routines written into a model, which then runs in any runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_models import FIRST, SECOND, model_of, node, random, run, tool, two_layers

import amanda
from amanda.drivers.onnxruntime import instrument
from amanda.errors import NotTraceableError

X = random(4, 16, seed=3)


def mask(weight: Any) -> Any:
    return np.where(abs(weight) > 0.7, weight, 0)


@amanda.traceable
def quantise(x: Any) -> Any:
    return np.clip(np.rint(x / 0.25), -8, 7) * 0.25


def pruning() -> amanda.Tool:
    return tool(lambda context: context.insert_before_op(mask, inputs=[1]), "MatMul")


def quantising() -> amanda.Tool:
    return tool(lambda context: context.insert_after_op(quantise), "Relu")


def test_what_a_routine_makes_of_weights_is_written_once() -> None:
    copy = instrument(two_layers(), pruning())
    onnx.checker.check_model(copy, full_check=True)
    assert [item.op_type for item in copy.graph.node] == ["MatMul", "Relu", "MatMul"]
    expected = np.maximum(X @ mask(FIRST), 0) @ mask(SECOND)
    np.testing.assert_allclose(run(copy, x=X)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_traceable_routine_becomes_nodes_that_compute_what_numpy_does() -> None:
    copy = instrument(two_layers(), quantising())
    onnx.checker.check_model(copy, full_check=True)
    assert {item.op_type for item in copy.graph.node} >= {"Round", "Div", "Mul"}
    hidden = np.maximum(run(two_layers_up_to("h"), x=X)[0], 0)
    (expected,) = run(last_layer(), r=quantise(hidden))
    np.testing.assert_array_equal(run(copy, x=X)[0], expected)


def two_layers_up_to(name: str) -> onnx.ModelProto:
    return model_of([node("MatMul", "x first", name)], {"x": ["N", 16]}, [name], {"first": FIRST})


def last_layer() -> onnx.ModelProto:
    return model_of([node("MatMul", "r second", "y")], {"r": ["N", 16]}, ["y"], {"second": SECOND})


def test_an_instrumented_model_runs_in_a_runtime_that_knows_nothing_of_amanda() -> None:
    copy = instrument(two_layers(), pruning(), quantising())
    (reference,) = ReferenceEvaluator(copy).run(None, {"x": X})
    np.testing.assert_allclose(run(copy, x=X)[0], reference, rtol=1e-5, atol=1e-5)


def test_inputs_outputs_and_the_given_model_stay_as_they_are() -> None:
    model = two_layers()
    before = model.SerializeToString()
    doubled = tool(lambda context: context.insert_after_op(amanda.traceable(lambda y: y * 2)), "MatMul")
    copy = instrument(model, doubled)
    assert model.SerializeToString() == before
    assert [value.name for value in copy.graph.input] == ["x"]
    assert [value.name for value in copy.graph.output] == ["y"]
    np.testing.assert_allclose(run(copy, x=X)[0], run(model, x=X)[0] * 4, rtol=1e-6)


def test_a_model_that_no_tool_changes_is_given_back_byte_by_byte() -> None:
    model = two_layers()
    assert instrument(model, tool(lambda context: None)).SerializeToString() == model.SerializeToString()


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(two_layers(), path)
    np.testing.assert_array_equal(
        run(instrument(path, pruning()), x=X)[0], run(instrument(two_layers(), pruning()), x=X)[0]
    )


def test_what_cannot_be_written_is_listed_with_op_tool_and_reason() -> None:
    class Counting(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            context.insert_after_op(self.count)
            if context.get_op().type == "Relu":
                context.insert_before_op(self.branch)

        def count(self, *values: Any) -> None: ...

        @amanda.traceable
        def branch(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(NotTraceableError) as caught:
        instrument(two_layers(), Counting())
    text = str(caught.value)
    assert "4 routines" in text
    assert "MatMul '/first/MatMul': insert_after_op(" in text
    assert "of Counting: it is not marked @amanda.traceable" in text
    assert "numpy.where chooses in a graph" in text
    assert {path for _, path, *_ in caught.value.refusals} == {"/first/MatMul", "/act/Relu", "/second/MatMul"}


def test_a_replacement_that_is_traceable_takes_the_place_of_the_node() -> None:
    leaky = amanda.traceable(lambda x: np.where(x > 0, x, x * 0.1))
    copy = instrument(two_layers(), tool(lambda context: context.replace_op(leaky), "Relu"))
    assert "Relu" not in {item.op_type for item in copy.graph.node}
    hidden = X @ FIRST
    expected = np.where(hidden > 0, hidden, hidden * np.float32(0.1)) @ SECOND
    np.testing.assert_allclose(run(copy, x=X)[0], expected, rtol=1e-4, atol=1e-4)


def branching() -> onnx.ModelProto:
    """relu(x) or -x, by whether a number is positive."""
    then = onnx.helper.make_graph(
        [node("Relu", "x", "t", "inner")], "then", [], [onnx.ValueInfoProto(name="t")]
    )
    otherwise = onnx.helper.make_graph([node("Neg", "x", "e")], "else", [], [onnx.ValueInfoProto(name="e")])
    return model_of(
        [node("If", "go", "y", "choose", then_branch=then, else_branch=otherwise)],
        {"x": [3], "go": []}, ["y"], types={"go": onnx.TensorProto.BOOL},
    )  # fmt: skip


@pytest.mark.parametrize("go", [True, False])
def test_traceable_routines_are_written_into_bodies_of_control_flow(go: bool) -> None:
    scaled = tool(lambda context: context.insert_after_op(amanda.traceable(lambda y: y * 3)), "Relu")
    copy = instrument(branching(), scaled)
    x = np.array([-1.0, 2.0, 3.0], np.float32)
    (result,) = run(copy, x=x, go=np.array(go))
    np.testing.assert_array_equal(result, np.maximum(x, 0) * 3 if go else -x)
