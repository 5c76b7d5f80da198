"""Interface between the pruning of channels and the models of a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import amanda
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from amanda.tools.prune.channels._plan import Plan
    from amanda.tools.prune.channels._tracing import Tracing


@amanda.differentiable
def masked(value: Any, mask: Any) -> Any:
    """Return a parameter, or those among a list of tensors, with 0 where it is removed."""
    if isinstance(value, (list, tuple)):
        return [
            tensor if tensor_mask is None else tensor * tensor_mask
            for tensor, tensor_mask in zip(value, mask, strict=True)
        ]
    return value * mask


@amanda.differentiable
def selected(value: Any, axis: int, indices: Any) -> Any:
    """Return the channels that are kept, for an op that computes over them."""
    import torch

    return value.index_select(axis, torch.from_numpy(indices).to(value.device))


@amanda.differentiable
def selected_of_array(value: Any, axis: int, indices: Any) -> Any:
    """Return the channels of an array that are kept, for an op that computes over them."""
    return value.take(indices, axis)


def array_over_kept(
    *inputs: Any, axis: int, indices: Any, compute: Callable[[Sequence[Any]], Any], names: Sequence[str]
) -> Any:
    """Return what a normalisation of ONNX makes of the channels that are kept, and 0 for the others."""
    kept_inputs = [
        array.take(indices, axis)
        if i == 0
        else array.take(indices, 0)
        if _is_vector(names[i], array)
        else array
        for i, array in enumerate(inputs)
    ]
    output = np.zeros_like(inputs[0])
    output[(slice(None),) * axis + (indices,)] = compute(kept_inputs)
    return output


def _is_vector(name: str, value: Any) -> bool:
    return value is not None and name.lower() in ("scale", "b", "bias")


def over_kept(
    *inputs: Any, axis: int, indices: Any, compute: Callable[[Sequence[Any]], Any], names: Sequence[str]
) -> Any:
    """Return what a normalisation makes of the channels that are kept, and 0 for the others."""
    import torch

    value, kept_inputs = inputs[0], list(inputs)
    indices = torch.from_numpy(indices).to(value.device)
    kept_inputs[0] = value.index_select(axis, indices)
    for i, name in enumerate(names):
        if name in ("weight", "bias") and kept_inputs[i] is not None:
            kept_inputs[i] = kept_inputs[i].index_select(0, indices)
        elif name == "normalized_shape":
            kept_inputs[i] = [len(indices)]
    return value.new_zeros(value.shape).index_copy(axis, indices, compute(kept_inputs))


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

    model: as the user has given it.  has_gradients: whether weights may have gradients.
    selected, over_kept: routines that simulate an op over the channels that are kept.
    """

    has_gradients: ClassVar[bool]
    selected: ClassVar[Callable[..., Any]]
    over_kept: ClassVar[Callable[..., Any]]

    def __init__(self, model: Any) -> None:
        self.model = model

    @abstractmethod
    def __call__(self, *example: Any, **named: Any) -> Any:
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
    def removal(self, plan: Plan) -> Removal:
        """Return what removes the channels that a plan does not keep."""

    @abstractmethod
    def smaller(self, plan: Plan, optimizer: Any) -> Any:
        """Remove for good the channels that a plan does not keep; return the smaller model."""

    @abstractmethod
    def with_zeros(self, masks: Masks) -> Any:
        """Write masks into weights; return the model that has them."""

    @abstractmethod
    def floats(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield the floating-point tensors of a result as arrays, and the rounding of their types."""

    def is_of(self, model: Any) -> bool:
        """Return True for the model that the user has given."""
        return model is self.model

    def key(self, context: amanda.OpContext) -> Any:
        """Return what tells an op from all others of the model, in any call of it."""
        return context.get_op_id()

    def reads(self, context: amanda.OpContext) -> Sequence[Any]:
        """Return the inputs of an op in the form that masks are found by."""
        return context.get_inputs()

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the model evaluates without gradients."""
        return nullcontext()

    def simulating(self) -> AbstractContextManager[None]:
        """Return a context in which the ops that the masks do not suit are taken apart."""
        return nullcontext()

    def time(self, *example: Any, **named: Any) -> None:
        """Run the model as its users do, until its results are there: the time of this is measured."""
        self(*example, **named)
