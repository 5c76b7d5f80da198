"""One instrumentation routine: its arguments, its call apart from autodiff, and its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from amanda.errors import MutationError, RoutineError
from amanda.plan.action import INSERT_BEFORE_OP, REPLACE_OP, replacement_arguments, signature_error
from amanda.plan.facts import add_note, error_note, explain_errors
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps

# None is a result: the routine changes nothing.
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
    copy_saved: Callable[[], None] | None = None,
    shapes: Hashable = None,
) -> list[Any]:
    """Call a routine on the selected values; return `values` itself if nothing changed, else a new list.

    A routine in a program that is traced is put into that program instead, and its future results returned.

    Args:
        ops: Primitives of the framework's tensors.
        action: Action of the routine.
        values: All values that the op has at this point.
        facts: Facts of the op.
        run: Dict that the routines of this execution share.
        autodiff: Whether every routine takes part in the backward pass.
        mutable: Positions of the user's tensors that the op writes into; a change is copied into them.
        returned: Routine's result, where the routine has been called already.
        copy_saved: Copies values that backward ops have saved of the user's tensors, before a write into
            these; None for no copies.
        shapes: Shapes of the execution, for a routine that takes shapes.
    """
    if ops.has_symbolic_tensors and returned is NOT_CALLED:
        future_values = ops.trace_routine(action, values, facts, run, autodiff, shapes)
        if future_values is not None:
            return future_values
    select = action.select
    isolated = not (action.differentiable or autodiff)
    selection: Sequence[Any] = values
    try:
        selection = values if select is None else selected_values(action, values, facts) if select else []
        positions = range(len(values)) if select is None else select
        if returned is NOT_CALLED:
            is_written = [i in mutable for i in positions] if mutable else ()
            arguments = _routine_arguments(ops, action, selection, is_written, isolated)
            results = _call_routine(ops, action, selection, arguments, run, isolated, shapes)
        else:
            results = match_results(action, returned, selection)
        if results is None:
            return values
        return _put_results_in_place(ops, values, positions, results, isolated, mutable, copy_saved)
    except BaseException as error:
        error_instead = annotate_failure(error, action, values, selection, facts)
        if error_instead is not None:
            raise error_instead from error
        raise


def _put_results_in_place(
    ops: TensorOps,
    values: list[Any],
    positions: Sequence[int],
    results: Sequence[Any],
    isolated: bool,
    mutable: Sequence[int],
    copy_saved: Callable[[], None] | None,
) -> list[Any]:
    """Return the values with a routine's results at some positions.

    At a mutable position the result is copied into the tensor, which stays.  Returns `values` itself if no
    value is replaced by another: callers compare by identity.
    """
    new_values = values
    for position, result in zip(positions, results, strict=True):
        original = values[position]
        if result is original:
            continue
        if new_values is values:
            new_values = list(values)
        if position in mutable:
            # Backward ops have saved the tensor itself; the write would change what they compute.
            if copy_saved is not None:
                copy_saved()
            write_into(ops, original, result, isolated)
        else:
            new_values[position] = _fit_result_to_original(ops, original, result) if isolated else result
    return new_values


def annotate_failure(
    error: BaseException, action: Action, values: Sequence[Any], selection: Sequence[Any], facts: OpFacts
) -> BaseException | None:
    """Add a note with the op to a routine's exception; return an exception to raise instead, or None.

    An exception is returned where the routine's signature does not accept the values.  It bears the note
    then. None means that the caller raises `error`; `error` itself is not returned, since a frame that holds
    an exception keeps the exception's frames alive.  In a RoutineError "a routine" becomes the action's name.

    Args:
        error: Exception that the routine raised.
        action: Action of the routine.
        values: All values that the op has at this point.
        selection: Values that the routine received.
        facts: Facts of the op.
    """
    # Outputs and gradients have no names in a schema.
    names = facts.names if action.type is INSERT_BEFORE_OP else ()
    # A RoutineError, which is a TypeError, tells what is wrong already.
    may_be_of_signature = isinstance(error, TypeError) and not isinstance(error, RoutineError)
    error_instead = signature_error(action, values, names, selection, {}) if may_be_of_signature else None
    # The errors of drivers, and those below, know no action and speak of "a routine".
    if isinstance(error, RoutineError) and str(error).startswith("a routine "):
        error.args = (str(error).replace("a routine", str(action), 1),)
    add_note(error_instead or error, error_note(facts, action.tool, str(action)))
    return error_instead


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
    """Call a routine instead of an op; return its result, or NotImplemented where the op has to run.

    Where the op writes into the user's tensors, the result is written into these, and they are returned.

    Args:
        ops: Primitives of the framework's tensors.
        action: Action of the routine.
        values: Inputs of the op, or gradients that enter a backward op.
        facts: Facts of the op.
        run: Dict that the routines of this execution share.
        targets: Positions of the user's tensors that the op would have written and returned.
        original: Computes the op; None where nothing can.
        reads: Values that the routine reads of other ops.

    Raises:
        RoutineError: For another number of results than of the user's tensors that the op writes.
    """
    if ops.has_symbolic_tensors:
        ops.note_replacement(action, facts)
    # Copies: what the replacement returns is written into the user's tensors below, and must not be mixed
    # with what it wrote into them itself.
    inputs = [_copy_tensors(ops, value) if i in targets else value for i, value in enumerate(values)]
    kwargs = _replacement_kwargs(action, run, original, reads)
    with explain_errors(facts, action.tool, str(action)):
        target_copies = spread(inputs[i] for i in targets)
        versions = ops.versions(target_copies)
        if action.select is None and action.type is REPLACE_OP:
            arguments, arguments_by_name = replacement_arguments(
                action.parameters, inputs, facts.names, partial(_holds_tensors, ops)
            )
            kwargs = {**kwargs, **arguments_by_name}
        else:
            arguments = inputs if action.select is None else selected_values(action, inputs, facts)
        with action.tool._amanda.lock:
            result = _call_replacement(ops, action, arguments, kwargs, inputs, facts.names)
        if not targets or result is NotImplemented:
            return result
        user_tensors = [values[i] for i in targets]
        # A replacement that returns nothing has written into its arguments.
        results = target_copies if result is None else spread([result])
        _write_results(ops, action, results, spread(user_tensors), target_copies, versions)
        # The program goes on with its own tensors, as after the op.
        return user_tensors[0] if len(user_tensors) == 1 else tuple(user_tensors)


def _replacement_kwargs(
    action: Action,
    run: dict[str, Any],
    original: Callable[[Sequence[Any]], Any] | None,
    reads: Sequence[Any],
) -> Mapping[str, Any]:
    """Return the tool's keyword arguments; with `run`, `original` and `reads` if the routine takes them."""
    kwargs = {**action.kwargs, "run": run} if action.takes_run else action.kwargs
    if action.takes_original and original is not None:
        kwargs = {**kwargs, "original": _accept_positional_inputs(original)}
    if action.reads:
        kwargs = {**kwargs, "reads": list(reads)}
    return kwargs


