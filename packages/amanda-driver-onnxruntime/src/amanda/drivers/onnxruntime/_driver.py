"""The driver of ONNX Runtime's sessions, and stand-ins for the methods by which sessions run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from amanda import interceptor
from amanda.backend import (
    Attributes,
    CannotInstrument,
    Execution,
    Exercise,
    GraphAnalysis,
    GraphDriver,
    State,
    digest,
    report_unseen,
)
from onnxruntime.capi.onnxruntime_inference_collection import Session

from ._copies import ModelCopy, model_of
from ._model import Model
from ._requirements import NEWEST_TESTED, PRIVATE_NAMES, run_tanh
from ._rewrite import ModelRewriting
from ._tensors import NumpyReads, OnnxTensorOps
from ._values import as_array, as_ort_value


class OnnxRuntimeDriver(GraphDriver[ModelRewriting, ModelCopy]):
    """Instruments ONNX Runtime's sessions: analyses their models, and runs instrumented copies instead."""

    api = 1
    framework = "onnxruntime"
    modes = ("graph",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES
    tensors = OnnxTensorOps()
    reads = NumpyReads

    def __init__(self) -> None:
        super().__init__()
        self._boundary = Boundary(self._prepare_session)
        # Weak, so that a model is dropped with its session.
        self._models: WeakKeyDictionary[Any, Model | CannotInstrument] = WeakKeyDictionary()

    def attach(self) -> None:
        """Patch the methods through which sessions run."""
        self._boundary.attach(self.attributes)

    def exercise(self) -> Exercise:
        """Return a program of a session with one op."""
        return Exercise(run_tanh, "Tanh")

    def rewrite(self, graph: Any, analysis: GraphAnalysis) -> ModelRewriting:
        """Rewrite the model of a session."""
        model = self._models.get(graph)
        if model is None:
            try:
                model = model_of(graph)
            except CannotInstrument as error:
                model = error
            # A model that cannot be read is remembered, too, so that it is not read at each run.
            self._models[graph] = model
        if isinstance(model, CannotInstrument):
            raise CannotInstrument(*model.args)
        identity = digest("onnxruntime/graph", interceptor.ordinal(graph))
        rewriting = ModelRewriting(
            analysis=analysis, namespace=self.namespace, model=model, identity=identity
        )
        rewriting.run()
        return rewriting

    def runnable(self, graph: Any, rewriting: ModelRewriting) -> ModelCopy:
        """Create the sessions of the rewritten model."""
        return ModelCopy(graph, rewriting)

    def _prepare_session(self, session: Any, state: State) -> tuple[ModelCopy, Execution] | None:
        # `set_providers` replaces the native session, so copies are cached by providers, too.
        return self.prepare(session, state, tuple(session.get_providers()))


Prepare = Callable[[Any, State], "tuple[ModelCopy, Execution] | None"]
"""Returns the copy that runs instead of a session, and its execution; None where nothing is inserted."""


class Boundary:
    """Sends the runs of sessions to instrumented copies of their models."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def attach(self, attributes: Attributes) -> None:
        """Patch the methods through which sessions run, until `attributes` are restored."""
        for name, stand_in in (
            ("run", self._stand_in_for_run),
            ("run_with_ort_values", self._stand_in_for_run_with_ort_values),
            ("run_async", self._stand_in_for_run_async),
            # Values of these methods never come to Python.
            ("run_with_iobinding", _run_uninstrumented),
            ("run_with_ortvaluevector", _run_uninstrumented),
        ):
            # Versions of ONNX Runtime differ in these methods.
            if name in vars(Session):
                attributes.set(Session, name, _method_with_original(stand_in, vars(Session)[name]))

    def _stand_in_for_run(
        self, run: Any, session: Any, output_names: Any, input_feed: Any, run_options: Any = None
    ) -> Any:
        """Stand-in for `run`: runs the copy; returns arrays."""
        results = self._run_copy(run, session, output_names, input_feed, run_options)
        return [as_array(result) for result in results]

    def _stand_in_for_run_with_ort_values(
        self, run: Any, session: Any, output_names: Any, input_dict_ort_values: Any, run_options: Any = None
    ) -> Any:
        """Stand-in for `run_with_ort_values`: runs the copy; returns values of ONNX Runtime."""
        results = self._run_copy(run, session, output_names, input_dict_ort_values, run_options)
        return [as_ort_value(result) for result in results]

    def _stand_in_for_run_async(
        self,
        run: Any,
        session: Any,
        output_names: Any,
        input_feed: Any,
        callback: Any,
        user_data: Any,
        run_options: Any = None,
    ) -> Any:
        """Stand-in for `run_async`: runs the copy on a new thread, which belongs to the present scope."""
        activation = interceptor.active()
        if not activation or self._prepare(session, activation.state) is None:
            return run(session, output_names, input_feed, callback, user_data, run_options)

        def work() -> None:
            """Run the session and call `callback` with the results, or with none and the error's text."""
            results, status = [], ""
            try:
                results = session.run(output_names, input_feed, run_options)
            except Exception as error:
                # `run_async` hands errors to the callback as text.
                status = f"{type(error).__name__}: {error}"
            callback(results, user_data, status)

        # A Python thread inherits the scope; the native threads of `run_async` do not.
        threading.Thread(target=work, daemon=True).start()
        return None

    def _run_copy(
        self, run: Any, session: Any, names: Sequence[str] | None, feed: Mapping[str, Any], options: Any
    ) -> Any:
        """Run the copy, or the session itself if nothing is inserted; return the results."""
        activation = interceptor.active()
        prepared = self._prepare(session, activation.state) if activation else None
        if activation is None or prepared is None:
            return run(session, names, feed, options)
        copy, execution = prepared
        # ONNX Runtime takes None and an empty list for all outputs.
        output_names = list(names) if names else list(copy.outputs)
        if not copy.fits(output_names, feed):
            # The session raises its own error for a wrong input, or accepts it after all.
            result = run(session, names, feed, options)
            activation.state.report("a run of a session", "it is given what is not as the model says")
            return result
        return copy.run(execution, output_names, feed, options)


def _run_uninstrumented(run: Any, session: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand-in for runs on memory that is bound natively: runs the session, and reports that."""
    report_unseen(
        f"{type(session).__name__}.{run.__name__}",
        "what it reads and writes is bound in native memory; call run or run_with_ort_values",
    )
    return run(session, *args, **kwargs)


def _method_with_original(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a stand-in with the original method ahead of the arguments."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return stand_in(original, *args, **kwargs)

    return method
