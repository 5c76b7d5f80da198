"""What rematerialisation needs to know of PyTorch: storages, saved tensors, and how an op is run again."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import amanda
from amanda import interceptor
from amanda.tools.kit._requirements import check
from amanda.tools.remat._operation import flat
from amanda.tools.remat._switches import Switches

Compute = Callable[[Sequence[Any]], Any]


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Settings(NamedTuple):
    """Under which an op ran.

    grad: whether autograd recorded it.  autocast: by device; None for off.  switches: how they stood.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, Any], ...] | None
    switches: list[Any]


class Kind(NamedTuple):
    """What an op is to this tool.

    written: positions of the inputs that it writes; None for all.  pure: whether it may be run again.
    random: whether it may draw random numbers.  scratch: positions that it writes and does not read.
    """

    written: tuple[int, ...] | None = ()
    pure: bool = False
    random: bool = False
    scratch: tuple[int, ...] = ()


_STATISTICS = (3, 4)
_NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType,
)  # fmt: skip


def kind(context: amanda.OpContext) -> Kind:
    """Read it off the schemas of an op's overloads."""
    import torch

    inputs, name = context.get_inputs(), context.get_op_type()
    if context["in_place"]:
        return Kind(None if name.startswith("_fused") else (0,))
    written = tuple(i for i, one in enumerate(inputs) if _is_out(context, one))
    if written:
        return Kind(written)
    native = isinstance(context.get_op(), _NATIVE) or hasattr(context.get_op(), "_descriptor")
    packet = torch.ops.aten.index if name == "getitem" else getattr(torch.ops.aten, name, None)
    if packet is None or not native:
        return Kind()
    overloads = [getattr(packet, one) for one in packet.overloads()]
    if any(one._schema.is_mutable for one in overloads if not _has_out(one)):
        return Kind(None)
    random = any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)
    trained = context["type"] in ("batch_norm", "instance_norm") and len(inputs) > 5 and bool(inputs[5])
    scratch = tuple(i for i in _STATISTICS if inputs[i] is not None) if trained else ()
    return Kind(scratch, True, random or any(isinstance(one, torch.Generator) for one in inputs), scratch)


def _is_out(context: amanda.OpContext, value: Any) -> bool:
    try:
        return value is not None and context.get_value("out") is value
    except amanda.AmandaError:
        return False


def _has_out(overload: Any) -> bool:
    return any(one.is_out for one in overload._schema.arguments)


