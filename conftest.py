"""For every test: equal random numbers whatever ran before, marks of slow suites, packages of models."""

import gc
import os
import random
import sys
from typing import Any

import pytest

if len(getattr(os, "sched_getaffinity", lambda _: "all")(0)) == 1:
    # TensorFlow waits forever where a routine calls a function on the only thread; the driver says so.
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")

# Workers of xdist have one, at whose width results fold their sentences.
os.environ.pop("COLUMNS", None)


SLOW_IN_SUITES = {
    "test_the_suite_passes_on_the_pure_python_interceptor",
    "test_ids_are_the_same_in_another_process",
}
"""Tests that every driver inherits from `amanda.testing`, which knows no marks of this project."""

GRAPH_SUITES = {"TestFunctionDriver", "TestGraphDriver"}
"""Suites of graph modes, beside that of the framework's eager mode."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them as slow; as long where another mode of the framework has the same test."""
    for item in items:
        if item.name in SLOW_IN_SUITES:
            is_of_graphs = isinstance(item, pytest.Function) and item.cls.__name__ in GRAPH_SUITES
            item.add_marker("long" if is_of_graphs else "slow")


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


@pytest.fixture(scope="session")
def operators_of_torchvision() -> None:
    """Declare the two operators that torchvision wants and a CPU build of PyTorch lacks."""
    import torch

    if "+cpu" not in torch.__version__:
        return  # a torchvision of this build declares them, and twice would end the process
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)


@pytest.fixture(scope="session")
def torchvision(operators_of_torchvision: None) -> Any:
    """The torchvision package."""
    return pytest.importorskip("torchvision")


@pytest.fixture(scope="session")
def transformers(operators_of_torchvision: None) -> Any:
    """The transformers package, which imports torchvision where that is installed."""
    return pytest.importorskip("transformers")
