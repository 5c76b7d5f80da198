"""Module calls: regions of the program, and the path of a module in its model."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from amanda.backend import Attributes, digest
from amanda.drivers.torch._overrides import Unseen
from amanda.drivers.torch._wrappers import without_wrappers
from amanda.interceptor import Enclosure

_METHODS = ("_wrapped_call_impl", "_call_impl")


def enclose_modules(attributes: Attributes) -> None:
    """Make each call of a module a region: the ops in it belong to that module."""
    attributes.enclose(torch.nn.Module, _place_within, _METHODS)


@contextmanager
def plain_module_calls() -> Iterator[None]:
    """Context in which module calls are torch's own, for what looks into them."""
    module = torch.nn.Module
    with _changing:
        before = vars(module)["__call__"]
        if type(before) is Enclosure:  # and no patch of the program's
            module.__call__ = before.__wrapped__  # type: ignore[method-assign]
        try:
            yield
        finally:
            if vars(module)["__call__"] is not before:
                module.__call__ = before  # type: ignore[method-assign]


_changing = threading.RLock()


def slot_of(module: Any, parameter: Any) -> tuple[str, Any] | None:
    """Name and shape of a parameter that a module holds; None of any other object."""
    if isinstance(module, torch.nn.Module) and isinstance(parameter, torch.nn.Parameter):
        for name, one in module._parameters.items():
            if one is parameter and not torch.nn.parameter.is_lazy(parameter):
                with Unseen():  # modes of the program hear of no read of ours
                    return name, tuple(parameter.shape)
    return None


def module_path(subjects: Sequence[Any]) -> str:
    """Path of the last module from the first, as `named_modules` spells it: "layer1.0.conv1".

    What libraries wrap around a model, such as DDP, is no part of it.
    """
    parts: list[str] = []
    outer = None
    for inner in subjects:
        if not isinstance(inner, torch.nn.Module):
            continue
        if outer is not None and inner is not outer:
            parts.append(without_wrappers(outer, _name_within(outer, inner)))
        outer = inner
    return ".".join(filter(None, parts))


def part_of(value: Any, variable: Any) -> str:
    """Name the part of a parameter that a view of it is by its offset, "@16"; "" for all elements."""
    if value is variable or value.layout is not torch.strided or value.numel() >= variable.numel():
        return ""
    return f"@{value.storage_offset()}"


class Paths:
    """Paths of parameters in the outermost of the modules that enclose an op: "layer1.0.conv1.weight".

    It keeps no module alive.
    """

    _names: ClassVar["weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]]"] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, subjects: Sequence[Any]) -> None:
        self._modules = [weakref.ref(one) for one in subjects if isinstance(one, torch.nn.Module)]

    def __call__(self, variable: Any) -> str | None:
        """The first name of a parameter in the outermost module that has it; None of any other tensor."""
        modules = [one for one in (reference() for reference in self._modules) if one is not None]
        for count, module in enumerate(modules, 1):
            name = self._name(module, variable)
            if name is not None:
                parts = module_path(modules[:count]), without_wrappers(module, name)
                return ".".join(part for part in parts if part)
        return None

    def _name(self, module: torch.nn.Module, variable: Any) -> str | None:
        known = self._names.setdefault(module, {})
        name = known.get(id(variable))
        if name is None or _held_at(module, name) is not variable:
            known.clear()
            known.update((id(one), path) for path, one in module.named_parameters())
            name = known.get(id(variable))
        return name


def _held_at(module: torch.nn.Module, path: str) -> Any:
    holder, _, name = path.rpartition(".")
    try:
        return getattr(module.get_submodule(holder), name)
    except AttributeError:
        return None


def _name_within(outer: torch.nn.Module, inner: torch.nn.Module) -> str:
    """Return the first path of a module in another, or its type where that does not hold it."""
    names = _names.get(outer)
    name = None if names is None else names.get(id(inner))
    if name is None or not _is_at(outer, name, inner):
        if not isinstance(outer, torch.nn.Module):  # of another framework
            return f"({type(inner).__name__})"
        names = _names[outer] = {id(one): path for path, one in reversed([*outer.named_modules()])}
        name = names.get(id(inner))
    return f"({type(inner).__name__})" if name is None else name


_names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""Paths in each module by the `id` of what lies there; used after a look whether it still does."""


def _is_at(outer: torch.nn.Module, path: str, inner: torch.nn.Module) -> bool:
    module: torch.nn.Module | None = outer
    for name in path.split(".") if path else ():
        module = None if module is None else module._modules.get(name)
    return module is inner


def _place_within(outer: Any, inner: Any) -> tuple[int, bool]:
    """Hash of a module's path in the one that calls it; one made for this call lies there by its type."""
    name = _name_within(outer, inner)
    return digest(name), not name.startswith("(")