def _write_results(
    ops: TensorOps,
    action: Action,
    results: Sequence[Any],
    targets: Sequence[Any],
    copies: Sequence[Any],
    versions: Sequence[Any],
) -> None:
    """Write a replacement's results into the user's tensors; raise RoutineError if their numbers differ.

    copies: copies of the targets, which the replacement received.  versions: their versions before its call.
    """
    if len(results) != len(targets):
        raise RoutineError(f"{action} returned {len(results)} values for an op that writes {len(targets)}")
    for target, copy, version, result in zip(targets, copies, versions, results, strict=True):
        # A copy that is handed back unwritten has the target's value already.
        if result is not copy or version is None or ops.version(copy) != version:
            ops.write(target, result, isolated=False)


def _call_replacement(
    ops: TensorOps,
    action: Action,
    arguments: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Sequence[Any],
    names: Sequence[str],
) -> Any:
    """Call a replacement; raise an error that lists the op's values if its signature does not fit."""
    try:
        return ops.call_in_autodiff(action.func, arguments, kwargs)
    except TypeError as error:
        signature_failure = signature_error(action, values, names, arguments, kwargs)
        if signature_failure is None:
            raise
        raise signature_failure from error


def _holds_tensors(ops: TensorOps, value: Any) -> bool:
    return ops.is_tensor(value) or (isinstance(value, (list, tuple)) and any(map(ops.is_tensor, value)))


