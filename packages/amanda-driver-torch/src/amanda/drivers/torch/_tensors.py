"""Operations on tensors for the core: isolated calls, straight-through values, writes, keys of inputs."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from amanda.backend import complex_error, dtype_error, shape_error
from amanda.eager import SavedTensors
from amanda.errors import RoutineError
from amanda.plan import spread

from ._overrides import as_class_of, leave_overrides, reading_context
from ._saved_tensors import SavedAtNodes, SavingHooks, has_hooks
from ._schema import flatten_outputs
from ._storages import PLAIN, has_overlap, same_bits
from ._straight_through import StraightThrough, WriteThrough, has_tangent, straight_through


class GradOff:
    """Context like `torch.no_grad`, without its generality and at a third of its cost."""

    __slots__ = ("_mode_before",)

    def __enter__(self) -> None:
        # None once the mode from before is restored.
        self._mode_before: bool | None = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: Any) -> None:
        was_grad_enabled, self._mode_before = self._mode_before, None
        torch._C._set_grad_enabled(bool(was_grad_enabled))

    def __del__(self) -> None:
        # An interrupt may come as `__exit__` is called: freeing the context still restores the mode.
        if getattr(self, "_mode_before", None) is not None:
            self.__exit__()


class TorchTensors:
    """`TensorOps` of PyTorch: the operations on tensors by which the core handles the values of ops."""

    has_symbolic_tensors = False

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a torch.Tensor."""
        return isinstance(value, torch.Tensor)

    def without_autodiff(self) -> GradOff:
        """Return a context in which autograd records nothing."""
        return GradOff()

    def version(self, value: Any) -> Any:
        """Return a tensor's version, or those of the tensors in a list; None where there is none."""
        if isinstance(value, torch.Tensor):
            return None if value.is_inference() else value._version
        if isinstance(value, (list, tuple)):
            return [self.version(item) for item in value if isinstance(item, torch.Tensor)] or None
        return None

    def versions(self, values: Sequence[Any]) -> list[Any]:
        """Return the version of each value; a hot path, so the common case is spelt out."""
        try:
            return [value._version if type(value) in PLAIN else self.version(value) for value in values]
        except RuntimeError:  # an inference tensor has none
            return [self.version(value) for value in values]

    def have_equal_bits(self, value: Any, other: Any) -> bool:
        """Return True if two tensors are of one kind and hold the same bits."""
        return same_bits(value, other)

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine with autograd off; a hot path, a third of the cost of `torch.no_grad`."""
        was_grad_enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return func(*values, **kwargs)
        finally:
            torch._C._set_grad_enabled(was_grad_enabled)

    def call_observer(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that changes no value."""
        return self.call_without_autodiff(func, values, kwargs)

    def call_in_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that computes for the program."""
        return func(*values, **kwargs)

    def without_overrides(self) -> AbstractContextManager[Any]:
        """Return a context in which reads of tensors call no mode and no override of the program."""
        return reading_context()

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `value` in the element type of `original`, to which its gradient passes straight through.

        The value's class stays; the value's graph is left out.  Raises RoutineError if it does not fit.
        """
        fitting_value = _without_node(_cast_outside_autograd(original, value))
        result: torch.Tensor = as_class_of(value, straight_through(original, fitting_value))
        return result

    def write(self, target: torch.Tensor, value: Any, isolated: bool) -> None:
        """Copy a routine's value into the user's tensor; an empty one takes its shape, as `out=` does.

        isolated: whether the gradient passes as if nothing was written; else it goes through the copy.
        Raises RoutineError for a value that is not a tensor, or that does not fit.
        """
        if not isinstance(value, torch.Tensor):
            raise RoutineError(f"a tensor is to be written, not {type(value).__name__}")
        if target.numel() == 0 and not target.requires_grad:
            target.resize_(value.shape)
        if not isolated:
            _write_recorded(target, _check_shape(target, value))
            return
        value = _without_node(_cast_outside_autograd(target, value))
        if has_overlap(target):  # `copy_` refuses a target whose elements share memory
            _without_gradient(_write_shared_cells, target, value)
            return
        is_recorded = target.requires_grad and torch.is_grad_enabled()
        # Torch cannot record a write into a tensor that `squeeze_` has made, nor into a strided nested one.
        if is_recorded and (target.retains_grad or (target.is_nested and target.layout is torch.strided)):
            _without_gradient(target.detach().copy_, value)
        # Torch records no write into a leaf that is not a view; `is_leaf` may raise if nothing is recorded.
        elif (is_recorded and not (target.is_leaf and not target._is_view())) or has_tangent(target):
            WriteThrough.apply(target, value)  # type: ignore[no-untyped-call]
        else:
            _without_gradient(target.copy_, value)

    def saved_tensors_recorder(self, values: Sequence[Any]) -> SavedTensors | None:
        """Return hooks to run an op under, by which what it saves is copied before a routine writes.

        None where autograd records nothing or forbids hooks, or `find_saved_tensors` finds all saved tensors.
        """
        are_hooks_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
        if not (torch.is_grad_enabled() and are_hooks_allowed()):
            return None
        tensors = [value for value in spread(values) if isinstance(value, torch.Tensor)]
        return SavingHooks(tensors) if any(map(self.may_hide_saved_tensors, tensors)) else None

    def may_hide_saved_tensors(self, value: torch.Tensor) -> bool:
        """Return True for a view, whose node lies within its base's, and while the user has saving hooks."""
        return value._is_view() or has_hooks()

    def find_saved_tensors(self, written: Sequence[Any], outputs: Sequence[Any]) -> SavedTensors:
        """Return the tensors in the memory of written ones that nodes of those and of outputs have saved.

        Nothing is found with autograd off.
        """
        if not torch.is_grad_enabled():
            return SavedTensors()
        written_tensors = [value for value in written if isinstance(value, torch.Tensor)]
        results = [value for value in outputs if isinstance(value, torch.Tensor)]
        return SavedAtNodes(written_tensors, [*written_tensors, *results])

    def detach_value(self, value: Any) -> Any:
        """Return a value with its tensor, or the tensors in a list, detached; a leaf is returned as it is.

        So is a tensor that cannot be detached: under `is_grads_batched`, or of a class that raises.
        """
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not _has_node(value):  # a leaf holds no graph
                return value
            try:
                if type(value) is torch.Tensor and not torch._C._len_torch_dispatch_stack():
                    return value.detach()  # the usual case: no class to restore, no modes to leave
                with leave_overrides():
                    return as_class_of(value, value.detach())
            except Exception:
                return value
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [self.detach_value(item) for item in value]
        return value

    def detach_values(self, values: Sequence[Any]) -> list[Any]:
        """Return values with their tensors detached, as `detach_value` does."""
        # Most values are results of ops: a method's call for each takes longer than to detach it.
        has_modes = torch._C._len_torch_dispatch_stack() > 0
        try:
            return [
                self.detach_value(value) if has_modes or type(value) is not torch.Tensor or value.is_leaf
                else value.detach()
                for value in values
            ]  # fmt: skip
        except RuntimeError:  # by a view of which torch does not say whether it is a leaf, see `_has_node`
            return [self.detach_value(value) for value in values]

    def differentiable_copy(self, value: Any) -> Any:
        """Return a clone of a tensor, with autograd and of the same class; any other value as it is."""
        return as_class_of(value, value.clone()) if isinstance(value, torch.Tensor) else value

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype, rank and device of each tensor, also in lists; None for any other input."""
        # A hot path: `tuple` of a list is faster than of a generator.
        return tuple(
            [
                (value.dtype, value.dim(), value.device) if isinstance(value, torch.Tensor)
                else _signatures_in_list(value) if isinstance(value, (list, tuple)) else None
                for value in inputs
            ]
        )  # fmt: skip

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors need a gradient, a bit for each; None with autograd off, or if no tensor does.

        The same for a call's arguments as for its inputs, which may have sizes gathered in a tuple.
        """
        if not torch.is_grad_enabled():
            return None
        bits = 1  # a leading 1 keeps the count of tensors in the number
        for value in inputs:
            if isinstance(value, torch.Tensor):
                bits = bits << 1 | value.requires_grad
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, torch.Tensor):
                        bits = bits << 1 | item.requires_grad
        return None if bits & (bits - 1) == 0 else bits  # a power of two: no tensor needs a gradient

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of each tensor, also in lists; None for any other input."""
        return tuple([shape_of(value) for value in inputs])

    def restore_autodiff_roles(
        self, call_inputs: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], values: list[Any]
    ) -> list[Any]:
        """Return the values of routines as leaves or results, as the outputs are that they replace.

        A new leaf, as `zeros(requires_grad=True)` returns it, is replaced by a leaf. Under no_grad an op's
        result needs no gradient, unless the op returned an input itself.  `values` itself is returned if no
        value has changed.
        """
        if values is outputs and torch.is_grad_enabled():
            return values
        new_values = [
            value.detach().requires_grad_() if value is not output and _is_new_leaf(output, inputs) else value
            for output, value in zip(outputs, values, strict=True)
        ]
        if not torch.is_grad_enabled():
            # If a routine replaced an input that the op returns, the gradient was of the program's own input.
            program_input_by_id = {
                id(op_input): program_input
                for program_input, op_input in zip(spread(call_inputs), spread(inputs), strict=False)
            }
            for i, (output, value) in enumerate(zip(outputs, new_values, strict=True)):
                original = program_input_by_id.get(id(output), output)
                is_replaced = value is not original and isinstance(value, torch.Tensor)
                if is_replaced and _lacks_gradient_of(original, value):
                    with torch.enable_grad():
                        new_values[i] = StraightThrough.apply(original, value)  # type: ignore[no-untyped-call]
        return values if all(map(operator.is_, new_values, values)) else new_values

    def is_program_tensor(self, value: Any, inputs: Sequence[Any]) -> bool:
        """Return True for a tensor that the op has not made: an input, or a leaf that needs a gradient.

        An op returns such a leaf from an object that holds it.
        """
        if not isinstance(value, torch.Tensor):
            return False
        is_input = any(value is tensor for tensor in spread(inputs))
        return is_input or (value.requires_grad and not _has_node(value))

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
        """Return an op's result as a list, and a function that puts a list back into its form."""
        return flatten_outputs(outputs)


