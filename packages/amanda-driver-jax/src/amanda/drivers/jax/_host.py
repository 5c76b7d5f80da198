"""Callbacks for routines in Python at ops of programs: JAX calls them with the values of each execution."""

# The functions of `_signal`, in C, are ten times as fast as those of `signal`, which make enums.
import _signal  # type: ignore[import-not-found]
import signal
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import wraps
from itertools import count
from typing import Any

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, OpFacts, Patches, State, selected_values
from amanda.errors import RoutineError
from amanda.plan import run_routine, spread
from jax._src import dispatch
from jax._src.interpreters import pxla
from jax._src.util import weakref_cache_key_types
from jax.extend.core import set_current_trace

from ._contexts import ToolStackPrograms
from ._modules import WeightStack, places_among, stacks_of
from ._primitives import CALLBACKS, FAILURES, call_python, raise_failure, straight_through
from ._stacks import reading_slices
from ._tensors import Arrays, cast_to_fit, without_derivative
from ._traces import base_trace, is_numeric, is_tensor

_MAX_RUNS = 1 << 12
"""Number of executions whose `run` is kept: those before are forgotten."""
_EXECUTION = "amanda: execution"
"""Key in the dict `run` for the symbol of an execution's number, while the program is traced."""
_NUMBER = jax.ShapeDtypeStruct((), np.uint32)


class HostArrays(Arrays):
    """Arrays of NumPy: the values of routines that programs call back."""

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the type of `original`."""
        return cast_to_fit(original, np.asarray(value))


_HOST_ARRAYS = HostArrays()
_EXECUTION_NUMBERS = count(1)
_RUN_DICTS: dict[int, dict[str, Any]] = {}
"""The dict `run` of each execution, by its number."""
_LOCK = threading.Lock()


def begin_execution(*_: Any) -> tuple[Any]:
    """Create the dict `run` of a new execution, called by the program; return the execution's number.

    More than _MAX_RUNS dicts are not kept: the oldest is dropped.
    """
    with _LOCK:
        number = next(_EXECUTION_NUMBERS) % (1 << 32)  # programs carry it as uint32
        _RUN_DICTS[number] = {}
        # Nothing says when an execution ends, so the oldest are dropped.
        if len(_RUN_DICTS) > _MAX_RUNS:
            del _RUN_DICTS[next(iter(_RUN_DICTS))]
    return (np.uint32(number),)


class RoutineToken:
    """Callback of a program that stands for a routine: the stack of tools keeps the routine, not the program.

    takes_run: an execution's number comes ahead of the values, and is returned for the next routine.
    is_observer: the routine changes no value.  slice_count: of slice numbers of stacks, after the values.
    """

    def __init__(
        self, takes_run: bool, slice_count: int, is_observer: bool, state: State, job: "RoutineJob"
    ) -> None:
        """Keep the job with the programs of the state's stack, and refer to both weakly."""
        self._number_count, self._slice_count, self._is_observer = int(takes_run), slice_count, is_observer
        programs = ToolStackPrograms.of(state.stack)
        self._programs, self._job = weakref.ref(programs), programs.keep_with(self, job)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Run the routine; return the execution's number, if any, and the arrays after it.

        An observer returns no arrays. Arrays pass as they are, and no routine runs, while no scope of the
        tools is open, and after a failure.
        """
        job, programs = self._job(), self._programs()
        values_end = len(arrays) - self._slice_count
        execution_number, values = arrays[: self._number_count], arrays[self._number_count : values_end]
        # The program may outlive the tools, and runs in scopes without them; after a failure it runs to its
        # end without routines, since XLA cannot be stopped.
        if job is not None and programs is not None and programs.is_open and not FAILURES:
            values = job(*execution_number, arrays=values, slice_numbers=arrays[values_end:])
        return execution_number if self._is_observer else (*execution_number, *values)


weakref_cache_key_types.add(RoutineToken)  # JAX's caches keep no routine


class RoutineJob:
    """One routine of one op, called at each execution with arrays of NumPy.

    leaves, tree: the routine's values, whose numeric tensors become arrays; others have stand-ins.
    axis_counts: of each stack of which the op reads a slice, the number of axes along which it is sliced.
    """

    def __init__(
        self, action: Action, facts: OpFacts, leaves: list[Any], tree: Any, shapes: Hashable,
        axis_counts: Mapping[WeightStack, int],
    ) -> None:  # fmt: skip
        """Copy action and facts, without the selection and the values; hold stand-ins for the leaves."""
        # Copies without selection and values: the callback gets the selected values, of its own execution.
        self._action, self._facts = copy(action), copy(facts)
        self._action.select = None
        self._facts.drop_values()
        self._stand_ins = list(map(_stand_in_for, leaves))
        self._array_positions = [i for i, leaf in enumerate(leaves) if is_numeric(leaf)]
        self._tree, self._shapes, self._axis_counts = tree, shapes, axis_counts

    def __call__(
        self, execution_number: Any = None, *, arrays: tuple[Any, ...], slice_numbers: Sequence[Any] = ()
    ) -> tuple[Any, ...]:
        """Run the routine; return the arrays that replace its values.

        An exception goes to FAILURES, and the arrays are returned as they came.
        """
        leaves: list[Any] = list(self._stand_ins)  # a job runs on several threads at once: no shared list
        # Not strict: a routine without numeric values gets empty slices of what its op depends on.
        for position, array in zip(self._array_positions, arrays, strict=False):
            leaves[position] = array.view()
            leaves[position].flags.writeable = False  # XLA's memory: an error instead of a silent write
        values = list(jax.tree_util.tree_unflatten(self._tree, leaves))
        run = {} if execution_number is None else _RUN_DICTS.setdefault(int(execution_number), {})
        try:
            with running_routine, interceptor.Suspension(), self._reading_slices(slice_numbers):
                results = run_routine(
                    _HOST_ARRAYS, self._action, values, self._facts, run, autodiff=False, shapes=self._shapes
                )
            result_leaves = jax.tree_util.tree_leaves(results, is_leaf=lambda leaf: leaf is None)
            self._check_stand_ins(result_leaves)
        except BaseException as error:  # XLA would wrap it; `execute` raises it as itself
            FAILURES.append(error)
            return arrays
        return tuple(np.asarray(result_leaves[position]) for position in self._array_positions)

    def _reading_slices(self, slice_numbers: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context in which routines see the numbers of slices: some for each stack, in order."""
        if not self._axis_counts:
            return nullcontext()
        remaining = iter(map(int, slice_numbers))
        numbers_by_stack = {
            stack: tuple(next(remaining) for _ in range(count)) for stack, count in self._axis_counts.items()
        }
        return reading_slices(numbers_by_stack)

    def _check_stand_ins(self, result_leaves: Sequence[Any]) -> None:
        """Raise RoutineError if the routine changed a value that the callback could not get."""
        for before, after in zip(self._stand_ins, result_leaves, strict=True):
            if isinstance(before, jax.ShapeDtypeStruct) and after is not before:
                raise RoutineError(
                    f"a routine in Python returned another value for one of dtype {before.dtype}, which it "
                    "cannot read in a program: return what the routine got, or mark it @amanda.traceable"
                )