class Torch:
    """PyTorch's tensors, as far as this tool is concerned."""

    def __init__(self) -> None:
        import torch

        check("remat", "torch")
        self.torch: Any = torch
        self._forward_ad: Any = torch.autograd.forward_ad
        self._switches = Switches(torch)
        self._uses: Any = torch._C._storage_Use_Count
        sample = torch.empty(1)
        address = self.memory(sample)._cdata
        self._offset = self._uses(address) - 1

    # ---- what may be followed ----

    def records(self, inputs: Sequence[Any]) -> bool:
        """Return True if autograd records an op on these inputs, and this tool can run it again."""
        torch = self.torch
        if not torch.is_grad_enabled() or self._forward_ad._current_level >= 0:
            return False
        tensors = self.tensors(inputs)
        if not any(one.requires_grad for one in tensors) or not all(map(self.is_plain, tensors)):
            return False
        return not torch._C._len_torch_dispatch_stack() and not self._has_modes()

    def _has_modes(self) -> bool:
        """Return True if a mode for functions is active besides that of the default device."""
        count = self.torch._C._len_torch_function_stack()
        return count > 0 and any(
            type(self.torch._C._get_function_stack_at(i)).__name__ != "DeviceContext" for i in range(count)
        )

    def is_plain(self, tensor: Any) -> bool:
        """Return True if a tensor is a plain view of its storage."""
        torch = self.torch
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and not tensor.is_inference()
            and tensor.device.type != "meta"
        )

    def tensors(self, values: Sequence[Any]) -> list[Any]:
        """The tensors among values."""
        return [one for one in flat(values) if isinstance(one, self.torch.Tensor)]

    def results(self, result: Any) -> list[Any]:
        """An op's results in order."""
        return flat(result) if type(result) is list or isinstance(result, tuple) else [result]

    # ---- memory ----

    def memory(self, tensor: Any) -> Any:
        """A tensor's storage."""
        return tensor.untyped_storage()

    def uses(self, address: int) -> int:
        """Return the number of tensors that share a storage."""
        return int(self._uses(address)) - self._offset

    def geometry(self, tensor: Any) -> Geometry:
        """Return extents, strides, offset and element type of a tensor in its storage."""
        return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def view(self, memory: Any, geometry: Geometry) -> Any:
        """A tensor on a storage."""
        made = self.torch.empty(0, dtype=geometry.dtype, device=memory.device)
        return made.set_(memory, geometry.offset, geometry.size, geometry.stride)

    def whole(self, memory: Any) -> Any:
        """A tensor of all bytes of a storage."""
        return self.view(memory, Geometry(self.torch.uint8, (memory.nbytes(),), (1,), 0))

    def scratch(self, geometry: Geometry, device: Any) -> Any:
        """Memory for what an op writes."""
        return self.torch.zeros(geometry.size, dtype=geometry.dtype, device=device)

    # ---- running ----

    def as_it_is(self, value: Any) -> Any:
        """Return an input that is no tensor; tensors in the bounds of a slice become numbers."""
        if not isinstance(value, slice):
            return value
        bounds = (value.start, value.stop, value.step)
        return slice(*(int(one) if isinstance(one, self.torch.Tensor) else one for one in bounds))

    def settings(self, inputs: Sequence[Any]) -> Settings:
        """Return the global settings that an op depends on."""
        torch = self.torch
        devices = sorted({"cpu", *(one.device.type for one in self.tensors(inputs))})
        states = tuple(
            (one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices
        )
        autocast = states if any(on for _, on, _ in states) else None
        return Settings(torch.is_grad_enabled(), autocast, self._switches.read())

    def random_states(self, inputs: Sequence[Any]) -> list[Any]:
        """Of the generators that an op on these inputs may draw from."""
        torch = self.torch
        states = [torch.default_generator.get_state()]
        for device in {one.device for one in self.tensors(inputs) if one.device.type != "cpu"}:
            states.append(getattr(torch, device.type).get_rng_state(device))
        states += [one.get_state() for one in flat(inputs) if isinstance(one, torch.Generator)]
        return states

    def are_equal(self, states: Sequence[Any], others: Sequence[Any]) -> bool:
        """Return True if no random number was drawn between two states."""
        return all(self.torch.equal(one, other) for one, other in zip(states, others, strict=True))

    def saving(self, pack: Any, unpack: Any) -> AbstractContextManager[Any] | None:
        """Context in which autograd keeps what `pack` gives; None where the user has a say in it."""
        autograd = self.torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled():
            return None
        if autograd._top_saved_tensors_default_hooks(False) is not None:
            return None
        hooks: AbstractContextManager[Any] = self.torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        return hooks

    def replay(
        self, compute: Compute, inputs: Sequence[Any], settings: Settings
    ) -> tuple[list[Any], list[Any]]:
        """Run an op once more: its results, and what autograd saves meanwhile, in order."""
        torch = self.torch
        saved: list[Any] = []

        def pack(tensor: Any) -> None:
            saved.append(tensor.detach())

        with self.undisturbed(), ExitStack() as stack:
            if settings.autocast is not None or self.settings(inputs).autocast is not None:
                for device, on, dtype in settings.autocast or self._off(inputs):
                    stack.enter_context(torch.autocast(device, dtype, on, cache_enabled=False))
            stack.enter_context(torch.set_grad_enabled(settings.grad))
            stack.enter_context(self._switches.standing(settings.switches))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _unpacked))
            return [self._alone(one) for one in self.results(compute(inputs))], saved

    def _off(self, inputs: Sequence[Any]) -> list[tuple[str, bool, Any]]:
        return [(device, False, dtype) for device, _, dtype in self.settings(inputs).autocast or ()]

    def _alone(self, value: Any) -> Any:
        return value.detach() if isinstance(value, self.torch.Tensor) else value

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Context in which no mode and no subclass of the user's sees what torch is asked for."""
        from torch.utils._python_dispatch import _disable_current_modes

        torch = self.torch
        with ExitStack() as stack:
            if torch._C._len_torch_dispatch_stack():
                stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(torch.no_grad())
            yield

    def expected(self, compute: Compute, inputs: Sequence[Any]) -> int | None:
        """Bytes that an op is going to make, by a run without numbers; None where it has no such run.

        On a thread of its own: there autograd counts its nodes apart, and nothing of the user's is in force.
        """
        given = [self._meta(one) for one in inputs]
        found: list[int] = []

        def run() -> None:
            with (
                interceptor.Suspension(),
                suppress(Exception),
            ):  # what is raised, if anything is, is for the op itself to raise
                found.append(self._bytes_made(compute, given))

        thread = threading.Thread(target=run, name="amanda-remat")
        thread.start()
        thread.join()
        return found[0] if found else None

    def _bytes_made(self, compute: Compute, inputs: Sequence[Any]) -> int:
        made: dict[int, Any] = {}
        given = {self.memory(one)._cdata for one in self.tensors(inputs)}

        def pack(tensor: Any) -> Any:
            made[self.memory(tensor)._cdata] = self.memory(tensor)
            return tensor.detach()

        with self.torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
            results = self.tensors(self.results(compute(inputs)))
        made.update({self.memory(one)._cdata: self.memory(one) for one in results})
        return sum(int(memory.nbytes()) for address, memory in made.items() if address not in given)

    def _meta(self, value: Any) -> Any:
        torch = self.torch
        if type(value) in (list, tuple):
            return type(value)(map(self._meta, value))
        if not isinstance(value, torch.Tensor):
            return torch.device("meta") if isinstance(value, torch.device) else value
        bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return bare.requires_grad_(value.requires_grad)


def _unpacked(packed: Any) -> Any:
    return packed
