"""The driver of ONNX Runtime's sessions."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from amanda import interceptor
from amanda.backend import CannotInstrument, Execution, GraphAnalysis, GraphDriver, State, digest

from ._boundary import Boundary
from ._copies import ModelCopy, model_of
from ._model import Model
from ._requirements import check
from ._rewrite import ModelRewriting
from ._tensors import GraphTensors, NumpyReads


class OnnxRuntimeDriver(GraphDriver[ModelRewriting, ModelCopy]):
    """Instruments ONNX Runtime's sessions: analyses their models, and runs instrumented copies instead."""

    api = 1
    framework = "onnxruntime"
    modes = ("graph",)
    tensors = GraphTensors()
    reads = NumpyReads

    def __init__(self) -> None:
        super().__init__()
        self._boundary = Boundary(self._prepare_session)
        self._models: WeakKeyDictionary[Any, Model | CannotInstrument] = WeakKeyDictionary()

    def attach(self) -> None:
        """Patch the methods through which sessions run."""
        check()
        self._boundary.attach(self.attributes)

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