def _lacks_gradient_of(original: Any, value: torch.Tensor) -> bool:
    """Return True if a value needs no gradient where its original does, and autograd can link the two."""
    is_lacking = isinstance(original, torch.Tensor) and original.requires_grad and not value.requires_grad
    return is_lacking and not torch.is_inference_mode_enabled() and original.shape == value.shape


def _is_new_leaf(output: Any, inputs: Sequence[Any]) -> bool:
    is_leaf = isinstance(output, torch.Tensor) and output.requires_grad and not _has_node(output)
    return is_leaf and not any(value is output or _may_hold_tensors(value) for value in spread(inputs))


def _may_hold_tensors(value: Any) -> bool:
    """Return True for an object whose `__torch_function__` may return tensors that the object holds."""
    override = getattr(type(value), "__torch_function__", None)
    if override is None or override is torch._C._disabled_torch_function_impl:
        return False
    default: Any = torch.Tensor.__torch_function__
    return getattr(override, "__func__", None) is not default.__func__


def _signatures_in_list(values: Sequence[Any]) -> Hashable:
    return tuple(
        [(tensor.dtype, tensor.dim(), tensor.device) for tensor in values if isinstance(tensor, torch.Tensor)]
    )


def shape_of(value: Any) -> Hashable:
    """Return the extents of a tensor, or of each tensor in a list; None for anything else.

    Those of all parts of a strided nested tensor are in one tuple; a lazy parameter has None.
    """
    if isinstance(value, torch.Tensor):
        if value.is_nested and value.layout is torch.strided:  # `shape` is an error
            return tuple(value._nested_tensor_size().flatten().tolist())
        try:
            return tuple(value.shape)
        except RuntimeError:  # of a parameter of a lazy module, which has none yet
            return None
    if isinstance(value, (list, tuple)):
        return tuple([shape_of(item) for item in value if isinstance(item, torch.Tensor)])
    return None


