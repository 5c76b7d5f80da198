"""Calls of routines that a graph makes as Python in each run: the values they get, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from amanda.backend import Action, Insertion, OpFacts
from amanda.errors import RoutineError
from amanda.plan import run_replacement
from torch.utils._pytree import tree_map

from ._node_runs import TemplateSlot, fill_template

if TYPE_CHECKING:
    from amanda.backend import Execution


def holds_tensors(value: Any) -> bool:
    """Return True for a tensor or a list of tensors that is not empty: a graph hands over such values."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


class PlaceValues:
    """The values of a routine's place, split into tensors and numbers that a graph hands over, and constants.

    tensor_positions: of the values that are a tensor or a list of tensors.  list_lengths: of those lists,
    None for a tensor.  floats: a tensor for each symbol of a float.  numbers: the integers, which may be
    symbols; in a run the floats follow them.  constants: templates of the other values.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        """Split the values; all integers but bools are handed over, as in another run they may be symbols."""
        self.all = list(values)
        self.tensor_positions = [i for i, value in enumerate(values) if holds_tensors(value)]
        tensor_values = [values[i] for i in self.tensor_positions]
        self.list_lengths = [
            len(value) if isinstance(value, (list, tuple)) else None for value in tensor_values
        ]
        self.tensors: list[torch.Tensor] = [tensor for value in tensor_values for tensor in _as_list(value)]
        self.numbers: list[int | torch.SymInt] = []
        self.floats: list[torch.Tensor] = []
        self._float_templates: list[TemplateSlot] = []
        self.constants = {
            i: tree_map(self._replace_number, value)
            for i, value in enumerate(values)
            if i not in self.tensor_positions
        }
        # In a run the floats come after all integers, whose number is known only now.
        for template in self._float_templates:
            template.slot += len(self.numbers)

    @property
    def flat(self) -> list[torch.Tensor]:
        """Return the tensors that the graph hands over."""
        return [*self.tensors, *self.floats]

    def _replace_number(self, leaf: Any) -> Any:
        """Return a slot for a number, which is noted as it may be a symbol; return anything else as it is."""
        if isinstance(leaf, torch.SymFloat):
            self._float_templates.append(TemplateSlot(len(self.floats)))
            self.floats.append(torch.scalar_tensor(cast("float", leaf), dtype=torch.float64))
            return self._float_templates[-1]
        if not isinstance(leaf, (torch.SymInt, int)) or isinstance(leaf, bool):
            return leaf
        self.numbers.append(leaf)
        return TemplateSlot(len(self.numbers) - 1)

    @property
    def pattern(self) -> Hashable:
        """Return which of the values are tensors, as a key."""
        return tuple(self.tensor_positions), tuple(self.list_lengths), len(self.floats)

    def with_tensors(self, flat: Sequence[torch.Tensor]) -> list[Any]:
        """Return the values with other tensors, single ones and in lists, taken from a flat list."""
        tensors = iter(flat)
        values = list(self.all)
        for i, length in zip(self.tensor_positions, self.list_lengths, strict=True):
            values[i] = next(tensors) if length is None else [next(tensors) for _ in range(length)]
        return values


def with_clones(values: Sequence[Any], targets: Sequence[int]) -> list[Any]:
    """Return the values, with clones of those at `targets`, which an op writes."""
    return [value.clone() if i in targets else value for i, value in enumerate(values)]


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


class PythonCall(Insertion):
    """Call of one routine at a place, before or after an op or a backward op, in each run of a graph.

    constants: the values that are not tensors.  numbers: those of a run, of which the last are floats.
    """

    __slots__ = ("constants", "float_count", "numbers")

    def __init__(
        self, action: Action, facts: OpFacts, values: PlaceValues, output_positions: Sequence[int]
    ) -> None:
        """Bind a routine to the values of its place, of which it returns those at `output_positions`."""
        # The action gets all values of the place, so it selects none of them again.
        action_on_all = Action(action.type, action.func, action.tool, select=None, kwargs=action.kwargs)
        super().__init__(
            [action_on_all], facts, len(values.all), values.tensor_positions, values.list_lengths,
            output_positions,
        )  # fmt: skip
        self.constants: Mapping[int, Any] = values.constants
        self.float_count = len(values.floats)
        self.numbers: Sequence[float] = ()

    def store_numbers(self, values: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
        """Store the numbers of a run, and return the tensors without those that stand for floats."""
        tensor_count = len(values) - self.float_count
        self.numbers = (*numbers, *(float(value) for value in values[tensor_count:]))
        return values[:tensor_count]

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """Return the values of the place: the graph's tensors, and constants with the numbers of the run."""
        values = super().unflatten(flat)
        for position, constant in self.constants.items():
            values[position] = fill_template(constant, self.numbers)
        return values

    def check_results(self, action: Action, before: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise RoutineError if a routine changed a value other than a tensor: graphs take tensors alone."""
        for position in self.constants:
            if _is_changed(values[position], before[position]):
                change = f"value {position}, {before[position]!r}, to {values[position]!r}"
                error = RoutineError(
                    f"{action} changed {change}; one that a compiled graph calls as Python changes "
                    "tensors alone: mark it @amanda.traceable if it is tensor code"
                )
                raise self.facts.annotate_error(error, action)

    def outputs_without_data(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return empty tensors like the outputs, for a call whose outputs are not like its values."""
        raise NotImplementedError


def _is_changed(value: Any, original: Any) -> bool:
    """Return True unless a value is the original or equals it; True if the two cannot be compared."""
    try:
        return value is not original and not bool(value == original)
    except (RuntimeError, TypeError, ValueError):  # of tensors in lists
        return True


class ReplacementCall(PythonCall):
    """Call of a routine that replaces an op.

    compute: runs the op on the values that the graph hands over; it writes copies of those at `targets`.
    output_count: number of the op's outputs, once the graph is traced.
    """

    __slots__ = ("compute", "output_count", "targets")

    def __init__(
        self, action: Action, facts: OpFacts, values: PlaceValues, compute: Callable[[Sequence[Any]],
        Any], targets: Sequence[int],
    ) -> None:  # fmt: skip
        """Bind a routine to an op's inputs; its outputs take no position among them."""
        super().__init__(action, facts, values, ())
        self.actions = (action,)
        self.compute = compute
        self.targets = targets
        self.output_count: int | None = None

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        """Return the op's inputs, with clones of those that the op writes."""
        return with_clones(super().unflatten(flat), self.targets)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the routine's outputs; the op's outputs if it returns NotImplemented, or may not run.

        rounds: unused, since the graphs of PyTorch hand none over.
        """
        (action,) = self.actions
        values = self.unflatten(flat)
        run = execution.run_dicts.setdefault((self.facts.op_id, ()), {})  # the dict that routines share
        result: Any = NotImplemented
        if execution.runs_action(action):
            result = run_replacement(
                execution.ops, action, values, self.facts, run, original=self.facts.compute
            )
        if result is NotImplemented:
            return list(_as_list(self.compute(values)))
        results = list(_as_list(result))
        if self.output_count is not None:
            self.check_count(results, self.output_count)
        for value in results:
            if not isinstance(value, torch.Tensor):
                kind = "None" if value is None else type(value).__name__
                gives = f"{self.facts.name} gives a tensor; return what the op would"
                error = RoutineError(f"{action} returned {kind} where {gives}")
                raise self.facts.annotate_error(error, action)
        return results

    def outputs_without_data(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the op, and return empty tensors like its results, which the routine's must be like."""
        results = _as_list(self.compute(self.unflatten(values)))
        self.output_count = len(results)
        return [torch.empty(result.shape, dtype=result.dtype, device=result.device) for result in results]


class GradientReplacementCall(PythonCall):
    """Call of a routine that replaces a backward op; is_read: for each outgoing gradient, if it is read.

    read_gradients: positions of the outgoing gradients that something reads.
    """

    __slots__ = ("read_gradients",)

    def __init__(self, action: Action, facts: OpFacts, values: PlaceValues, is_read: Sequence[bool]) -> None:
        super().__init__(action, facts, values, range(len(is_read)))
        self.read_gradients = tuple(i for i, something_reads in enumerate(is_read) if something_reads)
        self.actions = (action,)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the gradients that something reads: the routine's, or those of kernels if it gives none.

        Those of kernels, too, if the routine may not run.  Raises RoutineError for another number of them.
        rounds: unused, as in `ReplacementCall`.
        """
        (action,) = self.actions
        # Last come the gradients that kernels computed, which are the result if the routine declines.
        incoming_count = len(flat) - len(self.read_gradients)
        incoming, kernel_gradients = flat[:incoming_count], flat[incoming_count:]
        if not execution.runs_action(action):
            return list(kernel_gradients)
        run = execution.run_dicts.setdefault((self.facts.op_id, ()), {})  # the dict that routines share
        result = run_replacement(execution.ops, action, self.unflatten(incoming), self.facts, run)
        if result is NotImplemented:
            return list(kernel_gradients)
        return select_read_gradients(
            result, len(self.output_positions), self.read_gradients, action, self.facts
        )


def select_read_gradients(
    result: Any, gradient_count: int, read_positions: Sequence[int], action: Action, facts: OpFacts
) -> list[Any]:
    """Return the gradients that something reads; a replacement returns all gradients, or only these.

    Raises RoutineError for another number of gradients.
    """
    gradients = list(_as_list(result))
    if len(gradients) == gradient_count:
        return [gradients[i] for i in read_positions]
    if len(gradients) == len(read_positions):
        return gradients
    raise RoutineError(
        f"{action} returned {len(gradients)} gradients; {facts.name} gives {gradient_count}, of which "
        f"{len(read_positions)} are wanted (positions {list(read_positions)})"
    )
