"""Routines that a graph calls as Python each time it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from amanda.backend import Action, Insertion, OpFacts
from amanda.errors import RoutineError
from amanda.plan import run_replacement
from torch.utils._pytree import tree_map

from ._record import Given, filled

if TYPE_CHECKING:
    from amanda.backend import Execution


def holds_tensors(value: Any) -> bool:
    """Return True if a value of an op is a tensor or a list of tensors, so that a graph hands it over."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, torch.Tensor)


class Values:
    """The values at a place, taken apart: what a graph hands over as tensors and numbers, and the rest.

    tensors: those of the values.  floats: one for each symbol of a float.  numbers: the integers, which may
    be symbols; in a run the floats follow them.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.all = list(values)
        self.given = [i for i, value in enumerate(values) if holds_tensors(value)]
        self.sizes = [len(values[i]) if isinstance(values[i], (list, tuple)) else None for i in self.given]
        self.tensors: list[torch.Tensor] = [one for i in self.given for one in _listed(values[i])]
        self.numbers: list[int | torch.SymInt] = []
        self.floats: list[torch.Tensor] = []
        self._of_floats: list[Given] = []
        self.others = {i: tree_map(self._taken, one) for i, one in enumerate(values) if i not in self.given}
        for given in self._of_floats:
            given.slot += len(self.numbers)

    @property
    def flat(self) -> list[torch.Tensor]:
        """The tensors that are handed over."""
        return [*self.tensors, *self.floats]

    def _taken(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.SymFloat):
            self._of_floats.append(Given(len(self.floats)))
            self.floats.append(torch.scalar_tensor(cast("float", leaf), dtype=torch.float64))
            return self._of_floats[-1]
        if not isinstance(leaf, (torch.SymInt, int)) or isinstance(leaf, bool):
            return leaf
        self.numbers.append(leaf)
        return Given(len(self.numbers) - 1)

    @property
    def pattern(self) -> Hashable:
        """Return which of the values are tensors."""
        return tuple(self.given), tuple(self.sizes), len(self.floats)

    def with_tensors(self, flat: Sequence[torch.Tensor]) -> list[Any]:
        """The values with other tensors."""
        left = iter(flat)
        placed = list(self.all)
        for i, size in zip(self.given, self.sizes, strict=True):
            placed[i] = next(left) if size is None else [next(left) for _ in range(size)]
        return placed


def cloned(values: Sequence[Any], targets: Sequence[int]) -> list[Any]:
    """The values, with copies of those that an op writes."""
    return [one.clone() if i in targets else one for i, one in enumerate(values)]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


class Called(Insertion):
    """One routine at a place.

    others: the values that are no tensors.  numbers: those of a run, of which the last ones are floats.
    """

    __slots__ = ("floats", "numbers", "others")

    def __init__(self, action: Action, facts: OpFacts, values: Values, gives: Sequence[int]) -> None:
        own = Action(action.type, action.func, action.tool, None, action.kwargs)
        super().__init__([own], facts, len(values.all), values.given, values.sizes, gives)
        self.others: Mapping[int, Any] = values.others
        self.floats = len(values.floats)
        self.numbers: Sequence[float] = ()

    def handed(self, values: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
        """Take the numbers of a run; the tensors that are none of them."""
        count = len(values) - self.floats
        self.numbers = (*numbers, *(float(one) for one in values[count:]))
        return values[:count]

    def values(self, flat: Sequence[Any]) -> list[Any]:
        """The values of the place, from the tensors that the graph hands over."""
        values = super().values(flat)
        for position, other in self.others.items():
            values[position] = filled(other, self.numbers)
        return values

    def check(self, action: Action, given: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise RoutineError where the routine changed what is no tensor: the graph does not take it."""
        for position in self.others:
            if _differ(values[position], given[position]):
                changed = f"value {position}, {given[position]!r}, to {values[position]!r}"
                error = RoutineError(
                    f"{action} changed {changed}; one that a compiled graph calls as Python changes "
                    "tensors alone: mark it @amanda.traceable if it is tensor code"
                )
                raise self.facts.explain(error, action)

    def made(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what it gives, without data, where that is not like values that it is given."""
        raise NotImplementedError


def _differ(value: Any, other: Any) -> bool:
    try:
        return value is not other and not bool(value == other)
    except (RuntimeError, TypeError, ValueError):  # of tensors in lists
        return True


class CalledInstead(Called):
    """A routine in the place of an op.

    compute: the op itself, on the values that the graph hands over, of which it writes copies of `targets`.
    """

    __slots__ = ("compute", "targets")

    def __init__(
        self,
        action: Action,
        facts: OpFacts,
        values: Values,
        compute: Callable[[Sequence[Any]], Any],
        targets: Sequence[int],
    ) -> None:
        super().__init__(action, facts, values, ())
        self.actions = (action,)
        self.compute = compute
        self.targets = targets

    def values(self, flat: Sequence[Any]) -> list[Any]:
        return cloned(super().values(flat), self.targets)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return what the routine gives; the op's own outputs where it leaves the op to itself."""
        (action,) = self.actions
        values = self.values(flat)
        run = execution.runs.setdefault((self.facts.op_id, ()), {})
        result: Any = NotImplemented
        if execution.runs_action(action):
            result = run_replacement(
                execution.ops, action, values, self.facts, run, original=self.facts.compute
            )
        if result is NotImplemented:
            result = self.compute(values)
        return list(_listed(result))

    def made(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = _listed(self.compute(self.values(values)))
        return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in results]


class CalledForGradients(Called):
    """A routine in the place of a backward op; leaving: which of the gradients that leave are wanted."""

    __slots__ = ("leaving",)

    def __init__(self, action: Action, facts: OpFacts, values: Values, leaving: Sequence[bool]) -> None:
        super().__init__(action, facts, values, range(len(leaving)))
        self.read_gradients = tuple(i for i, wanted in enumerate(leaving) if wanted)
        self.actions = (action,)

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """The gradients that are wanted."""
        (action,) = self.actions
        own, kernels = flat[: -len(self.read_gradients)], flat[-len(self.read_gradients) :]
        if not execution.runs_action(action):
            return list(kernels)
        run = execution.runs.setdefault((self.facts.op_id, ()), {})
        result = run_replacement(execution.ops, action, self.values(own), self.facts, run)
        if result is NotImplemented:
            return list(kernels)
        return gradients_of(result, len(self.output_positions), self.read_gradients, action, self.facts)


def gradients_of(result: Any, count: int, wanted: Sequence[int], action: Action, facts: OpFacts) -> list[Any]:
    """The wanted gradients among those that a replacement gave: all that leave, or those that are wanted."""
    results = list(_listed(result))
    if len(results) == count:
        return [results[i] for i in wanted]
    if len(results) == len(wanted):
        return results
    raise RoutineError(
        f"{action} returned {len(results)} gradients; {facts.name} gives {count}, of which {len(wanted)} are "
        f"wanted (positions {list(wanted)})"
    )
