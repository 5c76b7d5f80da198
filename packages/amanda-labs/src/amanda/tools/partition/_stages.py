"""The tool for stages: traces and measures what its scopes execute, and cuts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import amanda
from amanda.errors import ToolError
from amanda.tools.flops import FlopsTool
from amanda.tools.partition._cut import Request
from amanda.tools.partition._parts import PartsResult
from amanda.tools.partition._result import PartitionResult
from amanda.tools.partition._work import Work, of_flops, of_time
from amanda.tools.profile import ProfileTool
from amanda.tools.steps import Steps
from amanda.tools.trace import TraceTool


class StagesTool(amanda.Tool):
    """Cuts what its scopes execute into stages, as a request asks.

    cost: of an op, its FLOPs, or the "time" that it took.  Raises OptionError for a request that is none.
    """

    def __init__(self, request: Request, cost: Literal["flops", "time"]) -> None:
        super().__init__()
        _check(request)
        self._request = request
        self._trace, self._steps = TraceTool(attributes=False), Steps()
        self._measure: FlopsTool | ProfileTool = FlopsTool() if cost == "flops" else ProfileTool(memory=False)
        self.depends_on(self._trace, self._measure, self._steps)

    @property
    def result(self) -> PartitionResult:
        """Return the stages of what was executed so far, a step on the average."""
        return PartitionResult(self._work(), self._request)

    def _work(self) -> Work:
        graph, steps = self._trace.graph, self._steps.number + 1
        if isinstance(self._measure, FlopsTool):
            return of_flops(graph, self._measure.result, steps)
        return of_time(graph, self._measure.result, steps)

    def write_onnx(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> PartsResult:
        """Write a file for each stage of an ONNX file; see `PartitionTool.write_parts`."""
        from amanda.tools.partition._onnx import write_stages

        measured = self._work() if self._trace.graph.ops else None
        if measured is None and not isinstance(self._measure, FlopsTool):
            raise ToolError(
                f"cost='time' is measured while a session runs, and none of {source} has: run one with "
                "amanda.apply(tool) before amanda.instrument, or take cost='flops'"
            )
        return write_stages(self._request, measured, source, folder, analyse, about)

    def clear(self) -> None:
        """Forget what was executed."""
        self._trace.clear()
        self._measure.clear()
        self._steps.clear()


def _check(request: Request) -> None:
    if request.method == "min_cut" and (
        request.stages != 2 or request.memory is not None or request.byte_cost
    ):
        raise ToolError(
            f"method='min_cut' makes 2 stages and knows neither memory nor byte_cost; it was given "
            f"stages={request.stages}, memory={request.memory}, byte_cost={request.byte_cost}: use "
            "method='order' for these"
        )
