"""Detours as attributes of torch's modules and classes, where there is no native interceptor."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from amanda.backend import Patches
from amanda.interceptor import Detour, Site

from ._collectives import PROCESS_GROUP
from ._requirements import torch_attribute
from ._targets import NAMESPACES

_FIND_BUILTIN = "_find_builtin"


def set_detours(patches: Patches, sites: Iterable[Site]) -> None:
    """Replace the targets of some sites by detours, wherever torch has them as attributes.

    TorchScript goes on to compile the targets themselves.
    """
    # No dict by target: `torch.mm` equals `torch.dsmm`, which calls the same C function.
    target_detours = [(site.target, Detour(site)) for site in sites]
    python_modules = (
        torch, torch.functional, torch.nn.functional, torch.special, torch.linalg, torch.fft, torch.sparse,
        torch.nested,
    )  # fmt: skip
    native_modules = [getattr(torch._C, name) for name in NAMESPACES if name != "_VariableFunctions"]
    classes = [torch.Tensor, torch.autograd.function._SingleLevelFunction]
    if PROCESS_GROUP:
        classes.append(PROCESS_GROUP)
    patches.replace(target_detours, [*python_modules, *native_modules, *classes])
    # Attributes of this native object cannot be set: another object takes its place, under both its names.
    functions = DetouredFunctions(torch._C._VariableFunctions, target_detours)
    patches.set(torch._C, "_VariableFunctions", functions)
    patches.set(torch._VF, "vf", functions)
    _keep_detours_out_of_scripts(patches)


def _keep_detours_out_of_scripts(patches: Patches) -> None:
    """Make TorchScript compile a detour as the function that it wraps, not as a call of Python.

    Does nothing if this torch finds builtin functions in another way.
    """
    find_builtin = torch_attribute(f"jit._builtins.{_FIND_BUILTIN}")
    if find_builtin is None:
        return

    def find_builtin_of(function: Any) -> Any:
        return find_builtin(function.__wrapped__ if type(function) is Detour else function)

    # `_recursive` has imported the function by name.
    for module in map(torch_attribute, ("jit._builtins", "jit._recursive")):
        if hasattr(module, _FIND_BUILTIN):
            patches.set(module, _FIND_BUILTIN, find_builtin_of)


class DetouredFunctions:
    """Stand-in for an object whose functions cannot be set: each function detoured, or as it is."""

    def __init__(self, functions: Any, target_detours: Sequence[tuple[Any, Detour]]) -> None:
        self._functions = functions
        self._detour_by_target_id = {id(target): detour for target, detour in target_detours}

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        return self._detour_by_target_id.get(id(function), function)

    def __dir__(self) -> list[str]:
        return dir(self._functions)
