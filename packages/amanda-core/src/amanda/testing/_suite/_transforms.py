"""Meaning 14: under function transforms an op is one op, seen where the program calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Op, Sample
from amanda.testing._tools import Executed, Seen, Unchanged, inserter, notes, tool

NUMBERS = [1.0, -2.0, 3.0]


class TransformTests(
    Rung, title="function transforms", implement=("unwrap_for_analysis", "shapes", "capture_backward_ops")
):
    """Under function transforms an op is one op."""

    @needs("vmap")
    def test_an_op_under_vmap_is_one_op_with_the_values_of_a_sample(self, sample: Sample) -> None:
        relu, shapes = sample.op_name("relu"), set()
        seen = Seen()
        observed = inserter("insert_before_op", relu, lambda x: shapes.add(sample.shape(x)))
        with amanda.apply(seen, observed):
            for _ in range(2):
                result = sample.vmap(relu_of(sample))(sample.tensor([NUMBERS, NUMBERS]))
        assert sample.numbers(result) == [1.0, 0.0, 3.0] * 2
        assert len(seen.ids(relu)) == 1
        assert shapes == {(3,)}

    @needs("vmap")
    def test_a_tool_that_changes_nothing_leaves_every_bit_under_vmap(self, sample: Sample) -> None:
        assert_unchanged(sample, lambda: sample.vmap(relu_of(sample))(sample.tensor(NUMBERS)))

    @needs("vmap")
    def test_routines_change_and_replace_what_an_op_computes_under_vmap(self, sample: Sample) -> None:
        mapped = sample.vmap(relu_of(sample))
        assert_computed(sample, lambda: mapped(sample.tensor(NUMBERS)), VALUES)

    @needs("grad")
    def test_a_tool_that_changes_nothing_leaves_every_bit_under_grad(self, sample: Sample) -> None:
        assert_unchanged(sample, lambda: sample.grad(relu_of(sample))(scalar(sample, 2.0)))

    @needs("grad")
    def test_changed_values_have_gradients_straight_through_under_grad(self, sample: Sample) -> None:
        gradient = sample.grad(relu_of(sample))
        for i, number in enumerate(NUMBERS):
            expected = {action: values[i : i + 1] for action, values in GRADIENTS.items()}
            assert_computed(sample, lambda number=number: gradient(scalar(sample, number)), expected)  # type: ignore[misc]

    @needs("grad")
    def test_backward_ops_under_grad_have_their_forward_op(self, sample: Sample) -> None:
        forward, backward = Seen(), set()
        tools = (
            forward,
            tool(lambda context: backward.add(context.get_op_id()), sample.relu_backward, backward=True),
        )
        with amanda.apply(*tools):
            sample.grad(relu_of(sample))(scalar(sample, 2.0))
        assert backward == {*forward.ids(sample.op_name("relu"))} != set()

    @needs("grad")
    def test_an_op_under_grad_is_the_same_op_in_each_call(self, sample: Sample) -> None:
        executed, gradient = Executed(sample.op_name("relu")), sample.grad(relu_of(sample))
        with amanda.apply(executed):
            for _ in range(3):
                gradient(scalar(sample, 2.0))
        assert len(executed.ids) == 3
        assert len({*executed.ids}) == 1

    @needs("grad")
    def test_gradients_under_grad_can_be_changed_and_replaced(self, sample: Sample) -> None:
        gradient = sample.grad(relu_of(sample))
        assert_gradients_changed(sample, lambda: gradient(scalar(sample, 2.0)), [1.0])

    @needs("vmap", "grad")
    def test_changed_values_have_gradients_straight_through_in_each_sample(self, sample: Sample) -> None:
        per_sample = sample.vmap(sample.grad(relu_of(sample)))
        assert_unchanged(sample, lambda: per_sample(sample.tensor(NUMBERS)))
        assert_computed(sample, lambda: per_sample(sample.tensor(NUMBERS)), GRADIENTS)

    @needs("vmap", "grad")
    def test_gradients_of_each_sample_can_be_changed_and_replaced(self, sample: Sample) -> None:
        per_sample = sample.vmap(sample.grad(relu_of(sample)))
        assert_gradients_changed(sample, lambda: per_sample(sample.tensor(NUMBERS)), [1.0, 0.0, 1.0])

    @needs("jvp")
    def test_changed_values_have_tangents_straight_through(self, sample: Sample) -> None:
        tangent = sample.jvp(relu_of(sample))

        def program() -> Any:
            return tangent(sample.tensor(NUMBERS), sample.tensor([1.0, 1.0, 1.0]))

        assert_unchanged(sample, program)
        assert_computed(sample, program, GRADIENTS)

    @needs("vmap", "batched_values")
    def test_a_number_of_a_batched_value_is_an_error_with_the_remedy(self, sample: Sample) -> None:
        relu = sample.op_name("relu")

        def read_numbers(x: Any) -> None:
            sample.numbers(x)

        reading = inserter("insert_before_op", relu, read_numbers)
        with pytest.raises(Exception) as caught, amanda.apply(reading):  # noqa: PT011 - the framework's own
            sample.vmap(relu_of(sample))(sample.tensor(NUMBERS))
        text = "\n".join(notes(caught.value))
        assert "vmap" in text
        assert relu in text

    @needs("vmap")
    def test_an_exception_under_a_transform_reaches_the_user_as_itself(self, sample: Sample) -> None:
        def fail(x: Any) -> None:
            raise ValueError("planted")

        mapped = sample.vmap(relu_of(sample))
        with (
            pytest.raises(ValueError, match="planted"),
            amanda.apply(inserter("insert_after_op", sample.op_name("relu"), fail)),
        ):
            mapped(sample.tensor(NUMBERS))
        assert sample.numbers(mapped(sample.tensor(NUMBERS))) == [1.0, 0.0, 3.0]


def scalar(sample: Sample, number: Any) -> Any:
    """Return a tensor without axes."""
    return sample.tensor(number)


def relu_of(sample: Sample) -> Op:
    """Return a function that calls `relu`, which it looks up at each call: scopes may replace it."""
    return lambda x: sample.relu(x)


ROUTINES: dict[str, Callable[[Any], Any]] = {
    "insert_before_op": lambda x: x * -1.0,
    "insert_after_op": lambda y: y + 1.0,
    "replace_op": lambda x: x * 3.0,
}
VALUES = {
    "insert_before_op": [0.0, 2.0, 0.0],
    "insert_after_op": [2.0, 1.0, 4.0],
    "replace_op": [3.0, -6.0, 9.0],
}
"""Results of `relu` of `NUMBERS` with each routine."""
# The op and its derivative are computed on a routine's value; the way to the original is the identity.
GRADIENTS = {
    "insert_before_op": [0.0, 1.0, 0.0],
    "insert_after_op": [1.0, 0.0, 1.0],
    "replace_op": [3.0, 3.0, 3.0],
}
"""Derivatives of `relu` at each of `NUMBERS` with each routine."""


def assert_computed(sample: Sample, program: Callable[[], Any], expected: dict[str, list[float]]) -> None:
    """Check the numbers of a program with each of ROUTINES at `relu`, when analysed and after that."""
    for action, numbers in expected.items():
        with amanda.apply(inserter(action, sample.op_name("relu"), ROUTINES[action])):  # type: ignore[arg-type]
            results = [sample.numbers(program()) for _ in range(2)]
        assert results == [numbers, numbers], action


def assert_gradients_changed(sample: Sample, program: Callable[[], Any], bare: list[float]) -> None:
    """Check the gradients of `relu` that routines at its backward op change and replace.

    bare: the gradients without tools, of a program that sums the results of `relu`.
    """
    changed = [5.0 * number for number in bare]
    replaced = [7.0] * len(bare)
    for action, routine, numbers in (
        ("insert_after_backward_op", lambda grad: grad * 5.0, changed),
        ("insert_before_backward_op", lambda grad: grad * 5.0, changed),
        ("replace_backward_op", lambda grad: grad * 7.0, replaced),
    ):
        with amanda.apply(inserter(action, sample.relu_backward, routine)):  # type: ignore[arg-type]
            results = [sample.numbers(program()) for _ in range(2)]
        assert results == [numbers, numbers], action


def assert_unchanged(sample: Sample, program: Callable[[], Any]) -> None:
    """Check that a tool that hands every value back leaves every bit of a program's result."""
    bare, unchanged = sample.bits(program()), Unchanged()
    with amanda.apply(unchanged):
        for _ in range(2):
            assert sample.bits(program()) == bare
    assert unchanged.calls
