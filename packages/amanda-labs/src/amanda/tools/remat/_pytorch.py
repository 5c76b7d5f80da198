"""PyTorch for rematerialisation: storages, saved tensors, and repeated runs of ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from amanda import interceptor
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.libraries import tree_map
from amanda.tools.remat._storage import Handle
from amanda.tools.rerun import undisturbed

_REQUIRED = RequiredNames(
    "amanda.tools.remat",
    "torch",
    "torch:UntypedStorage._cdata",
    "torch:Tensor._version",
    "torch:_C.DisableTorchFunction",
    "torch:_C._functorch.get_unwrapped",
    "torch:_C._functorch.is_functorch_wrapped_tensor",
    "torch:_C._functorch.peek_interpreter_stack",
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


def is_in_transform() -> bool:
    """Return True inside of a transform of torch.func, such as vmap or grad."""
    import torch

    return torch._C._functorch.peek_interpreter_stack() is not None


def _unwrap(tensor: Any) -> Any:
    """Return the tensor with memory that transforms wrap; other tensors as they are."""
    import torch

    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


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


class TorchRuntime:
    """Functions of PyTorch for storages, saved tensors and repeated runs of ops."""

    def __init__(self) -> None:
        import torch

        _REQUIRED.check()
        self.torch: Any = torch
        native: Any = torch._C
        self._tensor, self._strided = torch.Tensor, torch.strided
        self._plain_classes = (torch.Tensor, torch.nn.Parameter)
        available = [pair for pair in _SWITCHES if all(hasattr(native, name) for name in pair)]
        self._switches = [(getattr(native, getter), getattr(native, setter)) for getter, setter in available]
        self._last_settings = Settings(None, [])
        # The use count includes references that are not tensors; a sample with one tensor shows how many.
        sample = torch.empty(1)
        address = sample.untyped_storage()._cdata  # of the storage in C++
        self._extra_uses: int = native._storage_Use_Count(address) - 1

    def will_record(self, tensors: Sequence[Any]) -> bool:
        """Return True if autograd will record an op that reads these tensors, and the op can run again."""
        torch, native = self.torch, self.torch._C
        # Forward-mode levels keep tangents that a repeated run would not have.
        if not torch.is_grad_enabled() or torch.autograd.forward_ad._current_level >= 0:
            return False
        if not any(tensor.requires_grad for tensor in tensors) or not all(map(self.is_plain, tensors)):
            return False
        modes = map(native._get_function_stack_at, range(native._len_torch_function_stack()))
        # A mode of the program may change what an op computes, and is not there at a repeated run.
        has_user_mode = any(type(mode).__name__ != "DeviceContext" for mode in modes)  # the default device's
        return not has_user_mode and not native._len_torch_dispatch_stack()

    def is_plain(self, tensor: Any) -> bool:
        """Return True for a tensor that can be rebuilt from its storage and geometry."""
        return (
            type(tensor) in self._plain_classes
            and tensor.layout is self._strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and not tensor.is_inference()
            and tensor.device.type != "meta"
        )

    def tensors(self, values: Sequence[Any]) -> list[Any]:
        """Return the tensors among values; inside of transforms of torch.func those that they wrap."""
        tensor_class = self._tensor
        tensors = [value for value in leaves(values) if isinstance(value, tensor_class)]
        return [_unwrap(tensor) for tensor in tensors] if is_in_transform() else tensors

    def results_of(self, result: Any) -> list[Any]:
        """Return the values that an op's result consists of, in their order."""
        return leaves([result])

    def use_count(self, address: int) -> int:
        """Return the number of tensors on a storage."""
        count: int = self.torch._C._storage_Use_Count(address)
        return count - self._extra_uses

    def geometry(self, tensor: Any) -> Geometry:
        """Return the geometry of a tensor."""
        return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def view(self, memory: Any, geometry: Geometry) -> Any:
        """Return a tensor of a geometry in a storage."""
        # `set_` makes a view of any memory, without autograd and without a copy.
        tensor = self.torch.empty(0, dtype=geometry.dtype, device=memory.device)
        return tensor.set_(memory, geometry.offset, geometry.size, geometry.stride)

    def byte_tensor(self, memory: Any) -> Any:
        """Return a uint8 tensor of all bytes of a storage."""
        return self.view(memory, Geometry(self.torch.uint8, (memory.nbytes(),), (1,), 0))

    def refill(self, handle: Handle, memory: Any) -> None:
        """Set a handle's tensor again, in a storage, and its version."""
        handle.tensor = self.view(memory, handle.geometry)
        handle.version = handle.tensor._version

    def settings(self, tensors: Sequence[Any]) -> Settings:
        """Return the switches of torch, and autocast by device of an op's input tensors; None if off."""
        switches, torch = [get() for get, _ in self._switches], self.torch
        if not torch._C._is_any_autocast_enabled():
            if switches != self._last_settings.switches:
                self._last_settings = Settings(None, switches)
            return self._last_settings  # shared by most ops, so the garbage collector has fewer objects
        devices = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
        states = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in devices
        )
        return Settings(states if any(enabled for _, enabled, _ in states) else None, switches)

    def versions_and_generators(
        self, inputs: Sequence[Any], tensors: Sequence[Any], random: bool
    ) -> list[Any]:
        """Return state that an op must leave unchanged to be run again later: versions of its input tensors.

        random: also the states of the generators that an op on these inputs may draw from.
        """
        state: list[Any] = [tensor._version for tensor in tensors]
        if random:
            torch = self.torch
            devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
            generator_states = [torch.default_generator.get_state()]
            generator_states += [getattr(torch, device.type).get_rng_state(device) for device in devices]
            # A generator that is passed to the op is advanced like the default one.
            generator_states += [
                value.get_state() for value in leaves(inputs) if isinstance(value, torch.Generator)
            ]
            state += [generator_state.numpy().tobytes() for generator_state in generator_states]
        return state

    def saved_tensors_context(self, pack: Any, unpack: Any) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves the results of `pack`.

        Without effect if the user has hooks, or has disabled them.
        """
        autograd = self.torch._C._autograd
        enabled = autograd._saved_tensors_hooks_is_enabled()
        # The innermost hooks alone are called: ours would hide the program's.
        if not enabled or autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()
        hooks: AbstractContextManager[Any] = self.torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        return hooks

    def replay(
        self, compute: Compute, inputs: Sequence[Any], settings: Settings
    ) -> tuple[list[Any], list[Any]]:
        """Run an op again under the settings of its first run; return results and saved tensors, detached.

        The program's modes and hooks do not see the run.
        """
        torch = self.torch
        current_settings = self.settings(self.tensors(inputs))
        with undisturbed(), self._restored_settings(settings, current_settings):
            # As at the first run: only with gradients does autograd save what the backward pass reads.
            with torch.enable_grad():
                results, saved_tensors = self._run_and_collect_saved(compute, inputs)
            # The graph of the repeated run is not needed: the first one is still in place.
            detached_results = [
                result.detach() if isinstance(result, torch.Tensor) else result for result in results
            ]
            return detached_results, saved_tensors

    @contextmanager
    def _restored_settings(self, settings: Settings, current_settings: Settings) -> Iterator[None]:
        """Return a context with the autocast and the switches of an op's first run."""
        # Off, if the first run had no autocast and the present code has one.
        disabled_autocast = [(device, False, dtype) for device, _, dtype in current_settings.autocast or ()]
        with ExitStack() as stack:
            for device, enabled, dtype in settings.autocast or disabled_autocast:
                # Without autocast's cache, whose casts would hold on to weights.
                stack.enter_context(self.torch.autocast(device, dtype, enabled, cache_enabled=False))
            for (_, set_switch), current_value, recorded_value in zip(
                self._switches, current_settings.switches, settings.switches, strict=True
            ):
                if current_value != recorded_value:
                    set_switch(recorded_value)
                    stack.callback(set_switch, current_value)
            yield

    def _run_and_collect_saved(self, compute: Compute, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run an op; return its results, and the tensors that autograd saves, detached, in order."""
        saved_tensors: list[Any] = []
        hooks = self.torch.autograd.graph.saved_tensors_hooks
        with hooks(lambda tensor: saved_tensors.append(tensor.detach()), lambda packed: packed):
            return self.results_of(compute(inputs)), saved_tensors

    def without_torch_function(self) -> AbstractContextManager[Any]:
        """Return a context in which the user's modes and tensor subclasses do not see reads of tensors."""
        return self.torch._C.DisableTorchFunction()  # type: ignore[no-any-return]

    def expected_bytes(self, compute: Compute, inputs: Sequence[Any]) -> int | None:
        """Return the bytes of new storages of an op, from a run on the meta device; None if it fails.

        The run is on a new thread, so that it sees none of the user's modes and does not advance autograd's
        sequence numbers, which are per thread.
        """
        meta_inputs = tree_map(self._on_meta_device, list(inputs))
        sizes: list[int] = []

        def measure() -> None:
            with interceptor.Suspension(), suppress(Exception):  # the op itself will raise it again
                sizes.append(self._bytes_made(compute, meta_inputs))

        thread = threading.Thread(target=measure, name="amanda-remat")
        thread.start()
        thread.join()
        return sizes[0] if sizes else None

    def _bytes_made(self, compute: Compute, inputs: Sequence[Any]) -> int:
        """Run an op; return the bytes of the storages that it adds to those of its inputs."""
        results, saved_tensors = self._run_and_collect_saved(compute, inputs)
        storages_made = {
            tensor.untyped_storage()._cdata: tensor for tensor in (*saved_tensors, *self.tensors(results))
        }
        input_storages = {tensor.untyped_storage()._cdata for tensor in self.tensors(inputs)}
        return sum(
            int(storages_made[address].untyped_storage().nbytes())
            # A view of an input needs no memory.
            for address in storages_made.keys() - input_storages
        )

    def _on_meta_device(self, value: Any) -> Any:
        """Return a tensor without memory like this one, and the meta device for a device; else the value."""
        torch = self.torch
        if not isinstance(value, torch.Tensor):
            return torch.device("meta") if isinstance(value, torch.device) else value
        meta_tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return meta_tensor.requires_grad_(value.requires_grad)
