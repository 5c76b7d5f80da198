"""Sessions in a scope: analysis, routines between nodes, and what is left afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx_models import FIRST, SECOND, Array, random, session_of, tool, two_layers

import amanda

X = random(4, 16, seed=3)


@pytest.fixture
def session() -> Any:
    return session_of(two_layers())


class Everywhere(amanda.Tool):
    """Gives back every value that it is given, or looks at it."""

    def __init__(self, observing: bool = False) -> None:
        self.ran: list[str] = []
        self.see = amanda.observer(self.same_as) if observing else self.same_as
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.see, name="before " + context.get_op().name)
        context.insert_after_op(self.see, name="after " + context.get_op().name)

    @property
    def same_as(self) -> Any:
        def same(*values: Any, name: str) -> Any:
            self.ran.append(name)
            return values

        return same


ORDER = [
    f"{when} {name}"
    for name in ("/first/MatMul", "/act/Relu", "/second/MatMul")
    for when in ("before", "after")
]


@pytest.mark.parametrize("observing", [False, True])
def test_routines_run_in_order_and_leave_every_bit(session: Any, observing: bool) -> None:
    (bare,) = session.run(None, {"x": X})
    tool = Everywhere(observing)
    with amanda.apply(tool) as scope:
        for _ in range(2):
            (result,) = session.run(None, {"x": X})
            np.testing.assert_array_equal(result, bare)
    assert sorted(tool.ran) == sorted(ORDER * 2)
    assert observing or tool.ran == ORDER * 2
    assert scope.report == []
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], bare)
    assert len(tool.ran) == 2 * len(ORDER)


def test_a_routine_changes_a_weight_and_an_activation(session: Any) -> None:
    masked = tool(lambda context: context.insert_before_op(lambda w: w * (abs(w) > 1), inputs=[1]), "MatMul")
    shifted = tool(lambda context: context.insert_after_op(lambda y: y + 1), "Relu")
    with amanda.apply(masked, shifted):
        (result,) = session.run(["y"], {"x": X})
    expected = (np.maximum(X @ (FIRST * (abs(FIRST) > 1)), 0) + 1) @ (SECOND * (abs(SECOND) > 1))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_ort_values_go_in_and_out(session: Any) -> None:
    (bare,) = session.run(None, {"x": X})
    with amanda.apply(Everywhere()):
        (result,) = session.run_with_ort_values(None, {"x": onnxruntime.OrtValue.ortvalue_from_numpy(X)})
    assert isinstance(result, onnxruntime.OrtValue)
    np.testing.assert_array_equal(result.numpy(), bare)


def test_contexts_tell_names_values_and_scope(session: Any) -> None:
    facts: list[Any] = []

    def look(context: amanda.OpContext) -> None:
        x, weight = context.get_inputs()
        facts.append(
            (context.get_scope(), context.get_op().domain, context.get_input_names(), x.name, weight.shape)
        )
        np.testing.assert_array_equal(
            context.get_value(1), FIRST if context.get_scope() == "first" else SECOND
        )

    with amanda.apply(tool(look, "MatMul")):
        session.run(None, {"x": X})
    assert facts == [("first", "", ("A", "B"), "x", (16, 16)), ("second", "", ("A", "B"), "r", (16, 16))]


def test_wrong_calls_fail_as_they_do_without_a_scope(session: Any) -> None:
    calls: list[tuple[Any, dict[str, Array]]] = [
        (None, {}), (None, {"z": X}), (["z"], {"x": X}), (None, {"x": X.astype(np.float64)}),
        (None, {"x": X[:, :3]}),
    ]  # fmt: skip
    for names, feed in calls:
        with pytest.raises(Exception) as bare:  # noqa: PT011
            session.run(names, feed)
        with amanda.apply(Everywhere()), pytest.raises(type(bare.value)) as instrumented:
            session.run(names, feed)
        assert str(instrumented.value) == str(bare.value)


def test_a_patch_that_the_program_makes_in_a_scope_stays(session: Any, request: Any) -> None:
    request.addfinalizer(
        lambda: delattr(onnxruntime.InferenceSession, "run")
    )  # the session has it of its base
    (bare,) = session.run(None, {"x": X})
    calls = []
    with amanda.apply(Everywhere()):
        original = onnxruntime.InferenceSession.run

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return original(*args, **kwargs)

        onnxruntime.InferenceSession.run = wrapper
        session.run(None, {"x": X})
    assert onnxruntime.InferenceSession.run is wrapper
    later = Everywhere()
    with amanda.apply(later):
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], bare)
    assert onnxruntime.InferenceSession.run is wrapper
    assert later.ran == ORDER
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], bare)
    assert len(later.ran) == len(ORDER)
    assert len(calls) == 3
