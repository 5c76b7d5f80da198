"""The tool: keeps the values of a pass, and extracts paths along the graph from outputs back to inputs."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import amanda
from amanda.errors import OptionError
from amanda.options import Name, PositiveFloat, checked
from amanda.tools.effective_path._frameworks import FRAMEWORKS, SCALES, OpValues
from amanda.tools.effective_path._path import (
    EffectivePath,
    EffectivePathResult,
    Keys,
    OpOnPath,
    PathError,
    layer_names,
    layers_by_sample,
)
from amanda.tools.effective_path._rules import (
    PASSING,
    RULES,
    Indices,
    Mode,
    Numbers,
    Rule,
    Step,
    Terms,
    leading,
    operand_indices,
)
from amanda.tools.kit import leaves, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.select import Paths
from amanda.tools.trace import Graph, ProgramOp, Tensor, TraceTool

logger = logging.getLogger("amanda")

_MAX_EXECUTIONS = 64
"""Most ops that one line in a loop is in a path."""


class EffectivePathTool(amanda.Tool):
    """Extract the neurons, synapses and weights that explain each output of a model.

    `paths` and `result` are of the last pass.  A pass begins when an op runs again on the same inputs as
    before, or on new inputs; a loop over results of other ops continues the pass.

    Source: Qiu et al. 2019, Adversarial Defense Through Network Profiling Based Path Extraction.

    Args:
        theta: A neuron is explained by the fewest inputs whose contributions sum to the share theta of its
            value ("cumulative"), or by all inputs that contribute theta or more ("absolute").
        mode: See `theta`.
        output: Pattern for the module path of the op with the classes; by default the last op that makes
            (samples, classes).
        rules: Maps an operator type, such as "conv2d", to a function that returns the terms of its outputs;
            overrides the built-in rule.

    Raises:
        OptionError: For "cumulative" with a theta above 1.
    """

    purpose = "look"
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
        self._custom_types = frozenset(rules or ())
        # Paths lead along forward ops alone.
        self._trace = TraceTool(executions=_MAX_EXECUTIONS, backward=False)
        self._values: dict[tuple[int, int], OpValues] = {}
        self._missing: dict[str, str] = {}
        self._has_warned_of_unread = False
        self.depends_on(StandardMapping(), self._trace, MappingTool(FRAMEWORKS))
        self.add_inst_for_op(self._record_op)

    @property
    def result(self) -> EffectivePathResult:
        """Return the paths of the samples of the last pass; without any, `reason` says why `paths` raises."""
        try:
            return EffectivePathResult(self.paths(), self.theta, self._missing)
        except PathError as error:
            return EffectivePathResult([], self.theta, {}, str(error))

    def clear(self) -> None:
        """Forget the values of the last pass."""
        self._values.clear()
        self._missing = {}

    def _record_op(self, context: amanda.OpContext) -> None:
        """Insert routines that copy the inputs and outputs of a forward op, if there is a rule for the op."""
        if context["phase"] != "forward":
            return
        # Written by the mapping rules of FRAMEWORKS.
        moves, rule_key, attributes = context["effective path"]
        # The program's rule for a framework's own name comes before the one for the mapped type.
        if context.get_op_type() in self._custom_types:
            rule_key = context.get_op_type()
        if rule_key in self._rules:
            op_values = OpValues(
                rule_key, attributes, context["weight_index"], context["layout"],
                context["weight_layout"], moves, context["dtype"],
                reads_shapes_alone=rule_key in PASSING - SCALES.keys() - self._custom_types,
            )  # fmt: skip
            program_op = self._trace.place_of(context)
            context.insert_before_op(self._record_inputs, op_values=op_values, program_op=program_op)
            context.insert_after_op(self._record_outputs, program_op=program_op)

    @amanda.observer
    def _record_inputs(self, *inputs: Any, op_values: OpValues, program_op: ProgramOp) -> None:
        """Copy the inputs of an op; begin a new pass if the op has run in this one.

        An op whose tensors cannot be read is left out, the first with a warning.
        """
        tensors = [value for value in leaves(inputs) if op_values.dtype(value) is not None]
        obstacles = (tensors_of(tensor).unread(tensor) for tensor in tensors)
        # Under a transform of torch.func a tensor has no numbers to copy.
        if obstacle := next(filter(None, obstacles), None):
            if not self._has_warned_of_unread:
                self._has_warned_of_unread = True
                logger.warning("effective_path leaves %s out: %s", program_op.op.type, obstacle)
            return
        # An op in a loop has several places in the trace.
        key = program_op.op.id, program_op.position
        if key in self._values:  # the op has run in this pass already, so a new pass has begun
            self.clear()
        # Copied before the op runs: it may write its inputs.
        self._values[key] = replace(op_values, inputs=[op_values.copy_for_rules(value) for value in inputs])

    @amanda.observer
    def _record_outputs(self, *outputs: Any, program_op: ProgramOp) -> None:
        """Copy the outputs of an op whose inputs are recorded; others are left out."""
        values = self._values.get((program_op.op.id, program_op.position))
        if values is not None:
            values.outputs = [values.copy_for_rules(value) for value in outputs]

    def paths(self, labels: Sequence[int] | None = None) -> list[EffectivePath]:
        """Return a path for each sample of the last pass.

        Args:
            labels: The class to explain for each sample; by default the one with the largest output.

        Raises:
            PathError: If no pass has made (samples, classes), if no path leads back from there, and for
                labels that are not one class for each sample.
        """
        graph = self._trace.graph
        steps = self._executed_steps(graph)
        start = self._find_scores_step(steps)
        scores = start.outputs[0]
        samples, classes = scores.shape
        label_indices = _as_integers(scores.argmax(1) if labels is None else labels)
        if (
            label_indices is None
            or len(label_indices) != samples
            or not all(0 <= i < classes for i in label_indices)
        ):
            raise PathError(
                f"labels is {labels!r}; {start.type} in {start.op.module!r} at {start.op.source} gives "
                f"{samples} samples of {classes} classes"
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
        varying_tensors = _find_varying_tensors(graph)
        steps, execution_count = {}, Counter[int]()
        for op in graph.ops:
            # The n-th op of one id in the graph is the n-th execution in the pass.
            values = self._values.get((op.id, execution_count[op.id]))
            execution_count[op.id] += 1
            # An op that raised has inputs alone.
            if values is not None and values.outputs:
                steps[op.index] = Step(
                    op, values.type, values.inputs, values.outputs, values.weight, values.layout,
                    values.weight_layout, values.rule_arguments(),
                    values.find_varying_inputs(op, varying_tensors),
                )  # fmt: skip
        return steps

    def _find_scores_step(self, steps: Mapping[int, Step]) -> Step:
        """Return the last step whose output is scores, (samples, classes) in floats, in a module of `output`.

        Raises PathError if there is none.
        """
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
        # The last one: heads that come before the classifier give scores too.
        return candidates[-1]


def _is_scores(outputs: Sequence[Any]) -> bool:
    """Return True for floating-point numbers of (samples, classes)."""
    first = outputs[0] if outputs else None
    return isinstance(first, np.ndarray) and first.ndim == 2 and first.dtype.kind == "f"


def _find_varying_tensors(graph: Graph) -> set[int]:
    """Return the indices of tensors that depend on inputs or random numbers, not on the model's state alone.

    Single numbers that no op computes from tensors, and rows of integers, count as constants.
    """
    varying_tensors: set[int] = set()
    for tensor in graph.tensors:  # in the order of their first use, so producers' inputs come first
        producer_inputs = () if tensor.producer is None else graph.ops[tensor.producer].reads
        # Inputs of the model and random numbers: no op made the tensor from tensors.
        is_source = not producer_inputs and tensor.kind not in STATE and tensor.shape != ()
        depends_on_source = not varying_tensors.isdisjoint(producer_inputs)
        if (is_source or depends_on_source) and not _is_shape(tensor):
            varying_tensors.add(tensor.index)
    return varying_tensors


def _is_shape(tensor: Tensor) -> bool:
    """Return True for a row of integers, such as extents and axes, which are not neurons."""
    return tensor.shape is not None and len(tensor.shape) < 2 and (tensor.dtype or "").startswith("int")


def _as_integers(labels: Any) -> list[int] | None:
    """Return labels as a list of integers; None if they are no sequence or one is not an integer."""
    try:
        return [operator.index(label) for label in labels]
    except TypeError:
        return None


STATE = ("parameter", "buffer", "constant")
"""Kinds of tensors that do not depend on a model's inputs."""
_SHAPE_ONLY_TYPES = frozenset(
    {"reshape", "squeeze", "unsqueeze", "identity", "Identity", "contiguous", "clone", "to"}
)
TERMS_PER_CHUNK = 1 << 18
"""Number of terms that are computed at once."""


