"""Instrumented copies of sessions' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from amanda.backend import Execution, Uninstrumented

from ._control_flow import nodes_within
from ._model import Model
from ._rewrite import ModelRewriting
from ._sessions import Sessions
from ._steps import Steps
from ._symbols import Symbol
from ._values import as_array

_DRAWING = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


class Copy:
    """The instrumented copy of a session's model: routines, and sessions of the nodes between them.

    Raises Uninstrumented where ONNX Runtime refuses the copy.
    """

    def __init__(self, session: Any, rewriting: ModelRewriting) -> None:
        model, symbol = rewriting.model, rewriting.symbol
        for node in nodes_within(model.proto.graph.node):
            if node.op_type in _DRAWING:
                what = f"the state of {node.name or node.op_type}"
                rewriting.report(what, "its kernel holds it, and a copy's begins anew")
        constants = {**model.constants, **rewriting.constants}
        sparse = [one.values.name for one in model.proto.graph.sparse_initializer]
        held = {*constants, *sparse} - model.overridable
        self.outputs = {name: rewriting.renamed.get(name, name) for name in model.outputs}
        fetched = set(self.outputs.values())
        try:
            self._steps = Steps(
                Sessions(session, model), rewriting.items, constants, held, fetched, symbol, rewriting.free
            )
        except Exception as error:
            raise Uninstrumented("a session", f"ONNX Runtime refuses the copy: {error}") from error
        self._inputs: dict[str, Symbol] = {name: symbol(name) for name in (*model.inputs, *model.overridable)}
        self._defaults = {name: constants[name] for name in model.overridable}

    def fits(self, names: Sequence[str], feed: Mapping[str, Any]) -> bool:
        """Return True if a run asks for outputs that exist, and gives all inputs, of types that fit."""
        if not (set(names) <= self.outputs.keys() and feed.keys() <= self._inputs.keys()):
            return False
        missing = self._inputs.keys() - feed.keys() - self._defaults.keys()
        return not missing and all(self._inputs[name].admits(as_array(value)) for name, value in feed.items())

    def run(
        self, execution: Execution, names: Sequence[str], feed: Mapping[str, Any], options: Any
    ) -> list[Any]:
        """The outputs of these names."""
        values = {**self._defaults, **feed}
        with execution.under_way():
            return self._steps.run(execution, values, [self.outputs[name] for name in names], options)


def model_of(session: Any) -> Model:
    """The model of a session, from where the session has it.

    Raises Uninstrumented where it is out of reach.
    """
    path, data = session._model_path, session._model_bytes
    overridable = [one.name for one in session.get_overridable_initializers()]
    if path is not None and (not Path(path).exists() or str(path).endswith(".ort")):
        found = "in ORT format" if Path(path).exists() else "not there any more"
        raise Uninstrumented("a session", f"its model {path} is {found}")
    try:
        model = (
            Model.of_file(path, overridable)
            if path is not None
            else Model(onnx.load_from_string(data), "", overridable)
        )
    except Exception as error:
        raise Uninstrumented("a session", f"its model cannot be read: {error}") from error
    mine = model.inputs, model.outputs
    theirs = [one.name for one in session.get_inputs()], [one.name for one in session.get_outputs()]
    if mine != theirs:
        why = f"its model {path} has changed since the session was made: {mine}, not {theirs}"
        raise Uninstrumented("a session", why)
    model.infer_types(Sessions(session, model).types)
    return model
