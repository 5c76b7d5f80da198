"""Running one instrumentation routine: selection, isolation from autodiff, and its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from amanda._notes import add_note, describe, explained
from amanda.errors import MutationError, RoutineError

if TYPE_CHECKING:
    from amanda._state import State
    from amanda.action import Action, Routine
    from amanda.context import OpFacts


NOT_CALLED: Any = object()


class Saved:
    """What the backward ops of an op save, which may share memory with what is written later."""

    def seeing(self, op: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Run an op and see what it saves."""
        return op(inputs)

    def keep(self) -> None:
        """Hear that the values will be written now: what was saved of them has to be copied."""


class TensorOps(ABC):
    """What a driver knows of its framework's tensors."""

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of the framework."""

    @abstractmethod
    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype, rank and device of every tensor among the inputs."""

    @abstractmethod
    def shapes(self, inputs: Sequence[Any]) -> Hashable:
        """Shape of every tensor among the inputs."""

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

    def written_later(self, values: Sequence[Any]) -> Saved:
        """What an op is to run under after which these values may be written once more."""
        return Saved()

    def saves_out_of_reach(self, value: Any) -> bool:
        """Whether `saved_of` could not find what an op that writes this value is about to save of it."""
        return True

    def saved_of(self, values: Sequence[Any]) -> Saved:
        """What the backward ops of the op that has just written these values have saved of them."""
        return Saved()

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
    returned: Any = NOT_CALLED,
    saved: Saved | None = None,
) -> list[Any]:
    """Call a routine on the selected values: `values` itself where it changes none, else a new list.

    mutable: positions of the user's tensors that the op writes into; a change is copied into them.
    returned: what the routine returned, where it was called already.
    saved: what backward ops have saved of the user's tensors.
    """
    select = action.select
    isolated = not (action.differentiable or state.autodiff)
    try:
        picked = values if select is None else _picked(action, values, facts)
        positions = range(len(values)) if select is None else select
        if returned is NOT_CALLED:
            flags = [i in mutable for i in positions] if mutable else ()
            given = _given(ops, action, picked, flags, isolated)
            results = _call(ops, action, picked, given, run, isolated)
        else:
            results = _matched(action, returned, picked)
        if results is None:
            return values
        changed = values
        for position, original, result in zip(positions, picked, results, strict=True):
            if result is original:
                continue
            if changed is values:
                changed = list(values)
            if position in mutable:
                if saved is not None:
                    saved.keep()
                _write(ops, original, result, isolated)
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
    original: Callable[[Sequence[Any]], Any] | None = None,
    reads: Sequence[Any] = (),
) -> Any:
    """Call a routine instead of an op: what the op would have returned; NotImplemented: the op shall run.

    targets: positions of the user's tensors that the op would have written and returned.
    original: computes the op.  reads: the values that it reads of other ops.
    """
    given = [_copied(ops, value) if i in targets else value for i, value in enumerate(values)]
    kwargs = {**action.kwargs, "run": run} if action.takes_run else action.kwargs
    if action.takes_original and original is not None:
        kwargs = {**kwargs, "original": _spelt_out(original)}
    if action.reads:
        kwargs = {**kwargs, "reads": list(reads)}
    with explained(facts, action.tool, str(action)):
        lent = spread(given[i] for i in targets)
        versions = ops.versions(lent)
        picked = given if action.select is None else _picked(action, given, facts)
        with action.tool._amanda.lock:
            result = action.func(*picked, **kwargs)
        if not targets or result is NotImplemented:
            return result
        written = spread(values[i] for i in targets)
        results = lent if result is None else spread([result])
        if len(results) != len(written):
            raise RoutineError(
                f"{action} returned {len(results)} values for an op that writes {len(written)}"
            )
        for target, copy, version, new in zip(written, lent, versions, results, strict=True):
            if new is not copy or version is None or ops.version(copy) != version:
                ops.write(target, new, isolated=False)
        own = [values[i] for i in targets]
        return own[0] if len(own) == 1 else tuple(own)


