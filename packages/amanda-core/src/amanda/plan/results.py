"""The results of a routine, matched with the values that it received and put in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amanda.errors import RoutineError
from amanda.plan.tensors import spread

if TYPE_CHECKING:
    from amanda.plan.action import Action
    from amanda.plan.tensors import TensorOps


def matched(action: Action, result: Any, picked: Sequence[Any]) -> Sequence[Any] | None:
    """Return the routine's result as a sequence with one value for each argument; None for no change."""
    if result is None:
        return None
    if len(picked) == 1:
        listed = isinstance(picked[0], (list, tuple))
        single = isinstance(result, (list, tuple)) and len(result) == 1
        # Of a list of lists, such as the one output of a loop that is a sequence, depth tells which is meant.
        wrapped = single and (not listed or _depth(result) > _depth(picked[0]))
        results: Sequence[Any] = result if wrapped else (result,)
        plural = isinstance(results[0], (list, tuple)) and not listed and len(results[0]) != 1
        if plural and picked[0] is not None and hasattr(picked[0], "shape"):
            raise _wrong_count(action, len(results[0]), 1)
    elif isinstance(result, (list, tuple)) and len(result) == len(picked):
        results = result
    else:
        count = len(result) if isinstance(result, (list, tuple)) else 1
        raise _wrong_count(action, count, len(picked))
    return results


def _depth(value: Any) -> int:
    """Return the depth of nested lists; 0 for a value that is no list."""
    return 1 + max(map(_depth, value), default=0) if isinstance(value, (list, tuple)) else 0


def write_into(ops: TensorOps, target: Any, result: Any, isolated: bool) -> None:
    """Copy a routine's result into the user's tensor, or each of a list."""
    if isinstance(target, (list, tuple)):
        for tensor, new in zip(target, _require_list(target, result), strict=True):
            if new is not tensor:
                write_into(ops, tensor, new, isolated)
    else:
        ops.write(target, _require_tensor(ops, target, result), isolated)


def substitute(ops: TensorOps, original: Any, result: Any) -> Any:
    """Return a routine's result for the original; its gradient passes unchanged to the original."""
    if ops.is_tensor(original):
        return ops.straight_through(original, _require_tensor(ops, original, result))
    if isinstance(original, _NUMBERS) and isinstance(result, _NUMBERS):
        return _number_like(original, result)
    if not isinstance(original, (list, tuple)) or not all(
        ops.is_tensor(tensor) for tensor in spread(original)
    ):
        return result
    substituted = [
        new if new is old else substitute(ops, old, new)
        for old, new in zip(original, _require_list(original, result), strict=True)
    ]
    return tuple(substituted) if isinstance(original, tuple) else substituted


_NUMBERS = (bool, int, float)


def _number_like(original: float, result: float) -> float:
    """Return a result as a number of the original's type; raise RoutineError where that changes its value."""
    number = result if isinstance(original, float) else type(original)(result)
    if number != result:
        raise RoutineError(
            f"a routine returned {result!r} where the {type(original).__name__} {original!r} was given"
        )
    return number


def _require_tensor(ops: TensorOps, original: Any, result: Any) -> Any:
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


def _wrong_count(action: Action, count: int, expected: int) -> RoutineError:
    values = "value" if expected == 1 else "values"
    return RoutineError(
        f"{action} returned {count} values; it was given {expected} {values} and may return None (no "
        f"change) or {'that one value' if expected == 1 else f'a sequence of {expected}'}"
    )
