"""The tool: brings what ops read and give into a folder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import amanda
from amanda.backend import State
from amanda.options import NonNegativeInt, OutputFolder, PositiveInt, checked
from amanda.tools.dump._arrays import Format
from amanda.tools.dump._entry import Kept, Op
from amanda.tools.dump._result import DumpResult
from amanda.tools.dump._values import array, measured
from amanda.tools.dump._writer import Writer
from amanda.tools.kit import OpRecord, OpTensor, Role, TensorTool, leaves, parameter_inputs, tensors_of
from amanda.tools.mapping import itemsize

if TYPE_CHECKING:
    from numpy.typing import NDArray

Keep = Literal["no", "summary", "full"]

_Facts = tuple[int, int, int, str, int, tuple[int, ...], str]
"""The first fields of `Kept`."""
_SMALL = 1 << 18
"""Bytes of a tensor that is fetched, and summarised on the host, faster than it is where it lies."""


@dataclass(slots=True)
class _IndexedOp(OpRecord):
    """One op and its index in the dump."""

    index: int


class DumpTool(TensorTool[_IndexedOp]):
    """Writes summaries of tensors, or the tensors themselves, with an index, into a folder.

    folder: made when needed; in a run of several ranks, a folder for each in it.  inputs, outputs, weights,
    gradients: of each op "no", a "summary", or "full": what it reads, what it gives, the weight among what
    it reads, what its backward ops give.  executions: of each op, None for all.  every: of an op's
    executions the first and each so many-th after it.  max_bytes, max_tensor_bytes: a tensor beyond them is
    a summary.  format: of the files with tensors.  overwrite: an older dump in the folder.

    What waits is written now and then, at the end of a scope, at `result`, and when the program ends.  Where
    that fails, as on a full disk, a warning names the file, the program goes on, and later writings try
    again; the result says what the folder lacks.
    `amanda.tools.select` has it dump some ops alone.  Raises AmandaError for a folder that has other things
    in it, or cannot be written to.
    """

    is_copied_when_used = False

    @checked
    def __init__(
        self,
        folder: OutputFolder = Path("dump"),
        inputs: Keep = "no",
        outputs: Keep = "summary",
        weights: Keep = "summary",
        gradients: Keep = "summary",
        executions: PositiveInt | None = 1,
        every: PositiveInt = 1,
        max_bytes: NonNegativeInt = 1 << 30,
        max_tensor_bytes: NonNegativeInt = 64 << 20,
        format: Format = "safetensors",
        overwrite: bool = False,
    ) -> None:
        keeps: dict[Role, Keep] = {
            "input": inputs, "output": outputs, "weight": weights, "gradient": gradients
        }  # fmt: skip
        super().__init__([role for role, keep in keeps.items() if keep != "no"], every, executions)
        self._keeps: dict[str, Keep] = {str(role): keep for role, keep in keeps.items()}
        self._max_bytes, self._max_tensor_bytes = max_bytes, max_tensor_bytes
        self._writer = Writer(_of_rank(Path(folder)), format, overwrite)
        self._order = self._bytes = 0
        self._dtype: Any = None
        weakref.finalize(self, self._writer.flush)

    @property
    def result(self) -> DumpResult:
        """The entries that were dumped so far; they are written, or the remarks say why not."""
        self._writer.flush()
        writer = self._writer
        result = DumpResult(writer.folder, writer.ops, writer.entries, writer.written, writer.failure)
        result.remarks = self.remarks
        return result

    def scope_left(self) -> None:
        """Write what waits."""
        super().scope_left()
        self._writer.flush()

    def clear(self) -> None:
        """Forget what was dumped, also in the folder, and start anew."""
        super().clear()
        self._writer.clear()
        self._order = self._bytes = 0

    def add_returned(self, value: Any) -> None:
        """Keep the tensors in what a program has returned, as the outputs of an op of type "returned".

        value: a tensor, or lists, tuples, dicts and dataclasses of tensors; anything else is left out.
        """
        if self._dtype is not None:
            record = self._met(Op("forward", "returned", "", "", "", 0))
            tensors = leaves([value], structures=True)
            self._observe_execution(*tensors, record=record, role="output", dtype=self._dtype)

    def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> _IndexedOp:
        """Take an op into the index."""
        forward, backward = context.get_op_id(), context.get_backward_op_id()
        op, of = (forward, None) if context.is_forward() else (backward or 0, forward)
        return self._met(Op(
            phase, kind, context.get_scope(), context.get_source(), str(context.namespace), op, of,
            context["layout"], context["weight_layout"], context["in_place"] and context.is_forward(),
            _parameters(context) if context.is_forward() else (),
        ))  # fmt: skip

    def _met(self, op: Op) -> _IndexedOp:
        return _IndexedOp(op.phase, op.type, op.module, op.source, self._writer.add_op(op))

    def _record(self, context: amanda.OpContext, phase: str, kind: str) -> _IndexedOp:
        for scope in State.current().scopes:
            if not any(scope.report is one for one in self._writer.reports):
                self._writer.reports.append(scope.report)
        self._dtype = context["dtype"]
        return super()._record(context, phase, kind)

    def observe(self, record: _IndexedOp, tensors: Iterator[OpTensor], execution: int) -> None:
        """Take in what is kept of the tensors of an execution."""
        self.observe_all([(record, tensors, execution)])

    def observe_all(self, observed: Iterable[tuple[_IndexedOp, Iterator[OpTensor], int]]) -> None:
        """Take in what is kept of the tensors of executions of many ops."""
        taken: list[tuple[Any, NDArray[Any] | None, str | None, _Facts]] = []
        for record, tensors, execution in observed:
            for one in tensors:
                keep = self._keeps[one.role.split()[-1]]
                if keep != "no":
                    seen, shape, kept, left_out = self._taken(one, keep)
                    tensor = one.role, one.position, shape, one.dtype
                    taken.append((seen, kept, left_out, (record.index, self._order, execution, *tensor)))
            self._order += 1
        found = measured([seen for seen, *_ in taken])
        for (_, kept, left_out, facts), (numbers, sample) in zip(taken, found, strict=True):
            self._writer.add(Kept(*facts, numbers, sample, left_out), kept)

    def _taken(
        self, one: OpTensor, keep: Keep
    ) -> tuple[Any, tuple[int, ...], NDArray[Any] | None, str | None]:
        """Return what to measure, its shape, the numbers if they are kept, and why they are not."""
        tensors = tensors_of(one.tensor)
        seen = tensors.shared(one.tensor)
        if seen is not None and keep == "summary":  # a hot path
            return seen, seen.shape, None, None
        shape = tensors.extents(one.tensor) if seen is None else seen.shape
        size = prod(shape) * (itemsize(one.dtype) or 8)
        left_out = self._left_out(size) if keep == "full" else None
        is_kept = keep == "full" and left_out is None
        kept = array(one.tensor) if is_kept or (seen is None and size <= _SMALL) else None
        if is_kept and kept is None:
            left_out = "its layout"
        if seen is None:
            seen = one.tensor if kept is None else kept
        if not is_kept:
            kept = None
        self._bytes += 0 if kept is None else kept.nbytes
        return seen, shape, kept, left_out

    def _left_out(self, size: int) -> str | None:
        """The option by which a tensor of so many bytes is not kept."""
        if size > self._max_tensor_bytes:
            return "max_tensor_bytes"
        return "max_bytes" if self._bytes + size > self._max_bytes else None


def _parameters(context: amanda.OpContext) -> tuple[tuple[int, str], ...]:
    """Return the positions of inputs that are parameters with a path, and the paths."""
    paths = ((i, context.get_variable_path(context.get_variable(i))) for i in parameter_inputs(context))
    return tuple((i, path) for i, path in paths if path)


def _of_rank(folder: Path) -> Path:
    """A folder of its own for each rank that a launcher has started."""
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return folder / f"rank{os.environ.get('RANK', '0')}" if several else folder