class Extraction:
    """Extracts effective paths: follows keys, numbers of a sample and an element, from the scores to inputs.

    steps: the executed ops, by their index in the graph.  rules: by type.  theta, mode: see `leading`.
    missing: types of ops at which paths end because they have no rule, each with a source line.
    """

    def __init__(
        self, graph: Graph, steps: Mapping[int, Step], rules: Mapping[str, Rule], theta: float, mode: Mode
    ) -> None:
        self._graph, self._steps, self._rules = graph, steps, rules
        self._theta, self._mode = theta, mode
        # By tensor, its elements on the paths, until the tensor's producer is visited.
        self._pending_keys: dict[int, Keys] = {}
        self.missing: dict[str, str] = {}

    def paths(self, start: Step, labels: Sequence[int]) -> list[EffectivePath]:
        """Return a path for each sample, from the element of its label in an output (samples, classes).

        Records in `missing` the ops at which paths end for want of a rule.
        """
        samples, classes = start.outputs[0].shape
        sample_numbers = np.arange(samples)
        score_indices = sample_numbers * classes + np.asarray(labels)
        scores = start.op.outputs[0]
        assert isinstance(scores, int)
        # A key is sample * size + flat index; each sample has one, of its label's score.
        self._pending_keys = {scores: [sample_numbers * (samples * classes) + score_indices]}
        ops_on_path: list[OpOnPath] = []
        # Backwards in execution order, so all readers of a tensor have added their keys before its producer.
        for op in reversed(self._graph.ops[: start.op.index + 1]):
            for output, tensor in enumerate(op.outputs):
                keys = self._pending_keys.pop(tensor, None) if isinstance(tensor, int) else None
                step = None if keys is None else self._step_on_path(op.index)
                if keys is None or step is None:
                    continue
                op_on_path = OpOnPath(step, output)
                is_head = not ops_on_path  # backwards, the op that makes the scores is the first
                try:
                    with np.errstate(invalid="ignore"):  # infinities sum to NaN, which `leading` expects
                        self._follow_to_inputs(op_on_path, np.unique(np.concatenate(keys)), is_head)
                except NotImplementedError as error:
                    self.missing[f"{step.type}, {error}"] = op.source
                if op_on_path.synapses:
                    ops_on_path.append(op_on_path)
        ops_on_path.reverse()
        names = layer_names([op_on_path.step for op_on_path in ops_on_path])
        layers_of_ops = [layers_by_sample(op_on_path, samples) for op_on_path in ops_on_path]
        return [
            EffectivePath(
                {name: layers[i] for name, layers in zip(names, layers_of_ops, strict=True)}, int(label)
            )
            for i, label in enumerate(labels)
        ]

    def _step_on_path(self, index: int) -> Step | None:
        """Return the step of the op at an index of the graph; None if paths end at the op.

        Records in `missing` an op without a rule, unless it reads the model's state alone.
        """
        step = self._steps.get(index)
        # An op that reads constants alone ends the path as a weight does, and misses no rule.
        if step is not None and step.type in self._rules:
            return step if step.varying else None
        op = self._graph.ops[index]
        if any(self._graph.tensors[tensor].kind not in STATE for tensor in op.reads):
            self.missing[op.type] = op.source
        return None

    def _follow_to_inputs(self, op_on_path: OpOnPath, keys: Indices, is_head: bool) -> None:
        """Extend the paths from an output of an op to its inputs, and record both in op_on_path.

        keys: elements of the output that are on paths, maybe none.  is_head: the op makes the scores.
        """
        if not keys.size:
            return
        step, output = op_on_path.step, op_on_path.output
        size, rule = step.outputs[output].size, self._rules[step.type]
        # The terms of one element show how many terms the elements have, for the size of chunks.
        first_terms = rule(step, keys[:1] % size, output)
        op_on_path.fan_in = max(indices.shape[1] for indices in first_terms.sources.values())
        op_on_path.synapses = first_terms.synapses
        if first_terms.weighted and step.weight is not None and (step.weight, 0) in first_terms.sources:
            op_on_path.weight = step.weight, 0
        # A convolution may have thousands of terms for each element, more than memory has room for at once.
        chunk_length = max(1, TERMS_PER_CHUNK // op_on_path.fan_in)
        for first in range(0, len(keys), chunk_length):
            chunk = keys[first : first + chunk_length]
            elements = chunk % size  # flat indices, without the samples
            terms = rule(step, elements, output)
            is_on_path = self._mask_terms_on_path(step, elements, output, terms, is_head)
            _record_terms(op_on_path, chunk, is_on_path, terms)
        # The producers of the inputs extend the paths in their turn; they end at the weight.
        for input_index, keys_of_input in op_on_path.element_keys.items():
            position, index_in_list = input_index
            tensor_or_list = step.op.inputs[position]
            if isinstance(tensor_or_list, tuple):
                tensor = tensor_or_list[index_in_list]
            else:
                tensor = tensor_or_list
            if tensor is not None and input_index != op_on_path.weight:
                self._pending_keys.setdefault(tensor, []).extend(keys_of_input)

    def _mask_terms_on_path(
        self, step: Step, elements: Indices, output: int, terms: Terms, is_head: bool
    ) -> Indices:
        """Return (elements, terms), True for the terms on the path: all terms of an op without contributions.

        Contributions are taken with the sign of the sum, so that a negative neuron is explained by negative
        terms; the head's are not: what lowers a score does not explain it.
        """
        contributions = terms.contributions
        if contributions is None:
            return np.ones(next(iter(terms.sources.values())).shape, bool)
        values = contributions.sum(1)
        if terms.weighted:
            values, scale = self._fold_constants(step, elements, output)
            # A batch norm after the convolution scales each term as it scales the sum.
            contributions = contributions * scale[:, None]
        if is_head:  # for NaN `leading` takes the positive terms, so that a negative score has a path too
            values = np.where(values > 0, values, np.nan)
        else:
            signs = np.nan_to_num(np.sign(values), nan=1)
            contributions, values = contributions * signs[:, None], np.abs(values)
        # The threshold of "absolute" is for products; of a pooling all that contribute are taken.
        if self._mode == "absolute" and not terms.weighted:
            return contributions > 0
        return leading(contributions, values, self._theta, self._mode)

    def _fold_constants(self, step: Step, elements: Indices, output: int) -> tuple[Numbers, Numbers]:
        """Return the values of an output's elements after following ops with constants, and their scales.

        An op with constants counts as a part of the sum that it reads if it is the only reader, such as the
        bias, scale or batch norm of a convolution.
        """
        values = step.outputs[output].reshape(-1)[elements].astype(np.float64)
        scale = np.ones(len(elements))
        size, tensor = step.outputs[output].size, step.op.outputs[output]
        while isinstance(tensor, int):
            reader_ops = [op for op in self._graph.tensors[tensor].consumers if op in self._steps]
            reader = self._steps[reader_ops[0]] if len(reader_ops) == 1 else None
            # With a second reader the values before the op are used too, and are not part of a sum.
            if reader is None or len(reader.varying) != 1 or reader.outputs[0].size != size:
                break
            if reader.type not in _SHAPE_ONLY_TYPES:
                scales = reader.arguments.get("scales", ())  # by the position of the input that they scale
                position, _ = reader.data
                if position >= len(scales):
                    break  # the op scales no such input: it is not a part of the sum
                factor = np.asarray(scales[position], np.float64)
                if factor.ndim:
                    # Scales of a norm have one number for each channel.
                    factor = factor.reshape(-1)[
                        operand_indices(elements, reader.outputs[0].shape, factor.shape)
                    ]
                scale = scale * (1 / factor if reader.type == "div" else factor)
                values = reader.outputs[0].reshape(-1)[elements].astype(np.float64)
            tensor = reader.op.outputs[0]
        return values, scale


def _record_terms(op_on_path: OpOnPath, keys: Indices, is_on_path: Indices, terms: Terms) -> None:
    """Record in op_on_path the terms on the path of elements of an output, and the elements that they read.

    keys: of the output's elements.  is_on_path: (elements, terms), as the indices in terms.sources.
    """
    sample_of_key = keys // op_on_path.step.outputs[op_on_path.output].size
    reads_element = np.zeros_like(is_on_path)
    for input_index, indices in terms.sources.items():
        is_read = is_on_path & (indices >= 0)
        reads_element |= is_read
        input_size = op_on_path.step.tensor(input_index).size
        # Windows overlap, so that several terms read one element.
        input_keys = np.unique((sample_of_key[:, None] * input_size + indices)[is_read])
        op_on_path.element_keys.setdefault(input_index, []).append(input_keys)
    if op_on_path.synapses:
        element, term = np.nonzero(reads_element)
        op_on_path.synapse_keys.append(keys[element] * op_on_path.fan_in + term)
