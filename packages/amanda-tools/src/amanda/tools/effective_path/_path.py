"""Effective paths: which neurons, synapses and weights of each layer made an output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from operator import or_
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from amanda.errors import AmandaError
from amanda.tools.effective_path._terms import Indices
from amanda.tools.results import TooLargeError, check_schema, in_words, read_npz

Part = Literal["neurons", "synapses", "weights"]
PARTS: tuple[Part, ...] = get_args(Part)
NAME, VERSION = "effective_path.path", 1


class PathError(AmandaError, ValueError):
    """A path that cannot be extracted, compared or read."""


@dataclass(frozen=True, eq=False)
class Layer:
    """The part of one op that is on the path.

    neurons: of the op's inputs that are no weights; several inputs stand behind each other.  synapses: terms
    of the sums that its outputs are, each the output's index times `fan_in` and the term's.  weights:
    elements of the weight.  All are sorted flat indices; sizes: how many of each the op has.
    shape, weight_shape: of masks, as the op's tensors are laid out; `layout` and `weight_layout` name axes.
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
        found: Indices = getattr(self, which)
        return found

    def density(self, which: Part = "synapses") -> float | None:
        """Return the share that is on the path; None where the op has none."""
        size = self.sizes[PARTS.index(which)]
        return len(self.part(which)) / size if size else None

    def mask(self, which: Literal["neurons", "weights"] = "neurons") -> NDArray[np.bool_]:
        """Return True where a neuron, without the axis of the batch, or a weight is on the path."""
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
        neurons, synapses, weights = (np.union1d(self.part(one), other.part(one)) for one in PARTS)
        return replace(self, neurons=neurons, synapses=synapses, weights=weights)


class EffectivePath:
    """The layers of a path, from input to output; `|` is the union of two.

    label: the neuron of the output that it explains; None of a union of several.
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
        """Return the share of all layers together that is on the path."""
        size = sum(layer.sizes[PARTS.index(which)] for layer in self.layers.values())
        return self.count(which) / size if size else None

    def count(self, which: Part = "synapses") -> int:
        """Return the number on the path."""
        return sum(len(layer.part(which)) for layer in self.layers.values())

    def overlaps(self, other: EffectivePath, which: Part = "synapses") -> dict[str, float]:
        """Return by layer the share of this path that is on the other, too; 1 where this path has none.

        Source: Qiu et al. 2019, sec. 4.2: the similarity of an image's path to a class's.
        """
        common = self._common(other, which)
        return {name: _share(common[name], len(one.part(which))) for name, one in self.layers.items()}

    def overlap(self, other: EffectivePath, which: Part = "synapses") -> float:
        """Return the same of all layers together."""
        return _share(sum(self._common(other, which).values()), self.count(which))

    def jaccard(self, other: EffectivePath, which: Part = "synapses") -> float:
        """Return the size of the intersection over that of the union."""
        common = sum(self._common(other, which).values())
        return _share(common, self.count(which) + other.count(which) - common)

    def _common(self, other: EffectivePath, which: Part) -> dict[str, int]:
        """Return by layer how many both paths have."""
        theirs = {name: layer.part(which) for name, layer in other.layers.items()}
        return {
            name: np.intersect1d(layer.part(which), theirs.get(name, ()), assume_unique=True).size
            for name, layer in self.layers.items()
        }

    def save(self, path: str | Path) -> Path:
        """Write an npz file, which `load` reads back."""
        arrays: dict[str, Any] = {}
        told: dict[str, Any] = {"schema": f"amanda.{NAME}", "version": VERSION}
        told |= {"label": self.label, "layers": []}
        for i, (name, layer) in enumerate(self.layers.items()):
            fields = {key: value for key, value in vars(layer).items() if key not in PARTS}
            told["layers"].append({"name": name, **fields})
            arrays.update({f"{i}/{which}": layer.part(which) for which in PARTS})
        with Path(path).open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, path=np.array(json.dumps(told)), **arrays)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> EffectivePath:
        """Read what `save` wrote.

        Raises PathError for a file of another kind, or of a newer version.
        """
        try:
            file = read_npz(Path(path))
            told = json.loads(str(file["path"]))
            check_schema(told, NAME, VERSION)
            layers = {}
            for i, one in enumerate(told["layers"]):
                one.update({which: file[f"{i}/{which}"] for which in PARTS})
                shapes = {key: tuple(one[key]) for key in ("sizes", "shape", "weight_shape")}
                name = one.pop("name")
                layers[name] = Layer(**{**one, **shapes})
        except TooLargeError:
            raise
        except (ValueError, LookupError, TypeError, OSError, EOFError, BadZipFile) as error:
            why = in_words(error)
            raise PathError(f"{path} is no file of an effective path that can be read: {why}") from error
        return cls(layers, told["label"])


def union(paths: Iterable[EffectivePath]) -> EffectivePath:
    """Return what is on any of the paths: for the images of a class the path of the class.

    Raises PathError where there are none.
    """
    given = list(paths)
    if not given:
        raise PathError("union was given no paths; at least one is needed")
    return reduce(or_, given)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
