"""Tools that change nothing at any point, on nodes of many kinds: outputs are the session's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper
from onnx_models import node, random, session_of

import amanda
from amanda.errors import MutationError

X, WEIGHT, SQUARE = random(3, 6), random(6, 6, seed=1), random(64, 64, seed=2)
GO = {"go": np.array(True)}


def graph(
    nodes: Sequence[NodeProto], outputs: str, inputs: dict[str, Any], **weights: Any
) -> tuple[ModelProto, dict[str, Any]]:
    """A model of nodes and its feed; outputs: their names."""
    for i, item in enumerate(nodes):
        item.name = f"/{item.op_type}_{i}"
    input_infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    graph_proto = helper.make_graph(
        nodes, "graph", input_infos, [ValueInfoProto(name=name) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph_proto, opset_imports=imports, ir_version=9)
    infos_by_name = {info.name: info for info in input_infos}
    for output in model.graph.output:
        if output.name in infos_by_name:  # an input that is given back
            output.CopyFrom(infos_by_name[output.name])
        elif output.name in weights:
            array = np.asarray(weights[output.name])
            output.type.CopyFrom(helper.make_tensor_type_proto(1, array.shape))
    return onnx.shape_inference.infer_shapes(model), inputs


def body(nodes: Sequence[NodeProto], inputs: Sequence[Any], outputs: Sequence[Any]) -> onnx.GraphProto:
    """A body of control flow; inputs and outputs: name, type and shape."""
    sides = [
        [
            ValueInfoProto(name=entry)
            if isinstance(entry, str)
            else helper.make_tensor_value_info(entry[0], entry[1], entry[2])
            for entry in side
        ]
        for side in (inputs, outputs)
    ]
    return helper.make_graph(nodes, "body", *sides)


def initializer_as_input() -> tuple[ModelProto, dict[str, Any]]:
    model, feed = graph([node("MatMul", "x w", "y")], "y w", {"x": X}, w=WEIGHT)
    model.graph.input.append(helper.make_tensor_value_info("w", 1, WEIGHT.shape))
    return model, {**feed, "w": WEIGHT * 2}


def sparse() -> tuple[ModelProto, dict[str, Any]]:
    model, feed = graph([node("MatMul", "x s", "y")], "y", {"x": X})
    values = helper.make_tensor("s", 1, [2], [1.0, 2.0])
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, helper.make_tensor("at", 7, [2], [0, 7]), [6, 6])
    )
    return model, feed


def looping() -> tuple[ModelProto, dict[str, Any]]:
    inner = body(
        [node("Add", "v row", "v2"), node("Identity", "c", "c2"), node("Neg", "v2", "each")],
        [("i", 7, []), ("c", 9, []), ("v", 1, [6])], [("c2", 9, []), ("v2", 1, [6]), ("each", 1, [6])],
    )  # fmt: skip
    scanned = body(
        [node("Add", "s one", "s2"), node("Mul", "s2 row", "o")],
        [("s", 1, [6]), ("one", 1, [6])], [("s2", 1, [6]), ("o", 1, [6])],
    )  # fmt: skip
    nodes = [
        node("Loop", "n  row", "last all", "loop", body=inner),
        node("Scan", "last all", "final each2", "scan", body=scanned, num_scan_inputs=1),
    ]
    return graph(nodes, "final each2 last", {"n": np.array(3)}, row=WEIGHT[0])


def branching() -> tuple[ModelProto, dict[str, Any]]:
    nested = node(
        "If", "other", "u", "nested",
        then_branch=body([node("Neg", "h", "q")], [], ["q"]),
        else_branch=body([node("Identity", "w", "r")], [], ["r"]),
    )  # fmt: skip
    choice = node(
        "If", "go", "y", "if",
        then_branch=body([node("Identity", "h", "t")], [], ["t"]), else_branch=body([nested], [], ["u"]),
    )  # fmt: skip
    nodes = [node("Relu", "x", "h"), choice, node("Add", "y h", "z")]
    return graph(nodes, "z h", {"x": WEIGHT, "other": np.array(True), **GO}, w=WEIGHT)


def quantised() -> tuple[ModelProto, dict[str, Any]]:
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("QLinearMatMul", "q s z wq s z s z", "m"),
        node("DequantizeLinear", "m s z", "y"),
        node("DynamicQuantizeLinear", "y", "a b c"),
        node("MatMulInteger", "a wq c", "i"),
    ]
    weights = {"s": np.float32(0.05), "z": np.uint8(3), "wq": (abs(WEIGHT) * 20).astype(np.uint8)}
    return graph(nodes, "y i b", {"x": X}, **weights)


def recurrent() -> tuple[ModelProto, dict[str, Any]]:
    nodes = [node("LSTM", "s w r   h", " last", "lstm", hidden_size=4), node("Relu", "last", "y")]
    feed = {"s": random(2, 1, 6), "h": random(1, 1, 4)}
    return graph(nodes, "y", feed, w=random(1, 16, 6), r=random(1, 16, 4))


MODELS: dict[str, Callable[[], tuple[ModelProto, dict[str, Any]]]] = {
    "several outputs": lambda: graph(
        [node("Split", "x", "a b c", axis=1, num_outputs=3), node("Concat", "c a c", "y", axis=1)],
        "y b", {"x": X},
    ),
    "optional inputs and outputs left out": recurrent,
    "an optional input left out": lambda: graph(
        [node("Clip", "x  m", "y")], "y", {"x": X}, m=np.float32(0.3)
    ),
    "outputs that are inputs and initializers": lambda: graph(
        [node("MatMul", "x w", "y")], "x y w", {"x": X}, w=WEIGHT
    ),
    "an initializer as an input": initializer_as_input,
    "a sparse initializer": sparse,
    "weights that are moved": lambda: graph(
        [node("Transpose", "w", "t"), node("MatMul", "x t", "h"), node("MatMul", "h w", "y")],
        "y", {"x": SQUARE}, w=SQUARE,
    ),
    "strings": lambda: graph(
        [node("Gather", "v i", "g"), node("Identity", "g", "y")],
        "y g", {"i": np.array([1, 0, 1])}, v=np.array(["a", "é"], object),
    ),
    "sequences": lambda: graph(
        [node("SequenceConstruct", "x x", "s"), node("SequenceInsert", "s x", "more"),
         node("SequenceAt", "more i", "a"), node("ConcatFromSequence", "more", "y", axis=0)],
        "y a more", {"x": X}, i=np.array(1),
    ),
    "sequences that are split": lambda: graph(
        [node("SplitToSequence", "x", "s", axis=1, keepdims=0), node("SequenceLength", "s", "n"),
         node("SequenceErase", "s", "fewer")],
        "n fewer", {"x": X},
    ),
    "optional values": lambda: graph(
        [node("Optional", "x", "p"), node("OptionalHasElement", "p", "h"),
         node("OptionalGetElement", "p", "y")],
        "h y", {"x": X},
    ),
    "quantised": quantised,
    "ops of ONNX Runtime": lambda: graph(
        [node("FusedMatMul", "x w", "y", domain="com.microsoft", alpha=2.0),
         node("Gelu", "y", "z", domain="com.microsoft")],
        "z", {"x": X}, w=WEIGHT,
    ),
    "values without axes, and none": lambda: graph(
        [node("ReduceSum", "x", "s", keepdims=0), node("Neg", "s", "y"), node("Relu", "none", "r")],
        "y s r", {"x": X, "none": X[:0]},
    ),
    "values that are no numbers": lambda: graph(
        [node("Log", "x", "l"), node("Div", "l zero", "y")], "y l", {"x": X}, zero=np.float32(0)
    ),
    "loops": looping,
    "branches": branching,
}  # fmt: skip


def anew(value: Any) -> Any:
    """An equal value in other memory."""
    if isinstance(value, list):
        return [anew(element) for element in value]
    return value.copy() if isinstance(value, np.ndarray) else value


KINDS: dict[str, Callable[..., Any]] = {
    "looks": lambda *values: None,
    "echoes": lambda *values: values,
    "gives anew": lambda *values: [anew(value) for value in values],
    "observes": amanda.observer(lambda *values: None),
}


class Everywhere(amanda.Tool):
    """A routine at both points of every op."""

    def __init__(self, routine: Callable[..., Any]) -> None:
        self.routine = routine
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)


def assert_same(value: Any, expected: Any) -> None:
    """Equal to the last bit, sequences value by value."""
    if isinstance(value, list):
        assert isinstance(expected, list)
        for mine, theirs in zip(value, expected, strict=True):
            assert_same(mine, theirs)
        return
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    assert (
        value.tolist() == expected.tolist()
        if value.dtype.kind == "O"
        else value.tobytes() == expected.tobytes()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_tool_that_changes_nothing_leaves_every_bit(name: str, kind: str) -> None:
    model, feed = MODELS[name]()
    session = session_of(model)
    bare = session.run(None, feed)
    with amanda.apply(Everywhere(KINDS[kind])) as scope:
        for _ in range(2):
            assert_same(session.run(None, feed), bare)
    assert scope.report == []
    assert_same(session.run(None, feed), bare)


def test_float16_differs_by_its_rounding_alone() -> None:
    half = WEIGHT.astype(np.float16)
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r w", "y")]
    model, feed = graph(nodes, "y", {"x": X.astype(np.float16)}, w=half)
    session = session_of(model)
    (bare,) = session.run(None, feed)
    with amanda.apply(Everywhere(KINDS["gives anew"])) as scope:
        (output,) = session.run(None, feed)
    assert scope.report == []
    np.testing.assert_allclose(output, bare, rtol=0, atol=4 * np.finfo(np.float16).eps * np.abs(bare).max())


def test_a_routine_may_change_a_sequence_and_what_reads_it_sees_that() -> None:
    model, feed = MODELS["sequences"]()
    session = session_of(model)

    class Doubling(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "SequenceInsert":
                context.insert_after_op(lambda values: [value * 2 for value in values])

    with amanda.apply(Doubling()):
        joined, second, values = session.run(None, feed)
    np.testing.assert_array_equal(joined, np.concatenate([X * 2] * 3))
    np.testing.assert_array_equal(second, X * 2)
    assert_same(values, [X * 2] * 3)


def test_a_value_of_a_sequence_cannot_be_written() -> None:
    model, feed = MODELS["sequences"]()

    class Writing(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op().type == "SequenceAt":
                context.insert_before_op(self.write, inputs=[0])

        def write(self, values: Any) -> None:
            values[0][...] = 0

    with amanda.apply(Writing()), pytest.raises(MutationError):
        session_of(model).run(None, feed)
