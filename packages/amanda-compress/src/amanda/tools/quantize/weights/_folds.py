"""Folds: weights that multiply one input, and the parameters that can absorb the factors of the input."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from amanda.tools.quantize.weights._scale_tracing import FactorTracing

Axis = tuple[int, int]
"""The identity of a parameter, and an axis of it."""


@dataclass(frozen=True, eq=False)
class Fold:
    """Weights that multiply one input, and the parameters that compute that input.

    slots: index of the factor of each channel of the input, (channels,); channels that share an element of a
    parameter, such as those of queries that share a value, have the same index.
    readers: the weights that multiply the input, by the axes of their inputs.
    producers: the parameters that compute the input, by the axes of the channels, with the slot of each
    position along the axis, or -1 for a position without a factor.
    names: of all these parameters, by identity.
    """

    slots: NDArray[Any]
    readers: Sequence[Axis]
    producers: Mapping[Axis, NDArray[Any]]
    names: Mapping[int, str]

    def scales(self, factors: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield parameter, axis, and multipliers along the axis.  factors: (channels,)."""
        factors = factors.cpu().double()  # a quotient in float32 would round once more
        for identity, axis in self.readers:
            yield identity, axis, factors
        slot_count = int(self.slots.max()) + 1
        # One element more, which stays 1: the slot -1, of positions without a factor, selects it.
        by_slot = factors.new_ones(slot_count + 1)
        by_slot[self.slots] = factors
        for (identity, axis), slots in self.producers.items():
            yield identity, axis, 1 / by_slot[slots]


def find_folds(tracing: FactorTracing, identities: Mapping[str, int]) -> tuple[list[Fold], dict[int, str]]:
    """Return the folds of a traced call, and reasons for weights without a fold, by identity."""
    from amanda.tools.quantize.weights._scale_tracing import UNMADE

    names = {identity: name for name, identity in reversed(list(identities.items()))}
    multiplied_labels = {
        label for work in tracing.notes.work if work.inputs is not None for label in work.inputs.tolist()
    }
    reasons = _reasons_by_root(tracing, multiplied_labels)
    readers, producers = _reading_and_producing_axes(tracing, identities, multiplied_labels)
    produced_roots = {root for roots in producers.values() for root in roots.tolist()}
    # Weights whose inputs have the same roots multiply one input.
    readers_by_input: dict[tuple[int, ...], list[Axis]] = defaultdict(list)
    for parameter_axis, roots in readers.items():
        readers_by_input[tuple(roots.tolist())].append(parameter_axis)
    inputs_with_root = Counter(root for roots in readers_by_input for root in set(roots))
    folds: list[Fold] = []
    unfolded: dict[int, str] = {}
    for input_roots, reader_axes in readers_by_input.items():
        why = next((reasons[root] for root in input_roots if root in reasons), None)
        if why is None and not produced_roots.issuperset(input_roots):
            why = UNMADE
        if why is None and any(inputs_with_root[root] > 1 for root in input_roots):
            why = "another product reads a part of its input, or more than that"
        if why is None:
            folds.append(_fold_of_input(input_roots, reader_axes, producers, names))
        else:
            unfolded.update({identity: why for identity, _ in reader_axes})
    return folds, unfolded


def _reasons_by_root(tracing: FactorTracing, multiplied_labels: set[int]) -> dict[int, str]:
    """Return why channels cannot have factors, by their root."""
    labels = tracing.notes.labels
    reasons = labels.whole_roots()
    # A weight whose channels are both multiplied and made, as a tied embedding, cannot take both factors.
    contradictory_labels = sorted(multiplied_labels & labels.output_labels())
    for root in labels.roots(np.array(contradictory_labels, int)).tolist():
        reasons.setdefault(root, "another op reads its weight otherwise")
    return reasons


def _reading_and_producing_axes(
    tracing: FactorTracing, identities: Mapping[str, int], multiplied_labels: set[int]
) -> tuple[dict[Axis, NDArray[Any]], dict[Axis, NDArray[Any]]]:
    """Return the axes of weights along which inputs are multiplied, and all other axes of parameters.

    Both have the roots of the channels along the axis.
    """
    readers: dict[Axis, NDArray[Any]] = {}
    producers: dict[Axis, NDArray[Any]] = {}
    for name, families in tracing.channels.items():
        for family in families if name in identities else ():
            # A family of a parameter varies along one axis.
            axis, channels = int(np.argmax(family.shape)), family.reshape(-1)
            axes = readers if int(channels[0]) in multiplied_labels else producers
            axes[identities[name], axis] = tracing.notes.labels.roots(channels)
    return readers, producers


def _fold_of_input(
    input_roots: Sequence[int], reader_axes: Sequence[Axis], producers: Mapping[Axis, NDArray[Any]],
    names: Mapping[int, str],
) -> Fold:  # fmt: skip
    """Return the fold of an input with these roots of its channels; slots are in the order of channels."""
    slot_of_root = {root: slot for slot, root in enumerate(dict.fromkeys(input_roots))}
    producer_slots = {
        parameter_axis: np.array([slot_of_root.get(root, -1) for root in roots.tolist()])
        for parameter_axis, roots in producers.items() if not slot_of_root.keys().isdisjoint(roots.tolist())
    }  # fmt: skip
    fold_names = {identity: names[identity] for identity, _ in (*reader_axes, *producer_slots)}
    slots = np.array([slot_of_root[root] for root in input_roots])
    return Fold(slots, reader_axes, producer_slots, fold_names)
