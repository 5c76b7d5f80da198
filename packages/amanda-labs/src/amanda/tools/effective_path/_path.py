"""Effective paths: the neurons, synapses and weights of each layer that explain an output."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import prod
from operator import or_
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from amanda.errors import AmandaError
from amanda.files import replacing
from amanda.options import checked
from amanda.tools.effective_path._rules import Indices, InputIndex, Step
from amanda.tools.libraries import numpy as np
from amanda.tools.plots import PlottedResult
from amanda.tools.results import Column, check_schema, parsing, read_npz, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

Part = Literal["neurons", "synapses", "weights"]
PARTS: tuple[Part, ...] = get_args(Part)
NAME, VERSION = "effective_path.path", 1


class PathError(AmandaError, ValueError, module="amanda.tools.effective_path"):
    """A path that cannot be extracted, compared or read."""


@dataclass(frozen=True, eq=False)
class Layer:
    """The part of an op that is on the path.

    neurons: elements of the op's inputs without the weight; several inputs are concatenated.
    synapses: terms of the sums that are the op's outputs: the output's index times `fan_in`, plus the index
    of the term.  weights: elements of the weight.  All three are sorted flat indices.
    sizes: numbers of all neurons, synapses and weights of the op.
    shape, weight_shape: of masks, with axes in the order of `layout` and `weight_layout`.
    """

    type: str
    module: str
    source: str
    neurons: Indices
    synapses: Indices
    weights: Indices
    sizes: tuple[int, int, int]
    shape: tuple[int, ...]
    weight_shape: tuple[int, ...] = ()
    layout: str | None = None
    weight_layout: str | None = None
    fan_in: int = 1

    def part(self, which: Part) -> Indices:
        """Return flat indices of neurons, synapses or weights.

        Args:
            which: "neurons", "synapses" or "weights".

        Raises:
            PathError: For another word.
        """
        if which not in PARTS:
            raise PathError(f"a path has {', '.join(PARTS)}, not {which!r}")
        flat_indices: Indices = getattr(self, which)
        return flat_indices

    def check(self) -> None:
        """Raise ValueError for indices that the op does not have, as in a damaged file."""
        for part, size in zip(PARTS, self.sizes, strict=True):
            indices = self.part(part)
            if indices.ndim != 1 or indices.dtype.kind not in "iu":
                raise ValueError(f"the {part} of {self.module or self.type} are no list of indices")
            # Checked here: an index beyond the end would fail later, in a mask, far from the file.
            if indices.size and not 0 <= indices.min() <= indices.max() < size:
                raise ValueError(f"{self.module or self.type} has {size} {part}, and others are on the path")

    def density(self, which: Part = "synapses") -> float | None:
        """Return the share of neurons, synapses or weights on the path; None if the op has none.

        Args:
            which: "neurons", "synapses" or "weights".
        """
        size = self.sizes[PARTS.index(which)]
        return len(self.part(which)) / size if size else None

    def mask(self, which: Literal["neurons", "weights"] = "neurons") -> NDArray[np.bool_]:
        """Return a mask, True for the neurons or weights on the path.

        Args:
            which: "neurons", of the input without its batch axis, flat for several inputs, or "weights", of
                the weight's shape.
        """
        shape = self.weight_shape if which == "weights" else self.shape
        mask = np.zeros(prod(shape), bool)
        mask[self.part(which)] = True
        return mask.reshape(shape)

    def __or__(self, other: Layer) -> Layer:
        """Return the union of two layers; raise PathError if their sizes differ."""
        # Flat indices of other shapes would be joined without a sign that they mean other elements.
        if self.sizes != other.sizes:
            raise PathError(
                f"{self.module or self.type} has {self.sizes} neurons, synapses and weights, that of the "
                f"other path {other.sizes}; they are of different models or shapes"
            )
        neurons, synapses, weights = (np.union1d(self.part(part), other.part(part)) for part in PARTS)
        return replace(self, neurons=neurons, synapses=synapses, weights=weights)


class EffectivePath:
    """The layers of a path, from input to output; `|` is the union of two paths.

    Args:
        layers: Layers by the name of their op.
        label: The neuron of the output that the path explains; None for a union of paths with several labels.
    """

    def __init__(self, layers: Mapping[str, Layer], label: int | None = None) -> None:
        self.layers, self.label = dict(layers), label

    def __or__(self, other: EffectivePath) -> EffectivePath:
        """Return the union by layer; a layer of one path alone stays as it is, and a label that both have.

        Raises PathError if the sizes of a layer differ.
        """
        if not isinstance(other, EffectivePath):
            return NotImplemented
        layers = {
            name: self.layers[name] | other.layers[name] if name in self.layers and name in other.layers
            else self.layers.get(name) or other.layers[name]
            for name in dict.fromkeys((*self.layers, *other.layers))
        }  # fmt: skip
        return EffectivePath(layers, self.label if self.label == other.label else None)

    def density(self, which: Part = "synapses") -> float | None:
        """Return the share of neurons, synapses or weights on the path, of all layers together.

        Args:
            which: "synapses", "neurons" or "weights".
        """
        size = sum(layer.sizes[PARTS.index(which)] for layer in self.layers.values())
        return self.count(which) / size if size else None

    def count(self, which: Part = "synapses") -> int:
        """Return the number of neurons, synapses or weights on the path.

        Args:
            which: "synapses", "neurons" or "weights".
        """
        return sum(len(layer.part(which)) for layer in self.layers.values())

    def overlaps(self, other: EffectivePath, which: Part = "synapses") -> dict[str, float]:
        """Return by layer the share of this path that is also on the other; 1 for an empty layer.

        Source: Qiu et al. 2019, sec. 4.2: the similarity of an image's path to a class's.

        Args:
            other: A path of the same model.
            which: "synapses", "neurons" or "weights".
        """
        # Layers are matched by name: a layer that the other path lacks has nothing in common.
        common_counts = self._count_common(other, which)
        return {
            name: _overlap_share(common_counts[name], len(layer.part(which)))
            for name, layer in self.layers.items()
        }

    def overlap(self, other: EffectivePath, which: Part = "synapses") -> float:
        """Return the share of this path that is also on the other, of all layers together.

        Args:
            other: A path of the same model.
            which: "synapses", "neurons" or "weights".
        """
        return _overlap_share(sum(self._count_common(other, which).values()), self.count(which))

    def jaccard(self, other: EffectivePath, which: Part = "synapses") -> float:
        """Return the size of the intersection over that of the union.

        Args:
            other: A path of the same model.
            which: "synapses", "neurons" or "weights".
        """
        common_count = sum(self._count_common(other, which).values())
        return _overlap_share(common_count, self.count(which) + other.count(which) - common_count)

    def _count_common(self, other_path: EffectivePath, part: Part) -> dict[str, int]:
        """Return by layer the number of elements that both paths have; 0 for a layer that the other lacks."""
        other_parts = {name: layer.part(part) for name, layer in other_path.layers.items()}
        return {
            # Indices are unique and sorted, so NumPy need not sort them again.
            name: np.intersect1d(layer.part(part), other_parts.get(name, ()), assume_unique=True).size
            for name, layer in self.layers.items()
        }

    def save(self, path: str | Path) -> Path:
        """Write the path into an npz file, a JSON header and arrays of indices; return the file's path.

        Args:
            path: File to write or replace.

        Raises:
            FileError: Where the file cannot be written.
        """
        arrays: dict[str, Any] = {}
        layer_headers: list[dict[str, Any]] = []
        for i, (name, layer) in enumerate(self.layers.items()):
            fields = {key: value for key, value in vars(layer).items() if key not in PARTS}
            layer_headers.append({"name": name, **fields})
            arrays.update({f"{i}/{part}": layer.part(part) for part in PARTS})
        header = {"schema": f"amanda.{NAME}", "version": VERSION, "label": self.label}
        header["layers"] = layer_headers
        with replacing(path) as temporary, temporary.open("wb") as file:
            # No pickles: a file from elsewhere must not run code when it is loaded.
            np.savez_compressed(file, allow_pickle=False, path=np.array(json.dumps(header)), **arrays)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> EffectivePath:
        """Return the path in a file.

        Args:
            path: File that `save` wrote.

        Raises:
            PathError: For a damaged file, one of another kind or of a newer version.
            FileError: Where the file cannot be read.
        """
        with parsing(path, "file of an effective path", PathError):
            file = read_npz(Path(path))
            header = json.loads(str(file["path"]))
            check_schema(header, NAME, VERSION)
            layers = {}
            for i, layer_header in enumerate(header["layers"]):
                name = layer_header.pop("name")
                parts = {part: file[f"{i}/{part}"] for part in PARTS}
                # JSON has lists in the place of tuples.
                shapes = {
                    key: tuple(map(int, layer_header[key])) for key in ("sizes", "shape", "weight_shape")
                }
                layers[name] = layer = Layer(**{**layer_header, **parts, **shapes})
                layer.check()
            return cls(layers, header["label"])


@checked(error=PathError)
def union(paths: Iterable[EffectivePath]) -> EffectivePath:
    """Return the union of paths, such as the path of a class from those of its images.

    Args:
        paths: Paths of one model; the result has their label if all have the same.

    Raises:
        PathError: If there are no paths, or if they are of different models or shapes.
    """
    all_paths = list(paths)
    if not all_paths:
        raise PathError("union was given no paths; at least one is needed")
    return reduce(or_, all_paths)


def _overlap_share(common: int, total: int) -> float:
    """Return the share of elements in common; 1 where there are none at all."""
    return common / total if total else 1.0


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
        """Return a row for each layer; counts and densities are means over the paths that have the layer."""
        if not self.paths:
            return []
        rows = []
        for name, layer in union(self.paths).layers.items():
            layer_on_paths = [path.layers[name] for path in self.paths if name in path.layers]
            row: list[Any] = ["forward", layer.type, layer.module, layer.source]
            for part, size in zip(PARTS, layer.sizes, strict=True):
                mean_count = fmean(len(path_layer.part(part)) for path_layer in layer_on_paths)
                row += [mean_count, size, mean_count / size] if size else [None, 0, None]
            rows.append(row)
        return rows

    def notes(self) -> Sequence[str]:
        """Return a sentence on the ops at which paths end, or on the reason why there are no paths."""
        ends = [f"{kind} ({source})" for kind, source in self.missing.items()]
        notes = [f"Paths end at {', '.join(ends)}: no rule tells what it is made of."] if ends else []
        return [f"There is no path: {self.reason}."] if self.reason else notes

    def _facts(self) -> Mapping[str, Any]:
        """Return theta, and for each path its label and its density over all layers."""
        paths = [
            {"label": path.label, **{f"{part} density": path.density(part) for part in PARTS}}
            for path in self.paths
        ]
        return {"theta": self.theta, "paths": paths, "missing": self.missing, "reason": self.reason}

    def draw(self, axes: Axes) -> None:
        """Draw three bars for each layer: the shares of its neurons, synapses and weights, if it has them."""
        column_names = [column.name for column in self.columns]
        rows = [dict(zip(column_names, row, strict=True)) for row in self.rows()]
        for i, part in enumerate(PARTS):
            densities = [row[f"{part} density"] for row in rows]
            # The second of the three bars is at the tick of the layer.
            bars = [
                (tick + (i - 1) * 0.27, density)
                for tick, density in enumerate(densities) if density is not None
            ]  # fmt: skip
            axes.bar([x for x, _ in bars], [y for _, y in bars], 0.25, label=part, color=_COLOURS[i])
        labels = [f"{row['module']} {row['type']}" if row["module"] else row["type"] for row in rows]
        axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right")
        axes.set_ylabel("density")
        axes.set_title(self.title, loc="left")
        axes.legend(frameon=False)


# One number for sample and element: sets of them are sorted arrays, which NumPy joins fast.
Keys = list[Indices]
"""Elements of a tensor on the paths of all samples, in arrays that are not joined yet.

