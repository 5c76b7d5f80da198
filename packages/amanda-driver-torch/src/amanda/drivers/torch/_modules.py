"""Paths of modules and parameters in a model, slots of handed-in parameters, and calls of modules as regions.

Wrapper modules that libraries put around a model are left out of the paths, so that results from under DDP,
FSDP, peft or torch.compile have the paths of the bare model.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, ClassVar

import torch
from amanda.backend import ParameterSlot, Patches, path_of_call, place_by_path, type_as_path
from amanda.drivers.torch._levels import innermost, is_wrapped
from amanda.drivers.torch._overrides import WithoutTorchFunction
from amanda.interceptor import Enclosure

_METHODS = ("_wrapped_call_impl", "_call_impl")
_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    f"{_CHECKPOINT}.CheckpointWrapper": "_checkpoint_wrapped_module",
    f"{_CHECKPOINT}.OffloadWrapper": "_checkpoint_wrapped_module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "peft.peft_model.PeftModel": "base_model",
    "peft.tuners.tuners_utils.BaseTuner": "model",
    "peft.tuners.tuners_utils.BaseTunerLayer": "base_layer",
}
"""The attribute with the wrapped module, by the full name of the wrapper's class or a base of it."""


def enclose_modules(patches: Patches) -> None:
    """Make each call of a module a region: the ops in it belong to that module."""
    patches.track_module_calls(torch.nn.Module, place_by_path(_path_within), _METHODS)


