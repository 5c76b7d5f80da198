"""PyTorch for the profile: storages, the optimizer's ops, and the clock of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import amanda
from amanda.tools.kit._requirements import check
from amanda.tools.profile._memory import Storage


def roles(context: amanda.OpContext) -> None:
    """Write what the tool asks for in PyTorch's terms."""
    if context.is_backward():
        return
    check("profile", "torch")
    context["profile.storages"] = storages
    context["profile.saved"], context["profile.sequence"] = saved, sequence
    context["profile.device"] = clock_for(context.get_inputs())


class CudaClock:
    """CUDA events in the stream that is current where the op runs; none is waited for meanwhile."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._free: list[Any] = []

    def mark(self) -> Any:
        """An event behind what was launched; None while a CUDA graph is captured."""
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        """Return True if the stream has reached an event."""
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        """Wait until it has."""
        mark.synchronize()

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds from one event to another."""
        return float(begin.elapsed_time(end))

    def free(self, mark: Any) -> None:
        """Keep an event for another use."""
        self._free.append(mark)


_CLOCKS: dict[str, CudaClock] = {}


def clock_for(inputs: Iterable[Any]) -> CudaClock | None:
    """The clock of the GPU whose tensors an op works on; None for other devices."""
    import torch

    for value in _flat(inputs):
        is_placed = isinstance(
            value, (torch.Tensor, torch.Generator)
        )  # storages warn that they are deprecated
        device = value.device if is_placed else value
        if isinstance(device, torch.device) and device.type == "cuda":
            return _CLOCKS.setdefault(str(device), CudaClock(torch.cuda))
    return None


_DEVICES: dict[Any, str] = {}


def storages(values: Iterable[Any]) -> list[Storage]:
    """The storages of the tensors among values, also of those in lists."""
    import torch

    with torch._C.DisableTorchFunction():
        return list(_storages(torch, values))


def _storages(torch: Any, values: Iterable[Any]) -> Iterator[Storage]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _storages(torch, value)
        elif isinstance(value, torch.Tensor):
            try:
                memory = value.untyped_storage()
                device = value.device
                name = _DEVICES.get(device) or _DEVICES.setdefault(device, str(device))
                yield Storage(memory._cdata, name, memory.nbytes(), memory)
            except (NotImplementedError, RuntimeError):
                continue  # sparse, or a wrapper without memory of its own


_SAVED: dict[type, tuple[str, ...]] = {}


def sequence() -> int:
    """The number that autograd gives to the next node which is made on this thread."""
    import torch

    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def saved(outputs: Iterable[Any], since: int) -> list[Storage]:
    """Return the storages that the nodes of an op, from a sequence number on, saved for the backward pass.

    Nodes of Python functions, and saved tensors that hooks pack, are left alone.
    """
    import torch

    present = sequence()
    if present == since or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return []
    found: list[Any] = []
    seen: set[Any] = set()
    with torch._C.DisableTorchFunction():
        nodes = [one.grad_fn for one in _flat(outputs) if isinstance(one, torch.Tensor)]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or not since <= node._sequence_nr() < present:
                continue
            seen.add(node)
            found += _saved_by(node)
            nodes += [one for one, _ in node.next_functions]
        return list(_storages(torch, found))


def _saved_by(node: Any) -> Iterator[Any]:
    kind = type(node)
    if kind not in _SAVED:
        names = (name for name in vars(kind) if name.startswith("_saved_"))
        _SAVED[kind] = tuple(names)
    for name in _SAVED[kind]:
        try:
            yield getattr(node, name)
        except RuntimeError:  # freed, or written into since
            continue


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
