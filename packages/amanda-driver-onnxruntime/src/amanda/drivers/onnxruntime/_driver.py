"""The driver of ONNX Runtime's sessions."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from amanda import interceptor
from amanda.backend import Execution, GraphAnalysis, GraphDriver, State, Uninstrumented, digest

from ._boundary import Boundary
from ._copies import Copy, model_of
from ._model import Model
from ._reads import NumpyReads
from ._requirements import check
from ._rewrite import ModelRewriting
from ._tensors import GraphTensors


class OnnxRuntimeDriver(GraphDriver[ModelRewriting, Copy]):
    """Sessions of ONNX Runtime: their models are analysed, and an instrumented copy runs instead."""

    api = 1
    framework = "onnxruntime"
    modes = ("graph",)
    tensors = GraphTensors()
    reads = NumpyReads

    def __init__(self) -> None:
        super().__init__()
        self._boundary = Boundary(self._prepared)
        self._models: WeakKeyDictionary[Any, Model | Uninstrumented] = WeakKeyDictionary()

    def attach(self) -> None:
        """Stand where runs of sessions begin."""
        check()
        self._boundary.attach(self.attributes)

    def rewrite(self, graph: Any, analysis: GraphAnalysis) -> ModelRewriting:
        """Rewrite the model of a session."""
        known = self._models.get(graph)
        if known is None:
            try:
                known = model_of(graph)
            except Uninstrumented as error:
                known = error
            self._models[graph] = known
        if isinstance(known, Uninstrumented):
            raise Uninstrumented(*known.args)
        identity = digest("onnxruntime/graph", interceptor.ordinal(graph))
        rewriting = ModelRewriting(
            analysis=analysis, namespace=self.namespace, model=known, identity=identity
        )
        rewriting.run()
        return rewriting

    def runnable(self, graph: Any, rewriting: ModelRewriting) -> Copy:
        """Make sessions of the rewritten model."""
        return Copy(graph, rewriting)

    def _prepared(self, session: Any, state: State) -> tuple[Copy, Execution] | None:
        return self.prepare(session, state, tuple(session.get_providers()))
