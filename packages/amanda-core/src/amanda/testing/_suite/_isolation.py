"""Meaning 5: a routine runs outside autodiff, and its value takes the original's place."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda.errors import MutationError, RoutineError
from amanda.testing._sample import Sample, needs
from amanda.testing._tools import inserting, notes


class IsolationTests:
    """Isolation from autodiff."""

    @needs("backward")
    def test_gradients_pass_an_isolated_routine_straight_through(self, sample: Sample) -> None:
        x = sample.tensor([[2.0]], requires_grad=True)
        weight = sample.parameter([[3.0]])
        double = inserting("insert_before_op", sample.name("linear"), lambda w: w * 2, [sample.weight_index])
        with amanda.apply(double):
            result = sample.linear(x, weight)
            sample.backward(result)
        assert sample.numbers(result) == [12.0]
        assert sample.numbers(sample.gradient(x)) == [6.0]  # the op's backward is computed on the value
        assert sample.numbers(sample.gradient(weight)) == [2.0]  # the edge to the original is the identity

    @needs("backward")
    def test_an_output_that_is_changed_passes_gradients_straight_through(self, sample: Sample) -> None:
        x = sample.tensor([2.0], requires_grad=True)
        with amanda.apply(inserting("insert_after_op", sample.name("relu"), lambda y: y * 5)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.numbers(result) == [10.0]
        assert sample.numbers(sample.gradient(x)) == [1.0]

    @needs("backward")
    def test_gradients_reach_the_original_weights_of_the_model(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        weights = [model.first.weight, model.second.weight]
        # Cut off from its value, a weight would have no gradient at all; the edge between them is the
        # identity.
        zero = inserting("insert_before_op", sample.name("linear"), lambda w: w * 0, [sample.weight_index])
        with amanda.apply(zero):
            sample.backward(model(x))
        assert all(sample.gradient(weight) is not None for weight in weights)
        # The value takes the weight's place in the op, not in the model.
        assert model.first.weight is weights[0]

    @needs("backward")
    def test_a_differentiable_routine_takes_part_in_the_backward_pass(self, sample: Sample) -> None:
        x = sample.tensor([[2.0]], requires_grad=True)
        weight = sample.parameter([[3.0]])
        double = amanda.differentiable(lambda w: w * 2)
        change = inserting("insert_before_op", sample.name("linear"), double, [sample.weight_index])
        with amanda.apply(change):
            sample.backward(sample.linear(x, weight))
        assert sample.numbers(sample.gradient(weight)) == [4.0]

    @needs("backward")
    def test_autodiff_enabled_makes_routines_differentiable(self, sample: Sample) -> None:
        weights = [sample.parameter([[3.0]]) for _ in range(3)]
        x = sample.tensor([[2.0]])
        change = inserting("insert_before_op", sample.name("linear"), lambda w: w * 2, [sample.weight_index])
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
        with amanda.apply(inserting("insert_before_op", sample.name("relu"), twice)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.shape(result) == (4,)
        assert sample.numbers(sample.gradient(x)) == [2.0, 2.0]

    def test_a_value_handed_back_unchanged_adds_nothing(self, sample: Sample) -> None:
        x = sample.tensor([1.0], requires_grad=True)
        recorded: list[Any] = []
        keep = inserting("insert_before_op", sample.name("relu"), lambda value: value)
        with amanda.apply(keep):
            result = sample.relu(x)
            with amanda.apply(inserting("insert_before_op", sample.name("add"), recorded.append, [0])):
                sample.add(result, 1.0)
        # The same object: a new one would have a node of autodiff more.
        assert recorded[0] is result

    def test_a_change_of_shape_is_an_error_at_the_routine(self, sample: Sample) -> None:
        def widen(value: Any) -> Any:
            return sample.cat([value, value])

        with (
            amanda.apply(inserting("insert_before_op", sample.name("relu"), widen)),
            pytest.raises(RoutineError, match=r"shape \(4,\) where shape \(2,\).*differentiable") as caught,
        ):
            sample.relu(sample.tensor([1.0, 2.0]))
        assert "widen" in "".join(notes(caught.value))

    def test_a_change_from_real_to_complex_is_an_error(self, sample: Sample) -> None:
        wide, _, _, imaginary = sample.dtypes
        change = inserting("insert_before_op", sample.name("add"), lambda v: sample.cast(v, imaginary), [0])
        with amanda.apply(change), pytest.raises(RoutineError, match="complex"):
            sample.add(sample.tensor([1.0], wide), 1.0)

    @needs("backward")
    def test_another_floating_type_is_cast_back(self, sample: Sample) -> None:
        wide, narrow, *_ = sample.dtypes
        recorded: list[Any] = []
        # A third has other bits in each floating type, so that the cast can be seen.
        x = sample.tensor([1 / 3], wide, requires_grad=True)

        def round_to_narrow(value: Any) -> Any:
            return sample.cast(value, narrow)

        change = inserting("insert_before_op", sample.name("relu"), round_to_narrow)
        with amanda.apply(change, inserting("insert_before_op", sample.name("relu"), recorded.append)):
            result = sample.relu(x)
            sample.backward(result)
        assert sample.dtype(result) == sample.dtype(recorded[0]) == wide
        # Rounded to the narrow type, whose relative error is below 1e-3, and not computed in the wide one.
        assert 0 < abs(sample.numbers(result)[0] - 1 / 3) < 1e-3
        assert sample.dtype(sample.gradient(x)) == wide

    @needs("mutable_tensors")
    @pytest.mark.parametrize("action", ["insert_before_op", "insert_after_op"])
    def test_writing_into_a_given_value_is_an_error(self, sample: Sample, action: Any) -> None:
        with (
            amanda.apply(inserting(action, sample.name("relu"), sample.overwrite)),
            pytest.raises(MutationError, match="return a new value"),
        ):
            sample.relu(sample.tensor([1.0]))

    @needs("in_place")
    def test_a_changed_output_of_an_in_place_op_is_in_the_users_tensor(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        with amanda.apply(inserting("insert_after_op", sample.name("add_"), lambda y: y * 10)):
            result = sample.add_(x, 1.0)
        assert result is x
        assert sample.numbers(x) == [20.0]

    @needs("in_place")
    def test_a_changed_input_of_an_in_place_op_is_written_to_the_users_tensor(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        with amanda.apply(inserting("insert_before_op", sample.name("add_"), lambda y: y * 10, [0])):
            result = sample.add_(x, 1.0)
        assert result is x
        assert sample.numbers(x) == [11.0]

    @needs("backward", "in_place")
    def test_an_in_place_op_passes_gradients_straight_through(self, sample: Sample) -> None:
        x = sample.tensor([1.0], requires_grad=True)
        with amanda.apply(inserting("insert_after_op", sample.name("add_"), lambda y: y * 10)):
            # An op in place on a leaf that needs a gradient is an error of the framework itself.
            y = sample.add(x, 0.0)
            sample.add_(y, 1.0)
            sample.backward(y)
        assert sample.numbers(y) == [20.0]
        assert sample.numbers(sample.gradient(x)) == [1.0]

    @needs("out")
    def test_a_changed_output_is_in_the_tensor_given_as_out(self, sample: Sample) -> None:
        x, y, out = sample.tensor([1.0]), sample.tensor([2.0]), sample.tensor([0.0])
        with amanda.apply(inserting("insert_after_op", sample.name("add"), lambda y: y * 10)):
            result = sample.add(x, y, out=out)
        assert result is out
        assert sample.numbers(out) == [30.0]

    @needs("backward")
    def test_a_gradient_that_is_changed_keeps_its_shape(self, sample: Sample) -> None:
        x = sample.tensor([1.0, 2.0], requires_grad=True)
        change = inserting(
            "insert_before_backward_op", sample.relu_backward, lambda grad: sample.cat([grad, grad])
        )
        with amanda.apply(change), pytest.raises(RoutineError, match=r"shape \(4,\)"):
            sample.backward(sample.relu(x))
