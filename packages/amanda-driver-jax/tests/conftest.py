"""The driver for a test, and `--conformance`, which ends the run with what the driver fulfils, by rung."""

from collections.abc import Iterator

import pytest

from amanda.drivers.jax import JaxDriver
from amanda.testing import attached
from amanda.testing.conformance import *  # noqa: F403


@pytest.fixture
def attached_driver() -> Iterator[None]:
    """Attach the driver for a test."""
    with attached(JaxDriver):
        yield
