"""The tool: keeps what a pass computes, and walks back along the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import index, itemgetter
from typing import Any

import numpy as np

import amanda
from amanda.errors import ToolError
from amanda.tools.effective_path._extraction import STATE, Extraction
from amanda.tools.effective_path._folding import AFFINE
from amanda.tools.effective_path._moves import of_onnx, of_tensorflow, of_torch
from amanda.tools.effective_path._path import EffectivePath, PathError
from amanda.tools.effective_path._reading import Reading, array
from amanda.tools.effective_path._result import EffectivePathResult
from amanda.tools.effective_path._rules import FIRST, PASSING, RULES
from amanda.tools.effective_path._terms import Mode, Rule, Step, Where
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.select import Paths
from amanda.tools.trace import Graph, Op, Tensor, TraceTool

_MORE = ("FusedConv", "MultiHeadAttention", "SkipLayerNormalization")
_NO_NUMBERS = ("resource", "variant", "string", "complex")


@dataclass(eq=False)
class _Place:
    """One op of the program, and what its last execution read and gave."""

    kind: str
    attributes: Mapping[str, Any]
    weight: int | None
    layout: str | None
    weight_layout: str | None
    moves: Any
    dtype: Any
    shapes_alone: bool
    inputs: list[Any] | None = None
    outputs: list[Any] | None = None

    def may_vary(self, where: Where) -> bool:
        """Return True if an input can be no weight, and no scale or statistic of a normalisation."""
        return where[0] != self.weight and (self.kind not in FIRST or where[0] == 0)


class EffectivePathTool(amanda.Tool):
    """Extracts the effective paths of what a model computes in its scopes: `paths` and `result` tell.

    theta: each neuron on a path is explained by its fewest inputs whose contributions reach this share of its
    value.  mode: "cumulative", or "absolute": by all whose contribution is theta or more.  output: module of
    the op with the classes, by a pattern of its path; by default the last that gives (samples, classes).
    rules: by the word of StandardMapping or a framework's own name of an op, what its outputs are made of;
    they come before those that are built in.

    The paths are those of the last pass; it begins where an op runs again.
    Source: Qiu et al. 2019, Adversarial Defense Through Network Profiling Based Path Extraction.
    """

    def __init__(
        self,
        theta: float = 0.5,
        mode: Mode = "cumulative",
        output: str | None = None,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        super().__init__()
        is_share = isinstance(theta, Real) and theta > 0 and (mode == "absolute" or theta <= 1)
        if mode not in ("cumulative", "absolute") or not is_share:
            raise ToolError(
                f"EffectivePathTool was given theta={theta!r} and mode={mode!r}; a cumulative theta is in "
                "(0, 1], an absolute one above 0"
            )
        self.theta, self._mode, self._output = theta, mode, Paths("output", output)
        self._rules = {**RULES, **(rules or {})}
        self._custom = frozenset(rules or ())
        self._trace = TraceTool(executions=1, backward=False)
        self._places: dict[int, _Place] = {}
        self._missing: dict[str, str] = {}
        frameworks = [
            ["pytorch", _read_by(of_torch)], ["tensorflow", _read_by(of_tensorflow)],
            ["onnxruntime", _read_by(of_onnx, _word_of_onnx)],
        ]  # fmt: skip
        self.depends_on(StandardMapping(), self._trace, MappingTool(frameworks))
        self.add_inst_for_op(self._analyse)

    @property
    def result(self) -> EffectivePathResult:
        """The paths of the samples of the last pass, and their densities."""
        try:
            return EffectivePathResult(self.paths(), self.theta, self._missing)
        except PathError as error:
            return EffectivePathResult([], self.theta, {}, str(error))

    def clear(self) -> None:
        """Forget what was computed; what was analysed stays."""
        for place in self._places.values():
            place.inputs = place.outputs = None
        self._places.clear()
        self._missing = {}

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        moves, word = context["effective path"]
        kind = context.get_op_type() if context.get_op_type() in self._custom else word
        if kind not in self._rules:
            return
        place = _Place(
            kind, context.get_attrs(), context["weight_index"], context["layout"], context["weight_layout"],
            moves, context["dtype"], kind in PASSING - AFFINE - self._custom,
        )  # fmt: skip
        op = context.get_op_id()
        context.insert_before_op(self._enter, place=place, op=op)
        context.insert_after_op(self._leave, place=place)

    @amanda.observer
    def _enter(self, *inputs: Any, place: _Place, op: int) -> None:
        if op in self._places:
            self.clear()
        self._places[op] = place
        place.inputs = [self._kept(value, place) for value in inputs]

    @amanda.observer
    def _leave(self, *outputs: Any, place: _Place) -> None:
        place.outputs = [self._kept(value, place) for value in outputs]

    def _kept(self, value: Any, place: _Place) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._kept(one, place) for one in value]
        dtype = place.dtype(value)
        if dtype is None or dtype.startswith(_NO_NUMBERS):
            return value
        if place.shapes_alone and len(value.shape) > 2:
            return np.broadcast_to(np.float32(0), tuple(value.shape))
        return array(value)

    def paths(self, labels: Sequence[int] | None = None) -> list[EffectivePath]:
        """A path for each sample of the last pass.

        labels: which class to explain of each sample; by default the one with the largest output.
        Raises PathError where no pass has given (samples, classes), or no path leads back from there.
        """
        graph = self._trace.graph
        steps = self._steps(graph)
        start = self._start(steps)
        scores = start.outputs[0]
        chosen = _integers(scores.argmax(1) if labels is None else labels)
        if chosen is None or len(chosen) != len(scores) or not all(-1 < i < scores.shape[1] for i in chosen):
            raise PathError(
                f"labels is {labels!r}; {start.type} in {start.op.module!r} at {start.op.source} gives "
                f"{len(scores)} samples of {scores.shape[1]} classes"
            )
        extraction = Extraction(graph, steps, self._rules, self.theta, self._mode)
        found = extraction.paths(start, chosen)
        if not any(path.layers for path in found):
            raise PathError(
                f"nothing that chooses leads to {start.type} in {start.op.module!r} at {start.op.source}, as "
                "far as the pass shows: output= says in which modules to begin; a program compiled in "
                'part shows how the parts hang together with compiled="eager"'
            )
        self._missing = extraction.missing
        return found

    def _steps(self, graph: Graph) -> dict[int, Step]:
        varying, steps = _varying(graph), {}
        for op in graph.ops:
            place = self._places.get(op.id)
            if place is None or place.inputs is None or place.outputs is None:
                continue
            reading = Reading(
                place.kind, place.inputs, place.outputs, place.attributes, place.layout, place.weight_layout,
                place.moves,
            )  # fmt: skip
            steps[op.index] = Step(
                op, place.kind, place.inputs, place.outputs, place.weight, place.layout, place.weight_layout,
                reading.arguments(), [one for one in _reads_of(op, varying) if place.may_vary(one)],
            )  # fmt: skip
        return steps

    def _start(self, steps: Mapping[int, Step]) -> Step:
        """The last op that gives (samples, classes)."""
        found = [
            step for step in steps.values()
            if step.varying and _is_scores(step.outputs) and self._may_end(step.op.module)
        ]  # fmt: skip
        if not found:
            where = f" in a module like {self._output.patterns[0]!r}" if self._output.patterns else ""
            raise PathError(
                f"no op{where} has given floating-point numbers of (samples, classes); {len(steps)} ops of a "
                "pass were seen: run the model in the tool's scope first"
            )
        return max(found, key=lambda step: step.op.index)

    def _may_end(self, module: str) -> bool:
        return self._output(module)


def _read_by(moves: Any, word: Callable[[amanda.OpContext], str] = itemgetter("type")) -> Any:
    def rule(context: amanda.OpContext) -> None:
        context["effective path"] = moves, word(context)

    return rule


def _word_of_onnx(context: amanda.OpContext) -> str:
    """The word by whose rule a node is read; its own type where it computes more than that, or integers."""
    name, inputs = context.get_op_type(), context.get_inputs()
    otherwise = name in _MORE or name.startswith("QLinear") or name.endswith("Integer")
    if name == "Gemm":
        otherwise = bool(context.get_attrs().get("transA"))
    if name == "Attention":
        otherwise = len(context["shape"](inputs[0]) or ()) != 4 or len(inputs) > 4
    return name if otherwise else str(context["type"])


def _is_scores(outputs: Sequence[Any]) -> bool:
    first = outputs[0] if outputs else None
    return isinstance(first, np.ndarray) and first.ndim == 2 and first.dtype.kind == "f"


def _varying(graph: Graph) -> set[int]:
    """The tensors that depend on what comes from outside, or is drawn, and is no state of the model."""
    found: set[int] = set()
    for tensor in graph.tensors:  # in the order in which they were met
        made_by = None if tensor.producer is None else graph.ops[tensor.producer].reads
        from_outside = not made_by and tensor.kind not in STATE and tensor.shape != ()
        if (from_outside or not found.isdisjoint(made_by or ())) and not _is_shape(tensor):
            found.add(tensor.index)
    return found


def _is_shape(tensor: Tensor) -> bool:
    """Return True for a row of integers such as extents, axes and positions, which are no neurons."""
    return tensor.shape is not None and len(tensor.shape) < 2 and (tensor.dtype or "").startswith("int")


def _reads_of(op: Op, varying: set[int]) -> list[Where]:
    """The tensors among an op's inputs that vary."""
    return [
        (i, j) for i, position in enumerate(op.inputs)
        for j, tensor in enumerate(position if isinstance(position, tuple) else (position,))
        if tensor in varying
    ]  # fmt: skip


def _integers(labels: Any) -> list[int] | None:
    try:
        return [index(one) for one in labels]
    except TypeError:
        return None
