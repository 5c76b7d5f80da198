"""Meanings 2, 5 and 7: backward ops, their contexts and routines, and gradients of changed values."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.errors import ActionError, ReplaceConflictError, RoutineError
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import add_routine, inserter, op_name, tool


class BackwardTests(
    Rung,
    title="backward ops",
    implement=(
        "needs_grad", "capture_backward_ops", "note_op_inputs", "attach_trace", "detach_value",
        "mark_backward_analysed", "BackwardStep.has_work", "BackwardStep.run_before",
        "BackwardStep.run_after",
    ),
):  # fmt: skip
    """Backward ops come to the tools, each with its forward op."""

    @needs("backward")
    def test_a_backward_op_is_seen_under_its_name(self, sample: Sample) -> None:
        names: list[str] = []
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(tool(lambda context: names.append(op_name(context)), backward=True)):
            sample.backward(sample.relu(x))
        assert sample.relu_backward in names, (
            f"the backward pass of relu came to the tools as {names or 'no op at all'}, where "
            f"{sample.relu_backward!r} was expected: `attach_trace` leaves the trace with the backward "
            "ops, and the backward pass runs a `BackwardStep` around each"
        )

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
        assert recorded == [([1.0, 1.0], [0.0, 1.0])], (
            f"`BackwardStep.run_before` and `run_after` of {sample.relu_backward} saw {recorded}, pairs of "
            "the gradients that enter and leave it; relu of [-1, 2] has one, with [1, 1] and [0, 1]"
        )

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
        many = [context for context in contexts if context.get_op().__name__ == sample.op_name("many")]
        names = [name for name in map(op_name, many) if name != sample.leaf_backward]
        assert len(names) >= sample.many_backward_ops, (
            f"`many` has the backward ops {names}, where "
            f"Sample.many_backward_ops declares at least {sample.many_backward_ops}"
        )
        assert len({context.get_backward_op_id() for context in many}) == len(many)
        assert len({context.get_op_id() for context in many}) == 1
        # No context has a key of another: each inherits from the forward op alone.
        assert all(list(context) == [op_name(context)] for context in many)

    @needs("backward")
    def test_backward_analyses_see_what_forward_analyses_put_in(self, sample: Sample) -> None:
        recorded: list[tuple[Any, str]] = []

        def forward(context: OpContext) -> None:
            context["mark"] = context.get_op_id()

        def backward(context: OpContext) -> None:
            assert context.is_backward()
            recorded.append((context["mark"], op_name(context)))
            assert context["mark"] == context.get_op_id()

        recorder = add_routine(tool(forward), backward, backward=True)
        model, x = sample.model(), sample.input()
        with amanda.apply(recorder):
            sample.backward(model(x))
        names = [name for _, name in recorded]
        assert sample.relu_backward in names, f"of the model's backward ops tools saw {names}"
        # Two layers and the activation at least; a framework may run more ops.
        ops = len({mark for mark, _ in recorded})
        assert ops >= 3, f"backward ops of {ops} forward ops were seen; the model has at least 3"

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
    def test_gradients_are_changed_before_and_after_a_backward_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        before = inserter("insert_before_backward_op", sample.relu_backward, lambda grad: grad * 3)
        after = inserter("insert_after_backward_op", sample.relu_backward, lambda grad: grad + 1)
        with amanda.apply(before, after):
            sample.backward(sample.relu(x))
        # relu passes no gradient at -1 and the whole at 2: 3 * 0 + 1 and 3 * 1 + 1.
        assert sample.numbers(sample.gradient(x)) == [1.0, 4.0]

    @needs("backward")
    def test_changed_gradients_hold_for_every_backward_pass(self, sample: Sample) -> None:
        module = sample.module(lambda x: sample.relu(x))
        gradients = []
        with amanda.apply(inserter("insert_before_backward_op", sample.relu_backward, lambda grad: grad * 3)):
            for _ in range(3):
                x = sample.tensor([2.0], requires_grad=True)
                sample.backward(module(x))
                gradients.append(sample.numbers(sample.gradient(x)))
        assert gradients == [[3.0]] * 3

    @needs("backward")
    def test_a_gradient_that_is_changed_keeps_its_shape(self, sample: Sample) -> None:
        x = sample.tensor([1.0, 2.0], requires_grad=True)
        change = inserter(
            "insert_before_backward_op", sample.relu_backward, lambda grad: sample.cat([grad, grad])
        )
        with amanda.apply(change), pytest.raises(RoutineError, match=r"shape \(4,\)"):
            sample.backward(sample.relu(x))

    @needs("backward")
    def test_a_replacement_of_a_backward_op_gives_the_gradients(self, sample: Sample) -> None:
        module = sample.module(lambda x: sample.relu(x))
        gradients = []
        with amanda.apply(inserter("replace_backward_op", sample.relu_backward, lambda grad: grad * 100)):
            for _ in range(2):
                x = sample.tensor([-1.0, 2.0], requires_grad=True)
                sample.backward(module(x))
                gradients.append(sample.numbers(sample.gradient(x)))
        assert gradients == [[100.0, 100.0]] * 2

    @needs("backward")
    def test_two_tools_that_replace_one_backward_op_are_both_named(self, sample: Sample) -> None:
        class Rounding(amanda.Tool):
            pass

        class Pruner(amanda.Tool):
            pass

        tools = [
            add_routine(
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

    @needs("backward", "leaves")
    def test_the_gradient_of_a_leaf_is_changed_before_it_is_stored(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        change = inserter("insert_before_backward_op", sample.leaf_backward, lambda grad: grad * 3)
        with amanda.apply(change):
            sample.backward(sample.relu(x))
        assert sample.numbers(sample.gradient(x)) == [0.0, 3.0]

    @needs("backward", "leaves")
    def test_what_stores_a_gradient_is_not_replaced(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        change = inserter("replace_backward_op", sample.leaf_backward, lambda grad: grad)
        # The error says what works instead.
        with amanda.apply(change), pytest.raises(ActionError, match="insert_before_backward_op"):
            sample.backward(sample.relu(x))

    @needs("backward")
    def test_all_points_of_an_op_run_in_order(self, sample: Sample) -> None:
        order: list[str] = []
        recorder = tool(lambda _: None)
        for action in ("insert_before_op", "insert_after_op"):
            add_routine(recorder, _recording(action, order), sample.op_name("relu"))
        for action in ("insert_before_backward_op", "insert_after_backward_op"):
            add_routine(recorder, _recording(action, order), sample.relu_backward, backward=True)
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
    def test_run_goes_from_the_forward_to_the_backward_routines_of_one_execution(
        self, sample: Sample
    ) -> None:
        def forward(value: Any, run: dict[str, Any]) -> None:
            # Numbers, since a tensor in the dict would keep the execution's memory until its backward pass.
            run["input"] = sample.numbers(value)

        recorded: list[Any] = []

        def backward(grad: Any, run: dict[str, Any]) -> None:
            recorded.append(run["input"])

        name = sample.op_name("relu")
        recorder = tool(lambda context: context.insert_before_op(forward, [0]), name)
        add_routine(
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


class GradientTests(
    Rung,
    title="gradients",
    implement=(
        "straight_through", "differentiable_copy", "write", "restore_autodiff_roles", "call_in_autodiff",
    ),
):  # fmt: skip
    """Values that routines give have gradients, which reach the originals."""

    @needs("backward")
    def test_gradients_pass_an_isolated_routine_straight_through(self, sample: Sample) -> None:
        x = sample.tensor([[2.0]], requires_grad=True)
        weight = sample.parameter([[3.0]])
        double = inserter(
            "insert_before_op", sample.op_name("linear"), lambda w: w * 2, [sample.weight_index]
        )
        with amanda.apply(double):
            result = sample.linear(x, weight)
            sample.backward(result)
        assert sample.numbers(result) == [12.0]
        assert sample.numbers(sample.gradient(x)) == [6.0]  # the op's backward is computed on the value
        assert sample.numbers(sample.gradient(weight)) == [2.0]  # the edge to the original is the identity

    @needs("backward")
    def test_an_output_that_is_changed_passes_gradients_straight_through(self, sample: Sample) -> None:
        x = sample.tensor([2.0], requires_grad=True)
        with amanda.apply(inserter("insert_after_op", sample.op_name("relu"), lambda y: y * 5)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.numbers(result) == [10.0]
        assert sample.numbers(sample.gradient(x)) == [1.0]

    @needs("backward")
    def test_gradients_reach_the_original_weights_of_the_model(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        weights = [model.first.weight, model.second.weight]
        # Cut off from its value, a weight would have no gradient; the edge between them is the identity.
        zero = inserter("insert_before_op", sample.op_name("linear"), lambda w: w * 0, [sample.weight_index])
        with amanda.apply(zero):
            sample.backward(model(x))
        assert all(sample.gradient(weight) is not None for weight in weights)
        # The value takes the weight's place in the op, not in the model.
        assert model.first.weight is weights[0]

    @needs("backward")
    def test_another_floating_type_is_cast_back(self, sample: Sample) -> None:
        wide, narrow, *_ = sample.dtypes
        recorded: list[Any] = []
        # A third has other bits in each floating type, so that the cast can be seen.
        x = sample.tensor([1 / 3], wide, requires_grad=True)

        def round_to_narrow(value: Any) -> Any:
            return sample.cast(value, narrow)

        change = inserter("insert_before_op", sample.op_name("relu"), round_to_narrow)
        with amanda.apply(change, inserter("insert_before_op", sample.op_name("relu"), recorded.append)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.dtype(result) == sample.dtype(recorded[0]) == wide
        # Rounded to the narrow type, whose relative error is below 1e-3, and not computed in the wide one.
        assert 0 < abs(sample.numbers(result)[0] - 1 / 3) < 1e-3
        assert sample.dtype(sample.gradient(x)) == wide

    @needs("backward", "in_place")
    def test_an_in_place_op_passes_gradients_straight_through(self, sample: Sample) -> None:
        x = sample.tensor([1.0], requires_grad=True)
        with amanda.apply(inserter("insert_after_op", sample.op_name("add_"), lambda y: y * 10)):
            # An op in place on a leaf that needs a gradient is an error of the framework itself.
            y = sample.add(x, 0.0)
            sample.add_(y, 1.0)
            sample.backward(y)
        assert sample.numbers(y) == [20.0]
        assert sample.numbers(sample.gradient(x)) == [1.0]

    @needs("backward")
    def test_a_differentiable_routine_takes_part_in_the_backward_pass(self, sample: Sample) -> None:
        x = sample.tensor([[2.0]], requires_grad=True)
        weight = sample.parameter([[3.0]])
        double = amanda.differentiable(lambda w: w * 2)
        change = inserter("insert_before_op", sample.op_name("linear"), double, [sample.weight_index])
        with amanda.apply(change):
            sample.backward(sample.linear(x, weight))
        assert sample.numbers(sample.gradient(weight)) == [4.0]

    @needs("backward")
    def test_autodiff_enabled_makes_routines_differentiable(self, sample: Sample) -> None:
        weights = [sample.parameter([[3.0]]) for _ in range(3)]
        x = sample.tensor([[2.0]])
        change = inserter(
            "insert_before_op", sample.op_name("linear"), lambda w: w * 2, [sample.weight_index]
        )
        with amanda.apply(change):
            with amanda.autodiff_enabled():
                sample.backward(sample.linear(x, weights[0]))
                with amanda.autodiff_disabled():
                    sample.backward(sample.linear(x, weights[1]))
            sample.backward(sample.linear(x, weights[2]))
        # 4 where the doubling takes part in the backward pass, 2 where the gradient passes straight through.
        assert [sample.numbers(sample.gradient(weight)) for weight in weights] == [[4.0], [2.0], [2.0]]

    @needs("backward")
    def test_a_differentiable_routine_is_free_in_shape(self, sample: Sample) -> None:
        x = sample.tensor([1.0, 2.0], requires_grad=True)
        twice = amanda.differentiable(lambda value: sample.cat([value, value]))
        with amanda.apply(inserter("insert_before_op", sample.op_name("relu"), twice)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.shape(result) == (4,)
        assert sample.numbers(sample.gradient(x)) == [2.0, 2.0]

    @needs("backward")
    def test_a_replacement_takes_part_in_the_backward_pass(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(inserter("replace_op", sample.op_name("relu"), lambda value: value * 10)):
            sample.backward(sample.relu(x))
        assert sample.numbers(sample.gradient(x)) == [10.0, 10.0]

    @needs("backward")
    def test_the_identity_as_a_replacement_removes_the_op(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        with amanda.apply(inserter("replace_op", sample.op_name("relu"), lambda value: value)):
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
        with amanda.apply(inserter("replace_op", sample.op_name("relu"), negated)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.numbers(result) == [1.0, 0.0]
        assert sample.numbers(sample.gradient(x)) == [-1.0, 0.0]


def _recording(action: str, order: list[str]) -> Any:
    return lambda context: getattr(context, action)(lambda *_: order.append(action))
