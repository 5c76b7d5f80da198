"""The suite for drivers of graphs: copies of graphs, and traceable routines, which become part of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from amanda.action import traceable
from amanda.context import OpContext
from amanda.scope.scope import Scope, apply
from amanda.scope.state import cache_disabled
from amanda.testing._ladder import Gaps
from amanda.testing._tools import (
    ByName,
    Hidden,
    InClosure,
    InContainer,
    InGlobal,
    InObject,
    Listed,
    OrderRecorder,
    Scaling,
    Switched,
)
from amanda.tool import Tool

# Each holds the number where another kind of read finds it: attribute, container, object, cell, global, name.
KINDS = [Scaling, InContainer, InObject, InClosure, InGlobal, ByName]


class GraphSample(ABC):
    """A program of a framework's graphs that computes one op, once or more often.

    op: what `get_op_type` gives for the op.
    """

    op: ClassVar[str]

    @abstractmethod
    def check_scaled(self, scale: float) -> None:
        """Run the program, on the same values each time; assert that the op's values were times `scale`."""

    @abstractmethod
    def tensor(self, number: float) -> Any:
        """A constant tensor that all values of the op can be multiplied by."""

    @abstractmethod
    def copy_count(self) -> int:
        """Return how many copies of graphs have been made, or how many routines traced for them."""

    def apply(self, *tools: Tool) -> Scope:
        """The scope in which the program is instrumented."""
        return apply(*tools)

    def insert(self, context: OpContext, routine: Callable[..., Any]) -> None:
        """Insert a routine that changes an output or an input of the op.

        Args:
            context: Context of the op.
            routine: Routine of the value, which returns the changed one.
        """
        context.insert_after_op(routine)


