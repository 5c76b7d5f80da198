"""Extraction of paths, along the graph from outputs back to inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from amanda.tools.effective_path._path import EffectivePath, Layer
from amanda.tools.effective_path._terms import (
    Indices,
    InputIndex,
    Mode,
    Numbers,
    Rule,
    Step,
    Terms,
    aligned,
    leading,
)
from amanda.tools.libraries import numpy as np
from amanda.tools.trace import Graph

STATE = ("parameter", "buffer", "constant")
"""Kinds of tensors that do not depend on a model's inputs."""
_SHAPE_ONLY_TYPES = frozenset(
    {"reshape", "squeeze", "unsqueeze", "identity", "Identity", "contiguous", "clone", "to"}
)
TERMS_PER_CHUNK = 1 << 18
"""Number of terms that are computed at once."""

Keys = list[Indices]
"""Elements of a tensor on the paths of all samples.  A key is sample * size + flat index: the same element
may be on the paths of several samples, since tensors of constants have no batch axis."""


@dataclass
class _OpOnPath:
    """The elements of an op's inputs and outputs that are on the paths of all samples.

    weight: index of the weight among the inputs, if the op sums products with it.
    synapses: number of terms of all outputs.  synapse_keys: terms on the paths.
    element_keys: by input, the elements on the paths.
    """

    step: Step
    output: int
    fan_in: int = 1
    synapses: int = 0
    weight: InputIndex | None = None
    synapse_keys: Keys = field(default_factory=list)
    element_keys: dict[InputIndex, Keys] = field(default_factory=dict)


