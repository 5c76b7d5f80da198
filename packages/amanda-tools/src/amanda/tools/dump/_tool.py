"""The tool that dumps tensors of ops into a folder, and its result."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import amanda
from amanda.action import Executions
from amanda.backend import State
from amanda.options import NonNegativeInt, OutputFolder, PositiveInt, checked
from amanda.tools.dump._reader import UNMEASURED, Entry, Format, Op, RawEntry
from amanda.tools.dump._writer import Writer, exact_array, sample_of
from amanda.tools.kit import OpRecord, OpTensor, Role, TensorTool, leaves, parameter_paths, tensors_of
from amanda.tools.mapping import itemsize
from amanda.tools.results import Column, Result, amount, count_of
from amanda.tools.select import SelectOptions, select
from amanda.tools.stats import Accumulator

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack


def _shown_shape(axes: Sequence[int | str]) -> str:
    """Return a shape as the table shows it: "(vmap 8)x3"."""
    return "x".join(str(axis) if isinstance(axis, int) else f"({axis})" for axis in axes) or "scalar"


class DumpResult(Result):
    """Entries of a dump, in the order of execution.

    failure: why the last tensors are not in the folder; "" if all are.
    """

    name: ClassVar[str] = "dump"
    title = "Dumped tensors"
    columns: ClassVar[Sequence[Column]] = (
        *map(Column, ("phase", "type", "module", "source")), Column("tensor", priority=7),
        Column("execution", number=True, shown=False), Column("dtype"), Column("shape", show=_shown_shape),
        *(Column(name, show="{:.4g}".format, number=True) for name in ("mean", "std", "min", "max")),
        Column("NaN", show="{:,}".format, number=True), Column("Inf", show="{:,}".format, number=True),
        Column("file", show=lambda name: name.removeprefix("tensors-").partition(".")[0]),
    )  # fmt: skip

    def __init__(
        self, folder: Path, ops: Sequence[Op], entries: Sequence[Entry], stored_bytes: int, failure: str = ""
    ) -> None:
        self.folder, self.ops, self.entries = folder, list(ops), list(entries)
        self._stored_bytes, self.failure = stored_bytes, failure

    def rows(self) -> Sequence[Sequence[Any]]:
        return [self._row(self.ops[entry.op], entry) for entry in self.entries]

    def _row(self, op: Op, entry: Entry) -> tuple[Any, ...]:
        """Return the row of a tensor; no moments without finite numbers."""
        stats = entry.summary.statistics
        moments = (stats.mean, stats.std, stats.least, stats.most) if stats.count else (None,) * 4
        # The axes of batches of a vmap by name: ["vmap 8", 3].
        axes = [f"vmap {extent}" if i < entry.batches else extent for i, extent in enumerate(entry.shape)]
        return (
            op.phase, op.type, op.module, op.source, f"{entry.role} {entry.position}", entry.execution,
            entry.dtype, axes, *moments, stats.nan, stats.inf + stats.negative_inf, entry.file,
        )  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        return {"folder": str(self.folder), "bytes": self._stored_bytes}

    def notes(self) -> Sequence[str]:
        """Return where the tensors are, and which were left out."""
        stored_count = sum(entry.file is not None for entry in self.entries)
        size = amount(self._stored_bytes, "B")
        notes = [f"{stored_count:,} of {count_of(len(self.entries), 'tensor')}, {size}, in {self.folder}."]
        count_by_reason = Counter(entry.left_out for entry in self.entries if entry.left_out is not None)
        for reason, count in count_by_reason.items():
            notes.append(f"{count:,} more have summaries only because of {reason}.")
        if self.failure:
            notes.append(f"The folder lacks the last tensors: {self.failure}.")
        return notes


Keep = Literal["no", "summary", "full"]

# Bytes of a tensor that is fetched, and summarised on the host, faster than it is where it lies.
_HOST_BYTES = 1 << 18


@dataclass(slots=True)
class _IndexedOp(OpRecord):
    """One op and its index in the dump."""

    index: int


class DumpTool(TensorTool[_IndexedOp]):
    """Write inputs, outputs, weights and gradients of ops, or summaries of them, into a folder.

    Files are written every few seconds, at the end of a scope, when `result` is read, and when the program
    ends.  If writing fails, as on a full disk, a warning names the file, the program continues, and the next
    write tries again; the result says what the folder lacks.

    Args:
        folder: Created when needed, with a subfolder for each rank of a distributed run.
        inputs: What to write of each op's inputs: "no", "summary" or "full".
        outputs: See `inputs`.
        weights: See `inputs`.
        gradients: See `inputs`.
        executions: Number of executions to write for each op; None for all.
        every: Write every n-th execution, beginning with the first.
        max_bytes: Limit of all tensors; a tensor beyond it is written as a summary.
        max_tensor_bytes: Limit of one tensor, likewise.
        format: Of the files with tensors.
        overwrite: Replace an older dump in the folder.
        **selection: Options of `select`, such as module="encoder".

    Raises:
        AmandaError: For a folder that has other files in it, or that is not writable.
    """

    purpose = "look"
    is_copied_when_used = False

    @checked
    def __init__(
        self, folder: OutputFolder = Path("dump"), inputs: Keep = "no", outputs: Keep = "summary",
        weights: Keep = "summary", gradients: Keep = "summary", executions: PositiveInt | None = 1,
        every: PositiveInt = 1, max_bytes: NonNegativeInt = 1 << 30,
        max_tensor_bytes: NonNegativeInt = 64 << 20, format: Format = "safetensors", overwrite: bool = False,
        **selection: Unpack[SelectOptions],
    ) -> None:  # fmt: skip
        keep_by_role: dict[Role, Keep]
        keep_by_role = {"input": inputs, "output": outputs, "weight": weights, "gradient": gradients}
        super().__init__([role for role, keep in keep_by_role.items() if keep != "no"], every, executions)
        self._keep_by_role: dict[str, Keep] = {str(role): keep for role, keep in keep_by_role.items()}
        self._max_bytes, self._max_tensor_bytes = max_bytes, max_tensor_bytes
        self._writer = Writer(_rank_folder(Path(folder)), format, overwrite)
        self._next_order = self._stored_bytes = 0
        self._dtype: Any = None
        # Of the writer, not of the tool: a method of the tool would keep the tool alive.
        weakref.finalize(self, self._writer.flush)
        select(self, **selection)

    @property
    def result(self) -> DumpResult:
        """Write what is pending; return the entries so far."""
        self._writer.flush()
        writer = self._writer
        result = DumpResult(writer.folder, writer.ops, writer.entries, writer.written, writer.failure)
        result.remarks = self.remarks
        return result

    def scope_left(self) -> None:
        """Write what is pending."""
        super().scope_left()
        self._writer.flush()

    def clear(self) -> None:
        """Delete all entries, also in the folder, and start again."""
        super().clear()
        self._writer.clear()
        self._next_order = self._stored_bytes = 0

    def add_returned(self, value: Any) -> None:
        """Add the tensors in a value that a program returned, as outputs of an op of type "returned".

        value: a tensor, or lists, tuples, dicts, dataclasses of tensors.  All are left out before a first op.
        """
        if self._dtype is not None:  # an op has been analysed: else nothing tells how tensors are read
            op = Op(phase="forward", type="returned", module="", source="", namespace="", id=0)
            record = self._indexed_op(op)
            tensors = leaves([value], structures=True)
            self._observe_execution(*tensors, record=record, role="output", dtype=self._dtype)

    def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> _IndexedOp:
        """Add an op, or a backward op with the id of its forward op, to the index; return its record."""
        forward_id, backward_id = context.get_op_id(), context.get_backward_op_id()
        op_id, of = (forward_id, None) if context.is_forward() else (backward_id or 0, forward_id)
        return self._indexed_op(Op(
            phase, type=kind, module=context.get_scope(), source=context.get_source(),
            namespace=str(context.namespace), id=op_id, of=of, layout=context["layout"],
            weight_layout=context["weight_layout"], in_place=context["in_place"] and context.is_forward(),
            parameters=tuple(parameter_paths(context).items()) if context.is_forward() else (),
        ))  # fmt: skip

    def _indexed_op(self, op: Op) -> _IndexedOp:
        return _IndexedOp(op.phase, op.type, op.module, op.source, self._writer.add_op(op))

    def _record(self, context: amanda.OpContext, phase: str, kind: str) -> _IndexedOp:
        """Return the record of an op; note the reports of the scopes, and how element types are read."""
        # The reports say at the end which compiled callables ran op by op.
        for scope in State.current().scopes:
            if not any(scope.report is report for report in self._writer.reports):
                self._writer.reports.append(scope.report)
        self._dtype = context["dtype"]
        return super()._record(context, phase, kind)

    def _observe_executions(self, executions: Executions) -> None:
        """Add the tensors of a batch of executions in a graph; where all are summarised, by native code."""
        columns = executions.prepared(self._columns_of)
        if not (columns and self._add_summaries(executions, *columns)):
            columns.clear()  # native code cannot read one of the tensors
            super()._observe_executions(executions)

    def _columns_of(self, executions: Executions) -> list[Any]:
        """Return facts of a batch's tensors, which `_add_summaries` takes; [] if not all are summarised."""
        is_full = "full" in self._keep_by_role.values()
        if is_full or self._every > 1 or self._executions or not amanda.interceptor.NATIVE:
            return []
        return [*zip(*(
            (position, length, i, options["record"].index, tensor.role, tensor.position, tensor.dtype)
            for position, length, i, options, tensor in self._tensors_of_batch(executions)
            if self._keep_by_role[tensor.role.split()[-1]] != "no"
        ), strict=True)]  # fmt: skip

    def _add_summaries(self, executions: Executions, positions: Any, lengths: Any, *facts: Any) -> bool:
        """Measure tensors of a batch; return False, having added none, if native code cannot read one."""
        tensors, moments_type = executions.tensors, amanda.interceptor.Moments
        arrays: Any = tuple([tensors_of(tensors[i]).shared(tensors[i]) for i in positions])
        moments = tuple([moments_type() for _ in arrays])
        if moments_type.add_all(moments, arrays, lengths):
            return False
        numbers, order = self._count_executions(executions), self._next_order
        self._next_order += len(numbers)
        measured = [array.shape for array in arrays], moments, list(map(sample_of, arrays))

        def make_entries() -> Iterator[RawEntry]:
            for i, op, role, position, dtype, shape, sums, sample in zip(*facts, *measured, strict=True):
                entry = Entry(op, order + i, numbers[i], role, position, shape, dtype, UNMEASURED)
                yield RawEntry(entry, sums.numbers, sample)

        self._writer.add(make_entries)
        return True

    def observe(self, record: _IndexedOp, tensors: Iterator[OpTensor], execution: int) -> None:
        """Measure the tensors of an execution, and add their entries."""
        for tensor in tensors:
            keep = self._keep_by_role[tensor.role.split()[-1]]
            if keep != "no":
                to_measure, shape, stored_array, left_out = self._select_data(tensor, keep)
                entry = Entry(
                    record.index, self._next_order, execution, tensor.role, tensor.position, shape,
                    tensor.dtype, UNMEASURED, left_out=left_out, batches=tensor.batches,
                )  # fmt: skip
                accumulator = Accumulator(None)
                accumulator.add(to_measure)
                raw = RawEntry(entry, accumulator.vector(), sample_of(to_measure))
                self._writer.add(raw, stored_array)
        self._next_order += 1

    def _select_data(
        self, op_tensor: OpTensor, keep: Keep
    ) -> tuple[Any, tuple[int, ...], NDArray[Any] | None, str | None]:
        """Return what to measure, the shape, numbers to store, and a limit that forbids it; count bytes."""
        tensors = tensors_of(op_tensor.tensor)
        to_measure = tensors.shared(op_tensor.tensor)
        shape = tensors.extents(op_tensor.tensor) if to_measure is None else to_measure.shape
        # A type without a known size counts as the widest.
        size = prod(shape) * (itemsize(op_tensor.dtype) or 8)
        left_out = None
        if keep == "full" and size > self._max_tensor_bytes:
            left_out = "max_tensor_bytes"
        elif keep == "full" and self._stored_bytes + size > self._max_bytes:
            left_out = "max_bytes"
        is_stored = keep == "full" and left_out is None
        # What is stored is copied to the host anyway, and then summarised there.
        is_fetched = is_stored or (to_measure is None and size <= _HOST_BYTES)
        array = exact_array(op_tensor.tensor) if is_fetched else None
        if is_stored and array is None:
            left_out = "its layout"
        if to_measure is None:
            to_measure = op_tensor.tensor if array is None else array
        stored_array = array if is_stored else None
        self._stored_bytes += 0 if stored_array is None else stored_array.nbytes
        return to_measure, shape, stored_array, left_out


def _rank_folder(folder: Path) -> Path:
    """Return the folder of this rank in a run with several ranks, else the folder itself."""
    # From the environment: the tool may be made before the process group.
    has_several_ranks = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return folder / f"rank{os.environ.get('RANK', '0')}" if has_several_ranks else folder