class GraphDriverTests(Gaps):
    """Meanings that hold of rewritten graphs, beside those of DriverTests.

    A subclass has a fixture `sample`.  Most of its tests are of traceable routines, which become part of a
    graph: the graph follows what they read.
    """

    @pytest.fixture
    def sample(self) -> GraphSample:
        """The program under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `sample` that gives a GraphSample")

    def test_a_graph_is_rewritten_once_for_a_set_of_tools(self, sample: GraphSample) -> None:
        tools = Scaling(sample, 2.0), Scaling(sample, 5.0)
        for tool in tools:
            former_count = sample.copy_count()
            with sample.apply(tool):
                sample.check_scaled(tool.held)
            assert sample.copy_count() > former_count
        copy_count = sample.copy_count()
        for tool in tools * 2:
            with sample.apply(tool):
                sample.check_scaled(tool.held)
                sample.check_scaled(tool.held)
        assert sample.copy_count() == copy_count

    def test_a_graph_is_left_as_it_was(self, sample: GraphSample) -> None:
        sample.check_scaled(1.0)
        with sample.apply(Scaling(sample, 2.0)):
            sample.check_scaled(2.0)
        sample.check_scaled(1.0)
        with sample.apply(Tool()):
            sample.check_scaled(1.0)
        sample.check_scaled(1.0)

    def test_routines_that_are_traced_and_others_follow_in_the_order_of_their_tools(
        self, sample: GraphSample
    ) -> None:
        recorded: list[str] = []

        class Python(Scaling):
            def scaled(self, value: Any) -> Any:
                recorded.append("python")
                return value * self.held

        for tools in [(Scaling, Python), (Python, Scaling), (Python, Python)]:
            recorded.clear()
            with sample.apply(tools[0](sample, 2.0), tools[1](sample, 3.0)) as scope:
                sample.check_scaled(6.0)
                call_count = len(recorded)
                sample.check_scaled(6.0)
            assert call_count >= tools.count(Python)
            assert len(recorded) == 2 * call_count
            assert not traceable_reasons(scope)

    @pytest.mark.parametrize("observing", [False, True], ids=["routines", "observers"])
    def test_routines_are_called_in_the_order_of_the_data(self, sample: GraphSample, observing: bool) -> None:
        tool = OrderRecorder(observing)
        with sample.apply(tool):
            sample.check_scaled(1.0)
        assert any(name == sample.op for name, _, _ in tool.calls)
        # Each op's calls come as a pair, with none of the same op in between.
        begun_ops: set[int] = set()
        for name, number, point in tool.calls:
            if point == "before":
                assert number not in begun_ops, f"{point} {name} in {tool.calls}"
                begun_ops.add(number)
            else:
                assert number in begun_ops, f"{point} {name} in {tool.calls}"
                begun_ops.remove(number)
        assert not begun_ops
        if not observing:
            executed = list(dict.fromkeys(number for _, number, point in tool.calls if point == "before"))
            assert executed == [number for number in tool.analysed if number in executed]

    def test_a_routine_in_python_acts_in_each_scope_of_its_tool(self, sample: GraphSample) -> None:
        class Python(Scaling):
            def routine(self) -> Callable[..., Any]:
                return lambda value: value * self.held

        tools = Python(sample, 2.0), Python(sample, 3.0)
        for tool in tools * 2:
            with sample.apply(tool):
                sample.check_scaled(tool.held)
                sample.check_scaled(tool.held)
            sample.check_scaled(1.0)

    @pytest.mark.parametrize("traced", [True, False])
    def test_a_routine_that_fails_leaves_the_graph_as_it_was(self, sample: GraphSample, traced: bool) -> None:
        class Failing(Scaling):
            def routine(self) -> Callable[..., Any]:
                return traceable(self.fail) if traced else self.fail

            def fail(self, value: Any) -> Any:
                raise ZeroDivisionError("in the routine")

        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="in the routine"), sample.apply(Failing(sample, 0.0)):
                sample.check_scaled(0.0)
            sample.check_scaled(1.0)
            with sample.apply(Scaling(sample, 2.0)):
                sample.check_scaled(2.0)

    def test_threads_that_run_a_graph_at_once_share_its_copy(self, sample: GraphSample) -> None:
        tool = Scaling(sample, 2.0)
        sample.check_scaled(1.0)
        with sample.apply(tool), ThreadPoolExecutor(4) as pool:
            sample.check_scaled(2.0)
            copy_count = sample.copy_count()
            # More runs than threads, so that some begin while others are under way.
            for future in [pool.submit(sample.check_scaled, 2.0) for _ in range(16)]:
                future.result()
            assert sample.copy_count() == copy_count

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
    def test_what_is_held_instead_is_read(
        self, sample: GraphSample, kind: type[Scaling], tensors: bool
    ) -> None:
        scales = {scale: sample.tensor(scale) if tensors else scale for scale in (2.0, 5.0)}
        tool = kind(sample, scales[2.0])
        with sample.apply(tool) as scope:
            for scale in (2.0, 5.0, 2.0):
                tool.hold(scales[scale])
                for _ in range(2):
                    sample.check_scaled(scale)
        sample.check_scaled(1.0)
        copy_count = sample.copy_count()
        with sample.apply(tool):
            sample.check_scaled(2.0)
            assert sample.copy_count() == copy_count
            tool.hold(scales[5.0])
            sample.check_scaled(5.0)
        assert not traceable_reasons(scope)

    def test_what_changes_often_is_read_by_python(self, sample: GraphSample) -> None:
        tool = Scaling(sample, 0.0)
        copy_counts = []
        with sample.apply(tool) as scope:
            for i in range(12):
                tool.hold(i / 4)
                sample.check_scaled(i / 4)
                copy_counts.append(sample.copy_count())
        assert copy_counts[7] > copy_counts[0]
        # After eight values the place is volatile: the routine runs as Python, and no copy is made any more.
        assert copy_counts[8:] == [copy_counts[8]] * 4
        assert set(traceable_reasons(scope)) == {"what it reads changes often: held, so it runs as Python"}

    def test_a_routine_that_changes_nothing_for_now_is_asked_again(self, sample: GraphSample) -> None:
        tool = Switched(sample, 1.0)
        with sample.apply(tool):
            for scale in (1.0, 2.0, 1.0, 2.0):
                tool.hold(scale)
                sample.check_scaled(scale)

    def test_what_tracing_changes_is_no_reason_to_trace_again_and_is_reported(
        self, sample: GraphSample
    ) -> None:
        tool = Listed(sample, 2.0)
        with sample.apply(tool) as scope:
            sample.check_scaled(2.0)
            traced_count = len(tool.scales)
            for _ in range(2):
                sample.check_scaled(2.0)
        # Traced once: the routine's own append must not look like a change from outside.
        assert len(tool.scales) == traced_count
        assert [entry.what for entry in scope.report] == ["traceable routines of Listed"]
        assert traceable_reasons(scope)[0].startswith("they set scales; ")

    def test_a_tensor_that_no_name_leads_to_is_reported(self, sample: GraphSample) -> None:
        with sample.apply(Hidden(sample, sample.tensor(2.0))) as scope:
            sample.check_scaled(2.0)
        (reason,) = traceable_reasons(scope)
        assert "no name in its code leads to" in reason

    def test_with_the_cache_off_every_run_reads(self, sample: GraphSample) -> None:
        tool = Scaling(sample, 2.0)
        with sample.apply(tool), cache_disabled():
            for scale in (2.0, 5.0):
                tool.hold(scale)
                sample.check_scaled(scale)


def traceable_reasons(scope: Scope) -> list[str]:
    """Return what a scope's report says of traceable routines."""
    return [entry.reason for entry in scope.report if entry.what.startswith("traceable")]