def _spelt_out(op: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
    return lambda *inputs: op(list(inputs))


def _picked(action: Action, values: list[Any], facts: OpFacts) -> list[Any]:
    assert action.select is not None
    try:
        return [values[position] for position in action.select]
    except IndexError:
        raise RoutineError(
            f"{action} selects {list(action.select)}; {facts.name} has {len(values)} values here"
        ) from None


def _given(
    ops: TensorOps, action: Action, picked: list[Any], mutable: Sequence[bool], isolated: bool
) -> list[Any]:
    """What the routine is handed: no graph that `run` could keep alive, no tensor that is written later."""
    if isolated:
        return [ops.kept(value) for value in picked] if action.takes_run else picked
    if any(mutable):
        return [_copied(ops, one) if flag else one for one, flag in zip(picked, mutable, strict=True)]
    return picked


def _call(
    ops: TensorOps,
    action: Action,
    picked: list[Any],
    given: list[Any],
    run: dict[str, Any],
    isolated: bool,
) -> Sequence[Any] | None:
    kwargs = {**action.kwargs, "run": run} if action.takes_run else action.kwargs
    with action.tool._amanda.lock:
        versions = ops.versions(given) if isolated or given is not picked else []
        if not isolated:
            result = action.func(*given, **kwargs)
        else:
            result = ops.call_isolated(action.func, given, kwargs)
            if ops.versions(given) != versions:
                index = next(i for i, value in enumerate(given) if ops.version(value) != versions[i])
                raise mutation(action, index)
    if given is picked:
        return _matched(action, result, picked)
    unchanged = {
        id(lent): own
        for lent, own, version in zip(given, picked, versions, strict=True)
        if ops.version(lent) == version
    }
    if result is None:
        if len(unchanged) == len(given):
            return None
        result = given
    matched = _matched(action, result, picked)
    return matched and [unchanged.get(id(one), one) for one in matched]


def mutation(action: Action, index: int) -> MutationError:
    """The error for a routine that wrote into a value that it was given."""
    return MutationError(
        f"{action} wrote into value {index} that it was given; return a new value instead, or "
        "mark the routine @amanda.differentiable"
    )


def _matched(action: Action, result: Any, picked: Sequence[Any]) -> Sequence[Any] | None:
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
    return results


def _wrong_count(action: Action, count: int, wanted: int) -> RoutineError:
    values = "value" if wanted == 1 else "values"
    return RoutineError(
        f"{action} returned {count} values; it was given {wanted} {values} and may return None (no "
        f"change) or {'that one value' if wanted == 1 else f'a sequence of {wanted}'}"
    )


def spread(values: Iterable[Any]) -> list[Any]:
    """Values, each list among them as its elements."""
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,))]


def _copied(ops: TensorOps, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [ops.copied(one) for one in value]
    return ops.copied(value)


def _checked(ops: TensorOps, original: Any, result: Any) -> Any:
    if ops.is_tensor(original) and not ops.is_tensor(result):
        raise RoutineError(
            f"a routine returned {type(result).__name__} where a tensor was given; return a tensor of "
            "that shape, or None for no change"
        )
    return result


def _listed(original: Sequence[Any], result: Any) -> Sequence[Any]:
    """The result for a list of tensors: a list of as many."""
    if isinstance(result, (list, tuple)) and len(result) == len(original):
        return result
    count = f"{len(result)} values" if isinstance(result, (list, tuple)) else type(result).__name__
    raise RoutineError(
        f"a routine returned {count} where a list of {len(original)} tensors was given; return a list of as "
        "many, or mark it @amanda.differentiable if it is meant to change how many there are"
    )


def _write(ops: TensorOps, target: Any, result: Any, isolated: bool) -> None:
    """Copy a routine's result into the user's tensor, or each of a list."""
    if isinstance(target, (list, tuple)):
        for own, new in zip(target, _listed(target, result), strict=True):
            if new is not own:
                _write(ops, own, new, isolated)
    else:
        ops.write(target, _checked(ops, target, result), isolated)


def _substitute(ops: TensorOps, original: Any, result: Any) -> Any:
    if ops.is_tensor(original):
        return ops.straight_through(original, _checked(ops, original, result))
    if not isinstance(original, (list, tuple)) or not all(ops.is_tensor(one) for one in spread(original)):
        return result
    each = [
        new if new is old else _substitute(ops, old, new)
        for old, new in zip(original, _listed(original, result), strict=True)
    ]
    return tuple(each) if isinstance(original, tuple) else each
