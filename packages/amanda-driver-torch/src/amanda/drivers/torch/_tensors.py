"""Tensor primitives: isolation from autograd, the straight-through edge, signatures."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from amanda.eager import Saved
from amanda.errors import RoutineError
from amanda.plan import spread

from ._overrides import left, of_class, reading
from ._saved import Reached, SavedTensors, has_hooks
from ._schema import flatten_outputs
from ._storages import PLAIN, overlaps, same_bits
from ._straight_through import StraightThrough, WriteThrough, has_tangent, straight_through


class GradOff:
    """`torch.no_grad` without its generality: a third of the cost.

    Left at the latest as it is freed: an interrupt may come as `__exit__` is called.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: bool | None = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: Any) -> None:
        before, self._before = self._before, None
        torch._C._set_grad_enabled(bool(before))

    def __del__(self) -> None:
        if getattr(self, "_before", None) is not None:
            self.__exit__()


class TorchTensors:
    """`TensorOps` of PyTorch."""

    has_symbols = False

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a torch.Tensor."""
        return isinstance(value, torch.Tensor)

    def isolated(self) -> GradOff:
        """Context in which autograd records nothing."""
        return GradOff()

    def version(self, value: Any) -> Any:
        """The tensor's version counter; of each tensor, for a list."""
        if isinstance(value, torch.Tensor):
            return None if value.is_inference() else value._version
        if isinstance(value, (list, tuple)):
            return [self.version(item) for item in value if isinstance(item, torch.Tensor)] or None
        return None

    def versions(self, values: Sequence[Any]) -> list[Any]:
        """The version of each value; a hot path, so the common case is spelt out."""
        try:
            return [value._version if type(value) in PLAIN else self.version(value) for value in values]
        except RuntimeError:  # an inference tensor has none
            return [self.version(value) for value in values]

    def same(self, value: Any, other: Any) -> bool:
        """Return True if two tensors are of one kind and hold the same bits."""
        return same_bits(value, other)

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine with autograd off; a hot path, a third of the cost of `torch.no_grad`."""
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return func(*values, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    def call_observer(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that changes no value."""
        return self.call_isolated(func, values, kwargs)

    def call(self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine that computes for the program."""
        return func(*values, **kwargs)

    def reading(self) -> AbstractContextManager[Any]:
        """Context in which no mode and no override of the program's sees what is read."""
        return reading()

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`value` for `original`, in its floating type, with its gradient passed straight through."""
        like, value = value, _detached(_fitting(original, value))
        placed: torch.Tensor = of_class(like, straight_through(original, value))
        return placed

    def write(self, target: torch.Tensor, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor."""
        if not isinstance(value, torch.Tensor):
            raise RoutineError(f"a tensor is to be written, not {type(value).__name__}")
        if target.numel() == 0 and not target.requires_grad:
            target.resize_(value.shape)  # as `out=` does
        if not isolated:
            _write_recorded(target, _same_shape(target, value))
            return
        value = _detached(_fitting(target, value))
        if overlaps(target):
            _without_gradient(_write_each, target, value)
            return
        recorded = target.requires_grad and torch.is_grad_enabled()
        # Torch cannot record a write into a tensor that `squeeze_` has made, nor into a strided nested one.
        if recorded and (target.retains_grad or (target.is_nested and target.layout is torch.strided)):
            _without_gradient(target.detach().copy_, value)
        elif (recorded and not (target.is_leaf and not target._is_view())) or has_tangent(target):
            WriteThrough.apply(target, value)  # type: ignore[no-untyped-call]
        else:
            _without_gradient(target.copy_, value)

    def written_later(self, values: Sequence[Any]) -> SavedTensors | None:
        """Context around an op after which these tensors may be written once more, if `saved_of` may fail."""
        allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
        if not (torch.is_grad_enabled() and allowed()):
            return None
        written = [one for one in spread(values) if isinstance(one, torch.Tensor)]
        return SavedTensors(written) if any(map(self.saves_out_of_reach, written)) else None

    def saves_out_of_reach(self, value: torch.Tensor) -> bool:
        """Return True if the node is inside another, as a view's base has, or hooks of the user's save."""
        return value._is_view() or has_hooks()

    def saved_of(self, written: Sequence[Any], outputs: Sequence[Any]) -> Saved:
        """Return what the nodes of these tensors have saved of those that were written."""
        if not torch.is_grad_enabled():
            return Saved()
        tensors = [value for value in written if isinstance(value, torch.Tensor)]
        made = [value for value in outputs if isinstance(value, torch.Tensor)]
        return Reached(tensors, [*tensors, *made])

    def kept(self, value: Any) -> Any:
        """A tensor without its graph, also one that it gets later; a leaf, such as a parameter, as it is.

        So is a tensor that refuses to be detached: under `is_grads_batched`, or of a class that says so.
        """
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not _has_node(value):
                return value
            try:
                with left() if torch._C._len_torch_dispatch_stack() else nullcontext():
                    return of_class(value, value.detach())
            except Exception:
                return value
        if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
            return [self.kept(one) for one in value]
        return value

    def copied(self, value: Any) -> Any:
        """A differentiable copy."""
        return of_class(value, value.clone()) if isinstance(value, torch.Tensor) else value

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype, rank and device of each tensor, also in lists."""
        return tuple(
            [
                (value.dtype, value.dim(), value.device) if isinstance(value, torch.Tensor)
                else _signatures(value) if isinstance(value, (list, tuple)) else None
                for value in inputs
            ]
        )  # fmt: skip

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors need a gradient, as bits; None where no node can be made.

        The same for a call's arguments as for its inputs, which may have sizes gathered in a tuple.
        """
        if not torch.is_grad_enabled():
            return None
        bits = 1
        for value in inputs:
            if isinstance(value, torch.Tensor):
                bits = bits << 1 | value.requires_grad
            elif isinstance(value, (list, tuple)):
                for one in value:
                    if isinstance(one, torch.Tensor):
                        bits = bits << 1 | one.requires_grad
        return None if bits & (bits - 1) == 0 else bits

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each tensor, also in lists."""
        return tuple([_shape(value) for value in inputs])

    def known_to_autodiff(
        self, own: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], given: list[Any]
    ) -> list[Any]:
        """Return the values that routines gave as outputs: leaves for leaves, as `zeros(requires_grad=True)`.

        Under no_grad an op's result needs no gradient, unless it is the very tensor that the op was given.
        """
        if given is outputs and torch.is_grad_enabled():
            return given
        placed = [
            new.detach().requires_grad_() if new is not old and _is_made_a_leaf(old, inputs) else new
            for old, new in zip(outputs, given, strict=True)
        ]
        if not torch.is_grad_enabled():
            through = {id(new): old for old, new in zip(spread(own), spread(inputs), strict=False)}
            for i, (old, new) in enumerate(zip(outputs, placed, strict=True)):
                original = through.get(id(old), old)
                if new is not original and isinstance(new, torch.Tensor) and _needs_gradient(original, new):
                    with torch.enable_grad():
                        placed[i] = StraightThrough.apply(original, new)  # type: ignore[no-untyped-call]
        return given if all(map(operator.is_, placed, given)) else placed

    def is_handed_back(self, value: Any, inputs: Sequence[Any]) -> bool:
        """Return True for an input, and for a leaf that needs a gradient, which an object may hold."""
        if not isinstance(value, torch.Tensor):
            return False
        return any(value is one for one in spread(inputs)) or (value.requires_grad and not _has_node(value))

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """An op's result as a list, and how to put it back into its form."""
        return flatten_outputs(outputs)


def _needs_gradient(original: Any, value: torch.Tensor) -> bool:
    needs = isinstance(original, torch.Tensor) and original.requires_grad and not value.requires_grad
    return needs and not torch.is_inference_mode_enabled() and original.shape == value.shape


def _is_made_a_leaf(output: Any, inputs: Sequence[Any]) -> bool:
    is_leaf = isinstance(output, torch.Tensor) and output.requires_grad and not _has_node(output)
    return is_leaf and not any(one is output or _may_hold_tensors(one) for one in spread(inputs))


def _may_hold_tensors(value: Any) -> bool:
    """Return True for an object of a class that gives results of ops itself, as of tensors it holds."""
    override = getattr(type(value), "__torch_function__", None)
    if override is None or override is torch._C._disabled_torch_function_impl:
        return False
    default: Any = torch.Tensor.__torch_function__
    return getattr(override, "__func__", None) is not default.__func__


def _signatures(values: Sequence[Any]) -> Hashable:
    return tuple([(one.dtype, one.dim(), one.device) for one in values if isinstance(one, torch.Tensor)])


def _shape(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if value.is_nested and value.layout is torch.strided:  # `shape` is an error
            return tuple(value._nested_tensor_size().flatten().tolist())
        try:
            return tuple(value.shape)
        except RuntimeError:  # of a parameter of a lazy module, which has none yet
            return None
    if isinstance(value, (list, tuple)):
        return tuple([_shape(item) for item in value if isinstance(item, torch.Tensor)])
    return None


def _detached(value: torch.Tensor) -> torch.Tensor:
    return value.detach() if value.requires_grad and _has_node(value) else value


def _has_node(value: torch.Tensor) -> bool:
    """Return True if an op of a graph made it.

    Torch does not tell of a view from under no_grad whose base was written since: that may not be asked.
    """
    try:
        return value.grad_fn is not None
    except RuntimeError:
        return True


def _same_shape(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not (original.is_nested or value.is_nested) and original.shape != value.shape:
        raise RoutineError(
            f"a routine returned shape {tuple(value.shape)} where shape {tuple(original.shape)} was "
            "given; mark it @amanda.differentiable if it is meant to change shapes"
        )
    return value


def _without_gradient(function: Callable[..., Any], *values: Any) -> Any:
    before = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)
        return function(*values)
    finally:
        torch._C._set_grad_enabled(before)


def _write_recorded(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value, so that gradients go through it.

    After `retain_grad` and an op such as transpose_ torch records the write, and raises before it writes.
    """
    before = target.grad_fn
    try:
        target.copy_(value)
    except RuntimeError:
        if not target.retains_grad or target.grad_fn is before:
            raise
        _without_gradient(target.detach().copy_, value.detach())


def _write_each(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write into a tensor several elements of which are one in memory, as `expand` makes it."""
    size = target.untyped_storage().nbytes() // target.element_size()
    index = torch.arange(size, device=target.device).as_strided(
        target.size(), target.stride(), target.storage_offset()
    )
    target.detach().as_strided((size,), (1,), 0)[index] = value
    if not torch.equal(target.nan_to_num(), value.nan_to_num()):
        raise RoutineError(
            "a routine returned different values for elements of a tensor of shape "
            f"{tuple(target.shape)} that are one in memory, as after expand"
        )


def _fitting(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    fitting: torch.Tensor = _without_gradient(cast_to_fit, original, value)
    return fitting


def cast_to_fit(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` in the type of `original`.

    Raises RoutineError where it cannot stand for that: another shape, a complex value for a real one, or
    numbers that an integer or boolean type does not have.
    """
    _same_shape(original, value)
    if original.is_complex() != value.is_complex():
        raise RoutineError(
            f"a routine returned {value.dtype} where {original.dtype} was given; it may not turn real "
            "into complex or back"
        )
    if value.dtype == original.dtype or original.is_quantized or value.is_quantized:
        return value
    floating = original.dtype.is_floating_point | original.is_complex()
    if floating and not (value.dtype.is_floating_point or value.is_complex()):
        raise RoutineError(
            f"a routine returned {value.dtype} where {original.dtype} was given; return a floating type"
        )
    cast = value.to(original.dtype)
    if not floating and not value.is_meta and not bool((cast == value).all()):
        raise RoutineError(
            f"a routine returned {value.dtype} where {original.dtype} was given, with numbers that this type "
            "does not have; return that type, or select floating values alone"
        )
    return cast
