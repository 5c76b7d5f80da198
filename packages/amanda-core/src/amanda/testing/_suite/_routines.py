"""Meanings 6 and 7: routines run at every execution; a replacement computes instead of the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda.errors import ActionError, ReplaceConflictError
from amanda.testing._sample import Sample, needs
from amanda.testing._tools import also, inserting, op_name, tool


class RoutineTests:
    """The six actions."""

    def test_a_routine_runs_at_every_execution_with_runtime_values(self, sample: Sample) -> None:
        recorded: list[Any] = []

        def routine(value: Any) -> None:
            recorded.append(sample.numbers(value))

        module = sample.module(lambda x: sample.relu(x))
        with amanda.apply(inserting("insert_before_op", sample.name("relu"), routine)):
            for number in (1.0, 2.0, 3.0):
                module(sample.tensor([number]))
        assert recorded == [[1.0], [2.0], [3.0]]

    def test_a_tool_injects_arguments_into_its_routine(self, sample: Sample) -> None:
        def scale(value: Any, factor: float) -> Any:
            return value * factor

        with amanda.apply(inserting("insert_before_op", sample.name("relu"), scale, factor=4.0)):
            assert sample.numbers(sample.relu(sample.tensor([1.0]))) == [4.0]

    @pytest.mark.parametrize("mark", [amanda.observer, amanda.differentiable])
    def test_marked_routines_are_accepted_and_run(self, sample: Sample, mark: Any) -> None:
        assert _runs_twice_in_each_of_two_executions(sample, mark)

    @needs("traceable_calls")
    def test_a_traceable_routine_is_accepted_and_run(self, sample: Sample) -> None:
        assert _runs_twice_in_each_of_two_executions(sample, amanda.traceable)

    def test_what_a_traceable_routine_reads_of_its_tool_may_be_set_anew(self, sample: Sample) -> None:
        class SettableScaling(amanda.Tool):
            def __init__(self) -> None:
                self.factor = 2.0
                self.add_inst_for_op(self.analyse)

            def analyse(self, context: amanda.OpContext) -> None:
                if op_name(context) == sample.name("relu"):
                    context.insert_after_op(self.scaled)

            @amanda.traceable
            def scaled(self, value: Any) -> Any:
                return value * self.factor

        recorder = SettableScaling()
        for _ in range(2):
            with amanda.apply(recorder):
                # Back to the first value: a graph must not take the last copy for the right one.
                for factor in (2.0, 5.0, 2.0):
                    recorder.factor = factor
                    assert sample.numbers(sample.relu(sample.tensor([1.0]))) == [factor]

    @needs("backward")
    def test_all_points_of_an_op_run_in_order(self, sample: Sample) -> None:
        order: list[str] = []
        recorder = tool(lambda _: None)
        for action in ("insert_before_op", "insert_after_op"):
            also(recorder, _recording(action, order), sample.name("relu"))
        for action in ("insert_before_backward_op", "insert_after_backward_op"):
            also(recorder, _recording(action, order), sample.relu_backward, backward=True)
        module = sample.module(lambda x: sample.relu(x))
        with amanda.apply(recorder):
            for _ in range(2):
                sample.backward(module(sample.tensor([1.0], requires_grad=True)))
        one_run = [
            "insert_before_op", "insert_after_op", "insert_before_backward_op", "insert_after_backward_op",
        ]  # fmt: skip
        # Twice, since the second execution may run in native code.
        assert order == one_run * 2

    @needs("backward")
    def test_gradients_are_changed_before_and_after_a_backward_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        before = inserting("insert_before_backward_op", sample.relu_backward, lambda grad: grad * 3)
        after = inserting("insert_after_backward_op", sample.relu_backward, lambda grad: grad + 1)
        with amanda.apply(before, after):
            sample.backward(sample.relu(x))
        # relu passes no gradient at -1 and the whole at 2: 3 * 0 + 1 and 3 * 1 + 1.
        assert sample.numbers(sample.gradient(x)) == [1.0, 4.0]

    @needs("backward")
    def test_changed_gradients_hold_for_every_backward_pass(self, sample: Sample) -> None:
        module = sample.module(lambda x: sample.relu(x))
        gradients = []
        with amanda.apply(
            inserting("insert_before_backward_op", sample.relu_backward, lambda grad: grad * 3)
        ):
            for _ in range(3):
                x = sample.tensor([2.0], requires_grad=True)
                sample.backward(module(x))
                gradients.append(sample.numbers(sample.gradient(x)))
        assert gradients == [[3.0]] * 3

    def test_a_replacement_computes_instead_of_the_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0])
        with amanda.apply(inserting("replace_op", sample.name("relu"), lambda value: value * 10)):
            assert sample.numbers(sample.relu(x)) == [-10.0, 20.0]
        assert sample.numbers(sample.relu(x)) == [0.0, 2.0]

    @needs("backward")
    def test_a_replacement_takes_part_in_the_backward_pass(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(inserting("replace_op", sample.name("relu"), lambda value: value * 10)):
            sample.backward(sample.relu(x))
        assert sample.numbers(sample.gradient(x)) == [10.0, 10.0]

    @needs("backward")
    def test_the_identity_as_a_replacement_removes_the_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(inserting("replace_op", sample.name("relu"), lambda value: value)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.numbers(result) == [-1.0, 2.0]
        assert sample.numbers(sample.gradient(x)) == [1.0, 1.0]

    @needs("backward")
    def test_a_replacement_is_given_what_computes_the_op(self, sample: Sample) -> None:
        # The negation is a part of the replacement, so its gradient is, too.
        def negated(value: Any, original: Any) -> Any:
            return original(value * -1)

        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(inserting("replace_op", sample.name("relu"), negated)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.numbers(result) == [1.0, 0.0]
        assert sample.numbers(sample.gradient(x)) == [-1.0, 0.0]

    def test_before_and_after_routines_run_around_a_replacement(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        recorder = inserting("replace_op", sample.name("relu"), lambda value: value * 10)
        before = inserting("insert_before_op", sample.name("relu"), lambda value: value + 1)
        after = inserting("insert_after_op", sample.name("relu"), lambda value: value + 5)
        with amanda.apply(recorder, before, after):
            # (1 + 1) * 10 + 5: the replacement stands where the op stood.
            assert sample.numbers(sample.relu(x)) == [25.0]

    @needs("in_place")
    def test_a_replacement_of_an_in_place_op_writes_to_the_users_tensor(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        with amanda.apply(inserting("replace_op", sample.name("add_"), lambda a, b: a * 7)):
            result = sample.add_(x, 1.0)
        assert result is x
        assert sample.numbers(x) == [7.0]

    @needs("backward")
    def test_a_replacement_of_a_backward_op_gives_the_gradients(self, sample: Sample) -> None:
        module = sample.module(lambda x: sample.relu(x))
        gradients = []
        with amanda.apply(inserting("replace_backward_op", sample.relu_backward, lambda grad: grad * 100)):
            for _ in range(2):
                x = sample.tensor([-1.0, 2.0], requires_grad=True)
                sample.backward(module(x))
                gradients.append(sample.numbers(sample.gradient(x)))
        assert gradients == [[100.0, 100.0]] * 2

    @pytest.mark.parametrize("nested", [False, True])
    def test_two_tools_that_replace_one_op_are_both_named(self, sample: Sample, nested: bool) -> None:
        class Rounding(amanda.Tool):
            pass

        class Pruner(amanda.Tool):
            pass

        tools = [
            also(kind(), lambda context: context.replace_op(lambda value: value), sample.name("relu"))
            for kind in (Rounding, Pruner)
        ]
        with pytest.raises(ReplaceConflictError) as caught:  # noqa: PT012
            if nested:
                with amanda.apply(tools[0]), amanda.apply(tools[1]):
                    sample.relu(sample.tensor([1.0]))
            else:
                with amanda.apply(*tools):
                    sample.relu(sample.tensor([1.0]))
        assert "Rounding" in str(caught.value)
        assert "Pruner" in str(caught.value)

    @needs("backward")
    def test_two_tools_that_replace_one_backward_op_are_both_named(self, sample: Sample) -> None:
        class Rounding(amanda.Tool):
            pass

        class Pruner(amanda.Tool):
            pass

        tools = [
            also(
                kind(),
                lambda context: context.replace_backward_op(lambda grad: grad),
                sample.relu_backward,
                backward=True,
            )
            for kind in (Rounding, Pruner)
        ]
        with (
            amanda.apply(*tools),
            pytest.raises(ReplaceConflictError, match=r"Pruner.*Rounding|Rounding.*Pruner"),
        ):
            sample.backward(sample.relu(sample.tensor([1.0], requires_grad=True)))

    def test_an_action_at_the_wrong_point_says_where_it_belongs(self, sample: Sample) -> None:
        wrong = tool(
            lambda context: context.insert_before_backward_op(lambda grad: grad), sample.name("relu")
        )
        with amanda.apply(wrong), pytest.raises(ActionError, match="backward=True"):
            sample.relu(sample.tensor([1.0]))

    def test_an_action_before_an_op_that_has_run_says_where_it_belongs(self, sample: Sample) -> None:
        modes: list[str] = []
        recorded: list[Any] = []

        def late(context: amanda.OpContext) -> None:
            modes.append(context.namespace[-1])
            context.insert_before_op(recorded.append)

        errors: list[ActionError] = []
        with amanda.apply(tool(late, sample.name("relu"), require_outputs=True)):
            try:
                sample.relu(sample.tensor([1.0]))
            except ActionError as error:
                errors.append(error)
        # A graph is analysed before it runs.
        assert (modes == ["eager"]) == bool(errors)
        assert len(recorded) + len(errors) == 1
        assert all("require_outputs=False" in str(error) for error in errors)


def _recording(action: str, order: list[str]) -> Any:
    return lambda context: getattr(context, action)(lambda *_: order.append(action))


def _runs_twice_in_each_of_two_executions(sample: Sample, mark: Callable[[Any], Any]) -> bool:
    """Return True if a routine before and after an op does, so marked."""
    runs = []

    def count(*_: Any) -> None:
        runs.append(1)

    routine = mark(count)
    recorder = tool(lambda context: context.insert_before_op(routine), sample.name("relu"))
    also(
        recorder, lambda context: context.insert_after_op(routine), sample.name("relu"), require_outputs=True
    )
    with amanda.apply(recorder):
        for _ in range(2):
            sample.relu(sample.tensor([1.0]))
    return len(runs) == 4