def _stand_in_for(leaf: Any) -> Any:
    """Return what a routine sees of a value that no callback gets: shape and dtype of a tensor or symbol.

    None for an array of numbers, which the callback gets; any other value as it is.
    """
    if is_numeric(leaf):
        return None
    if is_tensor(leaf) or isinstance(leaf, jax.core.Tracer):
        return jax.ShapeDtypeStruct(np.shape(leaf), getattr(leaf, "dtype", jax.dtypes.float0))
    return leaf


def insert_callback(
    action: Action, values: list[Any], facts: OpFacts, run: dict[str, Any], shapes: Hashable
) -> list[Any]:
    """Insert a call of a routine into the program that is traced; return the values after the routine.

    Only numbers reach the routine; an observer, or a routine without any, leaves all values as they are.
    In `run` is then the number of the execution, for the next routine.
    Raises RoutineError for a selected value that the op does not have.
    """
    positions = range(len(values)) if action.select is None else action.select
    try:
        selection = values if action.select is None else selected_values(action, values, facts)
    except RoutineError as error:
        raise facts.annotate_error(error, action) from None
    leaves, tree = jax.tree_util.tree_flatten(selection, is_leaf=lambda leaf: leaf is None)
    arrays = [without_derivative(leaf) for leaf in leaves if is_numeric(leaf)]
    # At most one: the program passes it through each routine of the op, which keeps their order.
    execution_numbers = [_execution_number(run, values)] if action.takes_run else []
    is_observer = action.observer or not arrays
    slice_numbers_by_stack = stacks_of(values, places_among(interceptor.subjects()))
    slice_numbers = [number for numbers in slice_numbers_by_stack.values() for number in numbers]
    axis_counts = {stack: len(numbers) for stack, numbers in slice_numbers_by_stack.items()}
    job = RoutineJob(action, facts, leaves, tree, shapes, axis_counts)
    token = RoutineToken(action.takes_run, len(slice_numbers), is_observer, State.current(), job)
    results_like = execution_numbers if is_observer else [*execution_numbers, *arrays]
    with set_current_trace(base_trace()):
        inputs = arrays or _empty_slices(values)
        results = call_python(token, results_like, *execution_numbers, *inputs, *slice_numbers)
    if execution_numbers:
        run[_EXECUTION], *results = results
    if is_observer:
        return values
    result_arrays = iter(results)
    leaves = [straight_through(leaf, next(result_arrays)) if is_numeric(leaf) else leaf for leaf in leaves]
    values_after = list(values)
    for position, value in zip(positions, jax.tree_util.tree_unflatten(tree, leaves), strict=True):
        values_after[position] = value
    return values_after


