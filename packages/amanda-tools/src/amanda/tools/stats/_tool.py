"""The tool: measures what ops read and give, without keeping it."""

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
from amanda.tools.stats._sketch import Bins


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
    """Statistics of weights, activations and gradients, op by op, over all executions in its scopes.

    weights, activations, gradients: what is measured: the weight that an op reads, what forward ops give,
    what backward ops give.  every: of an op's executions the first and each so many-th after it.
    quantiles: shown in the result.  bins: of the histogram that they come from, 0 for none; a power of
    two from 256, and an error of at most 128 / bins of the quantile's value (3 % of 4096).

    Nothing is read from a device before `result` is asked for, or a model is dropped: models that are gone
    are counted together.  `clear` starts anew.
    `amanda.tools.select` has it measure some ops alone.
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
        chosen: dict[Role, bool] = {"weight": weights, "output": activations, "gradient": gradients}
        super().__init__([role for role, is_chosen in chosen.items() if is_chosen], every)
        self._bins = Bins.of(bins) if bins else None
        self._quantiles = tuple(quantiles) if bins else ()
        self._backward_ids: dict[int, list[int | None]] = {}  # of the ops in `_records`
        self._gone: dict[tuple[str, ...], Measured] = {}  # of ops that are gone, those alike together

    @property
    def result(self) -> StatsResult:
        """Return the statistics so far; wait for the devices."""
        records = list(self._records.values())
        measured = [*self._gone.values(), *(one for record in records for one in record.read())]
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
            for one in self._records.pop((op_id, backward)).read():
                key = (one.phase, one.type, one.module, one.source, one.tensor, one.dtype)
                self._gone[key] = self._gone[key].merged(one) if key in self._gone else one

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
        for one in tensors:
            label = one.role if "weight" in one.role else f"{one.role} {one.flat_index}"
            label += f" {one.slice}" * bool(one.slice) + " (partial)" * is_partial(one.tensor)
            stream = record.measured.get(label)
            if stream is None:
                stream = record.measured[label] = _Stream(Accumulator(self._bins), one.dtype)
            stream.executions += 1
            yield stream.accumulator, one.tensor
