"""PyTorch for rematerialisation: storages, saved tensors, and repeated runs of ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, NamedTuple

from amanda import interceptor
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.libraries import tree_map
from amanda.tools.mapping import undisturbed
from amanda.tools.remat._records import Handle

_REQUIRED = RequiredNames(
    "amanda.tools.remat",
    "torch",
    "torch:UntypedStorage._cdata",
    "torch:Tensor._version",
    "torch:_C.DisableTorchFunction",
    "torch:_C._autograd._saved_tensors_hooks_is_enabled",
    "torch:_C._autograd._top_saved_tensors_default_hooks",
    "torch:_C._get_function_stack_at",
    "torch:_C._is_any_autocast_enabled",
    "torch:_C._len_torch_dispatch_stack",
    "torch:_C._len_torch_function_stack",
    "torch:_C._storage_Use_Count",
    "torch.autograd.forward_ad:_current_level",
    "torch:ops.aten.add.Tensor._schema",
    "torch.utils._python_dispatch:_disable_current_modes",
)

Compute = Callable[[Sequence[Any]], Any]


class Geometry(NamedTuple):
    """The layout of a tensor in its storage."""

    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Settings(NamedTuple):
    """Settings at the execution of an op.

    autocast: by device; None for off.  switches: values of `_SWITCHES`.
    """

    autocast: tuple[tuple[str, bool, Any], ...] | None
    switches: list[Any]


_SWITCHES = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
)
"""Getter and setter of each switch by which PyTorch chooses kernels."""


class Torch:
    """The operations of PyTorch that this tool needs."""

    def __init__(self) -> None:
        import torch

        _REQUIRED.check()
        self.torch: Any = torch
        native: Any = torch._C
        self._tensor, self._strided = torch.Tensor, torch.strided
        self._plain = (torch.Tensor, torch.nn.Parameter)
        known = [pair for pair in _SWITCHES if all(hasattr(native, name) for name in pair)]
        self._switches = [(getattr(native, getter), getattr(native, setter)) for getter, setter in known]
        self._last = Settings(None, [])
        sample = torch.empty(1)
        address = sample.untyped_storage()._cdata
        self._offset: int = native._storage_Use_Count(address) - 1

    def records(self, tensors: Sequence[Any]) -> bool:
        """Return True if autograd records an op that reads these tensors, and the op can run again."""
        torch, native = self.torch, self.torch._C
        if not torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
            return False
        if not any(one.requires_grad for one in tensors) or not all(map(self.is_plain, tensors)):
            return False
        modes = map(native._get_function_stack_at, range(native._len_torch_function_stack()))
        disturbed = any(type(mode).__name__ != "DeviceContext" for mode in modes)  # the default device's
        return not disturbed and not native._len_torch_dispatch_stack()

    def is_plain(self, tensor: Any) -> bool:
        """Return True for a strided tensor that its storage and geometry describe."""
        return (
            type(tensor) in self._plain
            and tensor.layout is self._strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and not tensor.is_inference()
            and tensor.device.type != "meta"
        )

    def tensors(self, values: Sequence[Any]) -> list[Any]:
        """Return the tensors among values."""
        kind = self._tensor
        return [one for one in leaves(values) if isinstance(one, kind)]

    def results(self, result: Any) -> list[Any]:
        """Return an op's results in order."""
        return leaves([result])

    def uses(self, address: int) -> int:
        """Return the number of tensors on a storage."""
        count: int = self.torch._C._storage_Use_Count(address)
        return count - self._offset

    def geometry(self, tensor: Any) -> Geometry:
        """Return the geometry of a tensor."""
        return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def view(self, memory: Any, geometry: Geometry) -> Any:
        """Return a tensor on a storage."""
        made = self.torch.empty(0, dtype=geometry.dtype, device=memory.device)
        return made.set_(memory, geometry.offset, geometry.size, geometry.stride)

    def whole(self, memory: Any) -> Any:
        """Return a tensor of all bytes of a storage."""
        return self.view(memory, Geometry(self.torch.uint8, (memory.nbytes(),), (1,), 0))

    def fill(self, handle: Handle, memory: Any) -> None:
        """Give a handle its tensor anew, on a storage."""
        handle.tensor = self.view(memory, handle.geometry)
        handle.version = handle.tensor._version

    def settings(self, tensors: Sequence[Any]) -> Settings:
        """Return the present settings, with autocast for the devices of the inputs."""
        switches, torch = [get() for get, _ in self._switches], self.torch
        if not torch._C._is_any_autocast_enabled():
            if switches != self._last.switches:
                self._last = Settings(None, switches)
            return self._last  # most ops share one, which the garbage collector visits once
        devices = sorted({"cpu", *(one.device.type for one in tensors)})
        states = tuple(
            (one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices
        )
        return Settings(states if any(on for _, on, _ in states) else None, switches)

    def state(self, inputs: Sequence[Any], tensors: Sequence[Any], random: bool) -> list[Any]:
        """Return state that an op must leave unchanged to run again: versions, and states of generators.

        tensors: among the inputs.
        random: read the states of the generators that an op on these inputs may draw from.
        """
        state: list[Any] = [one._version for one in tensors]
        if random:
            torch = self.torch
            devices = {one.device for one in tensors if one.device.type != "cpu"}
            drawn = [torch.default_generator.get_state()]
            drawn += [getattr(torch, device.type).get_rng_state(device) for device in devices]
            drawn += [one.get_state() for one in leaves(inputs) if isinstance(one, torch.Generator)]
            state += [one.numpy().tobytes() for one in drawn]
        return state

    def saving(self, pack: Any, unpack: Any) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves results of `pack`, unless the user has hooks."""
        autograd = self.torch._C._autograd
        enabled = autograd._saved_tensors_hooks_is_enabled()
        if not enabled or autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()
        hooks: AbstractContextManager[Any] = self.torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        return hooks

    def replay(
        self, compute: Compute, inputs: Sequence[Any], settings: Settings
    ) -> tuple[list[Any], list[Any]]:
        """Run an op again; return its results, and the tensors that autograd saves, in order."""
        torch = self.torch
        present = self.settings(self.tensors(inputs))
        off = [(device, False, dtype) for device, _, dtype in present.autocast or ()]
        with undisturbed(), ExitStack() as stack:
            for device, on, dtype in settings.autocast or off:
                stack.enter_context(torch.autocast(device, dtype, on, cache_enabled=False))
            stack.enter_context(torch.enable_grad())
            for (_, turn), now, then in zip(self._switches, present.switches, settings.switches, strict=True):
                if now != then:
                    turn(then)
                    stack.callback(turn, now)
            results, saved = self._observed(compute, inputs)
            return [one.detach() if isinstance(one, torch.Tensor) else one for one in results], saved

    def _observed(self, compute: Compute, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run an op; return its results, and the tensors that autograd saves, in order."""
        saved: list[Any] = []
        hooks = self.torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda one: saved.append(one.detach()), lambda packed: packed):
            return self.results(compute(inputs)), saved

    def unseen(self) -> AbstractContextManager[Any]:
        """Return a context that hides what is read of tensors from the user's modes and tensor subclasses."""
        return self.torch._C.DisableTorchFunction()  # type: ignore[no-any-return]

    def expected(self, compute: Compute, inputs: Sequence[Any]) -> int | None:
        """Return the bytes that an op will make, from a run on the meta device; None if that fails.

        The run has a thread of its own, without the user's settings, where autograd counts apart.
        """
        given = tree_map(self._meta, list(inputs))
        found: list[int] = []

        def run() -> None:
            with interceptor.Suspension(), suppress(Exception):  # which the op itself will raise
                found.append(self._bytes_made(compute, given))

        thread = threading.Thread(target=run, name="amanda-remat")
        thread.start()
        thread.join()
        return found[0] if found else None

    def _bytes_made(self, compute: Compute, inputs: Sequence[Any]) -> int:
        results, saved = self._observed(compute, inputs)
        made = {one.untyped_storage()._cdata: one for one in (*saved, *self.tensors(results))}
        given = {one.untyped_storage()._cdata for one in self.tensors(inputs)}
        return sum(int(made[one].untyped_storage().nbytes()) for one in made.keys() - given)

    def _meta(self, value: Any) -> Any:
        torch = self.torch
        if not isinstance(value, torch.Tensor):
            return torch.device("meta") if isinstance(value, torch.device) else value
        bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return bare.requires_grad_(value.requires_grad)
