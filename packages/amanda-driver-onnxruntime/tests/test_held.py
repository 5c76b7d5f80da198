"""What traceable routines read of their tools: sessions follow its changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_models import model_of, node, session_of

import amanda

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
WEIGHT = np.array([2.0, -1.0, 0.5], np.float32)
SCALE: Any = 1.0


class Scaling(amanda.Tool):
    """Scales what Tanh gives, or what Mul reads of its weight, by what it holds in several ways."""

    def __init__(self, held: Any, of_weights: bool = False) -> None:
        self.held = held
        self.of_weights = of_weights
        self.set_up()
        self.add_inst_for_op(self.analyse)

    def set_up(self) -> None:
        """Nothing more is needed."""

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Tanh" and not self.of_weights:
            context.insert_after_op(self.routine())
        if context.get_op().type == "Mul" and self.of_weights:
            context.insert_before_op(self.routine(), inputs=[1])

    def routine(self) -> Callable[..., Any]:
        return self.scaled

    @amanda.traceable
    def scaled(self, value: Any) -> Any:
        return value * self.held

    def hold(self, held: Any) -> None:
        self.held = held


class InContainer(Scaling):
    def set_up(self) -> None:
        self.all = {"one": [self.held]}

    @amanda.traceable
    def scaled(self, value: Any) -> Any:
        return value * self.all["one"][0]

    def hold(self, held: Any) -> None:
        self.all["one"][0] = held


class InObject(Scaling):
    def set_up(self) -> None:
        self.options = SimpleNamespace(scale=self.held)

    @property
    def scale(self) -> Any:
        return self.options.scale

    @amanda.traceable
    def scaled(self, value: Any) -> Any:
        return value * self.scale

    def hold(self, held: Any) -> None:
        self.options.scale = held


class InClosure(Scaling):
    def routine(self) -> Callable[..., Any]:
        held = self.held

        def hold(value: Any) -> None:
            nonlocal held
            held = value

        self.hold = hold  # type: ignore[method-assign]
        return amanda.traceable(lambda value: value * held)


class InGlobal(Scaling):
    def set_up(self) -> None:
        self.hold(self.held)

    @amanda.traceable
    def scaled(self, value: Any) -> Any:
        return value * SCALE

    def hold(self, held: Any) -> None:
        globals()["SCALE"] = held


def session() -> Any:
    """tanh(x) * weight."""
    nodes = [node("Tanh", "x", "t"), node("Mul", "t weight", "y")]
    return session_of(model_of(nodes, {"x": ["N", 3]}, ["y"], {"weight": WEIGHT}))


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


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sessions that are made."""
    sessions: list[Any] = []
    create = onnxruntime.InferenceSession.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        sessions.append(self)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", recording)
    return sessions


@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize("values", [(2.0, 5.0), (np.full(3, 2.0, np.float32), np.full(3, 5.0, np.float32))])
@pytest.mark.parametrize("kind", [Scaling, InContainer, InObject, InClosure, InGlobal])
def test_what_is_held_instead_is_read(
    kind: type[Scaling], values: tuple[Any, Any], of_weights: bool, made: list[Any]
) -> None:
    user, tool = session(), kind(values[0], of_weights)
    bare = run(user)
    with amanda.apply(tool) as scope:
        for held in (values[0], values[1], values[0]):
            tool.hold(held)
            for _ in range(2):
                close(run(user), bare * held)
    tool.hold(values[1])
    np.testing.assert_array_equal(run(user), bare)
    with amanda.apply(tool):
        close(run(user), bare * values[1])
    assert len(made) == 3
    assert scope.report == []


def test_bodies_of_control_flow_read_what_is_set_anew_however_often() -> None:
    user, tool = looping(), Scaling(1.0)
    with amanda.apply(tool) as scope:
        for held in range(10):
            tool.hold(held / 4)
            value = X
            for _ in range(3):
                value = np.tanh(value) * np.float32(held / 4)
            close(run(user), value)
    ((_, reason, _),) = scope.report
    assert reason.startswith("what it reads changes often: held, and each time another copy")


@pytest.mark.parametrize("of_weights", [False, True])
def test_what_changes_often_is_read_by_python(of_weights: bool, made: list[Any]) -> None:
    user, tool = session(), Scaling(0.0, of_weights)
    bare, counts = run(user), []
    with amanda.apply(tool) as scope:
        for i in range(12):
            tool.hold(i / 4)
            close(run(user), bare * np.float32(i / 4))
            counts.append(len(made))
    assert counts[7] == 9
    assert counts[8:] == [counts[8]] * 4
    ((_, reason, _),) = scope.report
    assert reason == "what it reads changes often: held, so it runs as Python"


class Switching(Scaling):
    @amanda.traceable
    def scaled(self, value: Any) -> Any:
        return value * 2 if self.held else None


def test_a_routine_that_changes_nothing_for_now_is_asked_again() -> None:
    user, tool = session(), Switching(False)
    bare = run(user)
    with amanda.apply(tool):
        for held in (False, True, False, True):
            tool.hold(held)
            close(run(user), bare * (2 if held else 1))


class Listing(Scaling):
    def set_up(self) -> None:
        self.scales: list[Any] = []

    @amanda.traceable
    def scaled(self, value: Any) -> Any:
        self.scales.append(self.held)
        return value * self.scales[-1]


def test_what_tracing_changes_is_no_reason_to_trace_again_and_is_reported() -> None:
    user, tool = session(), Listing(2.0)
    bare = run(user)
    with amanda.apply(tool) as scope:
        for _ in range(3):
            close(run(user), bare * 2)
    assert len(tool.scales) == 1
    ((what, reason, _),) = scope.report
    assert what == "traceable routines of Listing"
    assert reason == "they set scales; a graph does not"


def test_with_the_cache_off_every_run_reads() -> None:
    user, tool = session(), Scaling(2.0)
    bare = run(user)
    with amanda.apply(tool), amanda.cache_disabled():
        for held in (2.0, 5.0):
            tool.hold(held)
            close(run(user), bare * np.float32(held))
