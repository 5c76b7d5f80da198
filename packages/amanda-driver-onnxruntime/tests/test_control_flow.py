"""Routines in the bodies of If, Loop, Scan and SequenceMap run at each execution, as anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx_models import model_of, node, random, session_of, tool

import amanda
from amanda.testing import EqualCopies, Unchanged

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = random(4, 3)
info = helper.make_tensor_value_info


def body(nodes: Sequence[NodeProto], inputs: Sequence[Any], outputs: Sequence[Any]) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", inputs, outputs)


def looping(limit: int = 3, inner: Sequence[NodeProto] = ()) -> ModelProto:
    """y = log(y * w + number of the round), for some rounds, with each round's y besides."""
    graph = body(
        [
            node("Cast", "i", "n", "n", to=1), node("Mul", "y w", "m", "mul"), node("Add", "m n", "a", "add"),
            *inner, node("Log", "a", "l", "log"), node("Identity", "go", "on", "on"),
            node("Identity", "l", "each", "each"),
        ],
        [info("i", INT, []), info("go", BOOL, []), info("y", FLOAT, [4, 3])],
        [info("on", BOOL, []), info("l", FLOAT, [4, 3]), info("each", FLOAT, [4, 3])],
    )  # fmt: skip
    weights = {"w": np.float32(0.5), "limit": np.array(limit)}
    return model_of(
        [node("Loop", "limit  x", "last all", "loop", body=graph)], {"x": [4, 3]}, ["last", "all"], weights
    )


def scanning() -> ModelProto:
    """Sums along columns from the right, with the partial sums from the last to the first."""
    graph = body(
        [node("Add", "sum column", "next", "add"), node("Neg", "next", "less", "neg")],
        [info("sum", FLOAT, [4]), info("column", FLOAT, [4])],
        [info("next", FLOAT, [4]), info("less", FLOAT, [4])],
    )
    attributes = {
        "num_scan_inputs": 1, "scan_input_axes": [1], "scan_input_directions": [1], "scan_output_axes": [-1],
        "scan_output_directions": [1],
    }  # fmt: skip
    nodes = [node("Scan", "start x", "total partial", "scan", body=graph, **attributes)]
    return model_of(nodes, {"x": [4, 3]}, ["total", "partial"], {"start": np.zeros(4, np.float32)})


def mapping() -> ModelProto:
    graph = body(
        [node("Mul", "one w", "more", "mul")], [info("one", FLOAT, None)], [info("more", FLOAT, None)]
    )
    nodes = [
        node("SequenceConstruct", "x x", "s"), node("SequenceMap", "s", "t", "map", body=graph),
        node("ConcatFromSequence", "t", "y", axis=0),
    ]  # fmt: skip
    return model_of(nodes, {"x": [4, 3]}, ["y"], {"w": np.float32(3)})


def branching() -> ModelProto:
    """A branch in a branch, with an op of ONNX Runtime's own."""
    fused = node("FusedMatMul", "x k", "f", "fused", domain="com.microsoft", alpha=2.0)
    choice = node(
        "If", "deep", "chosen", "inner",
        then_branch=body([fused, node("Neg", "f", "n", "neg")], [], [info("n", FLOAT, [4, 3])]),
        else_branch=body([node("Identity", "x", "e", "same")], [], [info("e", FLOAT, [4, 3])]),
    )  # fmt: skip
    outer = node(
        "If", "go", "y", "outer", then_branch=body([choice], [], [info("chosen", FLOAT, [4, 3])]),
        else_branch=body([node("Abs", "x", "b", "abs")], [], [info("b", FLOAT, [4, 3])]),
    )  # fmt: skip
    model = model_of(
        [outer], {"x": [4, 3], "go": [], "deep": []}, ["y"], {"k": random(3, 3, seed=1)},
        types={"go": BOOL, "deep": BOOL},
    )  # fmt: skip
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.graph.output[0].CopyFrom(info("y", FLOAT, [4, 3]))
    return model


CHOICES = {"go": np.array(True), "deep": np.array(True)}
PROGRAMS: dict[str, tuple[Callable[[], ModelProto], dict[str, Any]]] = {
    "Loop": (looping, {}), "Loop of no round": (lambda: looping(0), {}), "Scan": (scanning, {}),
    "SequenceMap": (mapping, {}), "If": (branching, CHOICES),
    "the other branch": (branching, {**CHOICES, "go": np.array(False)}),
}  # fmt: skip


