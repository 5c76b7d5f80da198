"""Means that people use today to be called at every operation, each calling nothing but the operation."""

import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils._python_dispatch import TorchDispatchMode

import amanda
from amanda.interceptor.attributes import Patches

NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
METADATA = frozenset(
    "size dim ndimension stride storage_offset numel nelement element_size is_contiguous is_complex "
    "is_floating_point is_signed is_inference is_neg is_conj is_same_size is_set_to is_pinned is_coalesced "
    "is_distributed is_nonzero get_device result_type promote_types can_cast data_ptr dense_dim sparse_dim "
    "has_names names type type_as requires_grad_ __getattribute__ __setattr__ __delattr__ __init__ __new__ "
    "__repr__ __format__ __hash__ __dir__ __reduce_ex__ __len__ __contains__ __iter__ __class__ backward "
    "register_hook register_post_accumulate_grad_hook retain_grad numpy tolist untyped_storage".split()
)


BY_HAND = "hooks by hand"
HOLDERS: list[tuple[Any, list[str]]] = [
    *(
        (holder, dir(holder))
        for holder in (
            torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch._C._nn,
        )
    ),
    (torch._VF, dir(torch._C._VariableFunctions)),
]  # fmt: skip
"""Objects through which programs and torch itself reach native functions, and the names there."""


class FunctionMode(TorchFunctionMode):
    """Calls the function and nothing else."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class StraightThrough(torch.autograd.Function):
    """A value in the place of another, whose gradient goes to the other as it is."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class ChangingMode(FunctionMode):
    """Gives another value in the place of a first argument, or of a result, of the value's shape."""

    def __init__(self, value: torch.Tensor, after: bool = False) -> None:
        super().__init__()
        self.value, self.after = value, after

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.after:
            return self.changed(function(*args, **(kwargs or {})))
        return function(self.changed(args[0]), *args[1:], **(kwargs or {}))

    def changed(self, original: Any) -> Any:
        """Return what stands in the place of an argument or a result."""
        if getattr(original, "shape", None) != self.value.shape:
            return original
        return StraightThrough.apply(original, self.value) if original.requires_grad else self.value


class DispatchMode(TorchDispatchMode):
    """Calls the kernel and nothing else."""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def nothing(*values: Any) -> None:
    """Do nothing, as the routine of a hook or patch."""


@contextmanager
def module_hooks(model: nn.Module, routine: Callable[..., None] = nothing) -> Iterator[None]:
    """Put a hook before and one after the forward of every module that has no modules in it."""
    with ExitStack() as hooks:
        for module in model.modules():
            if not any(True for _ in module.children()):
                hooks.enter_context(module.register_forward_pre_hook(routine))
                hooks.enter_context(module.register_forward_hook(routine))
        yield


def hooks_by_hand(leaves: bool = True) -> AbstractContextManager[Any]:
    """Put a hook before and one after each node of a graph, within `Tensor.backward`."""
    original = torch.Tensor.backward

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        for node in graph(loss):
            if leaves or node.next_functions:
                node.register_prehook(nothing)
                node.register_hook(nothing)
        original(loss, *args, **kwargs)  # type: ignore[no-untyped-call]

    return patch.object(torch.Tensor, "backward", backward)


def graph(loss: torch.Tensor) -> list[Any]:
    """Return every node of the graph that a result hangs in."""
    waiting: list[Any] = [loss.grad_fn]
    found = set(waiting)
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child is not None and child not in found:
                found.add(child)
                waiting.append(child)
    return list(found)


class MonkeyPatch:
    """Replaces torch's native functions and methods by Python ones that call a routine before and after.

    Those that compute: functions that torch lets others override or that work in place, less those that
    read metadata.  A function that is Python itself, such as F.relu, is left, because the functions that it
    calls are replaced.
    """

    def __init__(self, before: Callable[..., None] = nothing, after: Callable[..., None] = nothing) -> None:
        self.places: list[tuple[Any, str, Any]] = []
        overridable = {id(one) for functions in get_overridable_functions().values() for one in functions}
        for holder, names in HOLDERS:
            for name in names:
                original = getattr(holder, name)
                in_place = name.endswith("_") and not name.startswith("_")
                computes = holder is torch._C._nn or id(original) in overridable or in_place
                if computes and isinstance(original, NATIVE) and name not in METADATA:
                    self.places.append((holder, name, _patched(original, before, after)))

        self.patches = Patches()

    def __enter__(self) -> None:
        for holder, name, patched in self.places:
            self.patches.set(holder, name, patched)

    def __exit__(self, *_: object) -> None:
        self.patches.restore()


def _patched(original: Any, before: Callable[..., None], after: Callable[..., None]) -> Any:
    def patched(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = original(*args, **kwargs)
        after(result)
        return result

    return patched


@contextmanager
def scope_elsewhere(tool: amanda.Tool) -> Iterator[None]:
    """Open a scope in another thread, which waits."""
    scope = amanda.apply(tool)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(scope.start).result()
        try:
            yield
        finally:
            thread.submit(scope.stop).result()


@contextmanager
def switched_off(tool: amanda.Tool) -> Iterator[None]:
    """Open `amanda.disabled()` in a scope."""
    with amanda.apply(tool), amanda.disabled():
        yield