A key is sample * size of the tensor + flat index: the same element may be on the paths of several samples,
since tensors of constants have no batch axis."""


@dataclass
class OpOnPath:
    """The terms of one output of an op, and the elements of its inputs, that are on the paths of all samples.

    output: its position.  weight: index of the weight among the inputs, if the op sums products with it.
    fan_in: most terms of an element.  synapses: number of all terms of the output.
    synapse_keys: terms on the paths.  element_keys: by input, the elements on the paths.
    """

    step: Step
    output: int
    fan_in: int = 1
    synapses: int = 0
    weight: InputIndex | None = None
    synapse_keys: Keys = field(default_factory=list)
    element_keys: dict[InputIndex, Keys] = field(default_factory=dict)


def layers_by_sample(op_on_path: OpOnPath, samples: int) -> list[Layer]:
    """Return for each of the samples, a number, the layer with the part of an op that is on its path."""
    step = op_on_path.step
    neurons, neuron_count, shape = _neurons_by_sample(op_on_path, samples)
    weight = np.zeros(0) if op_on_path.weight is None else step.tensor(op_on_path.weight)
    weight_keys = [] if op_on_path.weight is None else op_on_path.element_keys[op_on_path.weight]
    # All samples share the weight, whose first axis is not a batch.
    weights, weight_count = _split_by_sample(weight_keys, weight.size, samples, shared=True)
    # As many as if each output had `fan_in` terms; at the border of a window's input it has fewer.
    term_slots = step.outputs[op_on_path.output].size * op_on_path.fan_in
    synapses, slots_of_sample = _split_by_sample(op_on_path.synapse_keys, term_slots, samples)
    # Of the terms that exist, the share of one sample.
    synapse_count = op_on_path.synapses * slots_of_sample // term_slots
    return [
        Layer(
            type=step.type, module=step.op.module, source=step.op.source,
            neurons=neurons[i], synapses=synapses[i], weights=weights[i],
            sizes=(neuron_count, synapse_count, weight_count), shape=shape, weight_shape=weight.shape,
            layout=step.layout, weight_layout=step.weight_layout, fan_in=op_on_path.fan_in,
        )
        for i in range(samples)
    ]  # fmt: skip


def _neurons_by_sample(op_on_path: OpOnPath, samples: int) -> tuple[list[Indices], int, tuple[int, ...]]:
    """Return the neurons on each sample's path, the number of all neurons of a sample, and their shape.

    Several inputs, as of an addition, are numbered one after another.
    """
    neurons: list[list[Indices]] = [[] for _ in range(samples)]
    neuron_count: int = 0
    shape: tuple[int, ...] = ()
    for input_index, keys in op_on_path.element_keys.items():
        if input_index == op_on_path.weight:
            continue
        tensor = op_on_path.step.tensor(input_index)
        indices_by_sample, tensor_neuron_count = _split_by_sample(keys, tensor.size, samples)
        for sample_neurons, indices in zip(neurons, indices_by_sample, strict=True):
            sample_neurons.append(indices + neuron_count)
        neuron_count += tensor_neuron_count
        shape = tensor.shape[1:] if tensor.shape[:1] == (samples,) else tensor.shape
    # The shape of one input is that of the neurons, unless there are several, or samples share the input.
    if prod(shape) != neuron_count:
        shape = (neuron_count,)
    return [np.concatenate(sample_neurons) for sample_neurons in neurons], neuron_count, shape


def _split_by_sample(keys: Keys, size: int, samples: int, shared: bool = False) -> tuple[list[Indices], int]:
    """Return the flat indices of keys for each sample, and the number of elements of a sample.

    Both are of the sample's block of the tensor, if each element on a path lies in the block of its sample;
    else, and for a tensor that the samples share, of the whole tensor.  size: of the tensor.
    """
    all_keys = np.unique(np.concatenate(keys)) if keys else np.zeros(0, np.int64)
    # The inverse of sample * size + flat index; a tensor without elements has no keys.
    sample_of_key, indices = np.divmod(all_keys, max(size, 1))
    # Only if each sample stays in its own block is the first axis that of the batch: a constant, and a tensor
    # that mixes samples, have none.
    block_size = size // samples
    within_block = indices - sample_of_key * block_size
    stays_in_block = np.all((within_block >= 0) & (within_block < block_size))
    if not shared and size % samples == 0 and stays_in_block:
        indices, size = within_block, block_size
    # The keys are sorted, and so are their samples.
    starts = np.searchsorted(sample_of_key, np.arange(samples + 1))
    return [indices[starts[i] : starts[i + 1]] for i in range(samples)], size


def layer_names(steps: Sequence[Step]) -> list[str]:
    """Return for each step "module/type", for the second step with this name "module/type.1", and so on."""
    earlier_count = Counter[str]()
    names = []
    for step in steps:
        name = f"{step.op.module}/{step.type}"
        # A module that is called twice has two layers, in the order of execution.
        names.append(f"{name}.{earlier_count[name]}" if earlier_count[name] else name)
        earlier_count[name] += 1
    return names
