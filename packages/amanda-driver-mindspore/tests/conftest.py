"""`--conformance` ends the run with what the driver fulfils, by rung."""

from __future__ import annotations

import pytest

from amanda.testing.conformance import *  # noqa: F403


@pytest.fixture(scope="session", autouse=True)
def _blocking_launches() -> None:
    """Run each op before the next begins, so that errors are raised where they arise.

    MindSpore takes this before the first op alone: in a module, it would depend on the order of the tests.
    """
    import mindspore

    mindspore.runtime.launch_blocking()
