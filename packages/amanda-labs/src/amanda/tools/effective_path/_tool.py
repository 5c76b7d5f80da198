"""The tool: keeps the values of a pass, and extracts paths along the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import amanda
from amanda.errors import OptionError
from amanda.options import Name, PositiveFloat, checked
from amanda.tools.effective_path._extraction import STATE, Extraction
from amanda.tools.effective_path._frameworks import FRAMEWORKS, SCALES, OpValues
from amanda.tools.effective_path._path import PARTS, EffectivePath, PathError, union
from amanda.tools.effective_path._rules import PASSING, RULES
from amanda.tools.effective_path._terms import Mode, Rule, Step
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.results import Column, PlottedResult, shortened
from amanda.tools.select import Paths
from amanda.tools.trace import Graph, ProgramOp, Tensor, TraceTool

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_EXECUTIONS = 64
"""Most ops that one line in a loop is in a path."""


class EffectivePathTool(amanda.Tool):
    """Extracts the neurons, synapses and weights that explain each output of a model.

    theta, mode: a neuron is explained by the fewest inputs whose contributions sum to the share theta of its
    value ("cumulative"), or by all inputs that contribute theta or more ("absolute").
    output: pattern for the module path of the op with the classes; by default the last op that makes
    (samples, classes).  rules: functions that return the terms of an op's outputs, by the word of
    StandardMapping or the framework's own name of an op; they replace built-in rules.

    `paths` and `result` are of the last pass.  A pass begins when an op runs again on the same inputs as
    before, or on new inputs; a loop over results of other ops continues the pass.
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
        self._trace = TraceTool(executions=_MAX_EXECUTIONS, backward=False)
        self._values: dict[tuple[int, int], OpValues] = {}
        self._missing: dict[str, str] = {}
        self.depends_on(StandardMapping(), self._trace, MappingTool(FRAMEWORKS))
        self.add_inst_for_op(self._record_op)

    @property
    def result(self) -> EffectivePathResult:
        """Return the paths of the samples of the last pass, and their densities."""
        try:
            return EffectivePathResult(self.paths(), self.theta, self._missing)
        except PathError as error:
            return EffectivePathResult([], self.theta, {}, str(error))

    def clear(self) -> None:
        """Forget the values of the last pass."""
        self._values.clear()
        self._missing = {}

    def _record_op(self, context: amanda.OpContext) -> None:
        """Record the inputs and outputs of a forward op that has a rule."""
        if context["phase"] != "forward":
            return
        moves, word, attributes = context["effective path"]
        rule_key = context.get_op_type() if context.get_op_type() in self._custom else word
        if rule_key in self._rules:
            op_values = OpValues(
                rule_key, attributes, context["weight_index"], context["layout"],
                context["weight_layout"], moves, context["dtype"],
                rule_key in PASSING - SCALES.keys() - self._custom,
            )  # fmt: skip
            program_op = self._trace.place_of(context)
            context.insert_before_op(self._record_inputs, op_values=op_values, program_op=program_op)
            context.insert_after_op(self._record_outputs, program_op=program_op)

    @amanda.observer
    def _record_inputs(self, *inputs: Any, op_values: OpValues, program_op: ProgramOp) -> None:
        key = program_op.op.id, program_op.position
        if key in self._values:  # the op has run in this pass already, so a new pass has begun
            self.clear()
        self._values[key] = replace(op_values, inputs=[op_values.copy_for_rules(value) for value in inputs])

    @amanda.observer
    def _record_outputs(self, *outputs: Any, program_op: ProgramOp) -> None:
        values = self._values.get((program_op.op.id, program_op.position))
        if values is not None:
            values.outputs = [values.copy_for_rules(value) for value in outputs]

    def paths(self, labels: Sequence[int] | None = None) -> list[EffectivePath]:
        """Return a path for each sample of the last pass.

        labels: the class to explain for each sample; by default the one with the largest output.
        Raises PathError if no pass has made (samples, classes), or no path leads back from there.
        """
        graph = self._trace.graph
        steps = self._executed_steps(graph)
        start = self._scores_step(steps)
        scores = start.outputs[0]
        label_indices = _as_integers(scores.argmax(1) if labels is None else labels)
        if (
            label_indices is None
            or len(label_indices) != len(scores)
            or not all(-1 < i < scores.shape[1] for i in label_indices)
        ):
            raise PathError(
                f"labels is {labels!r}; {start.type} in {start.op.module!r} at {start.op.source} gives "
                f"{len(scores)} samples of {scores.shape[1]} classes"
            )
        extraction = Extraction(graph, steps, self._rules, self.theta, self._mode)
        paths = extraction.paths(start, label_indices)
        if not any(path.layers for path in paths):
            raise PathError(
                f"nothing that chooses leads to {start.type} in {start.op.module!r} at {start.op.source}, as "
                "far as the pass shows: output= says in which modules to begin; a program compiled in "
                'part shows how the parts hang together with compiled="eager"'
            )
        self._missing = extraction.missing
        return paths

    def _executed_steps(self, graph: Graph) -> dict[int, Step]:
        """Return the steps of the last pass, by the index of their op in the graph."""
        varying, steps, executed = _varying_tensors(graph), {}, Counter[int]()
        for op in graph.ops:
            values = self._values.get((op.id, executed[op.id]))
            executed[op.id] += 1
            if values is not None and values.outputs:
                steps[op.index] = Step(
                    op, values.type, values.inputs, values.outputs, values.weight, values.layout,
                    values.weight_layout, values.arguments(), values.varying(op, varying),
                )  # fmt: skip
        return steps

    def _scores_step(self, steps: Mapping[int, Step]) -> Step:
        """Return the last step that makes (samples, classes), in a module of `output`."""
        candidates = [
            step for step in steps.values()
            if step.varying and _is_scores(step.outputs) and self._output(step.op.module)
        ]  # fmt: skip
        if not candidates:
            location = f" in a module like {self._output.patterns[0]!r}" if self._output.patterns else ""
            raise PathError(
                f"no op{location} has given floating-point numbers of (samples, classes); {len(steps)} ops "
                "of a pass were seen: run the model in the tool's scope first"
            )
        return candidates[-1]


