"""A look at the sample before any driver: the framework alone does what the suite takes for granted."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import free_garbage, trained_bits


class SampleTests(Rung, title="the sample"):
    """Without a scope the sample does what the suite takes for granted; the driver has no part in it."""

    def test_tensors_hold_what_they_are_made_of(self, sample: Sample) -> None:
        for values, numbers, shape in (
            ([1.0, -2.0], [1.0, -2.0], (2,)),
            ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (2, 3)),
        ):
            for requires_grad in (False, True):
                tensor = sample.tensor(values, requires_grad=requires_grad)
                assert_numbers(sample, "numbers(tensor(...))", tensor, numbers)
                assert sample.shape(tensor) == shape, f"Sample.shape of tensor({values})"
                assert sample.dtype(tensor) == sample.dtypes[0], "Sample.tensor makes the first of `dtypes`"
            assert sample.bits(tensor) == sample.bits(sample.tensor(values)), "equal tensors have equal bits"
            assert sample.bits(tensor) != sample.bits(tensor * 2.0), "Sample.bits of a tensor and its double"
        assert_numbers(sample, "tensor * 2 + 1", sample.tensor([1.0, -2.0]) * 2.0 + 1.0, [3.0, -3.0])
        assert sample.numbers(sample.parameter([[3.0]])) == [3.0], "Sample.parameter holds its values"

    def test_tensors_are_cast_to_each_real_dtype(self, sample: Sample) -> None:
        for dtype in sample.dtypes[:3]:
            cast = sample.cast(sample.tensor([1.0, 2.0]), dtype)
            assert sample.dtype(cast) == dtype, f"Sample.cast to {dtype} gives {sample.dtype(cast)}"
            assert_numbers(sample, f"cast to {dtype}", cast, [1, 2])

    @needs("complex")
    def test_tensors_are_cast_to_a_complex_dtype(self, sample: Sample) -> None:
        assert len(sample.dtypes) == 4, "the fourth of Sample.dtypes is complex; or lacks has `complex`"
        cast = sample.cast(sample.tensor([1.0]), sample.dtypes[3])
        assert sample.dtype(cast) == sample.dtypes[3], "Sample.cast to the fourth of `dtypes`"

    def test_ops_compute_what_their_names_say(self, sample: Sample) -> None:
        x, y = sample.tensor([-1.0, 2.0]), sample.tensor([10.0, 20.0])
        assert_numbers(sample, "relu([-1, 2])", sample.relu(x), [0.0, 2.0])
        assert_numbers(sample, "add(x, y)", sample.add(x, y), [9.0, 22.0])
        assert_numbers(sample, "add(x, 1.0)", sample.add(x, 1.0), [0.0, 3.0])
        assert_numbers(sample, "cat([x, y])", sample.cat([x, y]), [-1.0, 2.0, 10.0, 20.0])
        square = sample.tensor([[1.0, 2.0], [3.0, 4.0]])
        assert len(sample.pair(square)) == 2, "Sample.pair gives two tensors"
        assert sample.numbers(sample.many(square, square)), "Sample.many gives a tensor"
        product = sample.linear(sample.tensor([[2.0]]), sample.parameter([[3.0]]))
        assert_numbers(sample, "linear([[2]], [[3]])", product, [6.0])

    @needs("schema")
    def test_add_takes_its_arguments_by_name(self, sample: Sample) -> None:
        first, second = sample.argument_names
        result = sample.add(**{second: sample.tensor([2.0]), first: sample.tensor([1.0])})
        assert_numbers(sample, f"add({second}=[2], {first}=[1])", result, [3.0])

    @needs("in_place")
    def test_add_in_place_writes_into_the_tensor(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        assert sample.add_(x, 1.0) is x, "Sample.add_ returns the tensor that it writes into"
        assert_numbers(sample, "x after add_(x, 1)", x, [2.0])

    @needs("out")
    def test_add_writes_into_the_tensor_given_as_out(self, sample: Sample) -> None:
        out = sample.tensor([0.0])
        assert sample.add(sample.tensor([1.0]), sample.tensor([2.0]), out=out) is out
        assert_numbers(sample, "out after add(x, y, out=out)", out, [3.0])

    @needs("numbers")
    def test_item_gives_a_number_of_python(self, sample: Sample) -> None:
        assert sample.item(sample.tensor([5.0])) == 5.0, "Sample.item of [5]"

    @needs("auxiliary_state")
    def test_a_batch_norm_updates_its_statistics(self, sample: Sample) -> None:
        statistics = sample.running_statistics()
        before = [sample.numbers(tensor) for tensor in statistics]
        result = sample.batch_norm(sample.tensor(BATCH), *statistics)
        assert sample.shape(result) == (3, 2), "Sample.batch_norm keeps the shape (3, 2)"
        assert [sample.numbers(tensor) for tensor in statistics] != before, "it updates its statistics"

    def test_a_model_is_two_layers_with_a_relu_between(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        by_hand = model.second(sample.relu(model.first(x)))
        assert_numbers(sample, "model(x) and second(relu(first(x)))", model(x), sample.numbers(by_hand))
        assert [sample.shape(layer.weight) for layer in (model.first, model.second)] == [(3, 3)] * 2
        assert sample.bits(sample.model()(x)) == sample.bits(model(x)), "every model has the same weights"

    def test_a_module_calls_its_function(self, sample: Sample) -> None:
        module = sample.module(lambda x: sample.relu(x))
        assert_numbers(sample, "module(relu)([-1, 2])", module(sample.tensor([-1.0, 2.0])), [0.0, 2.0])
        outer = sample.module(lambda x: module(x))
        outer.part = module
        assert_numbers(sample, "a module in a module", outer(sample.tensor([-1.0, 2.0])), [0.0, 2.0])

    def test_a_step_of_the_model_has_the_same_bits_each_time(self, sample: Sample) -> None:
        assert trained_bits(sample) == trained_bits(sample), (
            "the framework itself computes other bits the second time"
        )

    @needs("backward")
    def test_backward_gives_leaves_and_weights_their_gradients(self, sample: Sample) -> None:
        for _ in range(2):
            x = sample.tensor([-1.0, 2.0], requires_grad=True)
            assert sample.gradient(x) is None, "Sample.gradient is None before a backward pass"
            sample.backward(sample.relu(x))
            assert_numbers(sample, "the gradient of sum(relu([-1, 2]))", sample.gradient(x), [0.0, 1.0])
        weight = sample.parameter([[3.0]])
        sample.backward(sample.linear(sample.tensor([[2.0]]), weight))
        assert_numbers(sample, "the gradient of the weight of linear", sample.gradient(weight), [2.0])
        model = sample.model()
        sample.backward(model(sample.input()))
        for layer in (model.first, model.second):
            assert sample.gradient(layer.weight) is not None, "backward reaches the weights of the model"

    @needs("backward")
    def test_two_results_may_go_backward_in_any_order(self, sample: Sample) -> None:
        leaves = [sample.tensor([number], requires_grad=True) for number in (1.0, 2.0)]
        results = [sample.relu(leaf) for leaf in leaves]
        for result in reversed(results):
            sample.backward(result)
        for leaf in leaves:
            assert_numbers(sample, "the gradient of relu", sample.gradient(leaf), [1.0])

    @needs("backward", "checkpoints")
    def test_a_checkpoint_has_the_gradient_of_its_function(self, sample: Sample) -> None:
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        result = sample.checkpoint(lambda value: sample.relu(value), x)
        assert_numbers(sample, "checkpoint(relu, [-1, 2])", result, [0.0, 2.0])
        sample.backward(result)
        assert_numbers(sample, "the gradient of a checkpoint", sample.gradient(x), [0.0, 1.0])

    @needs("weak_references")
    def test_a_tensor_is_freed_with_its_last_reference(self, sample: Sample) -> None:
        x = sample.tensor([1.0])
        dead = weakref.ref(x)
        del x
        free_garbage(sample)
        assert dead() is None, (
            "the tensor lives on: does Sample.tensor keep it, or Sample.wait_for_framework not wait?"
        )

    @needs("pickles")
    def test_a_model_is_copied_and_pickled(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert sample.bits(twin(x)) == sample.bits(model(x)), "a copy of the model computes the same"

    def test_an_op_raises_an_error_of_its_own(self, sample: Sample) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - the framework's own
            sample.bits(sample.linear(sample.tensor([[1.0, 2.0, 3.0, 4.0]]), sample.parameter([[1.0]])))

    def test_an_op_runs_on_a_thread(self, sample: Sample) -> None:
        results: list[Sequence[Any]] = []
        x = sample.tensor([-1.0, 2.0])
        thread = threading.Thread(target=lambda: results.append(sample.numbers(sample.relu(x))))
        thread.start()
        thread.join()
        assert results == [[0.0, 2.0]], "the framework runs an op on a thread that is not the main one"

    def test_an_op_beyond_the_driver_runs(self, sample: Sample) -> None:
        sample.run_uninstrumentable_op()

    @needs("vmap")
    def test_vmap_maps_a_function(self, sample: Sample) -> None:
        mapped = sample.vmap(lambda x: sample.relu(x))
        assert_numbers(sample, "vmap(relu)", mapped(sample.tensor([[-1.0], [2.0]])), [0.0, 2.0])

    @needs("grad")
    def test_grad_gives_a_gradient(self, sample: Sample) -> None:
        gradient = sample.grad(lambda x: sample.relu(x))
        assert_numbers(sample, "grad(relu)(2)", gradient(sample.tensor(2.0)), [1.0])

    @needs("jvp")
    def test_jvp_gives_a_tangent(self, sample: Sample) -> None:
        tangent = sample.jvp(lambda x: sample.relu(x))(sample.tensor([-1.0, 2.0]), sample.tensor([3.0, 3.0]))
        assert_numbers(sample, "jvp(relu) at [-1, 2] along [3, 3]", tangent, [0.0, 3.0])


BATCH = [[1.0, -2.0], [3.0, 5.0], [-0.5, 0.25]]


def assert_numbers(sample: Sample, what: str, tensor: Any, expected: Sequence[Any]) -> None:
    """Check what a tensor of the sample holds; the failure names the expression."""
    assert tensor is not None, f"the sample gives None for {what}, not {expected}"
    numbers = sample.numbers(tensor)
    assert numbers == expected, f"the sample gives {numbers} for {what}, not {expected}"