def call_within(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module whose call is the innermost region already."""
    call = type(module).__call__
    return (call.__wrapped__ if type(call) is Enclosure else call)(module, *args, **kwargs)


@contextmanager
def plain_module_calls() -> Iterator[None]:
    """Make module calls torch's own within the context: dynamo traces `Module.__call__` as it finds it.

    Other threads call modules so too; to enter the context they wait for its end.  A program's patch stays.
    """
    module = torch.nn.Module
    with _patch_lock:
        call_before = vars(module)["__call__"]
        if type(call_before) is Enclosure:  # a patch of the program's stays
            module.__call__ = call_before.__wrapped__  # type: ignore[method-assign]
        try:
            yield
        finally:
            if vars(module)["__call__"] is not call_before:
                module.__call__ = call_before  # type: ignore[method-assign]


_patch_lock = threading.RLock()


def slot_of(module: Any, parameter: Any) -> tuple[str, Any] | None:
    """Return the slot of a parameter in a module: name and shape; None if the module does not hold it.

    None, too, for a lazy parameter, which has no shape yet.
    """
    if isinstance(module, torch.nn.Module) and isinstance(parameter, torch.nn.Parameter):
        for name, module_parameter in module._parameters.items():
            if module_parameter is parameter and not torch.nn.parameter.is_lazy(parameter):
                # Modes of the program must not see that the driver reads a shape.
                with WithoutTorchFunction():
                    return name, tuple(parameter.shape)
    return None


def modules_among(subjects: Sequence[Any]) -> list[torch.nn.Module]:
    """Return the modules of torch among the objects of calls, which may be of other frameworks too."""
    return [subject for subject in subjects if isinstance(subject, torch.nn.Module)]


def module_path(modules: Sequence[torch.nn.Module]) -> str:
    """Return the path of the last module in the first, as `named_modules` spells it: "layer1.0.conv1".

    Wrappers that libraries put around a model, such as DDP, are not part of the path.
    """
    return path_of_call(modules, lambda outer, inner: strip_wrappers(outer, _path_within(outer, inner)))


class HandedInParameter(ParameterSlot):
    """The slot of a module for a parameter whose tensor is handed in, as by `torch.func.functional_call`.

    name: of the parameter in its module.  shape: without the axes of batches, as of one model of an ensemble.
    framework: the attribute by which tools choose the tensors of a framework.
    """

    framework = "torch"

    def __init__(self, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.name, self.shape = name, tuple(tensor.shape)
        super().__init__(module, (name, self.shape), tensor)
        self._module = weakref.ref(module)

    @property
    def module(self) -> torch.nn.Module | None:
        """Return the module; None once it is dead."""
        return self._module()

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor that lies in the slot now; None once the module is dead."""
        module = self._module()
        return None if module is None else module._parameters.get(self.name)

    def numel(self) -> int:
        """Return the number of elements, of one model of an ensemble."""
        return prod(self.shape)


class VariableFinder:
    """Function that finds the variables of an op: parameters, leaves, and slots for what is handed in.

    The op's module is held weakly.
    """

    _slots_by_module: ClassVar[
        "weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[str, Any], HandedInParameter]]"
    ] = weakref.WeakKeyDictionary()

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._innermost_module = weakref.ref(modules[-1]) if modules else None

    def __call__(self, value: Any) -> Any:
        """Return the parameter, leaf or slot whose tensor a value is or views; None for another value."""
        if not isinstance(value, torch.Tensor):
            return None
        with WithoutTorchFunction():  # routines ask, too
            base = value if value._base is None else value._base
            if isinstance(base, torch.nn.Parameter):
                return base
            slot = self._slot_of(value)
            if slot is not None:
                return slot
            is_leaf = base.requires_grad and base.is_leaf and not is_wrapped(base)
            return base if is_leaf else None

    def _slot_of(self, value: torch.Tensor) -> HandedInParameter | None:
        """Return the slot that holds a value or its base, in the op's module or a child of it; else None.

        Slots that hold a parameter, or a tensor of another subclass, are left out.
        """
        module = None if self._innermost_module is None else self._innermost_module()
        if module is None:
            return None
        # Of children too: MultiheadAttention reads the weights of its projection itself.
        for owner in (module, *module.children()):
            for name, tensor in owner._parameters.items():
                # A subclass says itself what operations on it do; wrappers of transforms are of this class.
                if type(tensor) is not torch.Tensor:
                    continue
                if value is tensor or _begins_within(innermost(value), innermost(tensor)):
                    return self._slot_at(owner, name, tensor)
        return None

    def _slot_at(self, owner: torch.nn.Module, name: str, tensor: torch.Tensor) -> HandedInParameter:
        """Return the one slot of a module for a name and a tensor's shape; make it the first time."""
        slot_by_key = self._slots_by_module.setdefault(owner, {})
        key = name, tuple(tensor.shape)
        if key not in slot_by_key:
            slot_by_key[key] = HandedInParameter(owner, name, tensor)
        return slot_by_key[key]


def _begins_within(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if a strided view begins within the elements of a tensor, in the same base tensor."""
    if view.layout is not torch.strided or tensor.layout is not torch.strided or view.is_nested:
        return False
    view_base = view if view._base is None else view._base
    tensor_base = tensor if tensor._base is None else tensor._base
    if view_base is not tensor_base or not tensor.numel():
        return False
    # Parameters may be views of one vector of them all: the view must begin within this parameter.
    last_element = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.storage_offset() <= view.storage_offset() <= last_element


def part_of(value: Any, variable: Any) -> str:
    """Return the part of a parameter that a view reads, as its offset: "@16"; "" for all elements."""
    with WithoutTorchFunction():
        if value is variable or value.layout is not torch.strided or value.numel() >= variable.numel():
            return ""
        return f"@{value.storage_offset()}"


class ParameterPaths:
    """Find paths of parameters in the outermost of the modules that enclose an op: "layer1.0.conv1.weight".

    The modules are held weakly.
    """

    _paths_by_module: ClassVar["weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]]"] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]

    def __call__(self, variable: Any) -> str | None:
        """Return the path of a parameter in the outermost module that holds it; None for any other tensor.

        The path of a slot is that of its module.
        """
        modules = [module for module in (reference() for reference in self._modules) if module is not None]
        if isinstance(variable, HandedInParameter):
            return self._path_of_slot(modules, variable)
        for count, module in enumerate(modules, 1):
            name = self._cached_path(module, variable)
            if name is not None:
                parts = module_path(modules[:count]), strip_wrappers(module, name)
                return ".".join(part for part in parts if part)
        return None

    @staticmethod
    def _path_of_slot(modules: Sequence[torch.nn.Module], slot: HandedInParameter) -> str | None:
        """Return the path of a slot of one of the enclosing modules, or of a child of the last of them.

        None once the module of the slot is dead.
        """
        owner = slot.module
        if owner is None:
            return None
        modules_around_owner = modules[: modules.index(owner)] if owner in modules else modules
        path_of_owner = module_path([*modules_around_owner, owner])
        return f"{path_of_owner}.{slot.name}" if path_of_owner else slot.name

    def _cached_path(self, module: torch.nn.Module, variable: Any) -> str | None:
        """Return the path of a parameter in a module; None if the module does not hold it."""
        # Paths are cached by `id`, which another object may have by now: each use looks whether the
        # parameter still lies there, and reads all paths again if not.
        path_by_id = self._paths_by_module.setdefault(module, {})
        path = path_by_id.get(id(variable))
        if path is None or _parameter_at(module, path) is not variable:
            path_by_id.clear()
            path_by_id.update((id(parameter), path) for path, parameter in module.named_parameters())
            path = path_by_id.get(id(variable))
        return path


def _parameter_at(module: torch.nn.Module, path: str) -> Any:
    """Return the parameter at a path in a module; None if there is none."""
    holder, _, name = path.rpartition(".")
    try:
        return getattr(module.get_submodule(holder), name)
    except AttributeError:
        return None


def _path_within(outer: torch.nn.Module, inner: torch.nn.Module) -> str:
    """Return the first path of a module in another; "(Type)" if the other module does not hold it."""
    cached_path_by_id = _submodule_paths.get(outer)
    path = None if cached_path_by_id is None else cached_path_by_id.get(id(inner))
    if path is None or not _holds_at(outer, path, inner):
        if not isinstance(outer, torch.nn.Module):  # of another framework
            return type_as_path(inner)
        path_by_id = _first_paths(outer)
        _submodule_paths[outer] = path_by_id
        path = path_by_id.get(id(inner))
    return type_as_path(inner) if path is None else path


_submodule_paths: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
"""Paths of submodules by `id`, for each module; a path is used only if the submodule still lies there."""


_NAMED_MODULES = torch.nn.Module.named_modules


def _first_paths(outer: torch.nn.Module) -> dict[int, str]:
    """Return the first path of each module in another by `id`, as `named_modules` spells it."""
    path_by_id: dict[int, str] = {}
    # Each module that calls others comes here: torch's recursion of generators takes several times as long.
    modules_to_visit = [("", outer)]
    while modules_to_visit:
        path, module = modules_to_visit.pop()
        if id(module) in path_by_id:
            continue
        if getattr(module.named_modules, "__func__", None) is not _NAMED_MODULES:  # which has other paths
            # Reversed, so that of a module in several places the first path stays.
            return {id(module): path for path, module in reversed([*outer.named_modules()])}
        path_by_id[id(module)] = path
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child) for name, child in module._modules.items() if child is not None]
        modules_to_visit += reversed(children)
    return path_by_id


def _holds_at(outer: torch.nn.Module, path: str, inner: torch.nn.Module) -> bool:
    """Return True if `inner` is the submodule of `outer` at a path; "" is the path of `outer` itself."""
    if "." not in path:  # of a child, as the path of nearly every call within its caller
        return outer._modules.get(path) is inner if path else outer is inner
    module: torch.nn.Module | None = outer
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module is inner


@cache
def wrapped_attribute(module_class: Any) -> str | None:
    """Return the attribute that holds the wrapped module in modules of a class; None for other classes."""
    # By name, so that no library need be imported to recognise its wrappers.
    names = (f"{base.__module__}.{base.__qualname__}" for base in module_class.__mro__)
    return next((WRAPPERS[name] for name in names if name in WRAPPERS), None)


def strip_wrappers(outer: torch.nn.Module, path: str) -> str:
    """Return the path of a submodule or a parameter in a module, without the attributes of wrappers.

    path: as `named_modules` or `named_parameters` spells it.
    """
    if "." not in path:  # of a child, as the path of nearly every call within its caller
        outer_class: Any = type(outer)
        return "" if path == wrapped_attribute(outer_class) else path
    parts, module = [], outer
    for part in path.split("."):
        module_class: Any = type(module)
        if part and part != wrapped_attribute(module_class):
            parts.append(part)
        submodule = module._modules.get(part)
        module = module if submodule is None else submodule  # the last part may name a parameter
    return ".".join(parts)


def strip_wrappers_by_stack(path: str, stack: Iterable[tuple[str, Any]]) -> str:
    """Return a path without the attributes of wrappers, from a compiler's stack of module calls.

    stack: path and class, or the class' full name, of each of the modules that enclose the last.
    """
    parts = path.split(".") if path else []
    positions_to_skip = set()
    for outer_path, outer_class in stack:
        is_name = isinstance(outer_class, str)
        attribute = WRAPPERS.get(outer_class) if is_name else wrapped_attribute(outer_class)
        outer_parts = outer_path.split(".") if outer_path else []
        if attribute is not None and parts[: len(outer_parts) + 1] == [*outer_parts, attribute]:
            positions_to_skip.add(len(outer_parts))
    return ".".join(part for i, part in enumerate(parts) if i not in positions_to_skip)
