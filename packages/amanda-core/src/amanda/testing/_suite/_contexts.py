"""Meaning 1: every op is seen, and a context tells what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.errors import AmandaError
from amanda.scope.attachment import attachment
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import Executed, op_name, tool


class SeeingTests(
    Rung,
    title="seeing ops",
    implement=(
        "attach", "site", "call_type", "bind", "flatten", "describe", "signature", "shapes", "namespace",
        "Call.op", "Call.inputs", "Call.names", "Call.invoke", "Call.attributes", "Call.op_type",
    ),
):  # fmt: skip
    """Each call of an operator in a scope comes to the tools."""

    def test_the_driver_is_attached_while_a_scope_is_open(self, sample: Sample) -> None:
        with amanda.apply(tool(op_name)) as scope:
            if not any(type(driver) is sample.driver for driver in attachment.attached):
                # Once more by hand, for the error and its traceback: a scope reports a driver that fails.
                attachment.driver(sample.driver).attach()
                pytest.fail(f"no {sample.driver.__name__} is attached: {scope.report}")
        assert not attachment.attached, "after the last scope no driver is attached"

    def test_an_op_is_seen_under_its_name(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0])
        self._assert_seen(sample, "relu", lambda: sample.relu(x))

    def test_an_op_computes_in_a_scope_what_it_computes_without_one(self, sample: Sample) -> None:
        with amanda.apply(tool(op_name)):
            numbers = sample.numbers(sample.relu(sample.tensor([-1.0, 2.0])))
        assert numbers == [0.0, 2.0], f"relu([-1, 2]) is {numbers} in a scope: does `Call.invoke` run the op?"

    def test_every_op_of_the_sample_is_seen_under_its_name(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        square = sample.tensor([[1.0, 2.0], [3.0, 4.0]])
        calls: dict[str, Callable[[], Any]] = {
            "add": lambda: sample.add(x, y),
            "cat": lambda: sample.cat([x, y]),
            "linear": lambda: sample.linear(square, square),
            "pair": lambda: sample.pair(square),
            "many": lambda: sample.many(square, square),
        }
        if "in_place" not in self.lacks:
            calls["add_"] = lambda: sample.add_(x, y)
        if "numbers" not in self.lacks:
            calls["item"] = lambda: sample.item(x)
        for name, call in calls.items():
            self._assert_seen(sample, name, call)

    @staticmethod
    def _assert_seen(sample: Sample, op: str, call: Callable[[], Any]) -> None:
        """Check that a call of one of the sample's ops comes to a tool under the op's name."""
        names: list[str] = []
        with amanda.apply(tool(lambda context: names.append(op_name(context)))):
            call()
        assert sample.op_name(op) in names, (
            f"a call of Sample.{op} came to the tools as {names or 'no op at all'}, where "
            f"{sample.op_name(op)!r} was expected: either `attach` puts no detour where the program finds "
            f"the operator, or Sample.op_names names {op!r} otherwise than the `__name__` of the site's op"
        )

    def test_every_op_of_the_model_is_seen_in_order(self, sample: Sample) -> None:
        names: list[str] = []
        model, x = sample.model(), sample.input()
        with amanda.apply(tool(lambda context: names.append(op_name(context)))):
            model(x)
        linear, relu = sample.op_name("linear"), sample.op_name("relu")
        # A linear layer may have ops of its own beside the product, such as a transposition.
        assert [name for name in names if name in (linear, relu)] == [linear, relu, linear]

    def test_nothing_is_seen_outside_a_scope(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        with amanda.apply(relu):
            pass
        sample.relu(sample.tensor([1.0]))
        assert relu.ids == [], "the detours stay after the last scope: `detach` has to restore the framework"

    def test_an_op_looked_up_before_the_scope_is_seen(self, sample: Sample) -> None:
        # The program's own reference, as by `from framework import relu`.
        early = sample.relu
        relu = Executed(sample.op_name("relu"))
        with amanda.apply(relu):
            early(sample.tensor([1.0]))
        assert len(relu.ids) == 1, "a reference that the program took before the scope goes past the detour"

    def test_an_op_is_in_the_namespace_of_its_driver(self, sample: Sample) -> None:
        recorded: list[amanda.Namespace] = []
        with amanda.apply(tool(lambda context: recorded.append(context.namespace))):
            sample.relu(sample.tensor([1.0]))
        framework, version, mode = recorded[0]
        assert mode in sample.driver.modes
        assert recorded[0].matches(framework)
        assert recorded[0].matches(f"{framework}/{version}")
        assert recorded[0].matches(f"*/*/{mode}")
        assert not recorded[0].matches(f"{framework}/0.0.0")
        assert not recorded[0].matches("nowhere")


class ContextTests(
    Rung,
    title="contexts",
    implement=(
        "is_tensor", "device_of", "Call.attributes", "OpFacts.scope", "OpFacts.variable_of",
        "OpFacts.path_of",
    ),
):  # fmt: skip
    """A context tells what an op is given, and where it is called."""

    @needs("schema")
    def test_inputs_are_in_the_order_of_the_schema(self, sample: Sample) -> None:
        inputs: list[list[Any]] = []
        model, x = sample.model(), sample.input()
        see = tool(lambda context: inputs.append(context.get_inputs()), sample.op_name("linear"))
        with amanda.apply(see):
            model(x)
        assert inputs[0][0] is x
        assert inputs[0][sample.weight_index] is model.first.weight
        assert inputs[1][sample.weight_index] is model.second.weight

    @needs("schema")
    def test_keyword_arguments_are_put_in_their_place(self, sample: Sample) -> None:
        first, second = sample.argument_names
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        recorded: list[list[Any]] = []
        see = tool(lambda context: recorded.append(context.get_inputs()), sample.op_name("add"))
        with amanda.apply(see):
            sample.add(**{second: y, first: x})
        assert recorded[0][0] is x
        assert recorded[0][1] is y

    def test_trailing_defaults_are_left_out(self, sample: Sample) -> None:
        x, y = sample.tensor([1.0]), sample.tensor([2.0])
        recorded: list[int] = []
        see = tool(lambda context: recorded.append(len(context.get_inputs())), sample.op_name("add"))
        with amanda.apply(see):
            sample.add(x, y)
        assert recorded == [2], "`Call.inputs` of add(x, y) has two values, without trailing defaults"

    @needs("values")
    def test_outputs_are_known_after_the_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0])
        outputs: list[Any] = []

        def ask_early(context: OpContext) -> None:
            with pytest.raises(AmandaError, match="require_outputs=True"):
                context.get_outputs()
            outputs.append(None)

        before = tool(ask_early, sample.op_name("relu"))
        after = tool(
            lambda context: outputs.append(context.get_outputs()),
            sample.op_name("relu"),
            require_outputs=True,
        )
        with amanda.apply(before, after):
            result = sample.relu(x)
        assert outputs[0] is None, "before an op its context has no outputs"
        assert outputs[1][0] is result, "`flatten` gives the very objects that the op has returned"

    @needs("schema")
    def test_arguments_that_are_no_tensors_are_attributes_by_name(self, sample: Sample) -> None:
        attributes: list[dict[str, Any]] = []

        def see(context: OpContext) -> None:
            attributes.append(context.get_attrs())

        with amanda.apply(tool(see, sample.op_name("add"))):
            sample.add(sample.tensor([1.0]), 2.5)
        assert attributes[0][sample.argument_names[1]] == 2.5

    def test_the_present_value_of_an_input_is_given(self, sample: Sample) -> None:
        values: list[Any] = []
        model, x = sample.model(), sample.input()
        see = tool(
            lambda context: values.append(context.get_value(sample.weight_index)), sample.op_name("linear")
        )
        with amanda.apply(see):
            model(x)
        assert sample.bits(values[0]) == sample.bits(model.first.weight)

    def test_the_weight_of_a_layer_is_a_variable(self, sample: Sample) -> None:
        weights, others, paths = [], [], []

        def see(context: OpContext) -> None:
            weights.append(context.get_variable(sample.weight_index))
            others.append(context.get_variable(1 - sample.weight_index))
            paths.append(context.get_variable_path(weights[-1]))

        model, x = sample.model(), sample.input()
        with amanda.apply(tool(see, sample.op_name("linear"))):
            model(x)
        assert None not in weights, "`OpFacts.variable_of` gives the parameter that an input is"
        assert others == [None, None], "an input that the program computes is no variable"
        assert weights[0] is not weights[1], "each layer has a weight of its own"
        # A driver that does not know the model has no paths.
        assert paths in (["first.weight", "second.weight"], [None, None])

    def test_a_context_names_the_device_of_its_tensors(self, sample: Sample) -> None:
        devices = []
        model, x = sample.model(), sample.input()
        with amanda.apply(
            tool(lambda context: devices.append(context.get_device()), sample.op_name("linear"))
        ):
            model(x)
        assert len(devices) == 2, "two layers call `linear`"
        # In graphs a tensor may have no device before the run.
        assert set(devices) <= {sample.device(x), ""}

    def test_a_context_knows_its_module_and_line(self, sample: Sample) -> None:
        recorded: list[tuple[str, str]] = []
        model, x = sample.model(), sample.input()
        outer = sample.module(model)
        outer.inside = model
        see = tool(
            lambda context: recorded.append((context.get_scope(), context.get_source())),
            sample.op_name("linear"),
        )
        with amanda.apply(see):
            model(x)
        paths = [scope for scope, _ in recorded]
        assert paths == ["first", "second"], f"`describe` sets OpFacts.scope to {paths}"
        assert all(":" in source and "/amanda/interceptor/" not in source for _, source in recorded)

    def test_tools_share_the_context(self, sample: Sample) -> None:
        recorded: list[Any] = []
        first = tool(lambda context: context.update(type="rectifier"), sample.op_name("relu"))
        second = tool(lambda context: recorded.append(context["type"]), sample.op_name("relu"))
        with amanda.apply(first, second):
            sample.relu(sample.tensor([1.0]))
        assert recorded == ["rectifier"]