def _accept_positional_inputs(op: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
    return lambda *inputs: op(list(inputs))


def selected_values(action: Action, values: Sequence[Any], facts: OpFacts) -> list[Any]:
    """Return the values that a routine selects.

    Args:
        action: Action of the routine, with positions that it selects.
        values: All values that the op has at this point.
        facts: Facts of the op, for the error.

    Raises:
        RoutineError: Where the op has fewer values.
    """
    assert action.select is not None
    try:
        return [values[position] for position in action.select]
    except IndexError:
        raise RoutineError(
            f"{action} selects {list(action.select)}; {facts.name} has "
            f"{len(values)} value{'s' * (len(values) != 1)} here"
        ) from None


def _routine_arguments(
    ops: TensorOps, action: Action, selection: list[Any], is_written: Sequence[bool], isolated: bool
) -> list[Any]:
    """Return the arguments for a routine: the selected values, some of them detached or copied.

    An isolated routine that takes `run`, which could keep a graph, receives detached tensors; a routine in
    autodiff receives copies of the tensors that the op writes.
    is_written: for each value, whether the op writes it; empty where the op writes none.
    """
    if isolated:
        return [ops.detach_value(value) for value in selection] if action.takes_run else selection
    if any(is_written):
        return [
            _copy_tensors(ops, value) if written else value
            for value, written in zip(selection, is_written, strict=True)
        ]
    return selection


def _call_routine(
    ops: TensorOps,
    action: Action,
    selection: list[Any],
    arguments: list[Any],
    run: dict[str, Any],
    isolated: bool,
    shapes: Hashable,
) -> Sequence[Any] | None:
    """Call a routine under its tool's lock; return a result for each selected value, or None for no change.

    Raises MutationError where an isolated routine wrote into an argument.  A differentiable routine receives
    copies of the tensors that the op writes; a copy that it left alone stands for the tensor itself.
    selection, arguments: the selected values, and the same or what the routine receives in their place.
    """
    kwargs = {**action.kwargs, "run": run} if action.takes_run else action.kwargs
    if action.takes_shapes:
        kwargs = {**kwargs, "shapes": shapes}
    with action.tool._amanda.lock:
        # A routine without values cannot write into any.
        is_guarded = bool(arguments) and (isolated or arguments is not selection)
        versions = ops.versions(arguments) if is_guarded else []
        if not isolated:
            result = ops.call_in_autodiff(action.func, arguments, kwargs)
        else:
            call = ops.call_observer if action.observer else ops.call_without_autodiff
            result = call(action.func, arguments, kwargs)
            # A changed version is the only trace of a write: tensors may be written through any of their
            # views.
            if is_guarded and ops.versions(arguments) != versions:
                index = next(i for i, value in enumerate(arguments) if ops.version(value) != versions[i])
                raise mutation_error(action, index)
    if arguments is selection:
        return match_results(action, result, selection)
    return _restore_unwritten(ops, action, result, selection, arguments, versions)


def _restore_unwritten(
    ops: TensorOps,
    action: Action,
    result: Any,
    selection: Sequence[Any],
    arguments: Sequence[Any],
    versions: Sequence[Any],
) -> Sequence[Any] | None:
    """Return a routine's result for each selected value; for an unwritten argument, the value itself.

    Returns None where the routine returned None and wrote into no argument; if it wrote, its arguments are
    its results.
    arguments: detached or copied values, which the routine received.  versions: theirs before its call.
    """
    # Where the original comes back, no write into the user's tensor follows.
    original_by_unwritten_id = {
        id(argument): original
        for argument, original, version in zip(arguments, selection, versions, strict=True)
        if ops.version(argument) == version
    }
    if result is None:
        if len(original_by_unwritten_id) == len(arguments):
            return None
        result = arguments  # some of them written
    results = match_results(action, result, selection) or ()
    return [original_by_unwritten_id.get(id(value), value) for value in results]


def mutation_error(action: Action, index: int) -> MutationError:
    """Return the error for a routine that wrote into an argument."""
    return MutationError(
        f"{action} wrote into value {index} that it was given; return a new value instead, or "
        "mark the routine @amanda.differentiable"
    )


def _copy_tensors(ops: TensorOps, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [ops.differentiable_copy(tensor) for tensor in value]
    return ops.differentiable_copy(value)


def match_results(action: Action, result: Any, arguments: Sequence[Any]) -> Sequence[Any] | None:
    """Return the routine's result as a sequence with one value for each argument; None for no change.

    For one argument the result may be the value itself, or a sequence of it.

    Args:
        action: Action of the routine, for the error.
        result: Value that the routine returned.
        arguments: Values that the routine selects.

    Raises:
        RoutineError: For another number of values.
    """
    if result is None:
        return None
    if len(arguments) == 1:
        return _result_in_sequence(action, result, arguments[0])
    if isinstance(result, (list, tuple)) and len(result) == len(arguments):
        return result
    count = len(result) if isinstance(result, (list, tuple)) else 1
    raise _wrong_count_error(action, count, len(arguments))


def _result_in_sequence(action: Action, result: Any, argument: Any) -> Sequence[Any]:
    """Return the result of a routine with one argument as a sequence of one value.

    The routine may have returned the value, or a sequence of it.  Raises RoutineError for several values
    where the argument is one tensor.
    """
    expects_list = isinstance(argument, (list, tuple))
    has_one_item = isinstance(result, (list, tuple)) and len(result) == 1
    # If the argument is a list, such as the one output of a loop that is a sequence, depth tells whether the
    # result is such a list or a sequence of one.
    is_sequence_of_one = has_one_item and (
        not expects_list or _nesting_depth(result) > _nesting_depth(argument)
    )
    value = result[0] if is_sequence_of_one else result
    # Several values for one tensor: the routine was written for more inputs than it selects.
    has_many_values = isinstance(value, (list, tuple)) and not expects_list and len(value) != 1
    if has_many_values and argument is not None and hasattr(argument, "shape"):
        raise _wrong_count_error(action, len(value), 1)
    return result if is_sequence_of_one else (result,)


def _nesting_depth(value: Any) -> int:
    """Return the depth of nested lists; 0 for a value that is not a list."""
    return 1 + max(map(_nesting_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


def write_into(ops: TensorOps, target: Any, result: Any, isolated: bool) -> None:
    """Copy a routine's result into the user's tensor, or each tensor of a list into that of the user's list.

    Raises RoutineError where the result is not a tensor, or not a list of as many.
    """
    if isinstance(target, (list, tuple)):
        for tensor, new in zip(target, _require_list(target, result), strict=True):
            if new is not tensor:
                write_into(ops, tensor, new, isolated)
    else:
        ops.write(target, _require_tensor(ops, target, result), isolated)


def _fit_result_to_original(ops: TensorOps, original: Any, result: Any) -> Any:
    """Return the value that takes the original's place: a routine's result, fitted to the original.

    The gradient of a tensor, also one in a list, passes unchanged to the original; a number takes the
    original's type; any other result is returned as it is.  Raises RoutineError where the original is a
    tensor and the result is none.
    """
    if ops.is_tensor(original):
        return ops.straight_through(original, _require_tensor(ops, original, result))
    if isinstance(original, _NUMBERS) and isinstance(result, _NUMBERS):
        return _number_like(original, result)
    if not isinstance(original, (list, tuple)) or not all(
        ops.is_tensor(tensor) for tensor in spread(original)
    ):
        return result
    fitted_tensors = [
        new if new is old else _fit_result_to_original(ops, old, new)
        for old, new in zip(original, _require_list(original, result), strict=True)
    ]
    return tuple(fitted_tensors) if isinstance(original, tuple) else fitted_tensors


_NUMBERS = (bool, int, float)


def _number_like(original: float, result: float) -> float:
    """Return a result, as an int or bool if the original is one; RoutineError if that changes its value."""
    # An op chooses its kernel by the type of a number, so an int stays an int; a float takes any number.
    number = result if isinstance(original, float) else type(original)(result)
    if number != result:
        raise RoutineError(
            f"a routine returned {result!r} where the {type(original).__name__} {original!r} was given"
        )
    return number


def _require_tensor(ops: TensorOps, original: Any, result: Any) -> Any:
    """Return the result; raise RoutineError where it is not a tensor and the original is."""
    if ops.is_tensor(original) and not ops.is_tensor(result):
        raise RoutineError(
            f"a routine returned {type(result).__name__} where a tensor was given; return a tensor of "
            "that shape, or None for no change"
        )
    return result


def _require_list(original: Sequence[Any], result: Any) -> Sequence[Any]:
    """Return a routine's result for a list of tensors; raise RoutineError unless it is a list of as many."""
    if isinstance(result, (list, tuple)) and len(result) == len(original):
        return result
    count = f"{len(result)} values" if isinstance(result, (list, tuple)) else type(result).__name__
    raise RoutineError(
        f"a routine returned {count} where a list of {len(original)} tensors was given; return a list of as "
        "many, or mark it @amanda.differentiable if it is meant to change how many there are"
    )


def _wrong_count_error(action: Action, count: int, expected: int) -> RoutineError:
    """Return the error for a routine that returned more or fewer values than it was given."""
    returned, values = ("value" if number == 1 else "values" for number in (count, expected))
    return RoutineError(
        f"{action} returned {count} {returned}; it was given {expected} {values} and may return None (no "
        f"change) or {'that one value' if expected == 1 else f'a sequence of {expected}'}"
    )