def _empty_slices(values: list[Any]) -> list[Any]:
    """Return an empty slice of each tensor of an op, for a callback that needs none of the values.

    As its arguments they have it called for each row of any of the tensors under vmap.
    """
    tensor_by_id = {
        id(value): value for value in spread(values) if is_tensor(value) and value.dtype != jax.dtypes.float0
    }
    return [_empty_slice(value) for value in tensor_by_id.values()]


def _empty_slice(value: Any) -> Any:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return jax.lax.slice(jax.numpy.reshape(without_derivative(value), -1), (0,), (0,))


def _execution_number(run: dict[str, Any], values: list[Any]) -> Any:
    """Return the symbol of an execution's number in `run`; at its first routine insert a call that counts."""
    if _EXECUTION not in run:
        # Below the traces of derivatives, since a number has none.
        with set_current_trace(base_trace()):
            (run[_EXECUTION],) = call_python(begin_execution, [_NUMBER], *_empty_slices(values))
    return run[_EXECUTION]


def raise_failures_of_programs(patches: Patches) -> None:
    """Make programs raise the exceptions of routines in them; when patches are undone, drop all `run`s."""
    patches.set(pxla.ExecuteReplicated, "__call__", _raise_after_execution(pxla.ExecuteReplicated.__call__))
    patches.on_restore(_RUN_DICTS.clear)


def _raise_after_execution(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap JAX's execution of a program: it waits for callbacks, and raises their first exception."""

    @wraps(original)
    def execute(self: Any, *args: Any) -> Any:
        """Execute the program; only one with callbacks is waited for."""
        if CALLBACKS not in self.ordered_effects:
            return original(self, *args)
        with collecting_exceptions(FAILURES):
            results = original(self, *args)
            # Execution is asynchronous: callbacks may run until results and tokens are ready.
            for result in results:
                result.block_until_ready()
            dispatch.runtime_tokens.block_until_ready()
        raise_failure()
        return results

    return execute


# Once, since each program that calls Python goes through them.
_SIGNAL_NUMBERS = sorted(signal.valid_signals())


class _RoutineState(threading.local):
    """State of a thread; in_routine: True while a routine runs, whose caller catches exceptions."""

    in_routine = False


_thread = _RoutineState()


class _RoutineContext:
    """Context of a routine, in which exceptions of handlers are raised at once: it may wait for a user."""

    def __enter__(self) -> None:
        _thread.in_routine = True

    def __exit__(self, *_: object) -> None:
        _thread.in_routine = False


running_routine = _RoutineContext()


@contextmanager
def collecting_exceptions(failures: list[BaseException]) -> Iterator[None]:
    """Collect exceptions of signal handlers in a list within the context, unless a routine runs.

    Nothing happens on threads other than the main thread, on which Python runs handlers.
    """
    handler_by_signal: dict[int, Callable[..., Any]] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = ((number, _signal.getsignal(number)) for number in _SIGNAL_NUMBERS)
        handler_by_signal = {number: handler for number, handler in handlers if callable(handler)}
    if not handler_by_signal:
        yield
        return
    handlers_to_restore, is_open = dict(handler_by_signal), True

    def call_and_collect(number: int, frame: Any) -> Any:
        """Call the original handler; collect its exception, or raise it in a routine or after the end."""
        try:
            return handler_by_signal[number](number, frame)
        except BaseException as error:
            # Raised within a callback XLA would turn it into its own error; a routine's caller catches it.
            if _thread.in_routine or not is_open:
                raise
            failures.append(error)

    for number in handler_by_signal:
        _signal.signal(number, call_and_collect)
    try:
        yield
    finally:
        is_open = False
        _restore_handlers(handlers_to_restore, call_and_collect)


def _restore_handlers(handlers: dict[int, Callable[..., Any]], replacement: Callable[..., Any]) -> None:
    """Put back handlers by their signals, taking them out of the dict, even if a signal raises meanwhile."""
    try:
        while handlers:
            number = next(iter(handlers))
            if _signal.getsignal(number) is replacement:  # unless the program has set another meanwhile
                _signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:  # a signal has raised: the others are put back before its exception goes on
            _restore_handlers(handlers, replacement)
