"""Meanings 1 and 2: what a context tells of an op, and the dict that forward and backward analyses share."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.errors import ActionError, AmandaError, RoutineError
from amanda.testing._sample import Sample, needs
from amanda.testing._tools import Referent, also, inserting, op_name, tool


class InputTests:
    """Inputs and outputs."""

    def test_every_op_of_the_model_is_seen_in_order(self, sample: Sample) -> None:
        names: list[str] = []
        model, x = sample.model(), sample.input()
        with amanda.apply(tool(lambda context: names.append(op_name(context)))):
            model(x)
        linear, relu = sample.name("linear"), sample.name("relu")
        # A linear layer may have ops of its own beside the product, such as a transposition.
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

        def ask_early(context: OpContext) -> None:
            with pytest.raises(AmandaError, match="require_outputs=True"):
                context.get_outputs()
            outputs.append(None)

        before = tool(ask_early, sample.name("relu"))
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

        # By position, by name, all, and in an order of the routine's own.
        for select in ([1], ["other"], None, [1, 0]):
            with amanda.apply(inserting("insert_before_op", sample.name("add"), routine, select)):
                sample.add(x, y)
        assert arguments == [(y,), (y,), (x, y), (y, x)]

    def test_a_selected_input_is_replaced_by_what_the_routine_returns(self, sample: Sample) -> None:
        x, y, ten = sample.tensor([1.0]), sample.tensor([2.0]), sample.tensor([10.0])
        results = []
        # One value may be returned as it is, or in a sequence of one.
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
        # The output that the routine did not select has every bit as before.
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


class ContextTests:
    """Contexts, and what an execution hands to its backward pass."""

    @needs("backward")
    def test_backward_analyses_see_what_forward_analyses_put_in(self, sample: Sample) -> None:
        recorded: list[tuple[Any, str]] = []

        def forward(context: OpContext) -> None:
            context["mark"] = context.get_op_id()

        def backward(context: OpContext) -> None:
            assert context.is_backward()
            recorded.append((context["mark"], op_name(context)))
            assert context["mark"] == context.get_op_id()

        recorder = also(tool(forward), backward, backward=True)
        model, x = sample.model(), sample.input()
        with amanda.apply(recorder):
            sample.backward(model(x))
        assert sample.relu_backward in [name for _, name in recorded]
        # Two layers and the activation at least; a framework may run more ops.
        assert len({mark for mark, _ in recorded}) >= 3

    def test_tools_share_the_context(self, sample: Sample) -> None:
        recorded: list[Any] = []
        first = tool(lambda context: context.update(type="rectifier"), sample.name("relu"))
        second = tool(lambda context: recorded.append(context["type"]), sample.name("relu"))
        with amanda.apply(first, second):
            sample.relu(sample.tensor([1.0]))
        assert recorded == ["rectifier"]

    @needs("backward")
    def test_one_op_may_have_many_backward_ops_each_with_its_own_context(self, sample: Sample) -> None:
        contexts: list[OpContext] = []

        def backward(context: OpContext) -> None:
            context[op_name(context)] = True
            contexts.append(context)

        recorder = tool(backward, backward=True)
        x = sample.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        y = sample.tensor([[5.0, 6.0], [7.0, 8.0]], requires_grad=True)
        with amanda.apply(recorder):
            sample.backward(sample.many(x, y))
        of_many = [context for context in contexts if context.get_op().__name__ == sample.name("many")]
        inner = [context for context in of_many if op_name(context) != sample.leaf_backward]
        assert len(inner) >= 2
        assert len({context.get_backward_op_id() for context in of_many}) == len(of_many)
        assert len({context.get_op_id() for context in of_many}) == 1
        # No context has a key of another: each inherits from the forward op alone.
        assert all(list(context) == [op_name(context)] for context in of_many)

    @needs("backward", "values")
    def test_backward_sees_gradients_in_and_out(self, sample: Sample) -> None:
        recorded: list[tuple[Any, Any]] = []

        def backward(context: OpContext) -> None:
            (grad_output,) = context.get_grad_outputs() or [None]
            (grad_input,) = context.get_grad_inputs() or [None]
            recorded.append((sample.numbers(grad_output), sample.numbers(grad_input)))

        recorder = tool(backward, sample.relu_backward, backward=True, require_outputs=True)
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(recorder):
            sample.backward(sample.relu(x))
        assert recorded == [([1.0, 1.0], [0.0, 1.0])]

    @needs("backward", "values")
    def test_forward_values_are_there_for_the_first_backward_analysis(self, sample: Sample) -> None:
        recorded: list[list[Any]] = []

        def backward(context: OpContext) -> None:
            (value,), outputs = context.get_inputs(), context.get_outputs()
            assert outputs is not None
            recorded.append([sample.numbers(value), sample.numbers(outputs[0])])

        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(tool(backward, sample.relu_backward, backward=True)):
            sample.backward(sample.relu(x))
        assert recorded == [[[-1.0, 2.0], [0.0, 2.0]]]

    @needs("backward")
    def test_forward_values_are_dropped_after_the_first_execution(self, sample: Sample) -> None:
        contexts: list[OpContext] = []
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        both = also(tool(contexts.append, sample.name("relu")), contexts.append, backward=True)
        with amanda.apply(both):
            result = sample.relu(x)
            sample.backward(result)
            dead = weakref.ref(x), weakref.ref(result)
            del x, result
            gc.collect()
            assert [reference() for reference in dead] == [None, None]
        assert len(contexts) > 1
        with pytest.raises(AmandaError, match="keep what you need of them in the context"):
            contexts[0].get_inputs()

    @needs("backward", "leaves")
    def test_the_gradient_of_a_leaf_is_changed_before_it_is_stored(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        change = inserting("insert_before_backward_op", sample.leaf_backward, lambda grad: grad * 3)
        with amanda.apply(change):
            sample.backward(sample.relu(x))
        assert sample.numbers(sample.gradient(x)) == [0.0, 3.0]

    @needs("backward", "leaves")
    def test_what_stores_a_gradient_is_not_replaced(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        change = inserting("replace_backward_op", sample.leaf_backward, lambda grad: grad)
        # The error says what works instead.
        with amanda.apply(change), pytest.raises(ActionError, match="insert_before_backward_op"):
            sample.backward(sample.relu(x))

    @needs("backward")
    def test_run_goes_from_the_forward_to_the_backward_routines_of_one_execution(
        self, sample: Sample
    ) -> None:
        def forward(value: Any, run: dict[str, Any]) -> None:
            # Numbers, since a tensor in the dict would keep the execution's memory until its backward pass.
            run["input"] = sample.numbers(value)

        recorded: list[Any] = []

        def backward(grad: Any, run: dict[str, Any]) -> None:
            recorded.append(run["input"])

        name = sample.name("relu")
        recorder = tool(lambda context: context.insert_before_op(forward, [0]), name)
        also(
            recorder,
            lambda context: context.insert_before_backward_op(backward),
            sample.relu_backward,
            backward=True,
        )
        with amanda.apply(recorder):
            for number in (1.0, 2.0, 3.0):
                sample.backward(sample.relu(sample.tensor([number], requires_grad=True)))
            results = [sample.relu(sample.tensor([number], requires_grad=True)) for number in (4.0, 5.0)]
            # In reverse, so that a dict by order of executions would be mixed up.
            for result in reversed(results):
                sample.backward(result)
        assert recorded == [[1.0], [2.0], [3.0], [5.0], [4.0]]

    @needs("backward")
    def test_run_is_freed_with_the_graph_of_its_execution(self, sample: Sample) -> None:
        values: list[weakref.ref[Referent]] = []

        def forward(_: Any, run: dict[str, Any]) -> None:
            run["value"] = value = Referent()
            values.append(weakref.ref(value))

        recorder = tool(lambda context: context.insert_before_op(forward, [0]), sample.name("relu"))
        also(recorder, lambda context: context.insert_before_backward_op(lambda *_: None), backward=True)
        with amanda.apply(recorder):
            for _ in range(2):
                result = sample.relu(sample.tensor([1.0], requires_grad=True))
                assert values[-1]() is not None
                sample.backward(result)
                del result
                gc.collect()
        assert [reference() for reference in values] == [None, None]

    def test_a_context_names_the_device_of_its_tensors(self, sample: Sample) -> None:
        devices = []
        model, x = sample.model(), sample.input()
        with amanda.apply(tool(lambda context: devices.append(context.get_device()), sample.name("linear"))):
            model(x)
        assert len(devices) == 2
        # In graphs a tensor may have no device before the run.
        assert set(devices) <= {sample.device(x), ""}

    def test_a_context_knows_its_module_and_line(self, sample: Sample) -> None:
        recorded: list[tuple[str, str]] = []
        model, x = sample.model(), sample.input()
        outer = sample.module(model)
        outer.inside = model
        see = tool(
            lambda context: recorded.append((context.get_scope(), context.get_source())),
            sample.name("linear"),
        )
        with amanda.apply(see):
            model(x)
        assert [scope for scope, _ in recorded] == ["first", "second"]
        assert all(":" in source and "/amanda/interceptor/" not in source for _, source in recorded)
