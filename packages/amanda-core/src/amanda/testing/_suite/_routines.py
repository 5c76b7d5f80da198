"""Meanings 1, 5, 6 and 7: routines before, after and instead of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda.errors import ActionError, MutationError, ReplaceConflictError, RoutineError
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import add_routine, inserter, notes, op_name, tool


class BeforeTests(
    Rung,
    title="before an op",
    implement=(
        "is_tensor", "without_autodiff", "call_without_autodiff", "version", "straight_through",
        "Call.written_positions", "write",
    ),
):  # fmt: skip
    """Routines before an op see its inputs, and change them."""

    def test_a_routine_runs_at_every_execution_with_runtime_values(self, sample: Sample) -> None:
        recorded: list[Any] = []

        def routine(value: Any) -> None:
            recorded.append(sample.numbers(value))

        module = sample.module(lambda x: sample.relu(x))
        with amanda.apply(inserter("insert_before_op", sample.op_name("relu"), routine)):
            for number in (1.0, 2.0, 3.0):
                module(sample.tensor([number]))
        assert recorded == [[1.0], [2.0], [3.0]]

    @needs("schema")
    def test_a_routine_is_given_the_inputs_that_it_selects(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        arguments: list[tuple[Any, ...]] = []

        def routine(*values: Any) -> None:
            arguments.append(values)

        # By position, by name, all, and in an order of the routine's own.
        for select in ([1], [sample.argument_names[1]], None, [1, 0]):
            with amanda.apply(inserter("insert_before_op", sample.op_name("add"), routine, select)):
                sample.add(x, y)
        assert arguments == [(y,), (y,), (x, y), (y, x)]

    def test_none_means_no_change(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        with amanda.apply(inserter("insert_before_op", sample.op_name("add"), lambda *_: None)):
            assert sample.numbers(sample.add(x, y)) == [3.0]

    def test_a_selected_input_is_replaced_by_what_the_routine_returns(self, sample: Sample) -> None:
        x, y, ten = sample.tensor([1.0]), sample.tensor([2.0]), sample.tensor([10.0])
        results = []
        # One value may be returned as it is, or in a sequence of one.
        for result in (ten, [ten], (ten,)):
            change = inserter("insert_before_op", sample.op_name("add"), lambda _, r=result: r, [1])
            with amanda.apply(change):
                results.append(sample.numbers(sample.add(x, y)))
        assert results == [[11.0]] * 3

    def test_a_routine_that_takes_all_returns_as_many(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        swap = inserter("insert_before_op", sample.op_name("add"), lambda a, b: (b * 2, a))
        with amanda.apply(swap):
            assert sample.numbers(sample.add(x, y)) == [5.0]

    def test_a_list_of_tensors_is_one_input(self, sample: Sample) -> None:
        x, y, ten = sample.tensor([1.0]), sample.tensor([2.0]), sample.tensor([10.0])
        arguments: list[tuple[Any, ...]] = []

        def routine(tensors: Any) -> Any:
            arguments.append(tensors)
            return [tensors[0], ten]

        with amanda.apply(inserter("insert_before_op", sample.op_name("cat"), routine, [0])):
            result = sample.cat([x, y])
        assert list(arguments[0]) == [x, y]
        assert sample.numbers(result) == [1.0, 10.0]

    def test_a_value_handed_back_unchanged_adds_nothing(self, sample: Sample) -> None:
        x = sample.tensor([1.0], requires_grad=True)
        recorded: list[Any] = []
        keep = inserter("insert_before_op", sample.op_name("relu"), lambda value: value)
        with amanda.apply(keep):
            result = sample.relu(x)
            with amanda.apply(inserter("insert_before_op", sample.op_name("add"), recorded.append, [0])):
                sample.add(result, 1.0)
        # The same object: a new one would have a node of autodiff more.
        assert recorded[0] is result, "what a routine gives back is wrapped or copied, not the same object"

    def test_a_tool_injects_arguments_into_its_routine(self, sample: Sample) -> None:
        def scale(value: Any, factor: float) -> Any:
            return value * factor

        with amanda.apply(inserter("insert_before_op", sample.op_name("relu"), scale, factor=4.0)):
            assert sample.numbers(sample.relu(sample.tensor([1.0]))) == [4.0]

    @pytest.mark.parametrize("mark", [amanda.observer, amanda.differentiable])
    def test_marked_routines_are_accepted_and_run(self, sample: Sample, mark: Any) -> None:
        assert _runs_twice_in_each_of_two_executions(sample, mark)

    @needs("traceable_calls")
    def test_a_traceable_routine_is_accepted_and_run(self, sample: Sample) -> None:
        assert _runs_twice_in_each_of_two_executions(sample, amanda.traceable)

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_wrong_count_is_an_error_that_says_what_was_expected(self, sample: Sample, count: int) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        wrong = inserter("insert_before_op", sample.op_name("add"), lambda *_: [x] * count)
        with (
            amanda.apply(wrong),
            pytest.raises(RoutineError, match=rf"returned {count} values?.* given 2 values.* sequence of 2"),
        ):
            sample.add(x, y)

    def test_several_values_for_one_are_an_error(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        wrong = inserter("insert_before_op", sample.op_name("relu"), lambda *_: (x, x), [0])
        with amanda.apply(wrong), pytest.raises(RoutineError, match=r"returned 2 values.*that one value"):
            sample.relu(x)

    def test_a_number_for_a_tensor_is_an_error(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        wrong = inserter("insert_before_op", sample.op_name("relu"), lambda _: 3.0, [0])
        with amanda.apply(wrong), pytest.raises(RoutineError, match="returned float where a tensor"):
            sample.relu(x)

    @pytest.mark.parametrize("select", [[7], ["nonsense"], [-7]])
    def test_selecting_what_is_not_there_is_an_error_at_analysis(self, sample: Sample, select: Any) -> None:
        wrong = inserter("insert_before_op", sample.op_name("relu"), lambda _: None, select)
        with amanda.apply(wrong), pytest.raises(ActionError, match="was asked for"):
            sample.relu(sample.tensor([1.0]))

    def test_a_change_of_shape_is_an_error_at_the_routine(self, sample: Sample) -> None:
        def widen(value: Any) -> Any:
            return sample.cat([value, value])

        with (
            amanda.apply(inserter("insert_before_op", sample.op_name("relu"), widen)),
            pytest.raises(RoutineError, match=r"shape \(4,\) where shape \(2,\).*differentiable") as caught,
        ):
            sample.relu(sample.tensor([1.0, 2.0]))
        assert "widen" in "".join(notes(caught.value))

    @needs("complex")
    def test_a_change_from_real_to_complex_is_an_error(self, sample: Sample) -> None:
        wide, imaginary = sample.dtypes[0], sample.dtypes[3]
        change = inserter("insert_before_op", sample.op_name("add"), lambda v: sample.cast(v, imaginary), [0])
        with amanda.apply(change), pytest.raises(RoutineError, match="complex"):
            sample.add(sample.tensor([1.0], wide), 1.0)

    @needs("mutable_tensors")
    @pytest.mark.parametrize("action", ["insert_before_op", "insert_after_op"])
    def test_writing_into_a_given_value_is_an_error(self, sample: Sample, action: Any) -> None:
        with (
            amanda.apply(inserter(action, sample.op_name("relu"), sample.overwrite)),
            pytest.raises(MutationError, match="return a new value"),
        ):
            sample.relu(sample.tensor([1.0]))

    @needs("in_place")
    def test_a_changed_input_of_an_in_place_op_is_written_to_the_users_tensor(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        with amanda.apply(inserter("insert_before_op", sample.op_name("add_"), lambda y: y * 10, [0])):
            result = sample.add_(x, 1.0)
        assert result is x
        assert sample.numbers(x) == [11.0]

    def test_an_action_at_the_wrong_point_says_where_it_belongs(self, sample: Sample) -> None:
        wrong = tool(
            lambda context: context.insert_before_backward_op(lambda grad: grad), sample.op_name("relu")
        )
        with amanda.apply(wrong), pytest.raises(ActionError, match="backward=True"):
            sample.relu(sample.tensor([1.0]))


class AfterTests(
    Rung,
    title="after an op",
    implement=(
        "flatten", "Call.target_positions", "Call.unreturned_positions", "write",
    ),
):  # fmt: skip
    """Routines after an op see its outputs, and change them."""

    def test_outputs_of_a_namedtuple_keep_its_type(self, sample: Sample) -> None:
        x = sample.tensor([[1.0, 2.0], [3.0, 4.0]])
        plain = sample.pair(x)

        def routine(*outputs: Any) -> Any:
            assert len(outputs) == 2
            return outputs[0] * 2, outputs[1]

        with amanda.apply(inserter("insert_after_op", sample.op_name("pair"), routine)):
            result = sample.pair(x)
        assert type(result) is type(plain)
        assert sample.numbers(result[0]) == [2 * number for number in sample.numbers(plain[0])]
        assert sample.numbers(result[1]) == sample.numbers(plain[1])

    def test_one_of_several_outputs_is_changed(self, sample: Sample) -> None:
        x = sample.tensor([[1.0, 2.0], [3.0, 4.0]])
        plain = sample.pair(x)
        change = inserter("insert_after_op", sample.op_name("pair"), lambda value: value * 3, [1])
        with amanda.apply(change):
            result = sample.pair(x)
        # The output that the routine did not select has every bit as before.
        assert sample.bits(result[0]) == sample.bits(plain[0])
        assert sample.numbers(result[1]) == [3 * number for number in sample.numbers(plain[1])]

    @needs("numbers")
    def test_an_output_that_is_no_tensor_is_seen_and_changed(self, sample: Sample) -> None:
        x = sample.tensor([5.0])
        change = inserter("insert_after_op", sample.op_name("item"), lambda number: number + 1)
        with amanda.apply(change):
            assert sample.item(x) == 6.0

    @needs("in_place")
    def test_a_changed_output_of_an_in_place_op_is_in_the_users_tensor(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        with amanda.apply(inserter("insert_after_op", sample.op_name("add_"), lambda y: y * 10)):
            result = sample.add_(x, 1.0)
        assert result is x
        assert sample.numbers(x) == [20.0]

    @needs("out")
    def test_a_changed_output_is_in_the_tensor_given_as_out(self, sample: Sample) -> None:
        x, y, out = sample.tensor([1.0]), sample.tensor([2.0]), sample.tensor([0.0])
        with amanda.apply(inserter("insert_after_op", sample.op_name("add"), lambda y: y * 10)):
            result = sample.add(x, y, out=out)
        assert result is out
        assert sample.numbers(out) == [30.0]

    def test_what_a_traceable_routine_reads_of_its_tool_may_be_set_anew(self, sample: Sample) -> None:
        class SettableScaling(amanda.Tool):
            def __init__(self) -> None:
                self.factor = 2.0
                self.add_inst_for_op(self.analyse)

            def analyse(self, context: amanda.OpContext) -> None:
                if op_name(context) == sample.op_name("relu"):
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

    def test_an_action_before_an_op_that_has_run_says_where_it_belongs(self, sample: Sample) -> None:
        modes: list[str] = []
        recorded: list[Any] = []

        def late(context: amanda.OpContext) -> None:
            modes.append(context.namespace[-1])
            context.insert_before_op(recorded.append)

        errors: list[ActionError] = []
        with amanda.apply(tool(late, sample.op_name("relu"), require_outputs=True)):
            try:
                sample.relu(sample.tensor([1.0]))
            except ActionError as error:
                errors.append(error)
        # An eager op has run, which is an error; a graph is analysed before it runs: the routine is called.
        is_eager = modes == ["eager"]
        assert (len(errors), len(recorded)) == ((1, 0) if is_eager else (0, 1))
        assert all("require_outputs=False" in str(error) for error in errors)


class ReplacementTests(
    Rung,
    title="instead of an op",
    implement=("Call.invoke_for_replacement", "Call.in_form_of_result", "differentiable_copy"),
):
    """Routines compute instead of an op."""

    def test_a_replacement_computes_instead_of_the_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0])
        with amanda.apply(inserter("replace_op", sample.op_name("relu"), lambda value: value * 10)):
            assert sample.numbers(sample.relu(x)) == [-10.0, 20.0]
        assert sample.numbers(sample.relu(x)) == [0.0, 2.0]

    def test_before_and_after_routines_run_around_a_replacement(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        recorder = inserter("replace_op", sample.op_name("relu"), lambda value: value * 10)
        before = inserter("insert_before_op", sample.op_name("relu"), lambda value: value + 1)
        after = inserter("insert_after_op", sample.op_name("relu"), lambda value: value + 5)
        with amanda.apply(recorder, before, after):
            # (1 + 1) * 10 + 5: the replacement stands where the op stood.
            assert sample.numbers(sample.relu(x)) == [25.0]

    @needs("in_place")
    def test_a_replacement_of_an_in_place_op_writes_to_the_users_tensor(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        with amanda.apply(inserter("replace_op", sample.op_name("add_"), lambda a, b: a * 7)):
            result = sample.add_(x, 1.0)
        assert result is x
        assert sample.numbers(x) == [7.0]

    @pytest.mark.parametrize("nested", [False, True])
    def test_two_tools_that_replace_one_op_are_both_named(self, sample: Sample, nested: bool) -> None:
        class Rounding(amanda.Tool):
            pass

        class Pruner(amanda.Tool):
            pass

        tools = [
            add_routine(
                kind(), lambda context: context.replace_op(lambda value: value), sample.op_name("relu")
            )
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


def _runs_twice_in_each_of_two_executions(sample: Sample, mark: Callable[[Any], Any]) -> bool:
    """Return True if a routine that `mark` has marked runs before and after an op, at each execution."""
    runs = []

    def count(*_: Any) -> None:
        runs.append(1)

    routine = mark(count)
    recorder = tool(lambda context: context.insert_before_op(routine), sample.op_name("relu"))
    add_routine(
        recorder,
        lambda context: context.insert_after_op(routine),
        sample.op_name("relu"),
        require_outputs=True,
    )
    with amanda.apply(recorder):
        for _ in range(2):
            sample.relu(sample.tensor([1.0]))
    return len(runs) == 4
