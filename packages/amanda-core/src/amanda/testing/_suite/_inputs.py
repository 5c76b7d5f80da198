"""Meaning 1: what the inputs and outputs of an op are, and what a routine may give back."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.errors import ActionError, RoutineError
from amanda.testing._gaps import needs
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import inserting, op_name, tool


class InputTests:
    """Inputs and outputs."""

    def test_every_op_of_the_model_is_seen_in_order(self, sample: Sample) -> None:
        names: list[str] = []
        model, x = sample.model(), sample.input()
        with amanda.apply(tool(lambda context: names.append(op_name(context)))):
            model(x)
        linear, relu = sample.name("linear"), sample.name("relu")
        assert [name for name in names if name in (linear, relu)] == [linear, relu, linear]

    @needs("schema")
    def test_inputs_are_in_the_order_of_the_schema(self, sample: Sample) -> None:
        inputs: list[list[Any]] = []
        model, x = sample.model(), sample.input()
        see = tool(lambda context: inputs.append(context.get_inputs()), sample.name("linear"))
        with amanda.apply(see):
            model(x)
        assert inputs[0][0] is x
        assert inputs[0][sample.weight_index] is model.first.weight
        assert inputs[1][sample.weight_index] is model.second.weight

    @needs("schema")
    def test_keyword_arguments_are_put_in_their_place(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        recorded: list[list[Any]] = []
        see = tool(lambda context: recorded.append(context.get_inputs()), sample.name("add"))
        with amanda.apply(see):
            sample.add(other=y, input=x)
        assert recorded[0][0] is x
        assert recorded[0][1] is y

    def test_trailing_defaults_are_left_out(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        recorded: list[int] = []
        see = tool(lambda context: recorded.append(len(context.get_inputs())), sample.name("add"))
        with amanda.apply(see):
            sample.add(x, y)
        assert recorded == [2]

    @needs("values")
    def test_outputs_are_known_after_the_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0])
        outputs: list[Any] = []
        before = tool(lambda context: outputs.append(context.get_outputs()), sample.name("relu"))
        after = tool(
            lambda context: outputs.append(context.get_outputs()), sample.name("relu"), require_outputs=True
        )
        with amanda.apply(before, after):
            result = sample.relu(x)
        assert outputs[0] is None
        assert outputs[1][0] is result

    @needs("schema")
    def test_a_routine_is_given_the_inputs_that_it_selects(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        arguments: list[tuple[Any, ...]] = []

        def routine(*values: Any) -> None:
            arguments.append(values)

        for select in ([1], ["other"], None, [1, 0]):
            with amanda.apply(inserting("insert_before_op", sample.name("add"), routine, select)):
                sample.add(x, y)
        assert arguments == [(y,), (y,), (x, y), (y, x)]

    def test_a_selected_input_is_replaced_by_what_the_routine_returns(self, sample: Sample) -> None:
        x, y, ten = sample.tensor([1.0]), sample.tensor([2.0]), sample.tensor([10.0])
        results = []
        for result in (ten, [ten], (ten,)):
            change = inserting("insert_before_op", sample.name("add"), lambda _, r=result: r, [1])
            with amanda.apply(change):
                results.append(sample.numbers(sample.add(x, y)))
        assert results == [[11.0]] * 3

    def test_none_means_no_change(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        with amanda.apply(inserting("insert_before_op", sample.name("add"), lambda *_: None)):
            assert sample.numbers(sample.add(x, y)) == [3.0]

    def test_a_routine_that_takes_all_returns_as_many(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        swap = inserting("insert_before_op", sample.name("add"), lambda a, b: (b * 2, a))
        with amanda.apply(swap):
            assert sample.numbers(sample.add(x, y)) == [5.0]

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_wrong_count_is_an_error_that_says_what_was_expected(self, sample: Sample, count: int) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        wrong = inserting("insert_before_op", sample.name("add"), lambda *_: [x] * count)
        with (
            amanda.apply(wrong),
            pytest.raises(RoutineError, match=rf"returned {count} values.* given 2 values.* sequence of 2"),
        ):
            sample.add(x, y)

    def test_several_values_for_one_are_an_error(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        wrong = inserting("insert_before_op", sample.name("relu"), lambda *_: (x, x), [0])
        with amanda.apply(wrong), pytest.raises(RoutineError, match=r"returned 2 values.*that one value"):
            sample.relu(x)

    def test_a_number_for_a_tensor_is_an_error(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        wrong = inserting("insert_before_op", sample.name("relu"), lambda _: 3.0, [0])
        with amanda.apply(wrong), pytest.raises(RoutineError, match="returned float where a tensor"):
            sample.relu(x)

    @pytest.mark.parametrize("select", [[7], ["nonsense"], [-7]])
    def test_selecting_what_is_not_there_is_an_error_at_analysis(self, sample: Sample, select: Any) -> None:
        wrong = inserting("insert_before_op", sample.name("relu"), lambda _: None, select)
        with amanda.apply(wrong), pytest.raises(ActionError, match="was asked for"):
            sample.relu(sample.tensor([1.0]))

    def test_a_list_of_tensors_is_one_input(self, sample: Sample) -> None:
        x, y, ten = sample.tensor([1.0]), sample.tensor([2.0]), sample.tensor([10.0])
        arguments: list[tuple[Any, ...]] = []

        def routine(tensors: Any) -> Any:
            arguments.append(tensors)
            return [tensors[0], ten]

        with amanda.apply(inserting("insert_before_op", sample.name("cat"), routine, [0])):
            result = sample.cat([x, y])
        assert list(arguments[0]) == [x, y]
        assert sample.numbers(result) == [1.0, 10.0]

    def test_outputs_of_a_namedtuple_keep_its_type(self, sample: Sample) -> None:
        x = sample.tensor([[1.0, 2.0], [3.0, 4.0]])
        plain = sample.pair(x)

        def routine(*outputs: Any) -> Any:
            assert len(outputs) == 2
            return outputs[0] * 2, outputs[1]

        with amanda.apply(inserting("insert_after_op", sample.name("pair"), routine)):
            result = sample.pair(x)
        assert type(result) is type(plain)
        assert sample.numbers(result[0]) == [2 * number for number in sample.numbers(plain[0])]
        assert sample.numbers(result[1]) == sample.numbers(plain[1])

    def test_one_of_several_outputs_is_changed(self, sample: Sample) -> None:
        x = sample.tensor([[1.0, 2.0], [3.0, 4.0]])
        plain = sample.pair(x)
        change = inserting("insert_after_op", sample.name("pair"), lambda value: value * 3, [1])
        with amanda.apply(change):
            result = sample.pair(x)
        assert sample.bits(result[0]) == sample.bits(plain[0])
        assert sample.numbers(result[1]) == [3 * number for number in sample.numbers(plain[1])]

    @needs("numbers")
    def test_an_output_that_is_no_tensor_is_seen_and_changed(self, sample: Sample) -> None:
        x = sample.tensor([5.0])
        change = inserting("insert_after_op", sample.name("item"), lambda number: number + 1)
        with amanda.apply(change):
            assert sample.item(x) == 6.0

    @needs("schema")
    def test_arguments_that_are_no_tensors_are_attributes_by_name(self, sample: Sample) -> None:
        attributes: list[dict[str, Any]] = []

        def see(context: OpContext) -> None:
            attributes.append(context.get_attrs())

        with amanda.apply(tool(see, sample.name("add"))):
            sample.add(sample.tensor([1.0]), 2.5)
        assert attributes[0]["other"] == 2.5

    def test_the_present_value_of_an_input_is_given(self, sample: Sample) -> None:
        values: list[Any] = []
        model, x = sample.model(), sample.input()
        see = tool(
            lambda context: values.append(context.get_value(sample.weight_index)), sample.name("linear")
        )
        with amanda.apply(see):
            model(x)
        assert sample.bits(values[0]) == sample.bits(model.first.weight)
