"""Levels of function transforms: the wrappers that torch.func puts around tensors, one for each level."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from amanda.plan import BatchedShape
from torch.autograd import forward_ad

_functorch: Any = torch._C._functorch
in_transform = torch._C._are_functorch_transforms_active
"""Return True while a function transform, such as vmap or grad, is in force."""
is_wrapped = _functorch.is_functorch_wrapped_tensor
level_of = _functorch.maybe_get_level


def is_within_kernel() -> bool:
    """Return True within a custom op's rule for vmap, whose calls are part of the op."""
    excluded: bool = _is_key_excluded(_BATCHED)
    return excluded


_is_key_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
_BATCHED: Any = torch._C.DispatchKey.FuncTorchBatched


def layers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor, the tensor that it wraps, and so on to the plain tensor with the data."""
    yield tensor
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        yield tensor


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor within the wrappers, with the axes of all batches."""
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def all_layers(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the layers of the tensors among some values."""
    return [layer for value in values if isinstance(value, torch.Tensor) for layer in layers(value)]


def leaves_no_graph(outputs: Sequence[Any], gradients: Sequence[Any]) -> bool:
    """Return True if a pass of a transform makes no graph that another pass could follow.

    Transforms always ask for a graph; what they make at their own level ends with them, so only tensors at
    the levels below that need a gradient, and gradients that do, lead to backward ops of backward ops.
    """
    layers_below = [layer for output in outputs for layer in all_layers([output])[1:]]
    return not any(layer.requires_grad for layer in (*layers_below, *all_layers(gradients)))


def is_run_by_transform(caller: FrameType) -> bool:
    """Return True for a backward pass of torch.func's grad, vjp or jacrev.  caller: frame that starts it."""
    caller_of_grad = caller.f_back  # `caller` is `torch.autograd.grad`, which the transforms call
    return caller_of_grad is not None and caller_of_grad.f_globals.get("__name__") == _EAGER_TRANSFORMS


_EAGER_TRANSFORMS = "torch._functorch.eager_transforms"


def batch_axes(tensor: torch.Tensor) -> dict[int, int]:
    """Return the axis of each batch in the innermost tensor, by the level of its vmap."""
    level_axes: list[tuple[int, int]] = [
        (level_of(layer), _functorch.maybe_get_bdim(layer))
        for layer in layers(tensor)
        if _functorch.is_batchedtensor(layer)
    ]
    axis_by_level: dict[int, int] = {}
    for level, axis in level_axes:
        # An inner layer has an axis more than the layers around it: their axes shift from this one on.
        axis_by_level = {
            outer_level: outer_axis + (outer_axis >= axis)
            for outer_level, outer_axis in axis_by_level.items()
        }
        axis_by_level[level] = axis
    return axis_by_level


def batch_sizes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the level and the number of samples of each batch of a tensor, the outermost first."""
    axis_by_level = batch_axes(tensor)
    # Levels count from the outermost transform.
    sizes = innermost(tensor).shape if axis_by_level else ()
    return [(level, sizes[axis_by_level[level]]) for level in sorted(axis_by_level)]


def with_batches_first(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the levels of a tensor's batches, and the plain tensor within with their axes in front."""
    axis_by_level = batch_axes(tensor)
    levels = tuple(sorted(axis_by_level))
    data, axes = innermost(tensor), [axis_by_level[level] for level in levels]
    front_axes = list(range(len(levels)))
    # The tensor itself where that will do: tools recognise it when they read it again.
    return levels, data if axes == front_axes else data.movedim(axes, front_axes)


def wrap_in_batches(levels: Sequence[int], data: torch.Tensor) -> torch.Tensor:
    """Return data with an axis for each of some batches in front as the batched tensor of these levels."""
    # Each call takes the axis in front, so that the batches come in the order of the levels.
    for level in levels:
        data = _functorch._add_batch_dim(data, 0, level)
    return data


def call_with_wrappers(function: Callable[[torch.Tensor, torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Return what a function makes of a tensor in a wrapper of vmap, and of that in a wrapper of grad.

    The function is called within both transforms.
    """
    results: list[Any] = []

    def call_within_vmap(batched: torch.Tensor) -> torch.Tensor:
        def call_within_grad(tracked: torch.Tensor) -> torch.Tensor:
            results.append(function(batched, tracked))
            return tracked

        torch.func.vjp(call_within_grad, batched)
        return batched

    torch.func.vmap(call_within_vmap)(tensor[None])
    return results[0]


FUNCTIONALIZE: Any = _functorch.TransformType.Functionalize


def transforms_in_force() -> Sequence[Any]:
    """Return the transforms in force, the outermost first."""
    return _functorch.get_interpreter_stack() or ()


def is_functionalized() -> bool:
    """Return True under torch.func.functionalize, which replaces ops that write."""
    return any(transform.key() == FUNCTIONALIZE for transform in transforms_in_force())


def has_tangents() -> bool:
    """Return True under a transform of forward-mode gradients, such as jvp."""
    return any(transform.key() == _functorch.TransformType.Jvp for transform in transforms_in_force())


def tangents(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Return, for each tangent of a tensor, the levels that differentiate, and the batches of the tangent.

    Batches are pairs of level and size.  A tangent of a tangent has the levels of both.
    """
    return [
        (levels, tuple(sorted(batches.items())))
        for levels, batches in _batches_of_value_and_tangents(tensor).items()
        if levels
    ]


def _batches_of_value_and_tangents(tensor: torch.Tensor) -> dict[tuple[int, ...], dict[int, int]]:
    """Return the batch sizes by level of a tensor's value, under (), and of tangents, under their levels."""
    if not is_wrapped(tensor):
        return {(): {}}
    level, inner = level_of(tensor), _functorch.get_unwrapped(tensor)
    batches_by_levels = _batches_of_value_and_tangents(inner)
    if _functorch.is_batchedtensor(tensor):
        size = inner.shape[_functorch.maybe_get_bdim(tensor)]
        return {levels: {**batches, level: size} for levels, batches in batches_by_levels.items()}
    # A wrapper of a transform that has ended, as of a hessian's inner vjp, has a negative level.
    if level < 0:
        return batches_by_levels
    with without_transforms_above(level):
        tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    if tangent is not None:
        batches_by_levels |= {
            (*levels, level): batches for levels, batches in _batches_of_value_and_tangents(tangent).items()
        }
    return batches_by_levels


@contextmanager
def without_transforms_above(level: int) -> Iterator[None]:
    """Leave the transforms within a level, which would take the wrappers of the level for plain tensors."""
    left_transforms: list[Any] = []
    try:
        while transforms_in_force()[-1:] and transforms_in_force()[-1].level() > level:
            left_transforms.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while left_transforms:
            _functorch.push_dynamic_layer_stack(left_transforms.pop())


_INTEGERS = frozenset({int})


def drop_ended_batches(shapes: Any) -> Any:
    """Return shapes of an op's execution without tangents and without batches of vmaps that have ended.

    Backward ops outside of the vmap of their op compute with gradients that have the axes of all samples.
    """
    if not BatchedShape.any_made:
        return shapes
    if isinstance(shapes, BatchedShape):
        # A vmap that began since may have the level of one that ended: nothing tells them apart.
        open_levels = {
            transform.level()
            for transform in transforms_in_force()
            if transform.key() == _functorch.TransformType.Vmap
        }
        batches = tuple([(level, size) for level, size in shapes.batches if level in open_levels])
        return BatchedShape(shapes, batches) if batches else tuple(shapes)
    # Each node of each pass comes here: no generator where a shape has no more than numbers.
    if isinstance(shapes, tuple) and not _INTEGERS.issuperset(map(type, shapes)):
        return tuple([drop_ended_batches(shape) for shape in shapes])
    return shapes


@contextmanager
def without_transforms() -> Iterator[None]:
    """Leave all transforms within the context, for work on innermost tensors."""
    left_transforms: list[Any] = []
    try:
        while _functorch.peek_interpreter_stack() is not None:
            left_transforms.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while left_transforms:  # the outermost, which was left last, comes first
            _functorch.push_dynamic_layer_stack(left_transforms.pop())
