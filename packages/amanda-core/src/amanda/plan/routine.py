"""Running one instrumentation routine: selection, isolation from autodiff, and its result."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from amanda.errors import MutationError, RoutineError
from amanda.plan.action import INSERT_BEFORE_OP, REPLACE_OP
from amanda.plan.arguments import arguments, refused
from amanda.plan.notes import add_note, describe, explained
from amanda.plan.results import matched, substitute, write
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps

NOT_CALLED: Any = object()


def run_routine(
    ops: TensorOps,
    action: Action,
    values: list[Any],
    facts: OpFacts,
    run: dict[str, Any],
    autodiff: bool,
    mutable: Sequence[int] = (),
    returned: Any = NOT_CALLED,
    keep_saved: Callable[[], None] | None = None,
    shapes: Hashable = None,
) -> list[Any]:
    """Call a routine on the selected values: `values` itself where it changes none, else a new list.

    autodiff: whether every routine takes part in the backward pass.
    mutable: positions of the user's tensors that the op writes into; a change is copied into them.
    returned: what the routine returned, where it was called already.
    shapes: of the execution, for a routine that takes them.
    keep_saved: copies what backward ops have saved of the user's tensors, before these are written.
    """
    if ops.has_symbols and returned is NOT_CALLED:
        later = ops.run_later(action, values, facts, run, autodiff, shapes)
        if later is not None:
            return later
    select = action.select
    isolated = not (action.differentiable or autodiff)
    picked: Sequence[Any] = values
    try:
        picked = values if select is None else picked_by(action, values, facts)
        positions = range(len(values)) if select is None else select
        if returned is NOT_CALLED:
            flags = [i in mutable for i in positions] if mutable else ()
            given = _given(ops, action, picked, flags, isolated)
            results = _call(ops, action, picked, given, run, isolated, shapes)
        else:
            results = matched(action, returned, picked)
        if results is None:
            return values
        changed = values
        for position, original, result in zip(positions, picked, results, strict=True):
            if result is original:
                continue
            if changed is values:
                changed = list(values)
            if position in mutable:
                if keep_saved is not None:
                    keep_saved()
                write(ops, original, result, isolated)
            else:
                changed[position] = substitute(ops, original, result) if isolated else result
        return changed
    except BaseException as error:
        told = failed(error, action, values, picked, facts)
        if told is not None:
            raise told from error
        raise


def failed(
    error: BaseException, action: Action, values: Sequence[Any], picked: Sequence[Any], facts: OpFacts
) -> BaseException | None:
    """Note the op on an exception of a routine that was given `picked`, or on the one to raise instead.

    Return the latter, or None: a frame that held the exception would keep it, and what it holds, alive.
    values: all values that the op has there.
    """
    names = facts.names if action.type is INSERT_BEFORE_OP else ()
    told = refused(action, values, names, picked, {}) if isinstance(error, TypeError) else None
    add_note(told or error, describe(facts, action.tool, str(action)))
    return told


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
    if ops.has_symbols:
        ops.note_replacement(action, facts)
    given = [_copied(ops, value) if i in targets else value for i, value in enumerate(values)]
    kwargs = {**action.kwargs, "run": run} if action.takes_run else action.kwargs
    if action.takes_original and original is not None:
        kwargs = {**kwargs, "original": _spelt_out(original)}
    if action.reads:
        kwargs = {**kwargs, "reads": list(reads)}
    with explained(facts, action.tool, str(action)):
        lent = spread(given[i] for i in targets)
        versions = ops.versions(lent)
        if action.select is None and action.type is REPLACE_OP:
            picked, named = arguments(action.parameters, given, facts.names, partial(_holds_tensors, ops))
            kwargs = {**kwargs, **named}
        else:
            picked = given if action.select is None else picked_by(action, given, facts)
        with action.tool._amanda.lock:
            result = _called(ops, action, picked, kwargs, given, facts.names)
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


def _called(
    ops: TensorOps,
    action: Action,
    given: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Sequence[Any],
    names: Sequence[str],
) -> Any:
    """Call a replacement; where it cannot take its arguments, say which values there are."""
    try:
        return ops.call(action.func, given, kwargs)
    except TypeError as error:
        told = refused(action, values, names, given, kwargs)
        if told is None:
            raise
        raise told from error


def _holds_tensors(ops: TensorOps, value: Any) -> bool:
    return ops.is_tensor(value) or (isinstance(value, (list, tuple)) and any(map(ops.is_tensor, value)))


def _spelt_out(op: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
    return lambda *inputs: op(list(inputs))


def picked_by(action: Action, values: Sequence[Any], facts: OpFacts) -> list[Any]:
    """Return the values that a routine selects; raise RoutineError where the op has fewer."""
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
    """Return what the routine is given: no graph that `run` could keep alive, nothing written later."""
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
    shapes: Hashable,
) -> Sequence[Any] | None:
    kwargs = {**action.kwargs, "run": run} if action.takes_run else action.kwargs
    if action.takes_shapes:
        kwargs = {**kwargs, "shapes": shapes}
    with action.tool._amanda.lock:
        versions = ops.versions(given) if isolated or given is not picked else []
        if not isolated:
            result = ops.call(action.func, given, kwargs)
        else:
            call = ops.call_observer if action.observer else ops.call_isolated
            result = call(action.func, given, kwargs)
            if ops.versions(given) != versions:
                index = next(i for i, value in enumerate(given) if ops.version(value) != versions[i])
                raise mutation(action, index)
    if given is picked:
        return matched(action, result, picked)
    unchanged = {
        id(lent): own
        for lent, own, version in zip(given, picked, versions, strict=True)
        if ops.version(lent) == version
    }
    if result is None:
        if len(unchanged) == len(given):
            return None
        result = given
    results = matched(action, result, picked)
    return results and [unchanged.get(id(one), one) for one in results]


def mutation(action: Action, index: int) -> MutationError:
    """The error for a routine that wrote into a value that it was given."""
    return MutationError(
        f"{action} wrote into value {index} that it was given; return a new value instead, or "
        "mark the routine @amanda.differentiable"
    )


def _copied(ops: TensorOps, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [ops.copied(one) for one in value]
    return ops.copied(value)
