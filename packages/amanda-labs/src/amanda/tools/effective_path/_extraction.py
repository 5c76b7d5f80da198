"""Extraction of paths: the walk along the graph from outputs back to inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from amanda.tools.effective_path._path import EffectivePath, Layer
from amanda.tools.effective_path._terms import (
    Indices,
    Mode,
    Numbers,
    Rule,
    Step,
    Terms,
    Where,
    aligned,
    leading,
)
from amanda.tools.libraries import numpy as np
from amanda.tools.trace import Graph

STATE = ("parameter", "buffer", "constant")
"""Kinds of tensors that do not depend on a model's inputs."""
_SAME = frozenset({"reshape", "squeeze", "unsqueeze", "identity", "Identity", "contiguous", "clone", "to"})
CHUNK = 1 << 18
"""Number of terms that are computed at once."""

Keys = list[Indices]
"""Elements of a tensor on the paths of all samples: sample times the tensor's size, and the flat index."""


@dataclass
class _Found:
    """The inputs and outputs of one op that are on the paths.

    weight: the index of the weight among the inputs, if the op sums products with the weight.
    """

    step: Step
    output: int
    fan_in: int = 1
    synapses: int = 0
    weight: Where | None = None
    chosen: Keys = field(default_factory=list)
    elements: dict[Where, Keys] = field(default_factory=dict)