def _without_node(value: torch.Tensor) -> torch.Tensor:
    return value.detach() if value.requires_grad and _has_node(value) else value


def _has_node(value: torch.Tensor) -> bool:
    """Return True if a tensor has a node in autograd's graph, or may have one.

    Torch raises for a view that was made under no_grad and whose base was written since.
    """
    try:
        return value.grad_fn is not None
    except RuntimeError:
        return True


def _check_shape(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value`; raise RoutineError if its shape is not that of `original`, unless one is nested."""
    if not (original.is_nested or value.is_nested) and original.shape != value.shape:
        raise shape_error(tuple(value.shape), tuple(original.shape))
    return value


def _without_gradient(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function with autograd off, as `torch.no_grad` does at three times the cost."""
    was_grad_enabled = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)
        return function(*values)
    finally:
        torch._C._set_grad_enabled(was_grad_enabled)


def _write_recorded(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor, with autograd: gradients go on to the value.

    After `retain_grad` and an op such as transpose_ torch records the write, and raises before it writes: the
    numbers are then written here.
    """
    node_before = target.grad_fn
    try:
        target.copy_(value)
    except RuntimeError:
        if not target.retains_grad or target.grad_fn is node_before:
            raise
        _without_gradient(target.detach().copy_, value.detach())


def _write_shared_cells(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write into a tensor several elements of which are one memory cell, as after `expand`.

    Raises RoutineError for different values at one cell.
    """
    cell_count = target.untyped_storage().nbytes() // target.element_size()
    # Elements that share a cell have the same index.
    cell_of_element = torch.arange(cell_count, device=target.device).as_strided(
        target.size(), target.stride(), target.storage_offset()
    )
    cells = target.detach().as_strided((cell_count,), (1,), 0)
    cells[cell_of_element] = value
    # Read back: a cell holds one value, so different values for it cannot all have been written.
    if not torch.equal(target.nan_to_num(), value.nan_to_num()):
        raise RoutineError(
            "a routine returned different values for elements of a tensor of shape "
            f"{tuple(target.shape)} that are one in memory, as after expand"
        )


def _cast_outside_autograd(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    cast_value: torch.Tensor = _without_gradient(cast_to_fit, original, value)
    return cast_value


def cast_to_fit(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a routine's value in the element type of the tensor that it replaces; a quantized one as it is.

    Raises RoutineError for another shape, a complex value for a real one, an integer for a float, or numbers
    that an integer or boolean type cannot hold.
    """
    _check_shape(original, value)
    if original.is_complex() != value.is_complex():
        raise complex_error(value.dtype, original.dtype)
    if value.dtype == original.dtype or original.is_quantized or value.is_quantized:
        return value
    is_floating = original.dtype.is_floating_point or original.is_complex()
    if is_floating and not (value.dtype.is_floating_point or value.is_complex()):
        raise dtype_error(value.dtype, original.dtype)
    cast = value.to(original.dtype)
    if not is_floating and not value.is_meta and not bool((cast == value).all()):
        raise RoutineError(
            f"a routine returned {value.dtype} where {original.dtype} was given, with numbers that this type "
            "does not have; return that type, or select floating values alone"
        )
    return cast
