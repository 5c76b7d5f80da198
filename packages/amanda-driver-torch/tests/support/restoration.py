"""What must be as it was after a scope: read from memory and from torch, not from the driver."""

import ctypes
import inspect
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
import torch.utils.checkpoint

from amanda import interceptor

_WORD = ctypes.sizeof(ctypes.c_void_p)
_MAPPING = 14 * _WORD  # of a PyTypeObject's tp_as_mapping
_THIRD, _SIXTH = 5 * _WORD, 6 * _WORD  # what a descriptor points to, and a slot's function

NAMESPACES = ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")


def _word(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def _natives() -> Iterator[Any]:
    for name in NAMESPACES:
        namespace = getattr(torch._C, name)
        yield from (getattr(namespace, each) for each in {*dir(namespace)} - {*dir(object)})
    for holder in (torch._C.TensorBase, torch._C._FunctionBase, torch._C.ScriptFunction):
        yield from vars(holder).values()


def _heirs(kind: type) -> Iterator[type]:
    yield kind
    for heir in kind.__subclasses__():
        yield from _heirs(heir)


def _regions(natives: list[Any]) -> Iterator[tuple[int, int]]:
    """Address and size of every definition that a native callable of torch is called through."""
    for native in natives:
        kind = type(native).__name__
        if kind == "builtin_function_or_method":
            yield id(native) + 2 * _WORD, _WORD
            yield _word(id(native) + 2 * _WORD), 4 * _WORD
            yield id(native) + 6 * _WORD, _WORD
        elif kind in ("method_descriptor", "classmethod_descriptor"):
            yield id(native) + _THIRD, _WORD
            yield _word(id(native) + _THIRD), 4 * _WORD
        elif kind == "getset_descriptor":
            yield id(native) + _THIRD, _WORD
            yield _word(id(native) + _THIRD), 5 * _WORD
        elif kind == "wrapper_descriptor":
            yield id(native) + _THIRD, 2 * _WORD
    for heir in (torch.Tensor, torch.nn.Parameter, torch._C.TensorBase):
        if _word(id(heir) + _MAPPING):
            yield _word(id(heir) + _MAPPING), 3 * _WORD


def _holders() -> list[Any]:
    named = [
        torch, torch.functional, torch.nn.functional, torch.autograd, torch.autograd.graph, torch._VF,
        torch.autograd.function, torch.utils.checkpoint, torch.overrides, torch._tensor, torch._C,
        torch.nn.modules.module, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch._C.TensorBase,
        torch.autograd.function._SingleLevelFunction, torch.autograd.Function, torch._ops.OpOverload,
        torch._ops.OpOverloadPacket, torch._C.ScriptFunction, torch._C.ScriptMethod, sys,
        torch.utils.checkpoint.CheckpointFunction, torch.special, torch.linalg, torch.fft, torch.sparse,
        torch.nested, threading, threading.Thread, ThreadPoolExecutor, ThreadPool,
        *(getattr(torch._C, name) for name in NAMESPACES),
    ]  # fmt: skip
    return [holder for holder in named if inspect.ismodule(holder) or isinstance(holder, type)]


_LASTING = frozenset(
    ["last_exc", "last_type", "last_value", "last_traceback", "ps1", "ps2", "__warningregistry__"]
)
_GLOBAL_HOOKS = [name for name in vars(torch.nn.modules.module) if name.startswith("_global_")]


class Restoration:
    """A reading of all that a scope changes; equal readings mean that it was put back."""

    def __init__(self) -> None:
        self._natives = list(_natives())  # held, so that no address is another's
        self._areas = list(dict.fromkeys(_regions(self._natives)))
        self._named = _holders()

    def pointers(self) -> bytes:
        """The native definitions themselves, byte by byte."""
        return b"".join(ctypes.string_at(address, size) for address, size in self._areas)

    def attributes(self) -> list[dict[str, int]]:
        """Which object every attribute of torch's namespaces and classes is."""
        return [
            {name: id(value) for name, value in vars(holder).items() if name not in _LASTING}
            for holder in self._named
        ]

    def surroundings(self) -> dict[str, Any]:
        """States of torch and of the interceptor that belong to the thread or the process."""
        native: Any = torch._C
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        hooks = native._autograd._top_saved_tensors_default_hooks(True)
        return {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "autocast": [torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "functions": str(native._get_torch_function_state()),
            "modes": native._len_torch_function_stack(),
            "dispatch modes": native._len_torch_dispatch_stack(),
            "transforms": native._functorch.peek_interpreter_stack(),
            "saved": hooks,
            "saved allowed": native._autograd._saved_tensors_hooks_is_enabled(),
            "module hooks": [repr(vars(torch.nn.modules.module)[name]) for name in _GLOBAL_HOOKS],
            "checkpoint": len(torch.utils.checkpoint._checkpoint_contexts)
            if hasattr(torch.utils.checkpoint, "_checkpoint_contexts")
            else 0,
            "stance": repr(dynamo._stance) if dynamo is not None else "",
            "finders": [id(finder) for finder in sys.meta_path],
            "recursion": sys.getrecursionlimit(),
            "threads": threading.active_count(),
            "activation": interceptor.active(),
            "enclosing": interceptor.subjects(),
        }

    def random(self) -> list[Any]:
        """State of the generators."""
        return [torch.get_rng_state().tolist(), random.getstate()]

    def __call__(self) -> list[Any]:
        """Everything but the generators."""
        return [self.pointers(), self.attributes(), self.surroundings()]