class Extraction:
    """The effective paths of the samples of one pass.

    steps: the executed ops, by their index in the graph.  rules: by type.  theta, mode: see `leading`.
    missing: types of ops at which paths end because no rule knows them, each with a source line.
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
        self._active = {scores: [np.arange(samples) * samples * classes + rows]}
        found: list[_Found] = []
        for op in reversed(self._graph.ops[: start.op.index + 1]):
            for output, tensor in enumerate(op.outputs):
                keys = self._active.pop(tensor, None) if isinstance(tensor, int) else None
                if keys is not None and (step := self._step(op.index)) is not None:
                    one = _Found(step, output)
                    try:
                        with np.errstate(invalid="ignore"):  # infinities sum to NaN, which `leading` expects
                            self._back(one, np.unique(np.concatenate(keys)), is_head=not found)
                    except NotImplementedError as error:
                        self.missing[f"{step.type}, {error}"] = op.source
                    found += [one] if one.synapses else []
        names = _names([one.step for one in reversed(found)])
        layers = [_layers(one, samples) for one in reversed(found)]
        return [
            EffectivePath({name: each[i] for name, each in zip(names, layers, strict=True)}, int(label))
            for i, label in enumerate(labels)
        ]

    def _step(self, index: int) -> Step | None:
        """Return the step of an op on a path; None if the path ends there."""
        step = self._steps.get(index)
        if step is not None and step.type in self._rules:
            return step if step.varying else None
        op = self._graph.ops[index]
        if any(self._graph.tensors[one].kind not in STATE for one in op.reads):
            self.missing[op.type] = op.source
        return None

    def _back(self, found: _Found, keys: Indices, is_head: bool) -> None:
        """Follow the paths from an output of an op to the op's inputs."""
        if not keys.size:
            return
        step, output = found.step, found.output
        size, rule = step.outputs[output].size, self._rules[step.type]
        one = rule(step, keys[:1] % size, output)
        found.fan_in = max(indices.shape[1] for indices in one.sources.values())
        found.synapses = one.synapses
        found.weight = next((at for at in one.sources if one.weighted and at == (step.weight, 0)), None)
        length = max(1, CHUNK // found.fan_in)
        for first in range(0, len(keys), length):
            part = keys[first : first + length]
            terms = rule(step, part % size, output)
            chosen = self._chosen(step, part % size, output, terms, is_head)
            _note(found, part, chosen, terms)
        for (i, j), elements in found.elements.items():
            position = step.op.inputs[i]
            tensor = position[j] if isinstance(position, tuple) else position
            if tensor is not None and (i, j) != found.weight:
                self._active.setdefault(tensor, []).extend(elements)

    def _chosen(self, step: Step, rows: Indices, output: int, terms: Terms, is_head: bool) -> Indices:
        """Return (outputs, terms), True for the terms on the path."""
        found = terms.contributions
        if found is None:
            return np.ones(next(iter(terms.sources.values())).shape, bool)
        values = found.sum(1)
        if terms.weighted:
            values, scale = self._folded(step, rows, output)
            found = found * scale[:, None]
        if is_head:
            values = np.where(values > 0, values, np.nan)
        else:
            signs = np.nan_to_num(np.sign(values), nan=1)
            found, values = found * signs[:, None], np.abs(values)
        if self._mode == "absolute" and not terms.weighted:
            return found > 0
        return leading(found, values, self._theta, self._mode)

    def _folded(self, step: Step, rows: Indices, output: int) -> tuple[Numbers, Numbers]:
        """Return values of an output's elements after the following ops with constants, and their scales.

        An op with constants that alone reads a sum counts as a part of the sum, such as the bias, scale or
        batch norm of a convolution.
        """
        values = step.outputs[output].reshape(-1)[rows].astype(np.float64)
        scale, size, tensor = np.ones(len(rows)), step.outputs[output].size, step.op.outputs[output]
        while isinstance(tensor, int):
            readers = [index for index in self._graph.tensors[tensor].consumers if index in self._steps]
            reader = self._steps[readers[0]] if len(readers) == 1 else None
            if reader is None or len(reader.varying) != 1 or reader.outputs[0].size != size:
                break
            if reader.type not in _SAME:
                scales, position = reader.arguments.get("scales", ()), reader.data[0]
                if position >= len(scales):
                    break
                by = np.asarray(scales[position], np.float64)
                if by.ndim:
                    by = by.reshape(-1)[aligned(rows, reader.outputs[0].shape, by.shape)]
                scale = scale * (1 / by if reader.type == "div" else by)
                values = reader.outputs[0].reshape(-1)[rows].astype(np.float64)
            tensor = reader.op.outputs[0]
        return values, scale


def _note(found: _Found, keys: Indices, chosen: Indices, terms: Terms) -> None:
    """Record the terms that were chosen of elements of an output."""
    samples = keys // found.step.outputs[found.output].size
    exists = np.zeros_like(chosen)
    for where, indices in terms.sources.items():
        reached = chosen & (indices >= 0)
        exists |= reached
        elements = np.unique((samples[:, None] * found.step.tensor(where).size + indices)[reached])
        found.elements.setdefault(where, []).append(elements)
    if found.synapses:
        row, term = np.nonzero(exists)
        found.chosen.append(keys[row] * found.fan_in + term)


def _layers(found: _Found, samples: int) -> list[Layer]:
    """Return for each sample the part of an op that is on the sample's path."""
    step = found.step
    neurons: list[list[Indices]] = [[] for _ in range(samples)]
    size: int = 0
    shape: tuple[int, ...] = ()
    for where in (one for one in found.elements if one != found.weight):
        tensor = step.tensor(where)
        parts, part_size = _by_sample(found.elements[where], tensor.size, samples)
        for mine, part in zip(neurons, parts, strict=True):
            mine.append(part + size)
        size += part_size
        shape = tensor.shape[1:] if tensor.shape[:1] == (samples,) else tensor.shape
    weight = np.zeros(0) if found.weight is None else step.tensor(found.weight)
    held = [] if found.weight is None else found.elements[found.weight]
    weights, weight_size = _by_sample(held, weight.size, samples, shared=True)
    terms = step.outputs[found.output].size * found.fan_in
    synapses, per_sample = _by_sample(found.chosen, terms, samples)
    total = found.synapses * per_sample // terms
    return [
        Layer(
            step.type, step.op.module, step.op.source, np.concatenate(neurons[i]), synapses[i], weights[i],
            (size, total, weight_size), shape if prod(shape) == size else (size,), weight.shape,
            step.layout, step.weight_layout, found.fan_in,
        )
        for i in range(samples)
    ]  # fmt: skip


def _by_sample(keys: Keys, size: int, samples: int, shared: bool = False) -> tuple[list[Indices], int]:
    """Return flat indices for each sample, within the sample's own block of the tensor if there is one."""
    every = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
    of, indices = np.divmod(every, max(size, 1))
    own = indices - of * (size // samples)
    if not shared and size % samples == 0 and np.all((own >= 0) & (own < size // samples)):
        indices, size = own, size // samples
    ends = np.searchsorted(of, np.arange(samples + 1))
    return [indices[ends[i] : ends[i + 1]] for i in range(samples)], size


def _names(steps: Sequence[Step]) -> list[str]:
    """Return a name for each step: module and type, with a number for repetitions."""
    seen: dict[str, int] = {}
    names = []
    for step in steps:
        name = f"{step.op.module}/{step.type}"
        seen[name] = seen.get(name, -1) + 1
        names.append(f"{name}.{seen[name]}" if seen[name] else name)
    return names
