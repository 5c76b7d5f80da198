"""What traceable routines read of their tools: sessions follow its changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx_models import model_of, node, session_of

import amanda
from amanda.testing import GraphDriverTests, GraphSample, Scaling, never

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
WEIGHT = np.array([2.0, -1.0, 0.5], np.float32)


class Values(GraphSample):
    """tanh(x) * weight; the values are what Tanh gives."""

    op: ClassVar = "Tanh"

    def __init__(self, created_sessions: list[Any]) -> None:
        nodes = [node("Tanh", "x", "t"), node("Mul", "t weight", "y")]
        self.session = session_of(model_of(nodes, {"x": ["N", 3]}, ["y"], {"weight": WEIGHT}))
        self.created_sessions = created_sessions

    def check_scaled(self, scale: float) -> None:
        close(run(self.session), np.tanh(X) * WEIGHT * np.float32(scale))

    def tensor(self, number: float) -> Any:
        return np.full(3, number, np.float32)

    def copy_count(self) -> int:
        return len(self.created_sessions)


class Weights(Values):
    """The same; the values are the weights that Mul reads."""

    op: ClassVar = "Mul"

    def insert(self, context: amanda.OpContext, routine: Callable[..., Any]) -> None:
        context.insert_before_op(routine, inputs=[1])


class Body(Values):
    """tanh, three times, in the body of a loop."""

    def __init__(self, created_sessions: list[Any]) -> None:
        self.session = looping()
        self.created_sessions = created_sessions

    def check_scaled(self, scale: float) -> None:
        value = X
        for _ in range(3):
            value = np.tanh(value) * np.float32(scale)
        close(run(self.session), value)


def looping() -> Any:
    """tanh, three times."""
    body = onnx.helper.make_graph(
        [node("Tanh", "v", "out"), node("Identity", "go", "again")],
        "body",
        [onnx.helper.make_tensor_value_info(name, kind, shape)
         for name, kind, shape in (("i", 7, []), ("go", 9, []), ("v", 1, [2, 3]))],
        [onnx.helper.make_tensor_value_info("again", 9, []),
         onnx.helper.make_tensor_value_info("out", 1, [2, 3])],
    )  # fmt: skip
    nodes = [node("Identity", "x", "start"), node("Loop", "n  start", "y", "loop", body=body)]
    return session_of(model_of(nodes, {"x": [2, 3]}, ["y"], {"n": np.array(3)}))


def run(session: Any) -> Any:
    return session.run(None, {"x": X})[0]


def close(values: Any, expected: Any) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


class TestGraphDriver(GraphDriverTests):
    gaps: ClassVar = {
        "test_a_tensor_that_no_name_leads_to_is_reported": never(
            "NumPy does not tell where an array is from"
        ),
    }

    @pytest.fixture(params=[Values, Weights])
    def sample(self, request: pytest.FixtureRequest, created_sessions: list[Any]) -> GraphSample:
        sample: GraphSample = request.param(created_sessions)
        return sample


def test_bodies_of_control_flow_read_what_is_set_anew_however_often(created_sessions: list[Any]) -> None:
    sample = Body(created_sessions)
    tool = Scaling(sample, 1.0)
    with amanda.apply(tool) as scope:
        for number in range(10):
            tool.hold(number / 4)
            sample.check_scaled(number / 4)
    ((_, reason, _),) = scope.report
    assert reason.startswith("what it reads changes often: held, so it runs as Python")
