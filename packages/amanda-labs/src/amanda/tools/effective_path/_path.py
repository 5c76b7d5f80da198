"""Effective paths: the neurons, synapses and weights of each layer that explain an output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from amanda.errors import AmandaError
from amanda.files import replacing
from amanda.options import checked
from amanda.tools.effective_path._terms import Indices
from amanda.tools.libraries import numpy as np
from amanda.tools.results import check_schema, parsing, read_npz

if TYPE_CHECKING:
    from numpy.typing import NDArray

Part = Literal["neurons", "synapses", "weights"]
PARTS: tuple[Part, ...] = get_args(Part)
NAME, VERSION = "effective_path.path", 1


class PathError(AmandaError, ValueError):
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

        Raises PathError for another word.
        """
        if which not in PARTS:
            raise PathError(f"a path has {', '.join(PARTS)}, not {which!r}")
        indices: Indices = getattr(self, which)
        return indices

    def check(self) -> None:
        """Raise ValueError for indices that the op does not have, as in a damaged file."""
        for part, size in zip(PARTS, self.sizes, strict=True):
            indices = self.part(part)
            if indices.ndim != 1 or indices.dtype.kind not in "iu":
                raise ValueError(f"the {part} of {self.module or self.type} are no list of indices")
            if indices.size and not 0 <= indices.min() <= indices.max() < size:
                raise ValueError(f"{self.module or self.type} has {size} {part}, and others are on the path")

    def density(self, which: Part = "synapses") -> float | None:
        """Return the share of neurons, synapses or weights on the path; None if the op has none."""
        size = self.sizes[PARTS.index(which)]
        return len(self.part(which)) / size if size else None

    def mask(self, which: Literal["neurons", "weights"] = "neurons") -> NDArray[np.bool_]:
        """Return a mask, True for the neurons (without the batch axis) or weights on the path."""
        shape = self.weight_shape if which == "weights" else self.shape
        mask = np.zeros(prod(shape), bool)
        mask[self.part(which)] = True
        return mask.reshape(shape)

    def __or__(self, other: Layer) -> Layer:
        if self.sizes != other.sizes:
            raise PathError(
                f"{self.module or self.type} has {self.sizes} neurons, synapses and weights, that of the "
                f"other path {other.sizes}; they are of different models or shapes"
            )
        neurons, synapses, weights = (np.union1d(self.part(part), other.part(part)) for part in PARTS)
        return replace(self, neurons=neurons, synapses=synapses, weights=weights)


class EffectivePath:
    """The layers of a path, from input to output; `|` is the union of two paths.

    label: the neuron of the output that the path explains; None for a union of paths with several labels.
    """

    def __init__(self, layers: Mapping[str, Layer], label: int | None = None) -> None:
        self.layers, self.label = dict(layers), label

    def __or__(self, other: EffectivePath) -> EffectivePath:
        if not isinstance(other, EffectivePath):
            return NotImplemented
        layers = {
            name: self.layers[name] | other.layers[name] if name in self.layers and name in other.layers
            else self.layers.get(name) or other.layers[name]
            for name in dict.fromkeys((*self.layers, *other.layers))
        }  # fmt: skip
        return EffectivePath(layers, self.label if self.label == other.label else None)

    def density(self, which: Part = "synapses") -> float | None:
        """Return the share of neurons, synapses or weights on the path, of all layers together."""
        size = sum(layer.sizes[PARTS.index(which)] for layer in self.layers.values())
        return self.count(which) / size if size else None

    def count(self, which: Part = "synapses") -> int:
        """Return the number of neurons, synapses or weights on the path."""
        return sum(len(layer.part(which)) for layer in self.layers.values())

    def overlaps(self, other: EffectivePath, which: Part = "synapses") -> dict[str, float]:
        """Return by layer the share of this path that is also on the other; 1 for an empty layer.

        Source: Qiu et al. 2019, sec. 4.2: the similarity of an image's path to a class's.
        """
        common = self._count_common(other, which)
        return {
            name: _overlap_share(common[name], len(layer.part(which))) for name, layer in self.layers.items()
        }

    def overlap(self, other: EffectivePath, which: Part = "synapses") -> float:
        """Return the share of this path that is also on the other, of all layers together."""
        return _overlap_share(sum(self._count_common(other, which).values()), self.count(which))

    def jaccard(self, other: EffectivePath, which: Part = "synapses") -> float:
        """Return the size of the intersection over that of the union."""
        common = sum(self._count_common(other, which).values())
        return _overlap_share(common, self.count(which) + other.count(which) - common)

    def _count_common(self, other_path: EffectivePath, part: Part) -> dict[str, int]:
        """Return by layer the size of the intersection of both paths."""
        other_parts = {name: layer.part(part) for name, layer in other_path.layers.items()}
        return {
            name: np.intersect1d(layer.part(part), other_parts.get(name, ()), assume_unique=True).size
            for name, layer in self.layers.items()
        }

    def save(self, path: str | Path) -> Path:
        """Write the path into an npz file; return the file's path. Raises FileError."""
        arrays: dict[str, Any] = {}
        header: dict[str, Any] = {"schema": f"amanda.{NAME}", "version": VERSION}
        header |= {"label": self.label, "layers": []}
        for i, (name, layer) in enumerate(self.layers.items()):
            fields = {key: value for key, value in vars(layer).items() if key not in PARTS}
            header["layers"].append({"name": name, **fields})
            arrays.update({f"{i}/{part}": layer.part(part) for part in PARTS})
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, path=np.array(json.dumps(header)), **arrays)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> EffectivePath:
        """Return the path in a file that `save` wrote.

        Raises PathError for a damaged file, one of another kind or of a newer version; FileError for none.
        """
        with parsing(path, "file of an effective path", PathError):
            file = read_npz(Path(path))
            header = json.loads(str(file["path"]))
            check_schema(header, NAME, VERSION)
            layers = {}
            for i, entry in enumerate(header["layers"]):
                entry.update({part: file[f"{i}/{part}"] for part in PARTS})
                shapes = {key: tuple(map(int, entry[key])) for key in ("sizes", "shape", "weight_shape")}
                name = entry.pop("name")
                layers[name] = layer = Layer(**{**entry, **shapes})
                layer.check()
            return cls(layers, header["label"])


@checked(error=PathError)
def union(paths: Iterable[EffectivePath]) -> EffectivePath:
    """Return the union of paths, such as the path of a class from those of its images.

    Raises PathError if there are no paths.
    """
    all_paths = list(paths)
    if not all_paths:
        raise PathError("union was given no paths; at least one is needed")
    return reduce(or_, all_paths)


def _overlap_share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
