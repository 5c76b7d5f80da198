"""Instrumented copies of sessions' models: one for each session and layer of tools."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import onnx

from amanda import interceptor
from amanda.backend import Execution, GuardedCopies, History, Namespace, Reads, State, digest

from ._model import Model
from ._places import Call
from ._reads import NumpyReads
from ._rewrite import Rewriting
from ._schedule import schedule
from ._sessions import Part, Sessions
from ._symbols import Symbol
from ._tensors import GraphTensors
from ._values import as_array

_DRAWING = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


class Unreadable(Exception):
    """A session's model is out of reach; the message says why."""


class Copy:
    """What runs for a session.

    steps: routines, the session after them, and values that are done with; None where nothing is inserted.
    outputs: what is read for each output of the model.  constants: values that some of these are.
    defaults: what inputs are that are not given.  inputs: symbols of all.
    """

    def __init__(self, reports: Iterable[tuple[str, str]]) -> None:
        self.reports = tuple(reports)
        self.steps: list[tuple[list[Call], Part | None, list[str]]] | None = None
        self.table: Mapping[int, Any] = {}
        self.outputs: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.inputs: dict[str, Symbol] = {}

    def fits(self, names: Sequence[str], feed: Mapping[str, Any]) -> bool:
        """Whether a run asks for outputs that there are, and gives all inputs, of their types and shapes."""
        if not (set(names) <= self.outputs.keys() and feed.keys() <= self.inputs.keys()):
            return False
        missing = self.inputs.keys() - feed.keys() - self.defaults.keys()
        return not missing and all(self.inputs[name].admits(as_array(value)) for name, value in feed.items())

    def run(
        self, execution: Execution, names: Sequence[str], feed: Mapping[str, Any], options: Any
    ) -> list[Any]:
        """The outputs of these names."""
        values = {**self.defaults, **feed}
        with execution.under_way():
            for calls, part, done in self.steps or ():
                for call in calls:
                    results = execution.call(call.slot, [as_array(values[name]) for name in call.reads])
                    values.update(zip(call.gives, results, strict=True))
                if part is not None:
                    with interceptor.Suspension():
                        values.update(part.run(values, options))
                for name in done:
                    del values[name]
        return [
            values[one] if one in values else self.constants[one]
            for one in (self.outputs[name] for name in names)
        ]


class Copies:
    """Makes copies, and keeps them with the layer that they are for."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._lock = threading.RLock()
        self._models: WeakKeyDictionary[Any, Model | Unreadable] = WeakKeyDictionary()

    def prepare(self, session: Any, state: State) -> tuple[Copy, Execution] | None:
        """The copy that stands for a run of a session, and its execution; None where nothing is inserted."""
        assert state.layer is not None
        copies = state.layer.rewrites.setdefault(session, {}) if state.cache else {}
        key = state.autodiff, tuple(session.get_providers())
        kept = copies.get(key)
        copy = None if kept is None else kept.find()
        if copy is None:
            with self._lock:
                kept = copies.setdefault(key, GuardedCopies(NumpyReads))
                copy = kept.find()
                if copy is None:
                    copy, reads = self._made(session, state, kept.history)
                    kept.add(copy, reads)
        state.report_all(copy, copy.reports)
        if copy.steps is None:
            return None
        return copy, Execution(state, GraphTensors(), copy.table)

    def _made(self, session: Any, state: State, history: History) -> tuple[Copy, Reads]:
        with interceptor.Suspension():
            model = self._model(session)
            if isinstance(model, Unreadable):
                return Copy([("a session", str(model))]), NumpyReads()
            identity = digest("onnxruntime/graph", interceptor.ordinal(session))
            rewriting = Rewriting(model, state, self._namespace, identity, history=history)
            try:
                rewriting.run()
            except BaseException:
                rewriting.analysis.forget()
                raise
            rewriting.analysis.finish(session)
            rewriting.tell_unfollowed()
            if not rewriting.changed:
                return Copy(rewriting.reports), rewriting.reads
            for node in model.proto.graph.node:
                if node.op_type in _DRAWING:
                    what = f"the state of {node.name or node.op_type}"
                    rewriting.report(what, "its kernel holds it, and a copy's begins anew")
            return self._placed(session, model, rewriting), rewriting.reads

    def _placed(self, session: Any, model: Model, rewriting: Rewriting) -> Copy:
        symbol = rewriting.symbol
        constants = {**model.constants, **rewriting.constants}
        sparse = [one.values.name for one in model.proto.graph.sparse_initializer]
        held = {*constants, *sparse} - model.overridable
        outputs = {name: rewriting.renamed.get(name, name) for name in model.outputs}
        steps = schedule(rewriting.items, held, set(outputs.values()), lambda name: symbol(name).nbytes)
        sessions = Sessions(session, model)
        copy = Copy(rewriting.reports)
        copy.steps = []
        try:
            for step in steps:
                part = sessions.part(step, symbol, constants, rewriting.free) if step.outputs else None
                copy.steps.append((step.calls, part, [one for one in step.done if one not in held]))
        except Exception as error:
            rewriting.report("a session", f"ONNX Runtime refuses the copy: {error}")
            return Copy(rewriting.reports)
        copy.table, copy.outputs = rewriting.table, outputs
        copy.inputs = {name: symbol(name) for name in (*model.inputs, *model.overridable)}
        copy.constants = {one: constants[one] for one in outputs.values() if one in constants}
        read = {name for step in steps for call in step.calls for name in call.reads}
        copy.defaults = {name: constants[name] for name in (read & constants.keys()) | model.overridable}
        return copy

    def _model(self, session: Any) -> Model | Unreadable:
        known = self._models.get(session)
        if known is None:
            try:
                known = _read(session)
            except Unreadable as error:
                known = error
            self._models[session] = known
        return known


def _read(session: Any) -> Model:
    """The model of a session, from where the session has it.

    Raises Unreadable.
    """
    path, data = session._model_path, session._model_bytes
    overridable = [one.name for one in session.get_overridable_initializers()]
    if path is not None and (not Path(path).exists() or str(path).endswith(".ort")):
        raise Unreadable(
            f"its model {path} is {'in ORT format' if Path(path).exists() else 'not there any more'}"
        )
    try:
        model = (
            Model.of_file(path, overridable)
            if path is not None
            else Model(onnx.load_from_string(data), "", overridable)
        )
    except Exception as error:
        raise Unreadable(f"its model cannot be read: {error}") from error
    mine = model.inputs, model.outputs
    theirs = [one.name for one in session.get_inputs()], [one.name for one in session.get_outputs()]
    if mine != theirs:
        raise Unreadable(f"its model {path} has changed since the session was made: {mine}, not {theirs}")
    model.infer_types(Sessions(session, model).types)
    return model
