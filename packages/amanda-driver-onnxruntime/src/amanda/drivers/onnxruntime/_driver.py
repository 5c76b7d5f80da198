"""The driver of ONNX Runtime's sessions: stand-ins for the methods that run them, and copies of models."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx
from onnx import TensorProto
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

import onnxruntime
from amanda import interceptor
from amanda.backend import (
    CannotInstrument,
    Execution,
    GraphAnalysis,
    GraphDriver,
    Patches,
    SelfTestProgram,
    State,
    digest,
    report_unseen,
)
from onnxruntime.capi.onnxruntime_inference_collection import Session

from ._control_flow import nodes_within
from ._graph_runner import GraphRunner
from ._model import Model
from ._rewrite import ModelRewriting
from ._sessions import SessionFactory
from ._tensors import NumpyReads, OnnxTensorOps
from ._values import OnnxSymbol, as_array, as_ort_value

NEWEST_TESTED = "1.32"
_SESSION = "onnxruntime.capi.onnxruntime_inference_collection:Session"
PRIVATE_NAMES = (
    # Methods of the Python class around the native session, which the driver replaces while it is attached.
    *(f"{_SESSION}.{name}" for name in ("run", "run_with_ort_values", "run_async", "run_with_iobinding")),
    # Sessions share large weights by it; without it each part would hold a copy of them.
    "onnxruntime:SessionOptions.add_external_initializers",
)
"""Undocumented names of ONNX Runtime that the driver needs."""


class OnnxRuntimeDriver(GraphDriver[ModelRewriting, "ModelCopy"]):
    """Instruments ONNX Runtime's sessions: analyses their models, and runs instrumented copies instead."""

    api = 2
    framework = "onnxruntime"
    modes = ("graph",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES
    tensors = OnnxTensorOps()
    reads_type = NumpyReads

    def __init__(self) -> None:
        super().__init__()
        self._boundary = Boundary(self._prepare_session)
        # Weak, so that a model is dropped with its session.
        self._models_or_errors: WeakKeyDictionary[Any, Model | CannotInstrument] = WeakKeyDictionary()

    def attach(self) -> None:
        """Patch the methods through which sessions run."""
        self._boundary.attach(self.patches)

    def self_test_program(self) -> SelfTestProgram:
        """Return a program of a session with one op."""
        return SelfTestProgram(compute_tanh, "Tanh")

    def rewrite(self, graph: Any, analysis: GraphAnalysis) -> ModelRewriting:
        """Rewrite the model of the session `graph`; raise CannotInstrument if the model cannot be read.

        The model is read once.
        """
        # A model that cannot be read is remembered by its error, so that it is not read at each run.
        model_or_error = self._models_or_errors.get(graph)
        if model_or_error is None:
            try:
                model_or_error = model_of(graph)
            except CannotInstrument as error:
                model_or_error = error
            self._models_or_errors[graph] = model_or_error
        if isinstance(model_or_error, CannotInstrument):
            raise CannotInstrument(*model_or_error.args)
        identity = digest("onnxruntime/graph", interceptor.ordinal(graph))
        rewriting = ModelRewriting(
            analysis=analysis, namespace=self.namespace, model=model_or_error, identity=identity
        )
        rewriting.run()
        return rewriting

    def build_runnable(self, graph: Any, rewriting: ModelRewriting) -> ModelCopy:
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

    def attach(self, patches: Patches) -> None:
        """Patch the methods through which sessions run, until `patches` are restored."""
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
                patches.set(Session, name, _method_with_original(stand_in, vars(Session)[name]))

    def _stand_in_for_run(
        self, run: Any, session: Any, output_names: Any, input_feed: Any, run_options: Any = None
    ) -> Any:
        """Stand-in for `run`: runs the copy, if there is one; returns arrays."""
        results = self._run_copy(run, session, output_names, input_feed, run_options)
        return [as_array(result) for result in results]

    def _stand_in_for_run_with_ort_values(
        self, run: Any, session: Any, output_names: Any, input_dict_ort_values: Any, run_options: Any = None
    ) -> Any:
        """Stand-in for `run_with_ort_values`: runs the copy, if any; returns values of ONNX Runtime."""
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
        """Stand-in for `run_async`: runs the copy, if any, on a new thread, which inherits the scope."""
        activation = interceptor.active()
        if not activation or self._prepare(session, activation.state) is None:
            return run(session, output_names, input_feed, callback, user_data, run_options)

        def work() -> None:
            """Run the session and call `callback` with the results, or with none and the error's text."""
            results, error_text = [], ""
            try:
                results = session.run(output_names, input_feed, run_options)
            except Exception as error:
                # `run_async` hands errors to the callback as text.
                error_text = f"{type(error).__name__}: {error}"
            callback(results, user_data, error_text)

        # A Python thread inherits the scope; the native threads of `run_async` do not.
        threading.Thread(target=work, daemon=True).start()
        return None

    def _run_copy(
        self, run: Any, session: Any, names: Sequence[str] | None, feed: Mapping[str, Any], options: Any
    ) -> Any:
        """Run the copy, or the session if nothing is inserted or, with a report, inputs do not fit."""
        activation = interceptor.active()
        copy_and_execution = self._prepare(session, activation.state) if activation else None
        if activation is None or copy_and_execution is None:
            return run(session, names, feed, options)
        copy, execution = copy_and_execution
        # ONNX Runtime takes None and an empty list for all outputs.
        output_names = list(names) if names else list(copy.outputs)
        if not copy.fits(output_names, feed):
            # The session raises its own error for a wrong input, or accepts it after all.
            results = run(session, names, feed, options)
            activation.state.report("a run of a session", "it is given what is not as the model says")
            return results
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


_RANDOM_OPS = (
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip


class ModelCopy:
    """The instrumented copy of a session's model: routines, and sessions for the nodes between them.

    Creation reports random ops, which start anew.  Raises CannotInstrument where ONNX Runtime refuses the
    copy.
    """

    def __init__(self, session: Any, rewriting: ModelRewriting) -> None:
        model, symbol = rewriting.model, rewriting.symbol
        # The generator of a random op is in the kernel of the user's session, out of reach of the copy.
        for node in nodes_within(model.proto.graph.node):
            if node.op_type in _RANDOM_OPS:
                rewriting.report_restarted(node.name or node.op_type)
        constants = {**model.constants, **rewriting.constants}
        sparse_names = [tensor.values.name for tensor in model.proto.graph.sparse_initializer]
        # A run may override a default, so no session may hold it as a constant.
        constant_names = {*constants, *sparse_names} - model.overridable
        self.outputs = {name: rewriting.renamed.get(name, name) for name in model.outputs}
        fetched_names = set(self.outputs.values())
        try:
            self._runner = GraphRunner(
                SessionFactory(session, model),
                rewriting.items,
                constants,
                constant_names,
                fetched_names,
                symbol,
                rewriting.may_change_shapes,
            )
        except Exception as error:
            raise CannotInstrument("a session", f"ONNX Runtime refuses the copy: {error}") from error
        self._inputs: dict[str, OnnxSymbol] = {
            name: symbol(name) for name in (*model.inputs, *model.overridable)
        }
        self._default_by_input = {name: constants[name] for name in model.overridable}

    def fits(self, output_names: Sequence[str], feed: Mapping[str, Any]) -> bool:
        """Return True if the copy can run for these outputs and inputs.

        All outputs must exist, and all inputs must be fed with values of their types; one with a default may
        be missing.  False also for an input that the model does not have.
        """
        if not (set(output_names) <= self.outputs.keys() and feed.keys() <= self._inputs.keys()):
            return False
        missing_names = self._inputs.keys() - feed.keys() - self._default_by_input.keys()
        return not missing_names and all(
            self._inputs[name].admits(as_array(value)) for name, value in feed.items()
        )

    def run(
        self, execution: Execution, names: Sequence[str], feed: Mapping[str, Any], options: Any
    ) -> list[Any]:
        """Run the copy; return the outputs of these names."""
        values = {**self._default_by_input, **feed}
        with execution.running():
            return self._runner.run(execution, values, [self.outputs[name] for name in names], options)


def model_of(session: Any) -> Model:
    """Read the model of a session, from its path or its bytes, and infer the types of its values.

    Raises CannotInstrument where the model is out of reach, or has changed since the session was created.
    """
    path, data = session._model_path, session._model_bytes
    overridable = [argument.name for argument in session.get_overridable_initializers()]
    # The ORT format has an optimized graph of its own, which the onnx package cannot read.
    if path is not None and (not Path(path).exists() or str(path).endswith(".ort")):
        file_state = "in ORT format" if Path(path).exists() else "not there any more"
        raise CannotInstrument("a session", f"its model {path} is {file_state}")
    try:
        model = (
            Model.of_file(path, overridable)
            if path is not None
            else Model(onnx.load_from_string(data), "", overridable)
        )
    except Exception as error:
        raise CannotInstrument("a session", f"its model cannot be read: {error}") from error
    names_in_model = model.inputs, model.outputs
    names_in_session = (
        [argument.name for argument in session.get_inputs()],
        [argument.name for argument in session.get_outputs()],
    )
    # The file may have been replaced after the session was created; its routines would be at the wrong ops.
    if names_in_model != names_in_session:
        reason = f"{names_in_model}, not {names_in_session}"
        raise CannotInstrument(
            "a session", f"its model {path} has changed since the session was made: {reason}"
        )
    model.infer_types(SessionFactory(session, model).infer_types)
    return model


def compute_tanh() -> list[float]:
    """Return the tanh of two numbers, from a session of a model with that op alone."""
    x, y = (make_tensor_value_info(name, TensorProto.DOUBLE, [2]) for name in "xy")
    graph = make_graph([make_node("Tanh", ["x"], ["y"])], "exercise", [x], [y])
    # Versions that every runtime which the driver supports can read.
    model = make_model(graph, opset_imports=[make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.array([0.5, -0.25])})
    return [*result.tolist()]
