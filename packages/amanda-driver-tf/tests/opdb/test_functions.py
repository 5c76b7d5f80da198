"""Public functions of TensorFlow and Keras compute the same under tools that change nothing, with gradients.

A sample runs with the tests, all of it by `nox -s opdb_tf`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ._calls import Count, differences, functions

pytestmark = pytest.mark.filterwarnings("ignore")  # what TensorFlow says of deprecations
SAMPLE = ("keras.ops.softmax", "tf.concat", "tf.linalg.cholesky", "tf.math.segment_sum", "tf.strings.lower")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each function."""
    if "function" in metafunc.fixturenames:
        metafunc.parametrize("function", list(functions()))


@pytest.mark.parametrize("sampled", SAMPLE)
def test_calls_of_the_sample_are_bit_identical(sampled: str) -> None:
    count = Count()
    assert list(differences(functions()[sampled], count)) == []
    assert count.calls


@pytest.mark.opdb
def test_calls_are_bit_identical(function: str, record_property: Callable[[str, int], None]) -> None:
    count = Count()
    assert list(differences(functions()[function], count)) == []
    for outcome, number in vars(count).items():
        record_property(outcome, number)