class Extraction:
    """Extracts the effective paths of the samples of a pass.

    steps: the executed ops, by their index in the graph.  rules: by type.  theta, mode: see `leading`.
    missing: types of ops at which paths end because they have no rule, each with a source line.
    """

    def __init__(
        self, graph: Graph, steps: Mapping[int, Step], rules: Mapping[str, Rule], theta: float, mode: Mode
    ) -> None:
        self._graph, self._steps, self._rules = graph, steps, rules
        self._theta, self._mode = theta, mode
        self._active: dict[int, Keys] = {}
        self.missing: dict[str, str] = {}

    def paths(self, start: Step, labels: Sequence[int]) -> list[EffectivePath]:
        """Return a path for each sample, from the element of its label in an output (samples, classes)."""
        samples, classes = start.outputs[0].shape
        rows = np.arange(samples) * classes + np.asarray(labels)
        scores = start.op.outputs[0]
        assert isinstance(scores, int)
        # The keys of one element for each sample: its label's score.
        self._active = {scores: [np.arange(samples) * samples * classes + rows]}
        ops_on_path: list[_OpOnPath] = []
        # Backwards in execution order, so all readers of a tensor have added their keys before its producer.
        for op in reversed(self._graph.ops[: start.op.index + 1]):
            for output, tensor in enumerate(op.outputs):
                keys = self._active.pop(tensor, None) if isinstance(tensor, int) else None
                if keys is not None and (step := self._step_on_path(op.index)) is not None:
                    op_on_path = _OpOnPath(step, output)
                    try:
                        with np.errstate(invalid="ignore"):  # infinities sum to NaN, which `leading` expects
                            self._follow_to_inputs(
                                op_on_path, np.unique(np.concatenate(keys)), is_head=not ops_on_path
                            )
                    except NotImplementedError as error:
                        self.missing[f"{step.type}, {error}"] = op.source
                    ops_on_path += [op_on_path] if op_on_path.synapses else []
        names = _layer_names([op_on_path.step for op_on_path in reversed(ops_on_path)])
        layers = [_layers_by_sample(op_on_path, samples) for op_on_path in reversed(ops_on_path)]
        return [
            EffectivePath({name: each[i] for name, each in zip(names, layers, strict=True)}, int(label))
            for i, label in enumerate(labels)
        ]

    def _step_on_path(self, index: int) -> Step | None:
        """Return the step of an op on a path; None if the path ends at the op."""
        step = self._steps.get(index)
        if step is not None and step.type in self._rules:
            return step if step.varying else None
        op = self._graph.ops[index]
        if any(self._graph.tensors[tensor].kind not in STATE for tensor in op.reads):
            self.missing[op.type] = op.source
        return None

    def _follow_to_inputs(self, op_on_path: _OpOnPath, keys: Indices, is_head: bool) -> None:
        """Extend the paths from an output of an op to its inputs.

        keys: elements of the output that are on paths.  is_head: True for the op that makes the scores.
        """
        if not keys.size:
            return
        step, output = op_on_path.step, op_on_path.output
        size, rule = step.outputs[output].size, self._rules[step.type]
        # The terms of one element show how many terms the elements have, for the size of chunks.
        first_terms = rule(step, keys[:1] % size, output)
        op_on_path.fan_in = max(indices.shape[1] for indices in first_terms.sources.values())
        op_on_path.synapses = first_terms.synapses
        op_on_path.weight = next(
            (at for at in first_terms.sources if first_terms.weighted and at == (step.weight, 0)), None
        )
        length = max(1, TERMS_PER_CHUNK // op_on_path.fan_in)
        for first in range(0, len(keys), length):
            chunk = keys[first : first + length]
            terms = rule(step, chunk % size, output)
            is_on_path = self._terms_on_path(step, chunk % size, output, terms, is_head)
            _record_terms(op_on_path, chunk, is_on_path, terms)
        for (i, j), keys_of_input in op_on_path.element_keys.items():
            position = step.op.inputs[i]
            tensor = position[j] if isinstance(position, tuple) else position
            if tensor is not None and (i, j) != op_on_path.weight:
                self._active.setdefault(tensor, []).extend(keys_of_input)

    def _terms_on_path(self, step: Step, rows: Indices, output: int, terms: Terms, is_head: bool) -> Indices:
        """Return (outputs, terms), True for the terms on the path.

        Contributions are taken with the sign of the sum, so that a negative neuron is explained by negative
        terms; the head's are not: what lowers a score does not explain it.
        """
        contributions = terms.contributions
        if contributions is None:
            return np.ones(next(iter(terms.sources.values())).shape, bool)
        values = contributions.sum(1)
        if terms.weighted:
            values, scale = self._fold_constants(step, rows, output)
            contributions = contributions * scale[:, None]
        if is_head:  # for NaN `leading` takes the positive terms, so that a negative score has a path too
            values = np.where(values > 0, values, np.nan)
        else:
            signs = np.nan_to_num(np.sign(values), nan=1)
            contributions, values = contributions * signs[:, None], np.abs(values)
        if self._mode == "absolute" and not terms.weighted:
            return contributions > 0
        return leading(contributions, values, self._theta, self._mode)

    def _fold_constants(self, step: Step, rows: Indices, output: int) -> tuple[Numbers, Numbers]:
        """Return the values of an output's elements after following ops with constants, and their scales.

        An op with constants counts as a part of the sum that it reads if it is the only reader, such as the
        bias, scale or batch norm of a convolution.
        """
        values = step.outputs[output].reshape(-1)[rows].astype(np.float64)
        scale, size, tensor = np.ones(len(rows)), step.outputs[output].size, step.op.outputs[output]
        while isinstance(tensor, int):
            readers = [index for index in self._graph.tensors[tensor].consumers if index in self._steps]
            reader = self._steps[readers[0]] if len(readers) == 1 else None
            # With a second reader the values before the op are used too, and are no part of a sum.
            if reader is None or len(reader.varying) != 1 or reader.outputs[0].size != size:
                break
            if reader.type not in _SHAPE_ONLY_TYPES:
                scales, position = reader.arguments.get("scales", ()), reader.data[0]
                if position >= len(scales):
                    break
                factor = np.asarray(scales[position], np.float64)
                if factor.ndim:
                    factor = factor.reshape(-1)[aligned(rows, reader.outputs[0].shape, factor.shape)]
                scale = scale * (1 / factor if reader.type == "div" else factor)
                values = reader.outputs[0].reshape(-1)[rows].astype(np.float64)
            tensor = reader.op.outputs[0]
        return values, scale


def _record_terms(op_on_path: _OpOnPath, keys: Indices, is_on_path: Indices, terms: Terms) -> None:
    """Record the terms on the path of elements of an output, and the elements that they read."""
    samples = keys // op_on_path.step.outputs[op_on_path.output].size
    exists = np.zeros_like(is_on_path)
    for where, indices in terms.sources.items():
        is_read = is_on_path & (indices >= 0)
        exists |= is_read
        elements = np.unique((samples[:, None] * op_on_path.step.tensor(where).size + indices)[is_read])
        op_on_path.element_keys.setdefault(where, []).append(elements)
    if op_on_path.synapses:
        row, term = np.nonzero(exists)
        op_on_path.synapse_keys.append(keys[row] * op_on_path.fan_in + term)


def _layers_by_sample(op_on_path: _OpOnPath, samples: int) -> list[Layer]:
    """Return for each sample the layer with the part of an op that is on the sample's path."""
    step = op_on_path.step
    neurons: list[list[Indices]] = [[] for _ in range(samples)]
    size: int = 0
    shape: tuple[int, ...] = ()
    for index in (where for where in op_on_path.element_keys if where != op_on_path.weight):
        tensor = step.tensor(index)
        parts, part_size = _split_by_sample(op_on_path.element_keys[index], tensor.size, samples)
        for sample_neurons, part in zip(neurons, parts, strict=True):
            sample_neurons.append(part + size)
        size += part_size
        shape = tensor.shape[1:] if tensor.shape[:1] == (samples,) else tensor.shape
    weight = np.zeros(0) if op_on_path.weight is None else step.tensor(op_on_path.weight)
    weight_keys = [] if op_on_path.weight is None else op_on_path.element_keys[op_on_path.weight]
    weights, weight_size = _split_by_sample(weight_keys, weight.size, samples, shared=True)
    terms = step.outputs[op_on_path.output].size * op_on_path.fan_in
    synapses, per_sample = _split_by_sample(op_on_path.synapse_keys, terms, samples)
    total = op_on_path.synapses * per_sample // terms
    return [
        Layer(
            step.type, step.op.module, step.op.source, np.concatenate(neurons[i]), synapses[i], weights[i],
            (size, total, weight_size), shape if prod(shape) == size else (size,), weight.shape,
            step.layout, step.weight_layout, op_on_path.fan_in,
        )
        for i in range(samples)
    ]  # fmt: skip


def _split_by_sample(keys: Keys, size: int, samples: int, shared: bool = False) -> tuple[list[Indices], int]:
    """Return the flat indices of keys for each sample, and the number of elements of a sample.

    They are within the sample's block of a tensor, if all elements on the path lie in the samples' blocks.
    """
    all_keys = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
    sample_of_key, indices = np.divmod(all_keys, max(size, 1))
    within_sample = indices - sample_of_key * (size // samples)
    if (
        not shared
        and size % samples == 0
        and np.all((within_sample >= 0) & (within_sample < size // samples))
    ):
        indices, size = within_sample, size // samples
    ends = np.searchsorted(sample_of_key, np.arange(samples + 1))
    return [indices[ends[i] : ends[i + 1]] for i in range(samples)], size


def _layer_names(steps: Sequence[Step]) -> list[str]:
    """Return a name for each step from its module and type, with a number for repetitions."""
    counts: dict[str, int] = {}
    names = []
    for step in steps:
        name = f"{step.op.module}/{step.type}"
        counts[name] = counts.get(name, -1) + 1
        names.append(f"{name}.{counts[name]}" if counts[name] else name)
    return names
