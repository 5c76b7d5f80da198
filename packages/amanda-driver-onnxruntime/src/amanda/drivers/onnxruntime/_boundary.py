"""Runs of sessions: every way that leads from Python into the runtime."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda import interceptor
from amanda.backend import Attributes, Execution, State
from onnxruntime.capi.onnxruntime_inference_collection import Session

from ._copies import Copy
from ._values import as_array, as_ort_value

Prepare = Callable[[Any, State], "tuple[Copy, Execution] | None"]
"""Gives what runs instead of a session, in a state, and the execution that it calls back to."""


class Boundary:
    """Sends the runs of sessions to instrumented copies of their models."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def attach(self, attributes: Attributes) -> None:
        """Take the place of the methods through which sessions run, until `attributes` are restored."""
        for name, stand_in in (
            ("run", self._run),
            ("run_with_ort_values", self._run_with_ort_values),
            ("run_async", self._run_async),
            ("run_with_iobinding", _left_alone),
            ("run_with_ortvaluevector", _left_alone),
        ):
            if name in vars(Session):
                attributes.set(Session, name, _method(stand_in, vars(Session)[name]))

    def _run(
        self, run: Any, session: Any, output_names: Any, input_feed: Any, run_options: Any = None
    ) -> Any:
        results = self._results(run, session, output_names, input_feed, run_options)
        return [as_array(one) for one in results]

    def _run_with_ort_values(
        self, run: Any, session: Any, output_names: Any, input_dict_ort_values: Any, run_options: Any = None
    ) -> Any:
        results = self._results(run, session, output_names, input_dict_ort_values, run_options)
        return [as_ort_value(one) for one in results]

    def _run_async(
        self,
        run: Any,
        session: Any,
        output_names: Any,
        input_feed: Any,
        callback: Any,
        user_data: Any,
        run_options: Any = None,
    ) -> Any:
        """A run on a thread of its own, which belongs to the scope that it starts in."""
        activation = interceptor.active()
        if not activation or self._prepare(session, activation.state) is None:
            return run(session, output_names, input_feed, callback, user_data, run_options)

        def work() -> None:
            results, status = [], ""
            try:
                results = session.run(output_names, input_feed, run_options)
            except Exception as error:
                status = f"{type(error).__name__}: {error}"
            callback(results, user_data, status)

        threading.Thread(target=work, daemon=True).start()
        return None

    def _results(
        self, run: Any, session: Any, names: Sequence[str] | None, feed: Mapping[str, Any], options: Any
    ) -> Any:
        """Return what the copy gives, or the session itself where nothing is inserted."""
        activation = interceptor.active()
        prepared = self._prepare(session, activation.state) if activation else None
        if activation is None or prepared is None:
            return run(session, names, feed, options)
        copy, execution = prepared
        wanted = list(names) if names else list(copy.outputs)
        if not copy.fits(wanted, feed):
            result = run(session, names, feed, options)  # which says what is wrong, or takes it after all
            activation.state.report("a run of a session", "it is given what is not as the model says")
            return result
        return copy.run(execution, wanted, feed, options)


def _left_alone(run: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    activation = interceptor.active()
    if activation:
        activation.state.report(
            f"{type(session).__name__}.{run.__name__}",
            "what it reads and writes is bound in native memory; call run or run_with_ort_values",
        )
    return run(session, *args, **kwargs)


def _method(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gives the original to a stand-in, before its own arguments."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return stand_in(original, *args, **kwargs)

    return method
