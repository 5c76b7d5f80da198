"""The driver within function transforms of torch.func: an op is seen where the program calls it.

Routines run at that place, under the same transforms, so their values are those of the level: a batched
tensor under vmap, a tensor that a gradient tracks under grad. What torch asks of one tensor elsewhere (its
version, its node, its memory) is asked of the layers of its wrapper.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from amanda.action import marks
from amanda.backend import Call, Trace
from amanda.eager import SavedTensors
from amanda.plan import BatchedShape, spread

from ._autograd import NodeBracket
from ._levels import (
    all_layers,
    batch_axes,
    batch_sizes,
    has_tangents,
    innermost,
    is_functionalized,
    is_wrapped,
    tangents,
    with_batches_first,
    without_transforms,
)
from ._saved_tensors import SavedAtNodes
from ._storages import same_bits
from ._straight_through import StraightThrough, recompute_stale_views, reports_irreplaceable
from ._tensors import TorchTensors, cast_to_fit, shape_of

_NODES_OF_AN_OP = 32
"""Nodes that are taken for those of one op, which a rule for vmap or for tangents may compute by several."""


class TransformedTensors(TorchTensors):
    """`TensorOps` of tensors that transforms of torch.func have wrapped; a mixin before a driver's class."""

    may_run_natively = False

    @contextmanager
    def without_overrides(self) -> Iterator[None]:
        """Return a context outside of all transforms, in which analysis routines read weights as ever."""
        # A weight that a routine reads here must not become a wrapper, which has no numbers.
        with super().without_overrides(), without_transforms():
            yield

    def version(self, value: Any) -> Any:
        """Return the version of the innermost tensor, which counts the writes at all levels."""
        if isinstance(value, torch.Tensor) and is_wrapped(value):
            return super().version(innermost(value))
        return super().version(value)

    def versions(self, values: Sequence[Any]) -> list[Any]:
        """Return the version of each value."""
        return [self.version(value) for value in values]

    def have_equal_bits(self, value: Any, other: Any) -> bool:
        """Return True if two tensors have the same batches, and the same bits in all samples."""
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        # Within a transform no number can be read of a batch.
        with without_transforms(), torch.no_grad():
            (levels, data), (other_levels, other_data) = map(with_batches_first, (value, other))
            return levels == other_levels and same_bits(data, other_data)

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors need a gradient at which levels; None where no node can be made."""
        needs_by_layer = tuple([layer.requires_grad for layer in all_layers(spread(inputs))])
        return needs_by_layer if any(needs_by_layer) else None

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of a sample of each tensor, also in lists, with its batches and tangents."""
        return tuple([_shape_of(value) for value in inputs])

    def attach_trace(self, trace: Trace, bracket: NodeBracket, values: list[Any]) -> None:
        """Attach the trace to the nodes of the op's results at all levels."""
        super().attach_trace(trace, bracket, all_layers(spread(values)))  # type: ignore[misc]

    def saved_tensors_recorder(self, values: Sequence[Any]) -> SavedTensors | None:
        """Return hooks to run an op under, or `OpOnCopy` in forward mode; None where no hooks are needed."""
        # With `functionalize` no routine writes here, and a copy into a tensor has no tangent.
        if torch.is_grad_enabled() and has_tangents() and not is_functionalized():
            return OpOnCopy()
        return super().saved_tensors_recorder(values)

    def find_saved_tensors(self, written: Sequence[Any], outputs: Sequence[Any]) -> SavedAtNodes:
        """Return the written tensors that the nodes of inputs and outputs have saved, at all levels."""
        tensors = all_layers(written)
        return SavedAtNodes(tensors, [*tensors, *all_layers(outputs)], _NODES_OF_AN_OP)

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `value` in type and batches of `original`, to which gradients of all levels pass unchanged.

        An original whose place no value can take is returned itself, with a report.
        """
        value = self._batched_like(original, self._cast_to_fit(original, value))
        if reports_irreplaceable(original):
            return original
        # Integers have no gradient, and an inference tensor enters no graph.  With `functionalize` nothing
        # is differentiated here.
        if is_functionalized() or original.is_inference() or not _is_differentiable(original):
            return value
        result: torch.Tensor = StraightThrough.apply(original, value)  # type: ignore[no-untyped-call]
        return result

    def write(self, target: torch.Tensor, value: Any, isolated: bool) -> None:
        """Copy a routine's value into the user's tensor, at the level of the tensor.

        A tensor whose place no value can take stays as it is, with a report.
        """
        if not isolated and is_functionalized() and isinstance(value, torch.Tensor):
            target.masked_scatter_(torch.ones_like(target, dtype=torch.bool), value)
            return
        if not isolated or not isinstance(value, torch.Tensor):
            super().write(target, value, isolated)
            return
        if reports_irreplaceable(target):
            return
        # The tensor as it was gets the gradient of the tensor as it is: no Function with a rule for vmap
        # can write into its argument.
        target.copy_(self.straight_through(target.clone(), value))

    def _cast_to_fit(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cast_value: torch.Tensor = self.call_without_autodiff(cast_to_fit, (original, value), {})
        return cast_value

    def _batched_like(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a value with the batches of an original: the program may write into each sample."""
        if not (batch_axes(original).keys() - batch_axes(value).keys()):
            return value
        return self.call_without_autodiff(_copy_in_batches_of, (original, value), {})  # type: ignore[no-any-return]

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine outside of autograd and modes; explain what it cannot do under a transform."""
        with running_routine(values):
            return super().call_without_autodiff(func, values, kwargs)

    def call_observer(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that changes no value; its errors under a transform get a note.

        A routine marked `all_samples` gets tensors with an axis for each batch in front, and by the keyword
        `batches` the number of such axes of each.
        """
        arguments = values
        if "all_samples" in marks(func):
            arguments, batch_counts = [_unwrapped_data(value) for value in values], _batch_counts(values)
            kwargs = {**kwargs, "batches": batch_counts} if any(batch_counts) else kwargs
        with running_routine(arguments):
            return super().call_observer(func, arguments, kwargs)

    def call_in_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that computes for the program; explain what it cannot do under a transform."""
        with running_routine(values):
            return super().call_in_autodiff(func, values, kwargs)


class OpOnCopy(SavedTensors):
    """Saved tensors of an op in place under transforms: it runs on a copy, which nodes of all levels save.

    A routine may then write the program's tensor, though what the nodes below save cannot be found: those of
    a tangent are not at the tensor.
    """

    def run_op(self, call: Call, inputs: list[Any]) -> Any:
        """Run an op in place on a copy of its tensor, and copy the result into the tensor, which is returned.

        The op runs on the tensor itself, perhaps for a second time, if it does more than write numbers into
        one tensor.
        """
        target = inputs[0]
        if tuple(call.target_positions) != (0,) or not isinstance(target, torch.Tensor):
            return call.invoke(inputs)
        if target.is_leaf and target.requires_grad:
            return call.invoke(inputs)  # which torch refuses, in its words
        copy = target.clone()
        form_before = copy.shape, copy.stride(), copy.dtype
        result = call.invoke([copy, *inputs[1:]])
        # An op such as `t_` has changed the shape of the copy: only a call on the tensor changes that one.
        if result is not copy or (copy.shape, copy.stride(), copy.dtype) != form_before:
            return call.invoke(inputs)
        return target.copy_(copy)


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _shape_of(value: Any) -> Hashable:
    """Return the extents of a tensor or of each tensor in a list, without batches; None for anything else.

    The shape of a tensor with batches or tangents lists these too.
    """
    if isinstance(value, torch.Tensor):
        batches = tuple(batch_sizes(value))
        value_tangents = tuple(tangents(value)) if has_tangents() else ()
        if batches or value_tangents:
            return BatchedShape(value.shape, batches, value_tangents)
        return shape_of(value)
    if isinstance(value, (list, tuple)):
        return tuple([_shape_of(item) for item in value if isinstance(item, torch.Tensor)])
    return None


@contextmanager
def running_routine(values: Sequence[Any]) -> Iterator[None]:
    """Run a routine within the context; a note on its errors says what values of a transform cannot do.

    A routine whose values no transform has wrapped, such as a weight that the transform is not applied to,
    runs outside of all: what it makes and keeps is then no wrapper either.
    """
    if not any(map(is_wrapped, _tensors_among(values))):
        with without_transforms():
            yield
        return
    recompute_stale_views(values)
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        add_transform_note(error, values)
        raise


def _tensors_among(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in spread(values) if isinstance(value, torch.Tensor)]


def _unwrapped_data(value: Any) -> Any:
    """Return the data of a tensor, or of each tensor in a list, with an axis for each batch in front.

    Any other value is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return with_batches_first(value)[1] if is_wrapped(value) else value
    return [_unwrapped_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def _batch_counts(values: Sequence[Any]) -> list[int]:
    """Return the number of batches of each value, 0 for no tensor; elements of lists count as values."""
    counts: list[int] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            counts += _batch_counts(value)
        else:
            counts.append(len(batch_axes(value)) if isinstance(value, torch.Tensor) else 0)
    return counts


def _copy_in_batches_of(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(original).copy_(value)


def add_transform_note(error: BaseException, values: Sequence[Any]) -> None:
    """Add a note to an error of a routine whose values function transforms have wrapped."""
    note = WITHOUT_NUMBERS if any(map(batch_axes, _tensors_among(values))) else WITHOUT_MEMORY
    notes = getattr(error, "__notes__", [])  # `add_note` comes with Python 3.11
    if note not in notes:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


_REMEDY = (
    "compute with tensor operations; a routine that only looks may read "
    "torch.func.debug_unwrap(value), which has the numbers"
)
WITHOUT_NUMBERS = (
    "[amanda] under torch.func.vmap a routine gets all samples as one batched tensor, out of which no number "
    f"and no branch can be read: {_REMEDY} of all samples"
)
WITHOUT_MEMORY = (
    f"[amanda] under a transform of torch.func a routine gets a tensor without memory of its own: {_REMEDY}"
)
