"""The tool: keeps the values of a pass, and extracts paths along the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any

import amanda
from amanda.errors import OptionError
from amanda.options import Name, PositiveFloat, checked
from amanda.tools.effective_path._extraction import STATE, Extraction
from amanda.tools.effective_path._frameworks import FRAMEWORKS, SCALES, OpValues
from amanda.tools.effective_path._path import EffectivePath, PathError
from amanda.tools.effective_path._result import EffectivePathResult
from amanda.tools.effective_path._rules import PASSING, RULES
from amanda.tools.effective_path._terms import Mode, Rule, Step
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.select import Paths
from amanda.tools.trace import Graph, ProgramOp, Tensor, TraceTool

_EXECUTIONS = 64
"""Most ops that one line in a loop is in a path."""


class EffectivePathTool(amanda.Tool):
    """A tool that extracts the effective paths of a model's outputs; `paths` and `result` return them.

    theta, mode: a neuron is explained by the fewest inputs whose contributions sum to the share theta of its
    value ("cumulative"), or by all inputs that contribute theta or more ("absolute").
    output: pattern for the module path of the op with the classes; by default the last op that makes
    (samples, classes).  rules: functions that return the terms of an op's outputs, by the word of
    StandardMapping or the framework's own name of an op; they replace built-in rules.

    The paths are those of the last pass; a pass begins when an op runs again on what it was given before, or
    on new inputs: a loop over what other ops have made goes on with the pass.
    Source: Qiu et al. 2019, Adversarial Defense Through Network Profiling Based Path Extraction.
    """

    is_copied_when_used = False

    @checked
    def __init__(
        self,
        theta: PositiveFloat = 0.5,
        mode: Mode = "cumulative",
        output: Name | None = None,
        rules: Mapping[Name, Rule] | None = None,
    ) -> None:
        super().__init__()
        if mode == "cumulative" and theta > 1:
            raise OptionError(
                f"EffectivePathTool: theta is {theta} and mode 'cumulative'; give a share, above 0 and at "
                "most 1, or mode='absolute'"
            )
        self.theta, self._mode, self._output = theta, mode, Paths("output", output)
        self._rules = {**RULES, **(rules or {})}
        self._custom = frozenset(rules or ())
        self._trace = TraceTool(executions=_EXECUTIONS, backward=False)
        self._values: dict[tuple[int, int], OpValues] = {}
        self._missing: dict[str, str] = {}
        self.depends_on(StandardMapping(), self._trace, MappingTool(FRAMEWORKS))
        self.add_inst_for_op(self._analyse)

    @property
    def result(self) -> EffectivePathResult:
        """Return the paths of the samples of the last pass, and their densities."""
        try:
            return EffectivePathResult(self.paths(), self.theta, self._missing)
        except PathError as error:
            return EffectivePathResult([], self.theta, {}, str(error))

    def clear(self) -> None:
        """Forget the values of the last pass; analysed ops stay analysed."""
        self._values.clear()
        self._missing = {}

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        moves, word, attributes = context["effective path"]
        kind = context.get_op_type() if context.get_op_type() in self._custom else word
        if kind in self._rules:
            place = OpValues(
                kind, attributes, context["weight_index"], context["layout"],
                context["weight_layout"], moves, context["dtype"],
                kind in PASSING - SCALES.keys() - self._custom,
            )  # fmt: skip
            traced = self._trace.place_of(context)
            context.insert_before_op(self._enter, place=place, traced=traced)
            context.insert_after_op(self._leave, traced=traced)

    @amanda.observer
    def _enter(self, *inputs: Any, place: OpValues, traced: ProgramOp) -> None:
        key = traced.op.id, traced.position
        if key in self._values:
            self.clear()
        self._values[key] = replace(place, inputs=[place.kept(value) for value in inputs])

    @amanda.observer
    def _leave(self, *outputs: Any, traced: ProgramOp) -> None:
        values = self._values.get((traced.op.id, traced.position))
        if values is not None:
            values.outputs = [values.kept(value) for value in outputs]

    def paths(self, labels: Sequence[int] | None = None) -> list[EffectivePath]:
        """Return a path for each sample of the last pass.

        labels: the class to explain for each sample; by default the one with the largest output.
        Raises PathError if no pass has made (samples, classes), or no path leads back from there.
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
        varying, steps, executed = _varying(graph), {}, Counter[int]()
        for op in graph.ops:
            place = self._values.get((op.id, executed[op.id]))
            executed[op.id] += 1
            if place is not None and place.outputs:
                steps[op.index] = Step(
                    op, place.type, place.inputs, place.outputs, place.weight, place.layout,
                    place.weight_layout, place.arguments(), place.varying(op, varying),
                )  # fmt: skip
        return steps

    def _start(self, steps: Mapping[int, Step]) -> Step:
        """Return the last op that makes (samples, classes)."""
        found = [
            step for step in steps.values()
            if step.varying and _is_scores(step.outputs) and self._output(step.op.module)
        ]  # fmt: skip
        if not found:
            where = f" in a module like {self._output.patterns[0]!r}" if self._output.patterns else ""
            raise PathError(
                f"no op{where} has given floating-point numbers of (samples, classes); {len(steps)} ops of a "
                "pass were seen: run the model in the tool's scope first"
            )
        return found[-1]


def _is_scores(outputs: Sequence[Any]) -> bool:
    first = outputs[0] if outputs else None
    return isinstance(first, np.ndarray) and first.ndim == 2 and first.dtype.kind == "f"


def _varying(graph: Graph) -> set[int]:
    """Return the tensors that depend on inputs or random numbers, and not only on the model's state."""
    found: set[int] = set()
    for tensor in graph.tensors:  # in the order of their first use
        made_by = None if tensor.producer is None else graph.ops[tensor.producer].reads
        from_outside = not made_by and tensor.kind not in STATE and tensor.shape != ()
        if (from_outside or not found.isdisjoint(made_by or ())) and not _is_shape(tensor):
            found.add(tensor.index)
    return found


def _is_shape(tensor: Tensor) -> bool:
    """Return True for a row of integers, such as extents and axes, which are not neurons."""
    return tensor.shape is not None and len(tensor.shape) < 2 and (tensor.dtype or "").startswith("int")


def _integers(labels: Any) -> list[int] | None:
    try:
        return [index(one) for one in labels]
    except TypeError:
        return None
