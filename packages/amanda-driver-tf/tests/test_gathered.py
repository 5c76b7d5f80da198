"""Observers that take the executions of many ops in one call."""

from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda.action import Observed


class Seeing(amanda.Tool):
    """Notes what ops read and give, and how often the gathered form was called."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.seen: list[tuple[str, str, list[float]]] = []
        self.calls = 0
        self.fails_at = fails_at
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        kind = str(context.get_op_type())
        context.insert_before_op(self.begin, kind=kind)
        context.insert_after_op(self.end, kind=kind)

    @amanda.observer
    def begin(self, *values: Any, kind: str, run: dict[str, Any]) -> None:
        run["given"] = len(values)
        self.note("begin", kind, values)

    @amanda.observer
    def end(self, *values: Any, kind: str) -> None:
        self.note("end", kind, values)

    def note(self, point: str, kind: str, values: Sequence[Any]) -> None:
        if kind == self.fails_at:
            raise ZeroDivisionError(kind)
        self.seen.append((point, kind, [float(tf.reduce_sum(one)) for one in values]))


class Gathering(Seeing):
    """The same with a gathered form."""

    @amanda.observer
    def begin(self, *values: Any, kind: str, run: dict[str, Any]) -> None:
        raise AssertionError("the gathered form takes its place")

    @amanda.observer
    def end(self, *values: Any, kind: str) -> None:
        raise AssertionError("the gathered form takes its place")

    @amanda.gathered(begin, end)
    def both(self, executions: Sequence[Observed]) -> None:
        self.calls += 1
        for one in executions:
            self.note("end" if "given" in one.run else "begin", one.kwargs["kind"], one.values)
            one.run["given"] = True


ONES, TWOS = tf.ones([3]), tf.fill([3], 2.0)


@tf.function  # type: ignore[untyped-decorator]
def program(x: tf.Tensor) -> Any:
    y = tf.tanh(x) * x
    return tf.reduce_sum(tf.exp(y))


def test_a_gathered_form_sees_what_its_observers_would_have_seen() -> None:
    one_by_one, together = Seeing(), Gathering()
    for tool in (one_by_one, together):
        with amanda.apply(tool):
            program(ONES)
            program(TWOS)
    assert together.seen == one_by_one.seen
    assert together.calls == 2


def test_an_exception_names_the_op_that_the_iteration_has_reached() -> None:
    for tool in (Seeing("Exp"), Gathering("Exp")):
        with pytest.raises(ZeroDivisionError, match="Exp") as raised, amanda.apply(tool):
            program(ONES)
        (note,) = vars(raised.value)["__notes__"]
        assert "of Exp (op" in note
        program(ONES)


def test_eager_ops_call_the_observers_themselves() -> None:
    tool = Gathering()
    with pytest.raises(AssertionError, match="takes its place"), amanda.apply(tool):
        tf.tanh(ONES)
    assert tool.calls == 0


def test_a_tensor_that_several_observe_enters_the_node_once() -> None:
    class Same(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[Any] = []
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            context.insert_before_op(self.see)
            context.insert_after_op(self.see)

        @amanda.observer
        def see(self, *values: Any) -> None:
            self.given.extend(values)

    tool = Same()
    with amanda.apply(tool):
        program(ONES)
    by_id = {id(one) for one in tool.given}
    assert len(by_id) < len(tool.given)


@amanda.observer
def see(*values: Any, seen: list[Any]) -> None:
    seen.append(len(values))


@amanda.gathered(see)
def see_all(executions: Sequence[Observed]) -> None:
    for one in executions:
        one.kwargs["seen"].append((see_all, len(one.values)))


def test_functions_outside_of_classes_have_gathered_forms_too() -> None:
    seen: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(see, seen=seen))
    with amanda.apply(tool):
        program(ONES)
    assert seen
    assert all(one == (see_all, 1) for one in seen)
