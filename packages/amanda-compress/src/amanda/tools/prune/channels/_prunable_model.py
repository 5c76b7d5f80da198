"""Models as the pruning of channels sees them: a call that is followed op by op, weights, and removal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import amanda
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune.channels._labels import (
    Families,
    Family,
    FollowedOp,
    Notes,
    Part,
)
from amanda.tools.prune.channels._rules import MOVES, Rule

if TYPE_CHECKING:
    from amanda.tools.prune.channels._plan import RemovalPlan


Masks = Callable[[Any], Any]
"""Returns the mask of a weight that an op reads, True where it is kept; None of one that stays whole."""

Axes = Iterable[tuple[str, int, Any]]
"""Names of weights, axes of them, and which places along each axis are kept."""


class Removal(Protocol):
    """A removal of channels of a subject, which can be undone."""

    def apply(self) -> None:
        """Remove the channels."""

    def undo(self) -> None:
        """Put everything back."""


class PrunableModel(ABC):
    """A model whose channels are followed and removed.

    model: as the user has given it.  has_gradients: True if weights may have gradients.
    selected, compute_over_kept: routines that simulate an op over the channels that are kept.
    """

    has_gradients: ClassVar[bool]
    selected: ClassVar[Callable[..., Any]]
    compute_over_kept: ClassVar[Callable[..., Any]]

    def __init__(self, model: Any) -> None:
        self.model = model

    @abstractmethod
    def __call__(self, *example: Any, **kwargs: Any) -> Any:
        """Run the model as it is now."""

    @abstractmethod
    def tracing(self) -> Tracing:
        """Return a tool that follows the channels in a call of the model as it is now."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Any]:
        """Return weights, and averages of normalisations, by all their names."""

    @abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """Return the weights that count, each once, by name."""

    @abstractmethod
    def masks(self, axes: Axes) -> Masks:
        """Return the masks of weights of which places along axes are kept."""

    @abstractmethod
    def removal(self, plan: RemovalPlan) -> Removal:
        """Return a removal of the channels that a plan does not keep."""

    @abstractmethod
    def make_smaller(self, plan: RemovalPlan, optimizer: Any) -> Any:
        """Remove for good the channels that a plan does not keep; return the smaller model."""

    @abstractmethod
    def write_masks(self, masks: Masks) -> Any:
        """Write masks into weights; return the model that has them."""

    @abstractmethod
    def float_arrays(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield the floating-point tensors of a result as arrays, and the rounding of their types."""

    def extents(self) -> Mapping[str, Any]:
        """Return the extents of tensors and layers that `make_smaller` changes in place, by name."""
        return {}

    def is_same_model(self, model: Any) -> bool:
        """Return True for the model that the user has given."""
        return model is self.model

    def op_key(self, context: amanda.OpContext) -> Any:
        """Return a key of an op that is unique in the model, and the same in each call."""
        return context.get_op_id()

    def inputs_for_masks(self, context: amanda.OpContext) -> Sequence[Any]:
        """Return the inputs of an op in the form that masks are found by."""
        return context.get_inputs()

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the model evaluates without gradients."""
        return nullcontext()

    def simulating(self) -> AbstractContextManager[None]:
        """Return a context in which the ops that the masks do not suit are taken apart."""
        return nullcontext()

    def run_to_completion(self, *example: Any, **kwargs: Any) -> None:
        """Run the model as its users do, until its results are there: the time of this is measured."""
        self(*example, **kwargs)


@dataclass(frozen=True)
class TracedOp:
    """An executed op: its word, its module's path, and families and extents of its tensors.

    key: tells the op from others.  move: of an op that only moves elements, see `FollowedOp.move`.
    """

    type: str
    module: str
    source: str
    key: Any
    inputs: Sequence[Part]
    outputs: Sequence[Part]
    move: Callable[[Family], list[Family]] | None = None

    @property
    def place(self) -> str:
        """Return the op in words."""
        return f"{self.type} of {self.module or 'the model'}"


class Tracing(amanda.Tool):
    """Follows channels from op to op in one call of a model: families of weights, ops with their families.

    traced_ops: in their order.  weight_families: families of parameters and buffers, by their names.
    result: of the call.  unfollowed: why layers are left whose weights have no channels, by layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()
        self.traced_ops: list[TracedOp] = []
        self.weight_families: dict[str, Families] = {}
        self.unfollowed: dict[str, str] = {}
        self.result: Any = None
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._analyse)

    @abstractmethod
    def follow(self, example: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model, keep the channels of its result whole, and return the result."""

    @abstractmethod
    def layer(self, name: str) -> str:
        """Return the path of the layer that a weight is of."""

    @abstractmethod
    def _analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines that follow an op."""

    def new_families(self, name: str | None, shape: Sequence[int]) -> Families:
        """Return new labels for the places along each axis of a weight that is longer than 1.

        The labels of an axis have a shape that broadcasts to that of the weight.
        name: the key in `weight_families`; None to leave these as they are.
        """
        labels = self.notes.labels
        # Axes share no labels. The window of a convolution gets some, too; the rules of convolutions leave
        # them alone.
        families = tuple(
            labels.new_labels(extent).reshape([-1 if i == axis else 1 for i in range(len(shape))])
            for axis, extent in enumerate(shape) if extent > 1
        )  # fmt: skip
        if name is not None:
            self.weight_families[name] = families
        return families

    def note_op(
        self,
        call: FollowedOp,
        rule: Rule,
        module: str,
        source: str,
        input_parts: Sequence[Part],
        output_families: Sequence[Families],
    ) -> None:
        """Append an op that a rule has followed to `traced_ops`, with its `move` if the rule only moves."""
        output_parts = [
            (families, tuple(output.shape))
            for output, families in zip(call.outputs, output_families, strict=True)
        ]
        # Ops that only move elements are replayed in the trial: code may select channels by fixed numbers,
        # such as a number of heads, which select others among fewer.
        move = call.move if rule in MOVES else None
        self.traced_ops.append(TracedOp(call.type, module, source, call.key, input_parts, output_parts, move))

    def kept_extents(self, part: Part, kept_label_mask: Any) -> tuple[int, ...]:
        """Return the extents of a tensor without removed channels.  kept_label_mask: by label."""
        families, shape = part
        extents = list(shape)
        for axis in range(len(extents)):
            keep_mask = self.keep_mask_along(families, axis, kept_label_mask)
            # An axis without channels keeps its extent.
            if keep_mask is not None:
                extents[axis] = int(keep_mask.sum())
        return tuple(extents)

    def keep_mask_along(self, families: Families, axis: int, kept_label_mask: Any) -> Any:
        """Return the mask of the places along an axis that are kept; None for an axis without channels."""
        for family in families:
            # One family at most varies along an axis.  A place stays if any channel at it is kept: of heads
            # and features a place along either axis has several channels.
            if family.shape[axis] > 1:
                other_axes = tuple(i for i in range(family.ndim) if i != axis)
                return np.any(kept_label_mask[family], axis=other_axes)
        return None


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a model's result."""
    return [leaf for leaf in leaves([value], structures=True) if hasattr(leaf, "shape")]


def first_unfit_op(expected: Tracing, kept_label_mask: Any, trial_ops: Sequence[TracedOp]) -> TracedOp | None:
    """Return the first op of which a trial of the smaller model has other results than the kept channels.

    Also the first op that the trial has not run; None for a trial without a difference.
    expected: the tracing of the whole model.  kept_label_mask: by label.
    """
    # Op by op: the first difference is the cause, and those after it follow from it.
    for i, op in enumerate(expected.traced_ops):
        if i >= len(trial_ops):  # the trial failed here
            return op
        trial_op = trial_ops[i]
        if (op.type, op.module) != (trial_op.type, trial_op.module):
            return op
        if len(op.outputs) != len(trial_op.outputs):
            return op
        for part, (_, trial_shape) in zip(op.outputs, trial_op.outputs, strict=True):
            _, shape = part
            has_elements = prod(trial_shape) > 0 or prod(shape) > 0
            if has_elements and expected.kept_extents(part, kept_label_mask) != trial_shape:
                return op
        # Extents alone miss an op that moves channels elsewhere.
        if not _moves_alike(op, trial_op, expected, kept_label_mask):
            return op
    return None


def _moves_alike(op: TracedOp, trial_op: TracedOp, expected: Tracing, kept_label_mask: Any) -> bool:
    """Return True if an op of the trial moves the kept channels as the same op moved them among all.

    True for an op that computes instead of moving elements.
    """
    if op.move is None or trial_op.move is None:
        return True
    roots = expected.notes.labels.roots
    families, _ = op.inputs[0]
    for family in families:
        if kept_label_mask[family].all():
            continue
        kept_family = _without_removed(family, ((family,), family.shape), expected, kept_label_mask)
        outputs = zip(op.move(family), op.outputs, trial_op.move(kept_family), strict=True)
        for whole_labels, part, trial_labels in outputs:
            # Roots: united channels may come in another order and still be the same.
            expected_roots = roots(_without_removed(whole_labels, part, expected, kept_label_mask))
            if expected_roots.size and not np.array_equal(expected_roots, roots(trial_labels)):
                return False
    return True


def _without_removed(array: Any, part: Part, expected: Tracing, kept_label_mask: Any) -> Any:
    """Return an array without the places at which a tensor of its shape has channels that are not kept."""
    families, _ = part
    positions = []
    for axis, extent in enumerate(array.shape):
        keep_mask = expected.keep_mask_along(families, axis, kept_label_mask)
        positions.append(np.arange(extent) if keep_mask is None else np.flatnonzero(keep_mask))
    return array[np.ix_(*positions)]


@amanda.differentiable
def masked(value: Any, mask: Any) -> Any:
    """Return a parameter, or a list of tensors, with 0 in place of removed channels."""
    # A list of tensors is one input, as for an LSTM's weights.
    if isinstance(value, (list, tuple)):
        return [
            tensor if tensor_mask is None else tensor * tensor_mask
            for tensor, tensor_mask in zip(value, mask, strict=True)
        ]
    return value * mask


@amanda.differentiable
def selected(value: Any, axis: int, indices: Any) -> Any:
    """Return the kept channels of a tensor of PyTorch, for an op that computes over them."""
    import torch

    return value.index_select(axis, torch.from_numpy(indices).to(value.device))


@amanda.differentiable
def selected_of_array(value: Any, axis: int, indices: Any) -> Any:
    """Return the channels of an array that are kept, for an op that computes over them."""
    return value.take(indices, axis)


def compute_array_over_kept(
    *inputs: Any, axis: int, indices: Any, compute: Callable[[Sequence[Any]], Any], names: Sequence[str]
) -> Any:
    """Return the output of a normalisation of ONNX over the kept channels, with 0 for the others."""
    # names: of the inputs.  compute: the op on other inputs.
    value, *parameters = inputs
    kept_inputs = [value.take(indices, axis)]
    for name, parameter in zip(names[1:], parameters, strict=False):
        is_vector = parameter is not None and name.lower() in ("scale", "b", "bias")
        kept_inputs.append(parameter.take(indices, 0) if is_vector else parameter)
    output = np.zeros_like(value)
    output[(slice(None),) * axis + (indices,)] = compute(kept_inputs)
    return output


def compute_over_kept(
    *inputs: Any, axis: int, indices: Any, compute: Callable[[Sequence[Any]], Any], names: Sequence[str]
) -> Any:
    """Return the output of a normalisation over the kept channels, with 0 for the others."""
    import torch

    value, kept_inputs = inputs[0], list(inputs)
    indices = torch.from_numpy(indices).to(value.device)
    kept_inputs[0] = value.index_select(axis, indices)
    for i, name in enumerate(names):
        if name in ("weight", "bias") and kept_inputs[i] is not None:
            kept_inputs[i] = kept_inputs[i].index_select(0, indices)
        elif name == "normalized_shape":
            # layer_norm is told the extent that it normalises over.
            kept_inputs[i] = [len(indices)]
    # Zeros in place of removed channels: later ops of the masked model have the old extents.
    return value.new_zeros(value.shape).index_copy(axis, indices, compute(kept_inputs))
