"""The conformance suite on graphs: each op of the sample is a compiled function of its own."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import amanda
from amanda.drivers.torch.graph import GraphDriver
from amanda.testing import DriverTests, Sample, never, notyet

_EAGER = importlib.util.spec_from_file_location(
    "tests_of_torch", Path(__file__).parents[1] / "test_driver.py"
)
assert _EAGER is not None
assert _EAGER.loader is not None
eager: Any = sys.modules.setdefault(_EAGER.name, importlib.util.module_from_spec(_EAGER))
_EAGER.loader.exec_module(eager)


NODES = never("an op is a node of a graph, wherever that is called from")
LINES = never("an op's line is that of the compiled function, not of its caller")
SYMBOLS = never("a graph is analysed before it runs, on tensors without data")
KEPT = notyet("what was compiled for a model lasts as long as its code and the tools")


class GraphSample(eager.TorchSample):  # type: ignore[misc]
    """The eager sample, with every op in a compiled function."""

    driver = GraphDriver

    @cached_property
    def linear(self) -> Any:
        return torch.compile(lambda x, weight: F.linear(x, weight), backend="eager")

    @cached_property
    def relu(self) -> Any:
        return torch.compile(lambda x: torch.relu(x), backend="eager")

    @cached_property
    def add(self) -> Any:
        return torch.compile(lambda *args, **kwargs: torch.add(*args, **kwargs), backend="eager")

    @cached_property
    def add_(self) -> Any:
        return torch.compile(lambda x, y: x.add_(y), backend="eager")

    @cached_property
    def cat(self) -> Any:
        return torch.compile(lambda tensors: torch.cat(tensors), backend="eager")

    @cached_property
    def pair(self) -> Any:
        return torch.compile(lambda x: torch.aminmax(x), backend="eager")

    @cached_property
    def many(self) -> Any:
        return torch.compile(lambda x, weight: F.linear(x, weight), backend="eager")

    def model(self) -> Any:
        return torch.compile(super().model(), backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo asks for it
class TestGraphDriver(DriverTests):
    """The suite on PyTorch, compiled."""

    lacks: ClassVar = {
        "call_sites": "an op is a node of a graph, wherever that is called from",
        "values": "a graph is analysed before it runs, on tensors without data",
        "traceable_calls": "a traceable routine is called when it is traced",
        "batched_values": "functions are transformed within a graph, not around one",
        "grad": "functions are transformed within a graph, not around one",
        "jvp": "functions are transformed within a graph, not around one",
        "vmap": "functions are transformed within a graph, not around one",
    }
    gaps: ClassVar = {
        "test_an_exception_of_an_analysis_reaches_the_user_as_itself": LINES,
        "test_an_exception_of_a_routine_reaches_the_user_as_itself": LINES,
        "test_an_op_is_in_the_namespace_of_its_driver": never("ops outside of compiled functions are eager"),
        "test_a_differentiable_routine_is_free_in_shape": notyet(
            "a routine that is called as Python and takes part in autodiff keeps shapes"
        ),
        "test_a_plan_dies_with_its_model": KEPT,
        "test_a_plan_dies_with_its_parameter": KEPT,
        "test_two_paths_to_one_line_are_two_ops": NODES,
        "test_a_checkpoint_computes_the_same_executions_again": NODES,
        "test_inputs_are_in_the_order_of_the_schema": SYMBOLS,
        "test_keyword_arguments_are_put_in_their_place": SYMBOLS,
        "test_the_suite_passes_on_the_pure_python_interceptor": pytest.mark.xfail(
            reason="never: without the native interceptor compiled callables run op by op", run=False
        ),
    }

    @pytest.fixture
    def sample(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sample]:
        torch._dynamo.reset()
        monkeypatch.setattr(amanda, "apply", functools.partial(amanda.apply, compiled="instrument"))
        yield GraphSample()
        torch._dynamo.reset()