@pytest.mark.parametrize("make", [Unchanged, lambda: EqualCopies(np.copy)], ids=["echo", "equal new values"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bodies_compute_the_same_under_routines_that_change_nothing(name: str, make: Any) -> None:
    model, feed = PROGRAMS[name]
    session = session_of(model())
    feed = {"x": abs(X) + 3, **feed}
    bare = session.run(None, feed)
    with amanda.apply(make()) as scope:
        instrumented = session.run(None, feed)
    assert scope.report == []
    assert [(value.shape, value.tobytes()) for value in instrumented] == [
        (value.shape, value.tobytes()) for value in bare
    ]


def test_a_routine_in_a_loop_runs_in_each_round_and_hands_on_within_the_round() -> None:
    rounds: list[Any] = []

    def note(value: Any, run: dict[str, Any]) -> None:
        run["first"] = float(value.flat[0])

    def compare(value: Any, run: dict[str, Any]) -> None:
        rounds.append((run.pop("first"), float(value.flat[0])))

    def both(context: amanda.OpContext) -> None:
        context.insert_before_op(note, inputs=[0])
        context.insert_after_op(compare)

    with amanda.apply(tool(both, "Log")) as scope:
        session_of(looping()).run(None, {"x": abs(X) + 3})
    assert scope.report == []
    assert len(rounds) == 3
    assert all(abs(np.log(before) - after) < 1e-6 for before, after in rounds)


def test_a_value_that_a_routine_changes_in_a_body_reaches_later_rounds_and_the_model() -> None:
    def double(context: amanda.OpContext) -> None:
        context.insert_after_op(lambda value: value * 2)

    model, x = looping(), abs(X) + 3
    with amanda.apply(tool(double, "Mul")):
        last, rows = session_of(model).run(None, {"x": x})
    expected = x
    for i in range(3):
        expected = np.log(expected * np.float32(0.5) * 2 + np.float32(i))
        np.testing.assert_allclose(rows[i], expected, rtol=1e-6)
    np.testing.assert_allclose(last, expected, rtol=1e-6)


def test_an_exception_in_a_body_reaches_the_caller_as_itself() -> None:
    def fail(context: amanda.OpContext) -> None:
        context.insert_after_op(lambda value: 1 / 0)

    session = session_of(looping())
    with amanda.apply(tool(fail, "Log")), pytest.raises(ZeroDivisionError) as caught:
        session.run(None, {"x": X})
    assert "Log" in str(getattr(caught.value, "__notes__", ""))


def test_a_replaced_op_in_a_body_is_not_computed() -> None:
    def replace(context: amanda.OpContext) -> None:
        context.replace_op(lambda value: value + 1)

    with amanda.apply(tool(replace, "Log")):
        last, _ = session_of(looping(1)).run(None, {"x": X})
    np.testing.assert_array_equal(last, X * np.float32(0.5) + 0 + 1)


@pytest.mark.parametrize("type", ["If", "Loop", "SequenceMap"])
def test_the_one_output_of_a_node_may_be_a_sequence(type: str) -> None:
    sequence = helper.make_tensor_sequence_value_info
    start = node("SequenceConstruct", "x x", "start")
    if type == "If":
        branches = {
            f"{name}_branch": body(
                [node("SequenceConstruct", "x" + " x" * i, name)], [], [sequence(name, FLOAT, None)]
            )
            for i, name in enumerate(("then", "else"))
        }
        nodes = [node("If", "go", "s", "flow", **branches)]
    elif type == "Loop":
        graph = body(
            [node("Identity", "c", "on"), node("SequenceInsert", "old x", "new")],
            [info("i", INT, []), info("c", BOOL, []), sequence("old", FLOAT, None)],
            [info("on", BOOL, []), sequence("new", FLOAT, None)],
        )
        nodes = [start, node("Loop", "n  start", "s", "flow", body=graph)]
    else:
        graph = body([node("Neg", "one", "less")], [info("one", FLOAT, None)], [info("less", FLOAT, None)])
        nodes = [start, node("SequenceMap", "start", "s", "flow", body=graph)]
    nodes.append(node("ConcatFromSequence", "s", "y", axis=0))
    model = model_of(nodes, {"x": [2], "go": []}, ["y"], {"n": np.array(2)}, types={"go": BOOL})
    session, feed = session_of(model), {"x": np.float32([1, 2]), "go": np.array(True)}
    (bare,) = session.run(None, feed)

    def hand_back(context: amanda.OpContext) -> None:
        context.insert_after_op(lambda value: value, [0])
        context.insert_after_op(lambda value: [[element.copy() for element in value[0]]], [0])

    with amanda.apply(tool(hand_back, type)) as scope:
        (instrumented,) = session.run(None, feed)
    assert scope.report == []
    np.testing.assert_array_equal(instrumented, bare)
