"""The tool that measures weights, activations and gradients, without storing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import amanda
from amanda.options import PositiveInt, Range, Share, checked
from amanda.tools.kit import OpRecord, OpTensor, Role, TensorTool
from amanda.tools.mapping import is_partial
from amanda.tools.stats._accumulator import Accumulator
from amanda.tools.stats._result import Measured, StatsResult
from amanda.tools.stats._statistics import Bins


@dataclass(slots=True)
class _OpStreams(OpRecord):
    """One op, forward or backward, and what was measured of each of its tensors."""

    measured: dict[str, _Stream] = field(default_factory=dict)

    def read(self) -> Iterator[Measured]:
        """Return the statistics so far; wait for the devices."""
        for tensor, stream in list(self.measured.items()):
            yield Measured(
                self.phase, self.type, self.module, self.source, tensor, stream.dtype,
                stream.executions, stream.accumulator.statistics(), stream.accumulator.sketch(),
            )  # fmt: skip


@dataclass(slots=True)
class _Stream:
    """One tensor of an op over its executions."""

    accumulator: Accumulator
    dtype: str
    executions: int = 0


class StatsTool(TensorTool[_OpStreams]):
    """Compute statistics of weights, activations and gradients, op by op, over all executions.

    weights, activations, gradients: measure the weights that ops read, the outputs of forward ops, the
    outputs of backward ops.  every: measure every n-th execution of an op, beginning with the first.
    quantiles: shares for which the result has a column.  bins: number of bins of the histogram from which
    quantiles are computed, a power of two from 256; the relative error is at most 128 / bins (3 % for 4096).
    0 for no histogram.

    Numbers are read from a device when `result` is read or a model is deleted; the statistics of deleted
    models are merged.  `clear` starts again.  Use `amanda.tools.select` to measure some ops only.
    """

    is_copied_when_used = False
    by_slice = True

    @checked
    def __init__(
        self,
        weights: bool = True,
        activations: bool = True,
        gradients: bool = True,
        every: PositiveInt = 1,
        quantiles: Sequence[Share] = (0.01, 0.5, 0.99),
        bins: Annotated[int, Range(0, 1 << 24)] = 4096,
    ) -> None:
        is_role_measured: dict[Role, bool] = {"weight": weights, "output": activations, "gradient": gradients}
        super().__init__([role for role, is_measured in is_role_measured.items() if is_measured], every)
        self._bins = Bins.of(bins) if bins else None
        self._quantiles = tuple(quantiles) if bins else ()
        self._backward_ids: dict[int, list[int | None]] = {}  # of the ops in `_records`
        self._gone: dict[tuple[str, ...], Measured] = {}  # of ops that are gone, those alike together

    @property
    def result(self) -> StatsResult:
        """Return the statistics so far; wait for the devices."""
        records = list(self._records.values())
        measured = [
            *self._gone.values(),
            *(entry for record in records for entry in record.read()),
        ]
        result = StatsResult(measured, self._quantiles)
        result.remarks = self.remarks
        return result

    def clear(self) -> None:
        """Forget what was measured; what was analysed stays."""
        super().clear()
        self._gone.clear()
        for record in self._records.values():
            record.measured.clear()

    def op_gone(self, op_id: int) -> None:
        """Keep what was measured of an op that is gone together with those alike; waits for the devices."""
        for backward in self._backward_ids.pop(op_id, ()):
            for entry in self._records.pop((op_id, backward)).read():
                key = (
                    entry.phase,
                    entry.type,
                    entry.module,
                    entry.source,
                    entry.tensor,
                    entry.dtype,
                )
                self._gone[key] = self._gone[key].merged(entry) if key in self._gone else entry

    def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> _OpStreams:
        """Return an op, of which nothing is measured yet."""
        self._backward_ids.setdefault(context.get_op_id(), []).append(context.get_backward_op_id())
        return _OpStreams(phase, kind, context.get_scope(), context.get_source())

    def observe(self, record: _OpStreams, tensors: Iterator[OpTensor], execution: int) -> None:
        """Measure the tensors of an execution."""
        for accumulator, tensor in self._accumulators(record, tensors):
            accumulator.add(tensor)

    def observe_all(self, observed: Iterable[tuple[_OpStreams, Iterator[OpTensor], int]]) -> None:
        """Measure the tensors of executions of many ops."""
        Accumulator.add_all(
            pair for record, tensors, _ in observed for pair in self._accumulators(record, tensors)
        )

    def _accumulators(
        self, record: _OpStreams, tensors: Iterator[OpTensor]
    ) -> Iterator[tuple[Accumulator, Any]]:
        for tensor in tensors:
            label = tensor.role if "weight" in tensor.role else f"{tensor.role} {tensor.flat_index}"
            label += f" {tensor.slice}" * bool(tensor.slice) + " (partial)" * is_partial(tensor.tensor)
            stream = record.measured.get(label)
            if stream is None:
                stream = record.measured[label] = _Stream(Accumulator(self._bins), tensor.dtype)
            stream.executions += 1
            yield stream.accumulator, tensor.tensor
