"""What the zoo compares is enough to notice what a tool might leave behind."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from . import timm_models, transformers_models
from .observation import apart, computed, differences, is_within, nudged, observed

MODEL = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
INPUTS = {"input": torch.linspace(-1, 1, 6).reshape(2, 3)}


def seen_differences(change: Callable[[Any, torch.Tensor], Any]) -> set[str]:
    """What differs when `change` is done to the model or its input within each step, without its number."""
    calls: list[tuple[nn.Module, torch.Tensor]] = []

    class Watched(nn.Sequential):
        def forward(self, input: torch.Tensor) -> Any:
            calls.append((self, input))
            return super().forward(input)

    @contextmanager
    def scope() -> Any:
        yield
        change(*calls[-1])

    model = Watched(*MODEL)
    within: Callable[[], AbstractContextManager[Any]] = scope
    different = differences(observed(model, INPUTS), observed(model, INPUTS, within))
    return {name.partition(": ")[2] or name for name in different}


def test_a_step_is_the_same_twice() -> None:
    assert seen_differences(lambda model, _: None) == set()


def test_a_changed_gradient_is_noticed() -> None:
    assert seen_differences(lambda model, _: model[1].bias.grad.mul_(2)) == {"gradient of 1.bias"}
    assert seen_differences(lambda model, _: model[1].bias.grad.add_(0)) == {"gradient of 1.bias"}


@pytest.mark.parametrize(
    ("draw", "name"),
    [(torch.rand, "torch's"), (np.random.rand, "numpy's"), (lambda _: random.random(), "Python's")],
)
def test_a_random_number_that_is_drawn_is_noticed(draw: Callable[[int], Any], name: str) -> None:
    assert seen_differences(lambda model, _: draw(1)) == {f"{name} random state"}


def test_what_is_left_on_a_module_is_noticed() -> None:
    assert "attributes of 1" in seen_differences(lambda model, _: setattr(model[1], "mark", 1))
    assert "attributes of 1" in seen_differences(
        lambda model, _: model[1].register_forward_hook(lambda *_: None)
    )
    assert "class of 2" in seen_differences(lambda model, _: model.__setattr__("2", nn.Dropout1d()))
    assert "state_dict" in seen_differences(lambda model, _: model[1].register_buffer("mark", torch.ones(1)))


def test_what_is_left_on_a_tensor_is_noticed() -> None:
    assert "tensor 0.weight" in seen_differences(lambda model, _: setattr(model[0].weight, "mark", 1))
    assert "tensor 0.weight" in seen_differences(
        lambda model, _: model[0].weight.register_hook(lambda grad: None)
    )
    assert "tensor 1.running_mean" in seen_differences(lambda model, _: model[1].running_mean.add_(0))
    assert "tensor 0.weight" in seen_differences(lambda model, _: model[0].weight.requires_grad_(False))
    assert "the same objects" in seen_differences(
        lambda model, _: setattr(model[0], "bias", nn.Parameter(model[0].bias + 0))
    )


def test_a_changed_input_is_noticed() -> None:
    assert seen_differences(lambda _, input: input.add_(0)) == {"input input"}


def test_every_model_of_the_zoo_has_a_name_of_its_own() -> None:
    for module, least in ((transformers_models, 80), (timm_models, 150)):
        names = [subject.name for subject in module.subjects()]
        assert len(names) == len(set(names)) >= least
        assert set(names) >= module.SAMPLE


def test_rounding_of_weights_excuses_a_gradient_that_is_zero_but_for_rounding_and_no_other() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)), {"input": torch.rand(16, 3)}
    expected, control = computed(model, inputs), computed(nudged(model), inputs)
    # The gradient of a bias ahead of a normalisation is 0.
    noise, gradient = "gradient of 0.bias", "gradient of 1.weight"
    tensors = {
        **expected,
        noise: 3 * control[noise] - 2 * expected[noise],
        gradient: expected[gradient] * 1.01,
    }
    assert set(apart(tensors, expected)) == {noise, gradient}
    assert is_within(tensors[noise], expected[noise], control[noise])
    assert not is_within(tensors[gradient], expected[gradient], control[gradient])
