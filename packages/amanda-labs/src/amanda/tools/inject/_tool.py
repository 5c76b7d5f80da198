"""The tool: changes random elements of tensors of the selected ops."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, get_args

import amanda
from amanda.options import (
    AnyFloat,
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    PositiveInt,
    Seed,
    Share,
    checked,
    deprecated,
)
from amanda.tools.inject._faults import (
    BitField,
    Fault,
    InjectError,
    Injection,
    InjectResult,
    Kind,
    OpLabels,
    SelectedOp,
    Site,
    TargetTensor,
    from_bytes,
    tensors_in,
)
from amanda.tools.kit import parameter_inputs, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.libraries import tree_iter, tree_map
from amanda.tools.mapping import StandardMapping, weight_gradient
from amanda.tools.select import Globs, Selection, as_remarks
from amanda.tools.steps import execution_number

Target = Literal["outputs", "inputs", "weights", "grad_outputs", "grad_inputs", "weight_grads"]


class InjectTool(amanda.Tool):
    """Inject faults into tensors of selected ops, and list the changed elements.

    On fault models: in Tyagi et al. 2026 (arXiv 2605.04213), stuck-at faults in the gates of a GPU gave NaN
    or Inf in 1.01 % of corruptions, one flipped bit in under 40 % of the corruptions with flipped bits, and
    periodic addresses.  Fernandes dos Santos et al. 2022 (arXiv 2211.13094) show why single flips are too
    simple.  Choose bits and period yourself: no distribution is built in.

    Args:
        fault: "bit_flip", "stuck_at_0", "stuck_at_1" change `flips` bits of an element, by default 1;
            "multi_bit" flips adjacent bits, by default 2; "value", "zero", "nan" write `value`, 0, NaN;
            "gaussian" adds noise of standard deviation `scale`; "uniform" adds noise of at most `scale`;
            "relative" multiplies by 1 + gaussian; "wrong_row" copies elements from another index of `axis`,
            by default -2.
        target: "outputs"; "inputs" that are not parameters; "weights", parameters as the op reads them (the
            stored parameters stay unchanged); "grad_outputs", which enter a backward op; "grad_inputs", which
            leave it; "weight_grads", the gradient of the weight.
        type: Globs of op types ("conv2d", "conv*"), as StandardMapping or the framework names them, and of
            module paths ("layer1"): see `amanda.tools.select.Selection`.  A backward op has a type of its own
            ("linear_backward"); the type of a forward op selects its first backward op, or for "weight_grads"
            the one that computes the weight's gradient.
        module: See `type`.
        exclude: See `type`.
        index: Position of the tensor among the op's inputs, outputs or gradients; None for all targets.
        probability: Chance of a fault in an element, at each execution.
        count: Faults at each execution, by default 1.  Give at most one of the two.
        bits: Positions of the bits that may change, 0 the least significant; None for all.
        field: Part of the number in which they lie: "sign", "exponent", "mantissa" or "any".
        flips: Bits of an element that "bit_flip" and "multi_bit" change.
        value: The number that fault "value" writes.
        scale: Standard deviation of "gaussian" and "relative", bound of "uniform".
        axis: A fault changes the same bits in a whole slice, all elements with one index of this axis;
            `count` and `probability` count slices.  None: a fault changes one element.
        seed: Faults depend on the seed, the op's id and the number of the execution alone; the framework's
            random generators are not touched.
        permanent: Inject the same faults at every execution of an op.
        start: Faults hit the executions in `range(start, end, frequency)` of each op.
        end: See `start`.
        frequency: See `start`.
        limit: Maximum number of changed elements that `result` lists.

    Raises:
        InjectError: For contradictory options.
    """

    purpose = "change"

    @checked(error=InjectError)
    def __init__(
        self,
        fault: Kind = "bit_flip",
        target: Target = "outputs",
        type: Globs = None,
        module: Globs = None,
        index: NonNegativeInt | None = None,
        probability: Share | None = None,
        count: PositiveInt | None = None,
        bits: Annotated[list[NonNegativeInt], NotEmpty] | None = None,
        field: BitField = "any",
        flips: PositiveInt | None = None,
        value: AnyFloat = 0.0,
        scale: NonNegativeFloat = 1.0,
        axis: int | None = None,
        seed: Seed = 0,
        permanent: bool = False,
        start: NonNegativeInt = 0,
        end: NonNegativeInt | None = None,
        frequency: PositiveInt = 1,
        limit: NonNegativeInt = 10_000,
        exclude: Globs = None,
    ) -> None:
        super().__init__()
        if flips is None:
            flips = 2 if fault == "multi_bit" else 1
        if axis is None and fault == "wrong_row":
            axis = -2
        self._fault = Fault(fault, bits, field, flips, value, scale, axis)
        self._fault.check()
        if count is not None and probability is not None:
            raise InjectError("give either count or probability, not both")
        if end is not None and end < start:
            raise InjectError(f"end is {end}, start {start}; give an end that is not before the start")
        self._target, self._index = target, index
        self._selection = Selection(type, module, exclude=exclude)
        self._probability, self._count = probability, count
        self._permanent, self._limit = permanent, limit
        self._faulty_executions = range(start, sys.maxsize if end is None else end, frequency)
        self.seed = seed
        self._analysed_types: set[str] = set()
        self._has_selected = False
        self._selected_count = 0
        self.op_names: Mapping[int, int] = {}
        """Ids by which ops draw and list faults, in a process that has other ids than the first."""
        # By the forward op, so that `op_gone` drops its backward ops as well; then by the op itself.
        self._selected_ops_by_forward_op: dict[int, dict[int, SelectedOp]] = {}
        self._first_backward_op_by_forward_op: dict[int, int | None] = {}
        self.try_at(0, None)
        self.depends_on(StandardMapping())
        if target in ("outputs", "inputs", "weights"):
            self.add_inst_for_op(self._instrument_forward)
        else:
            self.add_inst_for_op(self._instrument_backward, backward=True)

    @property
    def result(self) -> InjectResult:
        """Return the injections so far, in an order that does not depend on threads."""
        executions = self._all_executions()
        unselected_types = () if self._has_selected else self._analysed_types
        result = InjectResult(
            _sorted_items(self._ordered_injections), self._changed_count, executions, unselected_types
        )
        unread_remarks = dict.fromkeys(sentence for op in self._all_selected_ops() for sentence in op.remarks)
        result.remarks = [*as_remarks(self.unmatched()), *unread_remarks]
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without records of ops: a copy analyses ops anew."""
        # In another process an op may have the id of another op here, and its place in the order of ops.
        records = {
            "_selected_ops_by_forward_op": {},
            "_first_backward_op_by_forward_op": {},
            "_selected_count": 0,
        }
        return {**vars(self), **records, "_executions_of_deleted": self._all_executions()}

    def _all_executions(self) -> int:
        """Return the number of executions of selected ops, also of those that are gone."""
        return self._executions_of_deleted + sum(op.executions for op in self._all_selected_ops())

    def options(self) -> dict[str, Any]:
        """Return what decides the faults besides the selection of ops, as values for JSON."""
        executions = self._faulty_executions
        return {
            **self._fault._asdict(), "target": self._target, "index": self._index, "count": self._count,
            "probability": self._probability, "permanent": self._permanent, "seed": self.seed,
            "executions": [executions.start, executions.stop, executions.step], "limit": self._limit,
        }  # fmt: skip

    def unmatched(self) -> list[str]:
        """Return a sentence for each option that selected no op."""
        return [*super().unmatched(), *self._selection.unmatched()]

    def clear(self) -> None:
        """Forget the injections, and count executions from 0; analysed ops stay analysed."""
        # Each behind its execution and the number of its op, by which results are in order.
        self._ordered_injections: list[tuple[tuple[int, int], Injection]] = []
        self._changed_count = 0
        self._executions_of_deleted = 0  # of ops of deleted models
        # The records stay, as routines of analysed ops hold them.
        for selected_op in self._all_selected_ops():
            selected_op.executions = 0

    def op_gone(self, op_id: int) -> None:
        """Drop the records of a forward op and its backward ops, but keep the numbers of their executions."""
        self._first_backward_op_by_forward_op.pop(op_id, None)
        self._executions_of_deleted += sum(
            op.executions for op in self._selected_ops_by_forward_op.pop(op_id, {}).values()
        )

    def _all_selected_ops(self) -> list[SelectedOp]:
        """Return the records of all ops that live; copies, as another thread may add some."""
        return [
            selected_op
            for selected_op_by_id in list(self._selected_ops_by_forward_op.values())
            for selected_op in list(selected_op_by_id.values())
        ]

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Record the executions that can have faults, in a context without faults; `sites` lists them.

        Forgets the injections, and the site of `try_at`: afterwards faults hit all sites.
        """
        self._begin_calibration()
        try:
            yield
        finally:
            self._is_calibrating = False

    @deprecated(use="calibrating, a context", since="amanda-tools 0.2", gone="0.4")
    def look(self) -> None:
        """Note executions, and inject nothing, until `try_at`.  Deprecated: use `calibrating`."""
        self._begin_calibration()

    def _begin_calibration(self) -> None:
        """Record sites instead of faults, from the first execution on."""
        self.try_at(0, None)
        self._is_calibrating = True

    @property
    def sites(self) -> list[Site]:
        """Return the executions that can have faults, of the last `calibrating`."""
        return _sorted_items(self._ordered_sites)

    def try_at(self, trial: int, site: Site | None) -> None:
        """Forget injections and `sites`, and inject faults at one site, or at all sites, from now on.

        Args:
            trial: Number that varies the random choice.
            site: Site of the faults; None for all.
        """
        self.clear()
        self._ordered_sites: list[tuple[tuple[int, int], Site]] = []
        self._drawn_site, self._trial, self._is_calibrating = site, trial, False

    def _instrument_forward(self, context: amanda.OpContext) -> None:
        """Insert the injection at the outputs, inputs or weights of a selected forward op, if it has any."""
        self._analysed_types.add(context["type"])
        if not self._selection.fits(context):
            return
        selected_op = self._selected_op(context, context.get_op_id(), context["phase"], context["type"])
        if self._target == "outputs":
            context.insert_after_op(self._inject, selected_op=selected_op, **_run_argument(context))
            return
        # Both: a weight may be a plain tensor, and a bias is a parameter that is not a weight.
        parameter_positions = {context["weight_index"], *parameter_inputs(context)}
        wants_parameters = self._target == "weights"
        positions = [
            i for i in range(len(context.get_inputs())) if (i in parameter_positions) == wants_parameters
        ]
        if positions:
            context.insert_before_op(
                self._inject, inputs=positions, selected_op=selected_op, positions=positions,
                **_run_argument(context),
            )  # fmt: skip

    def _instrument_backward(self, context: amanda.OpContext) -> None:
        """Insert the injection at gradients of a backward op that its own or its op's type selects."""
        kind: str = context["backward_type"]
        self._analysed_types.add(kind)
        # The framework's name of the node, such as AddmmBackward0, selects it too.
        node_name = context.get_backward_op().__name__
        if not self._selection.fits(context, kind, node_name) and not self._selects_by_forward(context, kind):
            return
        selected_op = self._selected_op(context, context.get_backward_op_id() or 0, "backward", kind)
        if self._target == "grad_outputs":
            context.insert_before_backward_op(self._inject, selected_op=selected_op, run=None)
        elif self._target == "grad_inputs":
            context.insert_after_backward_op(self._inject, selected_op=selected_op, run=None)
        elif context["weight_grad_index"] is not None:
            positions = [context["weight_grad_index"]]
            context.insert_after_backward_op(
                self._inject, grad_inputs=positions, selected_op=selected_op, positions=positions,
                is_target=weight_gradient(context), run=None,
            )  # fmt: skip

    def _selects_by_forward(self, context: amanda.OpContext, kind: str) -> bool:
        """Return True if the forward op's type selects this backward op, of several the first analysed."""
        # Adding up a leaf's gradient belongs to no forward op.
        if kind == "accumulate_grad" or not self._selection.fits(context):
            return False
        if self._target == "weight_grads" and context["weight_grad_index"] is None:
            return False
        forward_id, backward_id = context.get_op_id(), context.get_backward_op_id()
        # The first backward op that is analysed is the one that the gradient enters.
        return self._first_backward_op_by_forward_op.setdefault(forward_id, backward_id) == backward_id

    def _selected_op(self, context: amanda.OpContext, op: int, phase: str, kind: str) -> SelectedOp:
        """Return the record of an op, new at its first analysis.  op: id of the forward or backward op."""
        selected_ops = self._selected_ops_by_forward_op.setdefault(context.get_op_id(), {})
        if op not in selected_ops:
            labels = OpLabels(phase, kind, context.get_scope(), context.get_source())
            selected_ops[op] = SelectedOp(op, labels, self._selected_count, context["dtype"])
            self._selected_count += 1
            self._has_selected = True
        return selected_ops[op]

    def _inject(
        self, *values: Any, selected_op: SelectedOp, positions: Sequence[int] | None = None,
        is_target: Callable[[int, Any], bool] = lambda position, value: True,
        run: dict[Any, Any] | None, recomputed: bool,
    ) -> Any:  # fmt: skip
        """Count an execution; return its values with faults, or None without, or to record its site alone.

        positions: of the values among the op's inputs, outputs or gradients; None for all in order.
        """
        execution = execution_number(selected_op, run, recomputed)
        site = self._drawn_site
        is_other_site = site is not None and (selected_op.op, execution) != (site.op, site.execution)
        if execution not in self._faulty_executions or is_other_site:
            return None
        tensors: list[TargetTensor] = []
        positions = positions or range(len(values))
        for value_index, (position, value) in enumerate(zip(positions, values, strict=True)):
            if self._index in (None, position) and is_target(position, value):
                name = f"{self._target}[{position}]"
                tensors += tensors_in(value, name, value_index, self._fault, selected_op)
        if not self._is_calibrating:
            return self._add_faults(values, tensors, selected_op, execution, recomputed)
        size = sum(tensor.size for tensor in tensors)
        # A checkpoint runs an op again: that is the same execution, and no further site.
        if size and not recomputed:
            site = Site(selected_op.op, execution, size, *selected_op.labels)
            self._ordered_sites.append(((execution, selected_op.number), site))
        return None

    def _add_faults(
        self, values: Sequence[Any], tensors: Sequence[TargetTensor], selected_op: SelectedOp, execution: int,
        recomputed: bool,
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """Return the values with faults in random units; None without faults.

        A unit of a fault is an element, or with an axis a slice.
        """
        # The units of all tensors are numbered one after the other, so that each is equally likely.
        unit_counts = [tensor.unit_count(self._fault.axis) for tensor in tensors]
        *first_units, total = itertools.accumulate(unit_counts, initial=0)
        # A permanent fault hits the same units in every execution.
        random = self._make_random(selected_op.op, 0 if self._permanent else execution)
        if self._probability is None:
            fault_count = min(self._count or 1, total)
        else:
            fault_count = int(random.binomial(total, self._probability))
        if not fault_count:
            return None
        # Sorted, so that the units of each tensor are one slice.
        units = np.sort(random.choice(total, fault_count, replace=False, shuffle=False))
        units_by_tensor = np.split(units, np.searchsorted(units, first_units[1:]))
        results = list(values)
        for tensor, first_unit, tensor_units in zip(tensors, first_units, units_by_tensor, strict=True):
            if not len(tensor_units):
                continue
            units_in_tensor = tensor_units - first_unit
            new_tensor = self._add_fault(tensor, units_in_tensor, selected_op, execution, random, recomputed)
            if tensor.item is None:
                results[tensor.position] = new_tensor
            else:
                # A copy of the list: the program may hold the original.
                results[tensor.position] = [*results[tensor.position]]
                results[tensor.position][tensor.item] = new_tensor
        return tuple(results)

    def _make_random(self, op: int, execution: int) -> np.random.Generator:
        """Return a random generator for an execution of an op, which does not depend on earlier draws."""
        # Seed and op are the key, trial and execution the counter: each execution has numbers of its own,
        # which do not depend on what ran before, on threads or on a checkpoint.
        key = np.array([self.seed, self.op_names.get(op, op)], np.uint64)
        target_number = get_args(Target).index(self._target)
        counter = np.array([0, execution, self._trial, target_number], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def _add_fault(
        self, tensor: TargetTensor, units: Any, selected_op: SelectedOp, execution: int,
        random: np.random.Generator, recomputed: bool,
    ) -> Any:  # fmt: skip
        """Return a tensor with the fault in some units, and record the injections.

        The recomputation of a checkpoint has the same fault, and no further record.
        """
        tensors, dtype, axis = tensors_of(tensor.value), tensor.dtype, self._fault.axis
        positions_of_units = tensor.positions(units, axis)
        positions = positions_of_units.ravel()
        old_bytes = tensors.bytes_at(tensor.value, positions)
        bits = None
        if self._fault.kind == "wrong_row":
            row_count = tensor.unit_count(axis)
            # From 1 on: the row itself would be no fault.
            other_rows = (units + random.integers(1, row_count, size=len(units))) % row_count
            new_bytes = tensors.bytes_at(tensor.value, tensor.positions(other_rows, axis).ravel())
        else:
            # All elements of a slice change the same bits, as a stuck line of memory does.
            slice_numbers = np.broadcast_to(np.arange(len(units))[:, None], positions_of_units.shape).ravel()
            new_bytes, bits = self._fault.apply(old_bytes, dtype, tensor.value, random, slice_numbers)
        if not recomputed:
            self._record_injections(tensor, positions, bits, old_bytes, new_bytes, selected_op, execution)
        return tensors.with_bytes(tensor.value, positions, new_bytes)

    def _record_injections(
        self, tensor: TargetTensor, positions: Any, bits: Any, old_bytes: Any, new_bytes: Any,
        selected_op: SelectedOp, execution: int,
    ) -> None:  # fmt: skip
        """Count the changed elements at flat positions of a tensor, and list them up to `limit`.

        bits: (elements, flips) the changed bits; None for a fault of whole numbers.
        """
        self._changed_count += len(positions)
        room = max(0, self._limit - len(self._ordered_injections))
        old_numbers = from_bytes(old_bytes[:room], tensor.dtype).tolist()
        new_numbers = from_bytes(new_bytes[:room], tensor.dtype).tolist()
        op_id = self.op_names.get(selected_op.op, selected_op.op)
        labels = (*selected_op.labels, op_id, execution, tensor.name, tensor.dtype)
        for i, position in enumerate(positions[:room]):
            element = tuple(map(int, np.unravel_index(position, tensor.value.shape)))
            changed_bits = () if bits is None else tuple(map(int, bits[i]))
            injection = Injection(*labels, element, changed_bits, old_numbers[i], new_numbers[i])
            self._ordered_injections.append(((execution, selected_op.number), injection))


def _run_argument(context: amanda.OpContext) -> dict[str, None]:
    """Return keyword arguments that set `run` to None in graphs, where no op runs again."""
    return {} if context.is_eager() else {"run": None}


def _sorted_items(pairs: list[tuple[tuple[int, int], Any]]) -> list[Any]:
    """Return injections or sites, sorted by execution and by the number of the op."""
    return [item for _, item in sorted(pairs, key=lambda pair: pair[0])]


class MemorySnapshot(amanda.Tool):
    """Save the memory that a program reads or writes but did not allocate: parameters, buffers, inputs.

    `restore` sets every byte to its value before the first op that read or wrote the memory.
    """

    def __init__(self) -> None:
        self.clear()
        self.add_inst_for_op(self._instrument)

    def clear(self) -> None:
        """Drop all copies, and forget which memory the program allocated."""
        self._restorers: dict[Any, Callable[[], None]] = {}  # by the key of the saved memory
        self._new_memory: set[Any] = set()  # keys of what the program allocated

    def restore(self) -> None:
        """Restore the saved memory; the copies stay, for the next run."""
        # Copies back are not ops of the program.
        with amanda.disabled():
            for restore in self._restorers.values():
                restore()

    def outlasting(self, value: Any) -> Any:
        """Return the value with copies of its tensors in saved memory, which `restore` would overwrite."""
        return tree_map(self._copy_outlasting, value, is_leaf=_is_leaf)

    def _copy_outlasting(self, value: Any) -> Any:
        """Return a copy of a tensor in saved memory; any other value as it is."""
        # An output may be a parameter itself, which `restore` writes.
        is_restored = any(key in self._restorers for key, _ in _memories_of([value]))
        return tensors_of(value).duplicate(value) if is_restored else value

    def _instrument(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._save_inputs)
        context.insert_after_op(self._note_outputs)

    @amanda.observer
    def _save_inputs(self, *inputs: Any) -> None:
        """Save memory that is read for the first time and was not allocated by the program."""
        # Memory that an op of the program allocated is new at each run; what is read before is from outside.
        for key, save in _memories_of(inputs):
            if key not in self._restorers and key not in self._new_memory:
                self._restorers[key] = save()

    @amanda.observer
    def _note_outputs(self, *outputs: Any) -> None:
        """Note the memory of outputs as allocated by the program, unless it is saved."""
        self._new_memory.update(key for key, _ in _memories_of(outputs) if key not in self._restorers)


def _is_leaf(value: Any) -> bool:
    """Return True for anything but a dict, a plain list or a plain tuple."""
    return not isinstance(value, dict) and type(value) not in (list, tuple)


def _memories_of(values: Any) -> Iterator[tuple[Any, Callable[[], Callable[[], None]]]]:
    """Yield key and save function of the memory of each value, also in lists."""
    memories = (tensors_of(value).memory(value) for value in tree_iter(values))
    yield from (memory for memory in memories if memory is not None)
