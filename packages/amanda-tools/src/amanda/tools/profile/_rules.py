"""Mapping rules for facts of an op that StandardMapping does not have, for each framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import amanda
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.mapping import itemsize
from amanda.tools.profile._memory import name_of

_REQUIRED = RequiredNames(
    "amanda.tools.profile",
    "torch",
    "torch:UntypedStorage._cdata",
    "torch:_C.DisableTorchFunction",
    "torch:_C._autograd._top_saved_tensors_default_hooks",
    "torch:_C._functions.AccumulateGrad._sequence_nr",
    "torch:autograd._get_sequence_nr",
    "torch:autograd._profiler_enabled",
    "torch:ops.profiler._record_function_enter_new",
    "torch:ops.profiler._record_function_exit._RecordFunction",
)


@dataclass(frozen=True)
class Roles:
    """Facts of an op, which a rule writes as `context["profile"]`.

    passes: whether the op only passes values on, and is not measured.  parallel: whether it runs beside other
    ops.  runs_others: whether it runs ops that have times of their own.
    ranges: whether torch.profiler sees the op's kernels.
    gpu: the device of the op.  record: function that records an event in the queue of the device.
    storages: function that returns the memory of values.  saved: function that returns the memory that a
    forward op saves for its backward pass, from the outputs and the value of `sequence` before the op.
    nbytes: function that returns the bytes of outputs whose end cannot be observed.
    untimed: why an op that only passes has no time of its own; "" for one that moves values alone.
    """

    passes: bool = False
    parallel: bool = False
    runs_others: bool = False
    ranges: bool = False
    gpu: str | None = None
    record: Callable[[Any], Any] | None = None
    storages: Callable[[Iterable[Any]], list[Any]] | None = None
    saved: Callable[[Iterable[Any], int], list[Any]] | None = None
    sequence: Callable[[], int] | None = None
    nbytes: Callable[[Iterable[Any]], int] | None = None
    untimed: str = ""


def _of_any(context: amanda.OpContext) -> None:
    context.setdefault("profile", Roles())


def _of_pytorch(context: amanda.OpContext) -> None:
    if context.is_backward():
        return
    _REQUIRED.check()
    context["profile"] = Roles(
        ranges=True, gpu=_gpu_of(context.get_inputs()), record=_record,
        storages=_storages, saved=_saved, sequence=_sequence,
    )  # fmt: skip


def _gpu_of(inputs: Iterable[Any]) -> str | None:
    """Return the GPU of an op's tensors; None for other devices."""
    import torch

    placed = (torch.Tensor, torch.Generator)  # storages warn that they are deprecated
    for value in leaves(inputs):
        device = value.device if isinstance(value, placed) else value
        if isinstance(device, torch.device) and device.type == "cuda":
            return name_of(device)
    return None


def _record(event: Any) -> Any:
    """Record an event, a new one for None, in the current stream; return None while a graph is captured."""
    from torch import cuda

    if cuda.is_current_stream_capturing():
        return None
    event = event or cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _storages(values: Iterable[Any]) -> list[Any]:
    """Return the storages of the tensors among values, also of those in lists."""
    torch = _torch()
    found: list[Any] = []
    with torch._C.DisableTorchFunction():
        for tensor in leaves(values):
            if not isinstance(tensor, torch.Tensor):
                continue
            try:
                memory = tensor.untyped_storage()
                memory.nbytes()
            except (NotImplementedError, RuntimeError):
                continue  # sparse, or a wrapper without memory of its own
            found.append(memory)
    return found


@cache
def _torch() -> Any:
    import torch

    return torch


def _sequence() -> int:
    """Return the sequence number of the next autograd node on this thread."""
    return int(_torch().autograd._get_sequence_nr())


def _saved(outputs: Iterable[Any], since: int) -> list[Any]:
    """Return the storages that the nodes of an op, from a sequence number on, saved for the backward pass.

    Nodes of Python functions, and saved tensors that hooks pack, are left alone.
    """
    torch, present = _torch(), _sequence()
    if present == since or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return []
    found: list[Any] = []
    seen: set[Any] = set()
    with torch._C.DisableTorchFunction():
        nodes = [one.grad_fn for one in leaves(outputs) if isinstance(one, torch.Tensor)]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or not since <= node._sequence_nr() < present:
                continue
            seen.add(node)
            found += _saved_by(node)
            nodes += [one for one, _ in node.next_functions]
    return _storages(found)


def _saved_by(node: Any) -> Iterator[Any]:
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            yield getattr(node, name)
        except RuntimeError:  # freed, or written into since
            continue


@cache
def _saved_names(kind: Any) -> Sequence[str]:
    return [name for name in vars(kind) if name.startswith("_saved_")]


_SHARED = frozenset(
    {"ExpandDims", "Identity", "IdentityN", "Placeholder", "PlaceholderWithDefault", "PreventGradient",
     "ReadVariableOp", "Reshape", "Snapshot", "Squeeze", "StopGradient"}
)  # fmt: skip
"""Types of TensorFlow's operations whose outputs share the memory of their inputs."""

_CALLS = frozenset(
    {"Case", "If", "MapDefun", "PartitionedCall", "RemoteCall", "StatefulPartitionedCall", "StatelessCase",
     "StatelessIf", "StatelessWhile", "SymbolicGradient", "While"}
)  # fmt: skip
"""Types of operations that run other operations, which have times of their own."""

_FLOW = frozenset(
    {"ControlTrigger", "Enter", "Exit", "LoopCond", "Merge", "NextIteration", "RefEnter", "RefExit",
     "RefMerge", "RefNextIteration", "RefSwitch", "Switch", "_SwitchN"}
)  # fmt: skip
"""Types of version 1's control flow, which pass values on."""


def _of_tensorflow(context: amanda.OpContext) -> None:
    kind = context.get_op_type() if context.is_forward() else str(context.get_backward_op().__name__)

    shape, dtype = context["shape"], context["dtype"]

    def nbytes(values: Iterable[Any]) -> int:
        sizes = ((shape(one) or (), itemsize(dtype(one)) or 0) for one in leaves(values))
        return 0 if kind in _SHARED else sum(prod(extents) * width for extents, width in sizes)

    context["profile"] = Roles(
        passes=kind in _FLOW, parallel=not context.is_eager(), runs_others=kind in _CALLS, nbytes=nbytes
    )


_COMPILED = (
    "are part of programs that XLA compiles and fuses, so that they have no time of their own: "
    "jax.profiler.trace shows the program's, and outside of jit each op is measured"
)


def _of_jax(context: amanda.OpContext) -> None:
    import jax

    values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or ()
    is_traced = any(isinstance(one, jax.core.Tracer) for one in leaves(values))
    context["profile"] = Roles(passes=True, untimed=_COMPILED) if is_traced else Roles()


RULES: Sequence[Sequence[Any]] = (
    ("*", _of_any), ("pytorch", _of_pytorch), ("tensorflow", _of_tensorflow), ("jax", _of_jax),
)  # fmt: skip
