"""Meaning 2: the context is a dict that an op's forward and backward analyses share."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.errors import ActionError, AmandaError
from amanda.testing._gaps import needs
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import also, inserting, op_name, tool


class Value:
    """Something that can be referenced weakly."""


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
        with amanda.apply(change), pytest.raises(ActionError, match="insert_before_backward_op"):
            sample.backward(sample.relu(x))

    @needs("backward")
    def test_run_goes_from_the_forward_to_the_backward_routines_of_one_execution(
        self, sample: Sample
    ) -> None:
        def forward(value: Any, run: dict[str, Any]) -> None:
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
            for result in reversed(results):
                sample.backward(result)
        assert recorded == [[1.0], [2.0], [3.0], [5.0], [4.0]]

    @needs("backward")
    def test_run_is_freed_with_the_graph_of_its_execution(self, sample: Sample) -> None:
        values: list[weakref.ref[Value]] = []

        def forward(_: Any, run: dict[str, Any]) -> None:
            run["value"] = value = Value()
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
