"""Running one instrumentation routine: selection, isolation from autodiff, and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from amanda._notes import add_note, describe, explained
from amanda.errors import MutationError, RoutineError

if TYPE_CHECKING:
    from amanda._state import State
    from amanda.action import Action, Routine
    from amanda.context import OpFacts


class TensorOps(ABC):
    """What a driver knows of its framework's tensors."""

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of the framework."""

    @abstractmethod
    def isolated(self) -> AbstractContextManager[Any]:
        """Context in which autodiff records nothing."""

    @abstractmethod
    def version(self, value: Any) -> Any:
        """What changes when a value is written into; None where that cannot be told."""

    def versions(self, values: Sequence[Any]) -> list[Any]:
        """The version of each value."""
        return [self.version(value) for value in values]

    def call_isolated(self, func: Routine, values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine where autodiff records nothing."""
        with self.isolated():
            return func(*values, **kwargs)

    @abstractmethod
    def straight_through(self, original: Any, value: Any) -> Any:
        """`value`, with the identity as its gradient's way back to `original`.

        Raises RoutineError where it has another shape or is complex and `original` is not, or the
        reverse; casts between floating types.
        """

    @abstractmethod
    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor, straight through where isolated."""

    @abstractmethod
    def kept(self, value: Any) -> Any:
        """A value for later: what it holds, without the graph that it hangs in."""

    @abstractmethod
    def copied(self, value: Any) -> Any:
        """A differentiable copy of a tensor."""


def run_routine(
    ops: TensorOps,
    action: Action,
    values: list[Any],
    facts: OpFacts,
    run: dict[str, Any],
    state: State,
    mutable: Sequence[int] = (),
) -> list[Any]:
    """Call a routine on the selected values: `values` itself where it changes none, else a new list.

    mutable: positions of the user's tensors that the op writes into; a change is copied into them.
    """
    select = action.select
    isolated = not (action.differentiable or state.autodiff)
    try:
        picked = values if select is None else _picked(action, values, facts)
        results = _call(ops, action, picked, run, isolated)
        if results is None:
            return values
        positions = range(len(values)) if select is None else select
        changed = values
        for position, original, result in zip(positions, picked, results, strict=True):
            if result is original:
                continue
            if changed is values:
                changed = list(values)
            target = values[position]
            if position in mutable and ops.is_tensor(target):
                if isolated:
                    result = _checked(ops, original, result)
                ops.write(target, result, isolated)
            else:
                changed[position] = _substitute(ops, original, result) if isolated else result
        return changed
    except BaseException as error:
        add_note(error, describe(facts, action.tool, str(action)))
        raise


def run_replacement(
    ops: TensorOps,
    action: Action,
    values: list[Any],
    facts: OpFacts,
    run: dict[str, Any],
    targets: Sequence[int] = (),
) -> Any:
    """Call a routine instead of an op: what the op would have returned.

    targets: positions of the user's tensors that the op would have written and returned.
    """
    given = [ops.copied(value) if i in targets else value for i, value in enumerate(values)]
    kwargs = {**action.kwargs, "run": run} if action.takes_run else action.kwargs
    with explained(facts, action.tool, str(action)):
        picked = given if action.select is None else _picked(action, given, facts)
        with action.tool._amanda.lock:
            result = action.func(*picked, **kwargs)
        if not targets:
            return result
        results = result if isinstance(result, (list, tuple)) else (result,)
        if len(results) != len(targets):
            raise RoutineError(
                f"{action} returned {len(results)} values for an op that writes {len(targets)}"
            )
        for target, new in zip(targets, results, strict=True):
            if new is not given[target]:
                ops.write(values[target], new, isolated=False)
        written = [values[target] for target in targets]
        return written[0] if len(written) == 1 else type(result)(written)


def _picked(action: Action, values: list[Any], facts: OpFacts) -> list[Any]:
    assert action.select is not None
    try:
        return [values[position] for position in action.select]
    except IndexError:
        raise RoutineError(
            f"{action} selects {list(action.select)}; {facts.name} has {len(values)} values here"
        ) from None


def _call(
    ops: TensorOps, action: Action, picked: list[Any], run: dict[str, Any], isolated: bool
) -> Sequence[Any] | None:
    kwargs = action.kwargs
    given: Sequence[Any] = picked
    if action.takes_run:
        kwargs = {**kwargs, "run": run}
        if isolated:
            given = [ops.kept(value) for value in picked]
    with action.tool._amanda.lock:
        if not isolated:
            return _matched(action, action.func(*given, **kwargs), picked, given)
        versions = ops.versions(given)
        result = ops.call_isolated(action.func, given, kwargs)
        if ops.versions(given) != versions:
            index = next(i for i, value in enumerate(given) if ops.version(value) != versions[i])
            raise MutationError(
                f"{action} wrote into value {index} that it was given; return a new value instead, or mark "
                "the routine @amanda.differentiable"
            )
    return _matched(action, result, picked, given)


def _matched(
    action: Action, result: Any, picked: Sequence[Any], given: Sequence[Any]
) -> Sequence[Any] | None:
    """The routine's result as one value for each that it was given; None for no change."""
    if result is None:
        return None
    if len(picked) == 1:
        listed = isinstance(picked[0], (list, tuple))
        single = isinstance(result, (list, tuple)) and len(result) == 1
        nested = single and isinstance(result[0], (list, tuple))
        results: Sequence[Any] = result if single and (nested or not listed) else (result,)
        plural = isinstance(results[0], (list, tuple)) and not listed and len(results[0]) != 1
        if plural and picked[0] is not None and hasattr(picked[0], "shape"):
            raise _wrong_count(action, len(results[0]), 1)
    elif isinstance(result, (list, tuple)) and len(result) == len(picked):
        results = result
    else:
        count = len(result) if isinstance(result, (list, tuple)) else 1
        raise _wrong_count(action, count, len(picked))
    if given is picked:
        return results
    back = {id(lent): own for lent, own in zip(given, picked, strict=True)}
    return [back.get(id(one), one) for one in results]


def _wrong_count(action: Action, count: int, wanted: int) -> RoutineError:
    values = "value" if wanted == 1 else "values"
    return RoutineError(
        f"{action} returned {count} values; it was given {wanted} {values} and may return None (no "
        f"change) or {'that one value' if wanted == 1 else f'a sequence of {wanted}'}"
    )


def _checked(ops: TensorOps, original: Any, result: Any) -> Any:
    if ops.is_tensor(original) and not ops.is_tensor(result):
        raise RoutineError(
            f"a routine returned {type(result).__name__} where a tensor was given; return a tensor of "
            "that shape, or None for no change"
        )
    return result


def _substitute(ops: TensorOps, original: Any, result: Any) -> Any:
    if not ops.is_tensor(original):
        if isinstance(original, (list, tuple)) and isinstance(result, (list, tuple)):
            return _substitute_each(ops, original, result)
        return result
    return ops.straight_through(original, _checked(ops, original, result))


def _substitute_each(ops: TensorOps, original: Sequence[Any], result: Sequence[Any]) -> Any:
    if len(original) != len(result):
        return result
    each = [
        new if new is old else _substitute(ops, old, new) for old, new in zip(original, result, strict=True)
    ]
    return tuple(each) if isinstance(original, tuple) else each
