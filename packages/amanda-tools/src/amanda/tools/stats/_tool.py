"""The tool: measures what ops read and give, without keeping it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import packed_inputs
from amanda.tools.mapping import UNINITIALISED, StandardMapping, is_partial, weight_gradient
from amanda.tools.stats._accumulator import Accumulator
from amanda.tools.stats._result import Measured, StatsResult
from amanda.tools.stats._sketch import Bins

_NUMBERS = ("float", "bfloat", "int", "uint", "bool", "complex", "half", "quint", "qint")

_IsWeights = Callable[[int, Any], bool]


@dataclass
class _Place:
    """One op, forward or backward: what was measured of each of its tensors, and how often."""

    phase: str
    type: str
    module: str
    source: str
    seen: dict[str, int] = field(default_factory=dict)
    measured: dict[str, _Stream] = field(default_factory=dict)

    def read(self) -> Iterator[Measured]:
        """Return the statistics so far; wait for the devices."""
        for tensor, stream in list(self.measured.items()):
            yield Measured(
                self.phase, self.type, self.module, self.source, tensor, stream.dtype,
                stream.executions, stream.accumulator.statistics(), stream.accumulator.sketch(),
            )  # fmt: skip


@dataclass
class _Stream:
    """One tensor of an op over its executions."""

    accumulator: Accumulator
    dtype: str
    executions: int = 0


class StatsTool(amanda.Tool):
    """Statistics of weights, activations and gradients, op by op, over all executions in its scopes.

    weights, activations, gradients: what is measured: the weight that an op reads, what forward ops give,
    what backward ops give.  every: of an op's executions the first and each so many-th after it.
    quantiles: shown in the result.  bins: of the histogram that they come from, 0 for none; a power of
    two from 256, and an error of at most 128 / bins of the quantile's value (3 % of 4096).

    Nothing is read from a device before `result` is asked for, or a model is dropped: models that are gone
    are counted together.  `clear` starts anew.
    `amanda.tools.select` has it measure some ops alone.
    """

    def __init__(
        self,
        weights: bool = True,
        activations: bool = True,
        gradients: bool = True,
        every: int = 1,
        quantiles: Sequence[float] = (0.01, 0.5, 0.99),
        bins: int = 4096,
    ) -> None:
        super().__init__()
        _check(every, quantiles)
        self._weights, self._activations = weights, activations
        self._every, self._bins = every, Bins.of(bins) if bins else None
        self._quantiles = tuple(quantiles) if bins else ()
        self._places: dict[tuple[int, int | None], _Place] = {}  # by ids of the op and of the backward op
        self._backward_ids: dict[int, list[int | None]] = {}  # the latter by the former
        self._gone: dict[tuple[str, ...], Measured] = {}  # of ops that are gone, those alike together
        self._packed: dict[str, None] = {}  # what is not read
        self.depends_on(StandardMapping())
        if weights or activations:
            self.add_inst_for_op(self._forward)
        if gradients:
            self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> StatsResult:
        """Return the statistics so far; wait for the devices."""
        result = StatsResult(self._read(), self._quantiles)
        result.remarks = list(self._packed)
        return result

    def clear(self) -> None:
        """Forget what was measured; what was analysed stays."""
        self._gone.clear()
        for place in self._places.values():
            place.seen.clear()
            place.measured.clear()

    def op_gone(self, op_id: int) -> None:
        """Keep what was measured of an op that is gone together with those alike; waits for the devices."""
        for backward in self._backward_ids.pop(op_id, ()):
            for one in self._places.pop((op_id, backward)).read():
                key = (one.phase, one.type, one.module, one.source, one.tensor, one.dtype)
                self._gone[key] = self._gone[key].merged(one) if key in self._gone else one

    def _read(self) -> Iterator[Measured]:
        yield from self._gone.values()
        for place in list(self._places.values()):
            yield from place.read()

    def _forward(self, context: amanda.OpContext) -> None:
        place, dtype = self._place(context, context["phase"], context["type"]), context["dtype"]
        weight = context["weight_index"]
        self._packed.update(dict.fromkeys(packed_inputs(context)))
        if self._weights and weight is not None:
            context.insert_before_op(self._see, inputs=[weight], place=place, name="weight", dtype=dtype)
        if self._activations and context["type"] not in UNINITIALISED:
            context.insert_after_op(self._see, place=place, name="output {}", dtype=dtype)

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        if kind == "accumulate_grad":
            return
        place = self._place(context, "backward", kind)
        context.insert_after_backward_op(
            self._see, place=place, name="gradient {}", dtype=context["dtype"],
            is_weights=weight_gradient(context),
        )  # fmt: skip

    def _place(self, context: amanda.OpContext, phase: str, kind: str) -> _Place:
        key = op_id, backward = context.get_op_id(), context.get_backward_op_id()
        if key not in self._places:
            self._places[key] = _Place(phase, kind, context.get_scope(), context.get_source())
            self._backward_ids.setdefault(op_id, []).append(backward)
        return self._places[key]

    @amanda.observer
    def _see(
        self, *values: Any, place: _Place, name: str, dtype: Any, is_weights: _IsWeights | None = None
    ) -> None:
        seen = place.seen.get(name, 0)
        place.seen[name] = seen + 1
        if seen % self._every:
            return
        for i, value in enumerate(_flat(values)):
            kind = dtype(value)
            if kind is not None and kind.startswith(_NUMBERS):
                weights = is_weights is not None and is_weights(i, value)
                label = "weight gradient" if weights else name.format(i)
                label += " (partial)" if is_partial(value) else ""
                self._stream(place, label, kind).add(value)

    def _stream(self, place: _Place, label: str, dtype: str) -> Accumulator:
        stream = place.measured.get(label)
        if stream is None:
            stream = place.measured[label] = _Stream(Accumulator(self._bins), dtype)
        stream.executions += 1
        return stream.accumulator


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    """Values, and those in lists among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _check(every: int, quantiles: Sequence[float]) -> None:
    if not isinstance(every, Integral) or every < 1:
        raise AmandaError(f"every is {every!r}; give 1 for each execution, n for every n-th")
    for q in quantiles:
        if not isinstance(q, Real) or not 0 <= q <= 1:
            raise AmandaError(f"{q!r} is no quantile; give numbers from 0 (least) to 1 (most)")
