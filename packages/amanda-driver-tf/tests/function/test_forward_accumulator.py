"""Forward accumulators over instrumented functions: their Jacobian-vector products pass the routines."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from acting import inserting

import amanda


def doubled(value):
    return value * 2.0


@amanda.differentiable
def squared(value):
    return value * value


def product(function, x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = function(x)
    return accumulator.jvp(y)


CASES = {
    "isolated, before": ("insert_before_op", doubled, lambda x: np.cos(2 * x) * x + np.sin(2 * x)),
    "isolated, after": ("insert_after_op", doubled, lambda x: np.cos(x) * x + 2 * np.sin(x)),
    "differentiable": ("insert_before_op", squared, lambda x: 2 * x * np.cos(x**2) * x + np.sin(x**2)),
    "replacing": ("replace_op", squared, lambda x: 3 * x**2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_that_of_what_ran(case: str) -> None:
    action, routine, derivative = CASES[case]
    function = tf.function(lambda x: tf.sin(x) * x)
    x = tf.constant([0.3, 0.7])
    with amanda.apply(inserting(action, "Sin", routine)):
        products = [product(function, x) for _ in range(2)]
    np.testing.assert_allclose(products, [derivative(x.numpy())] * 2, rtol=1e-5)
    np.testing.assert_allclose(product(function, x), np.cos(x) * x + np.sin(x), rtol=1e-5)
