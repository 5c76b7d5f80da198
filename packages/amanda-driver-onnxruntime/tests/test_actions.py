"""Replacements, traceable routines, observers, order and scopes, on sessions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_models import FIRST, SECOND, model_of, node, random, session_of, tool, two_layers
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.errors import MutationError, RoutineError

X = random(4, 16, seed=3)
HIDDEN = X @ FIRST


@pytest.fixture
def session() -> Any:
    return session_of(two_layers())


def result(session: Any, *tools: amanda.Tool) -> Any:
    with amanda.apply(*tools):
        return session.run(None, {"x": X})[0]


def close(values: Any, expected: Any) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


def test_values_without_axes_are_changed() -> None:
    nodes = [node("ReduceSum", "x", "s", keepdims=0), node("Neg", "s", "n"), node("Clip", "x n", "y")]
    session = session_of(model_of(nodes, {"x": ["N", 16]}, ["s", "y"]))
    double = tool(lambda c: c.insert_after_op(lambda value: value * 2), "ReduceSum", "Neg")
    with amanda.apply(double):
        total, clipped = session.run(None, {"x": X})
    assert isinstance(total, np.ndarray)
    close(total, 2 * X.sum())
    close(clipped, np.maximum(X, -4 * X.sum()))


def test_the_identity_removes_an_op(session: Any) -> None:
    close(result(session, tool(lambda c: c.replace_op(lambda x: x), "Relu")), HIDDEN @ SECOND)


def test_a_replacement_is_given_what_computes_the_op(session: Any) -> None:
    def routine(x: Any, original: Any) -> Any:
        return original(-x)

    close(result(session, tool(lambda c: c.replace_op(routine), "Relu")), np.maximum(-HIDDEN, 0) @ SECOND)


def test_routines_around_a_replacement_still_run(session: Any) -> None:
    around = tool(
        lambda c: (
            c.insert_before_op(lambda x: x + 1),
            c.replace_op(lambda x: x * 2),
            c.insert_after_op(lambda y: y - 3),
        ),
        "Relu",
    )
    close(result(session, around), ((HIDDEN + 1) * 2 - 3) @ SECOND)


def test_a_replacement_that_gives_too_much_is_an_error(session: Any) -> None:
    with pytest.raises(RoutineError, match="returned 2 outputs; Relu gives 1"):
        result(session, tool(lambda c: c.replace_op(lambda x: (x, x)), "Relu"))


def test_a_replacement_that_gives_nothing_is_an_error_that_names_the_node(session: Any) -> None:
    with pytest.raises(RoutineError, match="returned None where Relu gives a tensor") as caught:
        result(session, tool(lambda c: c.replace_op(lambda x: None), "Relu"))
    assert ", node /act/Relu)" in caught.value.__notes__[0]


def test_a_replacement_that_returns_no_array_is_an_error_that_names_the_node(session: Any) -> None:
    with pytest.raises(ValueError, match="could not convert") as caught:
        result(session, tool(lambda c: c.replace_op(lambda x: "text"), "Relu"))
    assert ", node /act/Relu)" in caught.value.__notes__[0]


def test_an_op_computes_other_inputs_in_a_routine(session: Any) -> None:
    computations: list[Any] = []
    result(session, tool(lambda c: computations.append(c.get_computation()), "MatMul"))
    close(computations[0]([X[:2], FIRST]), HIDDEN[:2])


def test_a_differentiable_routine_may_change_shapes(session: Any) -> None:
    twice = amanda.differentiable(lambda x: np.concatenate([x, x]))
    close(
        result(session, tool(lambda c: c.insert_before_op(twice), "Relu")),
        np.concatenate([np.maximum(HIDDEN, 0) @ SECOND] * 2),
    )


def test_writing_into_a_value_is_an_error_that_says_what_to_do(session: Any) -> None:
    def write(x: Any) -> None:
        x[...] = 0

    with pytest.raises(MutationError, match="return a new value instead"):
        result(session, tool(lambda c: c.insert_before_op(write), "Relu"))


def test_a_traceable_routine_runs_in_the_one_session(session: Any, created_sessions: list[Any]) -> None:
    calls: list[Any] = []

    @amanda.traceable
    def quantise(x: Any) -> Any:
        calls.append(type(x).__name__)
        return np.rint(x * 4) / 4

    inserting = tool(lambda c: c.insert_after_op(quantise), "Relu")
    with amanda.apply(inserting) as scope:
        first, second = (session.run(None, {"x": X})[0] for _ in range(2))
    assert calls == ["TracedArray"]
    assert len(created_sessions) == 1
    assert [entry.reason for entry in scope.report] == ["they set calls; a graph does not"]
    np.testing.assert_array_equal(first, second)
    close(first, (np.rint(np.maximum(HIDDEN, 0) * 4) / 4) @ SECOND)


def test_a_traceable_routine_that_cannot_be_traced_runs_as_python_and_that_is_said(session: Any) -> None:
    odd = amanda.traceable(lambda x: x if x.sum() > 0 else -x)
    with amanda.apply(tool(lambda c: c.insert_after_op(odd), "Relu")) as scope:
        (output,) = session.run(None, {"x": X})
    close(output, np.maximum(HIDDEN, 0) @ SECOND)
    ((subject, reason, _),) = scope.report
    assert subject.startswith("traceable insert_after_op(")
    assert "so it runs as Python" in reason


def test_observers_of_every_op_need_one_session_and_a_changing_routine_two(
    session: Any, created_sessions: list[Any]
) -> None:
    looking = tool(lambda c: c.insert_after_op(amanda.observer(lambda *values: None)))
    result(session, looking)
    assert len(created_sessions) == 1
    result(session, tool(lambda c: c.insert_after_op(lambda y: y * 2), "Relu"))
    assert len(created_sessions) == 3


def test_routines_on_weights_need_no_cut(session: Any, created_sessions: list[Any]) -> None:
    close(
        result(session, tool(lambda c: c.insert_before_op(lambda w: w * 2, inputs=[1]), "MatMul")),
        4 * np.maximum(HIDDEN, 0) @ SECOND,
    )
    assert len(created_sessions) == 1


def test_nothing_is_made_where_nothing_is_inserted(session: Any, created_sessions: list[Any]) -> None:
    bare = session.run(None, {"x": X})[0]
    np.testing.assert_array_equal(result(session, tool(lambda c: None)), bare)
    assert created_sessions == []


def test_a_copy_is_made_once_for_a_tool_and_at_each_run_without_the_cache(
    session: Any, created_sessions: list[Any]
) -> None:
    analysed: list[str] = []
    unchanging = tool(lambda c: (analysed.append(c.get_op().name), c.insert_after_op(lambda y: y)), "Relu")
    for _ in range(3):
        result(session, unchanging)
    assert (len(analysed), len(created_sessions)) == (1, 2)
    with amanda.cache_disabled():
        for _ in range(2):
            result(session, unchanging)
    assert (len(analysed), len(created_sessions)) == (3, 6)


def test_copies_share_the_weights_and_die_with_the_session(created_sessions: list[Any]) -> None:
    import gc
    import weakref

    session = session_of(two_layers())
    unchanging = tool(lambda c: c.insert_after_op(lambda y: y), "Relu")
    result(session, unchanging)
    copies = [weakref.ref(part) for part in created_sessions[1:]]
    assert len(copies) == 2
    created_sessions.clear()
    del session
    gc.collect()
    assert [copy() for copy in copies] == [None, None]


def test_all_copies_of_a_model_use_one_array_for_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"first": random(32, 32), "second": random(32, 32)}
    nodes = [
        node("MatMul", "x first", "h", "one"), node("Relu", "h", "r"), node("MatMul", "r second", "y", "two"),
    ]  # fmt: skip
    session = session_of(model_of(nodes, {"x": ["N", 32]}, ["y"], weights))
    addresses: list[int] = []
    create = onnxruntime.OrtValue.ortvalue_from_numpy

    def recording(array: Any, *args: Any) -> Any:
        value = create(array, *args)
        addresses.append(value.data_ptr())
        return value

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", recording)
    for _ in range(3):
        with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: y), "Relu")):
            session.run(None, {"x": random(2, 32)})
    assert len(addresses) >= 6
    assert len(set(addresses)) == 2


def test_tools_run_in_the_order_of_apply_and_inner_scopes_last(session: Any) -> None:
    order: list[str] = []

    def marking(name: str) -> amanda.Tool:
        return tool(lambda c: c.insert_before_op(lambda *values: order.append(name)), "Relu")

    with amanda.apply(marking("a"), marking("b")), amanda.apply(marking("c")):
        session.run(None, {"x": X})
    assert order == ["a", "b", "c"]


def test_run_is_handed_from_routine_to_routine_of_an_execution(session: Any) -> None:
    sums: list[Any] = []

    def before(x: Any, run: dict[str, Any]) -> None:
        run["x"] = x.sum()

    def after(y: Any, run: dict[str, Any]) -> None:
        sums.append(run["x"])

    result(session, tool(lambda c: (c.insert_before_op(before), c.insert_after_op(after)), "Relu"))
    assert sums == [pytest.approx(HIDDEN.sum(), rel=1e-4)]


def test_threads_run_a_session_side_by_side(session: Any) -> None:
    results: dict[int, Any] = {}
    scaled = tool(lambda c: c.insert_after_op(lambda y: y * 2), "Relu")
    with amanda.apply(scaled):

        def work(number: int) -> None:
            results[number] = session.run(None, {"x": X * number})[0]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, value in results.items():
        close(value / number, 2 * np.maximum(HIDDEN, 0) @ SECOND)


def test_runs_in_an_executor_are_in_the_scope_that_submits_them(session: Any) -> None:
    bare = session.run(None, {"x": X})[0]
    with ThreadPoolExecutor(2) as pool:
        with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: y * 2), "Relu")) as scope:
            inside = [pool.submit(session.run, None, {"x": X}) for _ in range(4)]
            for future in inside:
                close(future.result()[0], 2 * bare)
        outside = pool.submit(session.run, None, {"x": X}).result()[0]
    np.testing.assert_array_equal(outside, bare)
    assert scope.report == []


def test_an_asynchronous_run_is_instrumented_in_its_scope(session: Any) -> None:
    done = threading.Event()
    callbacks: list[Any] = []

    def callback(results: Any, user_data: Any, error: str) -> None:
        callbacks.append((results, user_data, error))
        done.set()

    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: y * 2), "Relu")):
        session.run_async(None, {"x": X}, callback, "mine")
        assert done.wait(60)
    ((results, user_data, error),) = callbacks
    assert (user_data, error) == ("mine", "")
    close(results[0], 2 * np.maximum(HIDDEN, 0) @ SECOND)


def test_external_data_are_read_where_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(two_layers(), path, save_as_external_data=True, size_threshold=0, location="weights.bin")
    session = onnxruntime.InferenceSession(path, session_options())
    bare = session.run(None, {"x": X})[0]
    unchanging = tool(lambda c: c.insert_before_op(lambda *values: values))
    np.testing.assert_array_equal(result(session, unchanging), bare)
    masked = tool(lambda c: c.insert_before_op(lambda w: w * 0, inputs=[1]), "MatMul")
    assert not result(session, masked).any()


def test_a_model_that_is_not_there_any_more_is_left_alone_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(two_layers(), path)
    session = onnxruntime.InferenceSession(str(path))
    path.unlink()
    bare = session.run(None, {"x": X})[0]
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: y * 2))) as scope:
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], bare)
    assert "is not there any more" in str(scope.report)


def test_bound_runs_are_left_alone_and_that_is_said(session: Any) -> None:
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("y")
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: y * 2))) as scope:
        session.run_with_iobinding(binding)
    close(binding.copy_outputs_to_cpu()[0], np.maximum(HIDDEN, 0) @ SECOND)
    assert "call run or run_with_ort_values" in str(scope.report)


def test_the_options_of_the_session_hold_for_its_copies(created_sessions: list[Any], tmp_path: Path) -> None:
    options = session_options()
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = onnxruntime.InferenceSession(two_layers().SerializeToString(), options)
    (tmp_path / "optimized.onnx").unlink()
    result(session, tool(lambda c: c.insert_after_op(lambda y: y), "Relu"))
    assert len(created_sessions) == 3
    for copy in created_sessions[1:]:
        assert copy.get_session_options().graph_optimization_level.name == "ORT_DISABLE_ALL"
        assert copy.get_session_options().intra_op_num_threads == 1
    assert list(tmp_path.iterdir()) == []
    assert options.optimized_model_filepath == str(tmp_path / "optimized.onnx")


def test_with_fusion_a_run_is_within_rounding() -> None:
    session = session_of(two_layers(), plain=False)
    bare = session.run(None, {"x": X})[0]
    unchanging = tool(lambda c: c.insert_after_op(lambda *values: values))
    np.testing.assert_allclose(result(session, unchanging), bare, rtol=1e-5, atol=1e-5)


def looping() -> onnx.ModelProto:
    """x doubled n times, with a weight that is added in each round."""
    body = onnx.helper.make_graph(
        [
            node("Add", "v v", "twice", "double"),
            node("Add", "twice shift", "out", "shifted"),
            node("Identity", "go", "again", "on"),
        ],
        "body",
        [onnx.helper.make_tensor_value_info(name, kind, shape)
         for name, kind, shape in (("i", 7, []), ("go", 9, []), ("v", 1, [3]))],
        [onnx.helper.make_tensor_value_info("again", 9, []),
         onnx.helper.make_tensor_value_info("out", 1, [3])],
    )  # fmt: skip
    return model_of(
        [node("Neg", "x", "start"), node("Loop", "n  start", "y", "loop", body=body)],
        {"x": [3], "n": []}, ["y"], {"shift": np.ones(3, np.float32)}, types={"n": onnx.TensorProto.INT64},
    )  # fmt: skip


FEED = {"x": np.array([1, 2, 3], np.float32), "n": np.array(3)}


def test_ops_of_bodies_are_analysed_and_their_routines_run() -> None:
    session, names, calls = session_of(looping()), [], []
    bare = session.run(None, FEED)[0]
    counting = tool(lambda c: (names.append(c.get_op().name), c.insert_after_op(lambda *_: calls.append(1))))
    with amanda.apply(counting) as scope:
        np.testing.assert_array_equal(session.run(None, FEED)[0], bare)
    assert names == ["/Neg", "loop", "loop/body/double", "loop/body/shifted", "loop/body/on"]
    assert len(calls) == 2 + 3 * FEED["n"]
    assert scope.report == []


def test_traceable_routines_run_in_every_round_of_a_loop() -> None:
    session = session_of(looping())
    halved = amanda.traceable(lambda v: v / 2)
    inserting = tool(
        lambda c: c.insert_before_op(halved, inputs=[1]) if c.get_op().name.endswith("shifted") else None,
        "Add",
    )
    with amanda.apply(inserting) as scope:
        (output,) = session.run(None, FEED)
    expected = -FEED["x"]
    for _ in range(3):
        expected = expected * 2 + 0.5
    np.testing.assert_array_equal(output, expected)
    assert scope.report == []


def test_a_changed_value_is_what_a_body_reads_from_outside() -> None:
    then = onnx.helper.make_graph([node("Relu", "h", "t")], "then", [], [onnx.ValueInfoProto(name="t")])
    else_branch = onnx.helper.make_graph(
        [node("Neg", "h", "e")], "other", [], [onnx.ValueInfoProto(name="e")]
    )
    branching = model_of(
        [node("Neg", "x", "h", "first"), node("If", "go", "y", then_branch=then, else_branch=else_branch)],
        {"x": [3], "go": []}, ["y"], types={"go": onnx.TensorProto.BOOL},
    )  # fmt: skip
    session = session_of(branching)
    added = tool(lambda c: c.insert_after_op(lambda y: y + 10) if c.get_op().name == "first" else None)
    x = np.array([1, 2, 30], np.float32)
    for go, expected in ((True, np.maximum(10 - x, 0)), (False, x - 10)):
        with amanda.apply(added):
            np.testing.assert_array_equal(session.run(None, {"x": x, "go": np.array(go)})[0], expected)


def branches() -> onnx.ModelProto:
    """x by one weight or another, which both branches turn and name alike; and a constant."""

    def branch(weight: str, number: float) -> Any:
        value = onnx.numpy_helper.from_array(np.float32(number))
        nodes = [
            node("Transpose", weight, "t", "turn", perm=[1, 0]),
            node("MatMul", "x t", "p", "product"),
            onnx.helper.make_node("Constant", [], ["c"], "number", value=value),
        ]
        return onnx.helper.make_graph(nodes, weight, [], [onnx.ValueInfoProto(name=name) for name in "pc"])

    return model_of(
        [node("If", "go", "y z", then_branch=branch("first", 1.0), else_branch=branch("second", 2.0))],
        {"x": [4, 16], "go": []}, ["y", "z"], {"first": FIRST, "second": SECOND},
        types={"go": onnx.TensorProto.BOOL},
    )  # fmt: skip


@pytest.mark.parametrize("go", [True, False])
def test_names_that_branches_share_stay_apart(go: bool) -> None:
    session, feed = session_of(branches()), {"x": X, "go": np.array(go)}
    doubled = amanda.traceable(lambda value: value * 2)
    changing = tool(lambda c: c.insert_after_op(doubled), "Transpose", "Constant")
    with amanda.apply(changing) as scope:
        product, number = session.run(None, feed)
    assert scope.report == []
    close(product, X @ (FIRST if go else SECOND).T * 2)
    assert number == (2 if go else 4)
    inside = tool(lambda c: c.insert_before_op(amanda.traceable(lambda w: w - 1), inputs=[1]), "MatMul")
    with amanda.apply(inside):
        close(session.run(None, feed)[0], X @ ((FIRST if go else SECOND).T - 1))


def test_values_of_ops_that_onnx_does_not_know_have_the_types_that_the_runtime_gives_them() -> None:
    gelu = onnx.helper.make_node("FastGelu", ["x"], ["g"], "gelu", domain="com.microsoft")
    graph = model_of([node("Neg", "x", "y")], {"x": ["N", 4]}, ["y"])
    graph.graph.node.insert(0, gelu)
    graph.graph.node[1].input[0] = "g"
    graph.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    session, x, types = session_of(graph), random(2, 4), []
    bare = session.run(None, {"x": x})[0]
    doubled = amanda.traceable(lambda value: value * 2)
    look = tool(lambda c: (types.append(c.get_inputs()[0].dtype), c.insert_before_op(doubled)), "Neg")
    with amanda.apply(look) as scope:
        close(session.run(None, {"x": x})[0], bare * 2)
    assert types == [np.float32]
    assert scope.report == []


def test_a_list_of_tensors_is_one_input_and_one_output() -> None:
    model = model_of(
        [node("Split", "x", "a b", num_outputs=2, axis=1), node("Concat", "b a", "y", axis=1)],
        {"x": [2, 4]}, ["y"],
    )  # fmt: skip
    x, shapes = random(2, 4), []

    def swapped(values: Any) -> Any:
        shapes.append([value.shape for value in values])
        return values[::-1]

    with amanda.apply(tool(lambda c: c.insert_before_op(swapped, inputs=[0]), "Concat")):
        np.testing.assert_array_equal(session_of(model).run(None, {"x": x})[0], x)
    with amanda.apply(tool(lambda c: c.insert_after_op(swapped), "Split")):
        np.testing.assert_array_equal(session_of(model).run(None, {"x": x})[0], x)
    assert shapes == [[(2, 2), (2, 2)]] * 2


def test_bfloat16_sequences_and_text_pass_between_sessions() -> None:
    model = model_of(
        [
            node("Cast", "x", "b", "narrow", to=onnx.TensorProto.BFLOAT16),
            node("Cast", "b", "f", "wide", to=onnx.TensorProto.FLOAT),
            node("SequenceConstruct", "f x", "s", "sequence"),
            node("SequenceAt", "s i", "y", "at"),
            node("Identity", "t", "u", "text"),
        ],
        {"x": [3], "t": [2]}, ["y", "u"], {"i": np.array(0)}, types={"t": onnx.TensorProto.STRING},
    )  # fmt: skip
    session = session_of(model)
    feed = {"x": np.array([1.001, 2, 3], np.float32), "t": np.array(["a", "b"], object)}
    bare = session.run(None, feed)
    dtypes: dict[str, str] = {}

    def look(*values: Any, name: str) -> Any:
        dtypes[name] = str(getattr(values[0], "dtype", type(values[0]).__name__))
        return values

    with amanda.apply(tool(lambda c: c.insert_after_op(look, name=c.get_op().name))) as scope:
        instrumented = session.run(None, feed)
    for value, expected in zip(instrumented, bare, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert dtypes["narrow"] == "bfloat16"
    assert dtypes["text"] == "object"
    assert scope.report == []


@pytest.mark.parametrize("dtype", ["U1", "S1", "V1", object, np.int64, np.float32])
def test_an_input_that_is_no_text_reaches_the_session_and_no_routine(dtype: Any) -> None:
    types = {"t": onnx.TensorProto.STRING, "u": onnx.TensorProto.STRING}
    session = session_of(model_of([node("Identity", "t", "u")], {"t": [2]}, ["u"], types=types))
    feed = {"t": np.array([b"1", b"2"]).astype(dtype)}
    seen: list[Any] = []
    is_text = np.dtype(dtype).kind in "OUSV"
    error = nullcontext() if is_text else pytest.raises(InvalidArgument, match=r"expected: \(tensor\(string")
    with amanda.apply(tool(lambda c: c.insert_before_op(seen.append))), error:
        session.run(None, feed)
    assert len(seen) == is_text


def test_a_routine_that_changes_a_dictionary_is_told_that_it_cannot() -> None:
    labelled = node("ZipMap", "x", "y", domain="ai.onnx.ml", classlabels_int64s=[1, 2, 3])
    input_info = onnx.helper.make_tensor_value_info("x", 1, [1, 3])
    graph = onnx.helper.make_graph([labelled], "graph", [input_info], [onnx.ValueInfoProto(name="y")])
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ai.onnx.ml", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=9)
    session, feed = session_of(model), {"x": np.zeros((1, 3), np.float32)}
    copying = tool(
        lambda c: c.insert_after_op(lambda values: [dict(probabilities) for probabilities in values])
    )
    with amanda.apply(copying), pytest.raises(RoutineError, match="which holds no tensor"):
        session.run(None, feed)


def test_the_state_of_random_ops_is_said_to_begin_anew() -> None:
    model = model_of(
        [node("RandomNormalLike", "x", "r", "noise"), node("Add", "x r", "y")], {"x": [3]}, ["y"]
    )
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: y), "Add")) as scope:
        session_of(model).run(None, {"x": np.zeros(3, np.float32)})
    assert "the state of noise" in str(scope.report)


def test_inputs_with_defaults_are_given_or_not() -> None:
    model = model_of(
        [node("Mul", "x scale", "y")], {"x": [3], "scale": [1]}, ["y"], {"scale": np.float32([2])}
    )
    session = session_of(model)
    x = np.array([1, 2, 3], np.float32)
    with amanda.apply(tool(lambda c: c.insert_before_op(lambda s: s + 1, inputs=[1]))):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], x * 3)
        np.testing.assert_array_equal(session.run(None, {"x": x, "scale": np.float32([4])})[0], x * 5)


def test_outputs_may_be_values_that_routines_gave_and_inputs() -> None:
    model = model_of([node("Relu", "x", "h"), node("Neg", "h", "y")], {"x": [3]}, ["h", "y"])
    session, x = session_of(model), np.array([-1, 2, 3], np.float32)
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda h: h * 2), "Relu")):
        hidden, negated = session.run(None, {"x": x})
        (alone,) = session.run(["y"], {"x": x})
    np.testing.assert_array_equal(hidden, np.maximum(x, 0) * 2)
    np.testing.assert_array_equal(negated, -hidden)
    np.testing.assert_array_equal(alone, negated)