def _is_scores(outputs: Sequence[Any]) -> bool:
    """Return True for floating-point numbers of (samples, classes)."""
    first = outputs[0] if outputs else None
    return isinstance(first, np.ndarray) and first.ndim == 2 and first.dtype.kind == "f"


def _varying_tensors(graph: Graph) -> set[int]:
    """Return the tensors that depend on inputs or random numbers, not on the model's state alone."""
    varying: set[int] = set()
    for tensor in graph.tensors:  # in the order of their first use
        producer_reads = None if tensor.producer is None else graph.ops[tensor.producer].reads
        # Inputs of the model and random numbers: no op made the tensor from tensors.
        from_outside = not producer_reads and tensor.kind not in STATE and tensor.shape != ()
        if (from_outside or not varying.isdisjoint(producer_reads or ())) and not _is_shape(tensor):
            varying.add(tensor.index)
    return varying


def _is_shape(tensor: Tensor) -> bool:
    """Return True for a row of integers, such as extents and axes, which are not neurons."""
    return tensor.shape is not None and len(tensor.shape) < 2 and (tensor.dtype or "").startswith("int")


def _as_integers(labels: Any) -> list[int] | None:
    try:
        return [index(label) for label in labels]
    except TypeError:
        return None


_COLOURS = ("#2563eb", "#d97706", "#059669")


class EffectivePathResult(PlottedResult):
    """Paths, and the share of each op that is on them, as a mean over the paths.

    missing: types of ops at which paths end because they have no rule, each with a source line.
    reason: text of the error if there are no paths.
    """

    name: ClassVar[str] = "effective_path"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase", shown=False), Column("type"), Column("module"),
        Column("source", show=partial(shortened, width=36)),
        *(column for part in PARTS for column in (
            Column(part, show="{:,.1f}".format, number=True, total=True),
            Column(f"all {part}", show="{:,}".format, number=True, total=True),
            Column(f"{part} density", show="{:.2%}".format, number=True, unit="share"),
        )),
    )  # fmt: skip

    def __init__(
        self, paths: Sequence[EffectivePath], theta: float, missing: Mapping[str, str], reason: str = ""
    ) -> None:
        self.paths, self.theta, self.missing = tuple(paths), theta, dict(missing)
        self.reason = reason
        self.title = f"Effective paths of {len(self.paths)} samples, theta {theta:g}"

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each layer; counts and densities are means."""
        rows = []
        for name, layer in union(self.paths).layers.items() if self.paths else ():
            layers = [path.layers[name] for path in self.paths if name in path.layers]
            row: list[Any] = ["forward", layer.type, layer.module, layer.source]
            for part, size in zip(PARTS, layer.sizes, strict=True):
                count = fmean(len(sample_layer.part(part)) for sample_layer in layers)
                row += [count, size, count / size] if size else [None, 0, None]
            rows.append(row)
        return rows

    def notes(self) -> Sequence[str]:
        """Return a sentence on the ops at which paths end, or on the reason why there are no paths."""
        ends = [f"{kind} ({source})" for kind, source in self.missing.items()]
        notes = [f"Paths end at {', '.join(ends)}: no rule tells what it is made of."] if ends else []
        return [f"There is no path: {self.reason}."] if self.reason else notes

    def facts(self) -> Mapping[str, Any]:
        """Return theta, and for each path its label and its density over all layers."""
        paths = [
            {"label": path.label, **{f"{part} density": path.density(part) for part in PARTS}}
            for path in self.paths
        ]
        return {"theta": self.theta, "paths": paths, "missing": self.missing, "reason": self.reason}

    def draw(self, axes: Axes) -> None:
        """Draw bars for each layer: the share of its neurons, synapses and weights."""
        rows = self.rows()
        names = [column.name for column in self.columns]
        for i, part in enumerate(PARTS):
            column = names.index(f"{part} density")
            bars = [
                (n + (i - 1) * 0.27, row[column]) for n, row in enumerate(rows) if row[column] is not None
            ]
            axes.bar([x for x, _ in bars], [y for _, y in bars], 0.25, label=part, color=_COLOURS[i])
        labels = [f"{row[2] or row[1]} {row[1] if row[2] else ''}".strip() for row in rows]
        axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right")
        axes.set_ylabel("density")
        axes.set_title(self.title, loc="left")
        axes.legend(frameon=False)
