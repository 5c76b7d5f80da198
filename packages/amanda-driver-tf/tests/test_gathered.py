"""Observers that take the executions of many ops in one call."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda.action import Executions, Observed


class Seeing(amanda.Tool):
    """Notes what ops read and give, and how often the gathered form was called."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.notes: list[tuple[str, str, list[float]]] = []
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
        self.notes.append((point, kind, [float(tf.reduce_sum(value)) for value in values]))


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
        for observation in executions:
            self.note(
                "end" if "given" in observation.run else "begin",
                observation.kwargs["kind"],
                observation.values,
            )
            observation.run["given"] = True


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
    assert together.notes == one_by_one.notes
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
            self.tensors: list[Any] = []
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            context.insert_before_op(self.see)
            context.insert_after_op(self.see)

        @amanda.observer
        def see(self, *values: Any) -> None:
            self.tensors.extend(values)

    tool = Same()
    with amanda.apply(tool):
        program(ONES)
    by_id = {id(tensor) for tensor in tool.tensors}
    assert len(by_id) < len(tool.tensors)


@amanda.observer
def see(*values: Any, seen: list[Any]) -> None:
    seen.append(len(values))


@amanda.gathered(see)
def see_all(executions: Sequence[Observed]) -> None:
    for observation in executions:
        observation.kwargs["seen"].append((see_all, len(observation.values)))


def test_functions_outside_of_classes_have_gathered_forms_too() -> None:
    seen: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(see, seen=seen))
    with amanda.apply(tool):
        program(ONES)
    assert seen
    assert all(call == (see_all, 1) for call in seen)


class Static(amanda.Tool):
    """Asks for all tensors, and for what depends on keyword arguments alone."""

    def __init__(self) -> None:
        super().__init__()
        self.preparations = 0
        self.kinds: list[list[str]] = []
        self.sums: list[list[float]] = []
        self.add_inst_for_op(lambda context: context.insert_after_op(self.see, kind=context.get_op_type()))

    @amanda.observer
    def see(self, *values: Any, kind: str) -> None:
        raise AssertionError("the gathered form takes its place")

    @amanda.gathered(see)
    def see_all(self, executions: Executions) -> None:
        self.kinds.append(executions.prepared(self.kinds_of))
        self.sums.append(sorted(float(tf.reduce_sum(tensor)) for tensor in executions.tensors))
        assert executions.values() == [observation.values for observation in executions]
        assert [observation.values for observation in executions[1:]] == [
            executions[i].values for i in range(1, len(executions))
        ]

    def kinds_of(self, executions: Sequence[Observed]) -> list[str]:
        self.preparations += 1
        return [observation.kwargs["kind"] for observation in executions]


def test_a_gathered_form_is_given_all_tensors_and_prepares_once_what_does_not_change() -> None:
    tool, one_by_one = Static(), Seeing()
    for each in (tool, one_by_one):
        with amanda.apply(each):
            program(ONES)
            program(TWOS)
    ends = [(kind, sums) for point, kind, sums in one_by_one.notes if point == "end"]
    assert tool.preparations == 1
    assert tool.kinds[0] + tool.kinds[1] == [kind for kind, _ in ends]
    assert sorted(tool.sums[0] + tool.sums[1]) == sorted(total for _, sums in ends for total in sums)


def test_threads_of_tensorflow_keep_what_is_local_to_them() -> None:
    threads, created = set(), []

    class Local(threading.local):
        def __init__(self) -> None:
            created.append(threading.get_ident())

    local = Local()
    created.clear()

    class Plain(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(lambda context: context.insert_after_op(self.see))

        def see(self, *values: Any) -> None:
            threads.add(threading.get_ident())
            local.created = True

    with amanda.apply(Plain()):
        for _ in range(10):
            program(ONES)
    assert len(created) <= len(threads) < 30, "each thread's is made once, not at each of the 50 calls"
