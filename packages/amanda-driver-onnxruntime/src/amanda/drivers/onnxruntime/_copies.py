"""Instrumented copies of sessions' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from amanda.backend import CannotInstrument, Execution

from ._control_flow import nodes_within
from ._graph_runner import GraphRunner
from ._model import Model
from ._rewrite import ModelRewriting
from ._sessions import SessionFactory
from ._values import OnnxSymbol, as_array

_RANDOM_OPS = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


class ModelCopy:
    """The instrumented copy of a session's model: routines, and sessions for the nodes between them.

    Raises CannotInstrument where ONNX Runtime refuses the copy.
    """

    def __init__(self, session: Any, rewriting: ModelRewriting) -> None:
        model, symbol = rewriting.model, rewriting.symbol
        # The generator of a random op is in the kernel of the user's session, out of reach of the copy.
        for node in nodes_within(model.proto.graph.node):
            if node.op_type in _RANDOM_OPS:
                rewriting.report_restarted(node.name or node.op_type)
        constants = {**model.constants, **rewriting.constants}
        sparse = [tensor.values.name for tensor in model.proto.graph.sparse_initializer]
        # A run may override a default, so no session may hold it as a constant.
        constant_names = {*constants, *sparse} - model.overridable
        self.outputs = {name: rewriting.renamed.get(name, name) for name in model.outputs}
        fetched = set(self.outputs.values())
        try:
            self._runner = GraphRunner(
                SessionFactory(session, model),
                rewriting.items,
                constants,
                constant_names,
                fetched,
                symbol,
                rewriting.free,
            )
        except Exception as error:
            raise CannotInstrument("a session", f"ONNX Runtime refuses the copy: {error}") from error
        self._inputs: dict[str, OnnxSymbol] = {
            name: symbol(name) for name in (*model.inputs, *model.overridable)
        }
        self._defaults = {name: constants[name] for name in model.overridable}

    def fits(self, names: Sequence[str], feed: Mapping[str, Any]) -> bool:
        """Return True if the copy can run for these outputs and inputs.

        All outputs must exist, and all inputs must be fed with values of their types; one with a default may
        be missing.  False also for an input that the model does not have.
        """
        if not (set(names) <= self.outputs.keys() and feed.keys() <= self._inputs.keys()):
            return False
        missing = self._inputs.keys() - feed.keys() - self._defaults.keys()
        return not missing and all(self._inputs[name].admits(as_array(value)) for name, value in feed.items())

    def run(
        self, execution: Execution, names: Sequence[str], feed: Mapping[str, Any], options: Any
    ) -> list[Any]:
        """Run the copy; return the outputs of these names."""
        values = {**self._defaults, **feed}
        with execution.under_way():
            return self._runner.run(execution, values, [self.outputs[name] for name in names], options)


def model_of(session: Any) -> Model:
    """Read the model of a session, from its path or its bytes.

    Raises CannotInstrument where the model is out of reach.
    """
    path, data = session._model_path, session._model_bytes
    overridable = [argument.name for argument in session.get_overridable_initializers()]
    # The ORT format has an optimized graph of its own, which the onnx package cannot read.
    if path is not None and (not Path(path).exists() or str(path).endswith(".ort")):
        state = "in ORT format" if Path(path).exists() else "not there any more"
        raise CannotInstrument("a session", f"its model {path} is {state}")
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
