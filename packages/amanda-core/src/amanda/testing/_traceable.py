"""The suite for drivers that make traceable routines part of graphs, which follow what they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from amanda._scope import Scope, apply
from amanda._state import cache_disabled
from amanda.context import OpContext
from amanda.testing._gaps import Gaps
from amanda.testing._held import (
    ByName,
    Hidden,
    InClosure,
    InContainer,
    InGlobal,
    InObject,
    Listed,
    Scaling,
    Switched,
)
from amanda.tool import Tool

KINDS = [Scaling, InContainer, InObject, InClosure, InGlobal, ByName]


class GraphSample(ABC):
    """A program of a framework's graphs that computes one op, once or more often.

    op: what `get_op_type` gives for the op.
    """

    op: ClassVar[str]

    @abstractmethod
    def check(self, scale: float) -> None:
        """Run the program, on the same values each time; assert that the op's values were times `scale`."""

    @abstractmethod
    def tensor(self, number: float) -> Any:
        """A constant tensor that all values of the op can be multiplied by."""

    @abstractmethod
    def copies(self) -> int:
        """How many copies of graphs have been made, or how many routines traced for them."""

    def apply(self, *tools: Tool) -> Scope:
        """The scope in which the program is instrumented."""
        return apply(*tools)

    def insert(self, context: OpContext, routine: Callable[..., Any]) -> None:
        """Let a routine change the op's values."""
        context.insert_after_op(routine)


class TraceableTests(Gaps):
    """What holds where a graph has traceable routines in it; a subclass has a fixture `sample`."""

    @pytest.fixture
    def sample(self) -> GraphSample:
        """The program under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `sample` that gives a GraphSample")

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
    def test_what_is_held_instead_is_read(
        self, sample: GraphSample, kind: type[Scaling], tensors: bool
    ) -> None:
        held = {scale: sample.tensor(scale) if tensors else scale for scale in (2.0, 5.0)}
        tool = kind(sample, held[2.0])
        with sample.apply(tool) as scope:
            for scale in (2.0, 5.0, 2.0):
                tool.hold(held[scale])
                for _ in range(2):
                    sample.check(scale)
        sample.check(1.0)
        copies = sample.copies()
        with sample.apply(tool):
            sample.check(2.0)
            assert sample.copies() == copies
            tool.hold(held[5.0])
            sample.check(5.0)
        assert not told(scope)

    def test_what_changes_often_is_read_by_python(self, sample: GraphSample) -> None:
        tool = Scaling(sample, 0.0)
        copies = []
        with sample.apply(tool) as scope:
            for i in range(12):
                tool.hold(i / 4)
                sample.check(i / 4)
                copies.append(sample.copies())
        assert copies[7] > copies[0]
        assert copies[8:] == [copies[8]] * 4
        assert set(told(scope)) == {"what it reads changes often: held, so it runs as Python"}

    def test_a_routine_that_changes_nothing_for_now_is_asked_again(self, sample: GraphSample) -> None:
        tool = Switched(sample, 1.0)
        with sample.apply(tool):
            for scale in (1.0, 2.0, 1.0, 2.0):
                tool.hold(scale)
                sample.check(scale)

    def test_what_tracing_changes_is_no_reason_to_trace_again_and_is_reported(
        self, sample: GraphSample
    ) -> None:
        tool = Listed(sample, 2.0)
        with sample.apply(tool) as scope:
            sample.check(2.0)
            traced = len(tool.scales)
            for _ in range(2):
                sample.check(2.0)
        assert len(tool.scales) == traced
        assert [entry.what for entry in scope.report] == ["traceable routines of Listed"]
        assert told(scope)[0].startswith("they set scales; ")

    def test_a_tensor_that_no_name_leads_to_is_reported(self, sample: GraphSample) -> None:
        with sample.apply(Hidden(sample, sample.tensor(2.0))) as scope:
            sample.check(2.0)
        (reason,) = told(scope)
        assert "no name in its code leads to" in reason

    def test_with_the_cache_off_every_run_reads(self, sample: GraphSample) -> None:
        tool = Scaling(sample, 2.0)
        with sample.apply(tool), cache_disabled():
            for scale in (2.0, 5.0):
                tool.hold(scale)
                sample.check(scale)


def told(scope: Scope) -> list[str]:
    """What a scope's report says of traceable routines."""
    return [entry.reason for entry in scope.report if entry.what.startswith("traceable")]
