"""For every test: random numbers that do not go by what ran before it, and what is slow of the suites."""

import gc
import os
import random
import sys

import pytest

if len(getattr(os, "sched_getaffinity", lambda _: "all")(0)) == 1:
    # TensorFlow waits forever where a routine calls a function on the only thread; the driver says so.
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")


SLOW_IN_SUITES = {
    "test_the_suite_passes_on_the_pure_python_interceptor",
    "test_ids_are_the_same_in_another_process",
}
"""Tests that every driver inherits from `amanda.testing`, which knows no marks of this project."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them as slow."""
    for item in items:
        if item.name in SLOW_IN_SUITES:
            item.add_marker("slow")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Take what earlier modules left out of later collections, which are many and would take seconds each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed what draws numbers; frameworks that no test has imported are left alone."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
