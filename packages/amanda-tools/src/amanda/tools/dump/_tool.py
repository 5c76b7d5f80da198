"""The tool: brings what ops read and give into a folder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import amanda
from amanda.backend import current_state
from amanda.errors import AmandaError
from amanda.tools.dump._arrays import Format
from amanda.tools.dump._entry import Entry, Op
from amanda.tools.dump._result import DumpResult
from amanda.tools.dump._values import array, extents, summary
from amanda.tools.dump._writer import Writer
from amanda.tools.kit import packed_inputs
from amanda.tools.mapping import UNINITIALISED, StandardMapping, weight_gradient

Keep = Literal["no", "summary", "full"]

_SMALL = 1 << 18
"""Bytes of a tensor that is fetched, and summarised on the host, faster than it is where it lies."""
_NUMBERS = ("float", "bfloat", "int", "uint", "bool", "complex", "quint", "qint")
_IsWeights = Callable[[int, Any], bool]


@dataclass
class _Place:
    """One op: its index in the dump, and how often each side of it was seen."""

    op: Op
    index: int
    seen: dict[str, int] = field(default_factory=dict)


class DumpTool(amanda.Tool):
    """Writes summaries of tensors, or the tensors themselves, with an index, into a folder.

    folder: made when needed; in a run of several ranks, a folder for each in it.  inputs, outputs, weights,
    gradients: of each op "no", a "summary", or "full": what it reads, what it gives, the weight among what
    it reads, what its backward ops give.  executions: of each op, None for all.  every: of an op's
    executions the first and each so many-th after it.  max_bytes, max_tensor_bytes: a tensor beyond them is
    a summary.  format: of the files with tensors.  overwrite: an older dump in the folder.

    What waits is written now and then, at `result`, and when the program ends.  `amanda.tools.select` has it
    dump some ops alone.  Raises AmandaError for a
    folder that has other things in it.
    """

    def __init__(
        self,
        folder: Path = Path("dump"),
        inputs: Keep = "no",
        outputs: Keep = "summary",
        weights: Keep = "summary",
        gradients: Keep = "summary",
        executions: int | None = 1,
        every: int = 1,
        max_bytes: int = 1 << 30,
        max_tensor_bytes: int = 64 << 20,
        format: Format = "safetensors",
        overwrite: bool = False,
    ) -> None:
        super().__init__()
        self._keeps = {"input": inputs, "output": outputs, "weight": weights, "gradient": gradients}
        _check(self._keeps, every, format)
        self._executions, self._every = executions, every
        self._max_bytes, self._max_tensor_bytes = max_bytes, max_tensor_bytes
        self._writer = Writer(_of_rank(Path(folder)), format, overwrite)
        self._places: dict[tuple[int, int | None], _Place] = {}
        self._order = self._bytes = 0
        self._packed: dict[str, None] = {}  # what is not read
        self._dtype: Callable[[Any], str | None] | None = None
        weakref.finalize(self, self._writer.flush)
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)
        if gradients != "no":
            self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> DumpResult:
        """The entries that were dumped so far, all of which are written."""
        self._writer.flush()
        result = DumpResult(self._writer.folder, self._writer.ops, self._writer.entries, self._bytes)
        result.remarks = list(self._packed)
        return result

    def clear(self) -> None:
        """Forget what was dumped, also in the folder, and start anew."""
        self._writer.clear()
        self._order = self._bytes = 0
        for place in self._places.values():
            place.seen.clear()

    def add_returned(self, value: Any) -> None:
        """Keep the tensors in what a program has returned, as the outputs of an op of type "returned".

        value: a tensor, or lists, tuples and dicts of tensors; anything else is left out.
        """
        if self._dtype is not None:
            op = Op("forward", "returned", "", "", "", 0)
            place = _Place(op, self._writer.add_op(op))
            self._see(*_leaves(value), place=place, role="output", dtype=self._dtype)

    def _forward(self, context: amanda.OpContext) -> None:
        weight, dtype = context["weight_index"], context["dtype"]
        self._packed.update(dict.fromkeys(packed_inputs(context)))
        place = self._place(context, Op(
            context["phase"], context["type"], context.get_scope(), context.get_source(),
            str(context.namespace), context.get_op_id(), None, context["layout"], context["weight_layout"],
        ))  # fmt: skip
        if self._keeps["input"] != "no":
            is_weights = partial(_is_at, weight)
            context.insert_before_op(self._see, place=place, role="input", dtype=dtype, is_weights=is_weights)
        elif self._keeps["weight"] != "no" and weight is not None:
            context.insert_before_op(
                self._see, inputs=[weight], place=place, role="weight", dtype=dtype, first=weight
            )
        if self._keeps["output"] != "no" and context["type"] not in UNINITIALISED:
            context.insert_after_op(self._see, place=place, role="output", dtype=dtype)

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        if kind == "accumulate_grad":
            return
        place = self._place(context, Op(
            "backward", kind, context.get_scope(), context.get_source(), str(context.namespace),
            context.get_backward_op_id() or 0, context.get_op_id(), context["layout"],
            context["weight_layout"],
        ))  # fmt: skip
        context.insert_after_backward_op(
            self._see, place=place, role="gradient", dtype=context["dtype"],
            is_weights=weight_gradient(context),
        )  # fmt: skip

    def _place(self, context: amanda.OpContext, op: Op) -> _Place:
        key = (context.get_op_id(), context.get_backward_op_id())
        for scope in current_state().scopes:
            if not any(scope.report is one for one in self._writer.reports):
                self._writer.reports.append(scope.report)
        self._dtype = context["dtype"]
        if key not in self._places:
            self._places[key] = _Place(op, self._writer.add_op(op))
        return self._places[key]

    @amanda.observer
    def _see(
        self, *values: Any, place: _Place, role: str, dtype: Any, is_weights: _IsWeights | None = None,
        first: int = 0,
    ) -> None:  # fmt: skip
        seen = place.seen.get(role, 0)
        place.seen[role] = seen + 1
        taken, between = divmod(seen, self._every)
        if between or (self._executions is not None and taken >= self._executions):
            return
        for position, value in _flat(values, first):
            kind = dtype(value)
            if kind is not None and kind.startswith(_NUMBERS):
                weights = is_weights is not None and is_weights(position, value)
                self._take(value, kind, place, _role(role, weights), position, seen)
        self._order += 1

    def _take(self, value: Any, dtype: str, place: _Place, role: str, position: int, execution: int) -> None:
        keep = self._keeps[role.split()[-1]]
        if keep == "no":
            return
        shape = extents(value)
        size = prod(shape) * _width(value)
        left_out = self._left_out(size) if keep == "full" else None
        kept = keep == "full" and left_out is None
        numbers = array(value) if kept or size <= _SMALL else None
        entry = Entry(
            place.index, self._order, execution, role, position, shape, dtype,
            summary(value if numbers is None else numbers),
            left_out="its layout" if kept and numbers is None else left_out,
        )  # fmt: skip
        self._writer.add(entry, numbers if kept else None)
        self._bytes += numbers.nbytes if kept and numbers is not None else 0

    def _left_out(self, size: int) -> str | None:
        """The option by which a tensor of so many bytes is not kept."""
        if size > self._max_tensor_bytes:
            return "max_tensor_bytes"
        return "max_bytes" if self._bytes + size > self._max_bytes else None


def _flat(values: Sequence[Any], first: int) -> Iterator[tuple[int, Any]]:
    """Values, and those in lists among them, with their positions."""
    for position, value in enumerate(values, first):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            yield position, one


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _is_at(weight: int | None, position: int, value: Any) -> bool:
    return position == weight


def _role(role: str, is_weight: bool) -> str:
    if not is_weight:
        return role
    return "weight gradient" if role == "gradient" else "weight"


def _width(value: Any) -> int:
    """Bytes of one element, 8 where a tensor does not tell."""
    size = getattr(value, "itemsize", None) or getattr(getattr(value, "dtype", None), "size", None)
    return size if isinstance(size, int) else 8


def _of_rank(folder: Path) -> Path:
    """A folder of its own for each rank that a launcher has started."""
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return folder / f"rank{os.environ.get('RANK', '0')}" if several else folder


def _check(keeps: dict[str, Keep], every: int, form: str) -> None:
    for name, keep in keeps.items():
        if keep not in ("no", "summary", "full"):
            raise AmandaError(f'{name}s is {keep!r}; it is "no", "summary" or "full"')
    if not isinstance(every, Integral) or every < 1:
        raise AmandaError(f"every is {every!r}; give 1 for each execution, n for every n-th")
    if form not in ("safetensors", "npz"):
        raise AmandaError(f'format is {form!r}; it is "safetensors" or "npz"')
