"""Tools on a program as autograd's users write it: functions of a list of arrays, and gradient descent."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad
from sklearn.datasets import load_digits

import amanda
from amanda.drivers.autograd import mark_parameters
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.prune import PruneTool

Parameters = list[tuple[Any, Any]]
SIZES = (64, 32, 10)
BATCH = 100


def initial() -> Parameters:
    """Return weights and biases of the layers."""
    random = np.random.RandomState(0)
    return [(random.randn(i, o) * 0.1, np.zeros(o)) for i, o in pairwise(SIZES)]


def logits(parameters: Parameters, x: Any) -> Any:
    """Return the outputs of the network."""
    for weight, bias in parameters[:-1]:
        x = anp.tanh(anp.dot(x, weight) + bias)
    weight, bias = parameters[-1]
    return anp.dot(x, weight) + bias


def loss(parameters: Parameters, x: Any, targets: Any) -> Any:
    """Return the mean cross entropy."""
    outputs = logits(parameters, x)
    shifted = outputs - anp.max(outputs, axis=1, keepdims=True)
    return anp.mean(anp.log(anp.sum(anp.exp(shifted), axis=1)) - anp.sum(shifted * targets, axis=1))


def overconfident_loss(parameters: Parameters, x: Any, targets: Any) -> Any:
    """Return a cross entropy that is NaN where a probability has become 0."""
    powers = anp.exp(100 * logits(parameters, x))
    probabilities = powers / anp.sum(powers, axis=1, keepdims=True)
    return -anp.mean(anp.sum(targets * anp.log(probabilities), axis=1))


def train(parameters: Parameters, x: Any, targets: Any, steps: int) -> Parameters:
    """Return new arrays after some steps of gradient descent."""
    gradient = grad(loss)
    for step in range(steps):
        rows = slice(step * BATCH % len(x), step * BATCH % len(x) + BATCH)
        gradients = gradient(parameters, x[rows], targets[rows])
        parameters = [
            (weight - 0.5 * dw, bias - 0.5 * db)
            for (weight, bias), (dw, db) in zip(parameters, gradients, strict=True)
        ]
    return parameters


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    """Images of digits, 64 numbers each, and their classes as rows of an identity matrix."""
    images, classes = load_digits(return_X_y=True)
    return images[:1500] / 16, np.eye(10)[classes[:1500]]


def accuracy(parameters: Parameters, digits: tuple[Any, Any]) -> float:
    """Return the share of digits whose class has the largest output."""
    x, targets = digits
    return float(np.mean(np.argmax(logits(parameters, x), axis=1) == np.argmax(targets, axis=1)))


def test_flops_of_a_step_are_those_counted_by_hand(digits: tuple[Any, Any]) -> None:
    flops = FlopsTool()
    with amanda.apply(flops):
        train(initial(), *digits, steps=1)
    forward = BATCH * (64 * 32 + 32 * 10)
    # Each product has two gradients, but the images need none.
    backward = BATCH * (64 * 32 + 2 * 32 * 10)
    macs = {phase: flops.result.total("macs", phase=phase) for phase in ("forward", "backward")}
    assert macs == {"forward": forward, "backward": backward}, flops.result


def test_a_step_under_tools_has_the_same_bits(digits: tuple[Any, Any]) -> None:
    bare = train(initial(), *digits, steps=3)
    with amanda.apply(FlopsTool(), NanTool()) as scope:
        seen = train(initial(), *digits, steps=3)
    assert not list(scope.report), scope.report
    for layer, other in zip(bare, seen, strict=True):
        assert [array.tobytes() for array in layer] == [array.tobytes() for array in other]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_nan_of_a_loss_is_found_at_its_op_and_line(digits: tuple[Any, Any]) -> None:
    nan = NanTool()
    x, targets = digits
    with amanda.apply(nan):
        gradient = grad(overconfident_loss)([(100 * weight, bias) for weight, bias in initial()], x, targets)
    assert np.isnan(gradient[0][0]).any()
    line = overconfident_loss.__code__.co_firstlineno + 3
    assert str(nan.result).startswith(f"First NaN: div (forward), {__file__}:{line},"), nan.result


def test_a_network_is_pruned_in_training_and_finalized(digits: tuple[Any, Any]) -> None:
    prune = PruneTool(sparsity=0.5)
    with amanda.apply(prune):
        parameters = train(initial(), *digits, steps=150)
        masked = logits(mark_parameters(parameters, loss), digits[0])
    assert accuracy(parameters, digits) > 0.8
    prune.finalize(parameters)
    assert [np.mean(weight == 0) for weight, _ in parameters] == [0.5, 0.5]
    assert logits(parameters, digits[0]).tobytes() == masked.tobytes()
    assert accuracy(parameters, digits) > 0.9
