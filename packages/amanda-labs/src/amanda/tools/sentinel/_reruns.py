"""Ops of PyTorch that run again on the same inputs, and the bits, hashes and norms of their tensors."""

from __future__ import annotations

import ctypes
import math
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import amanda
from amanda.tools.kit import torch_tensors
from amanda.tools.mapping import UNINITIALISED
from amanda.tools.rerun import Rerun, undisturbed

_RUNS = 4
_VARYING = re.compile(
    r"(Embedding|EmbeddingBag|Index|IndexSelect|IndexAdd|IndexPut|Gather|Scatter|ScatterAdd|Put|Take|Repeat"
    r"|Cumsum|NllLoss2D|Ctc|MaxPool3D|AdaptiveMaxPool|AdaptiveAvgPool|AvgPool3D|FractionalMaxPool|MaxUnpool"
    r"|Upsample|GridSampler|ReflectionPad|ReplicationPad|Convolution|Cudnn|Scaled|Flash|Efficient).*"
)
"""Backward nodes whose kernels on accelerators may add in a new order each time.

Source: the list in torch.use_deterministic_algorithms.
"""


def reason_not_to_rerun(context: amanda.OpContext) -> str:
    """Return the reason not to run a forward op again; "" if it can run again."""
    import torch

    rerun: Rerun | None = context.get("rerun")
    if rerun is None:
        return "of a compiled graph"
    if context["in_place"] or rerun.written is None or (rerun.written and rerun.written != rerun.scratch):
        return "in place, or into out="
    if not rerun.pure:
        return "not a native op of PyTorch"
    # Attention is tagged as random for its dropout, which is checked at each execution.
    if rerun.random and context["type"] != "scaled_dot_product_attention":
        return "random"
    # Its bits are what lay in memory, and differ without a fault.
    if context["type"] in UNINITIALISED:
        return "uninitialised"
    packet = getattr(torch.ops.aten, context.get_op_type(), None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    varies = any(torch.Tag.nondeterministic_bitwise in overload.tags for overload in overloads)
    if varies and not context.get_device().startswith("cpu"):
        return "not deterministic"
    return ""


def reason_not_to_rerun_node(node: Any, device: str) -> str:
    """Return the reason not to run a backward node again; "" if it can run again."""
    import torch

    # A user's backward may count calls or write; native nodes have a sequence number.
    if isinstance(node, torch.autograd.function.BackwardCFunction) or not hasattr(node, "_sequence_nr"):
        return "not a native op of PyTorch"
    if node.__name__.startswith("CopySlices"):
        return "in place, or into out="
    varies = device != "cpu" and not torch.are_deterministic_algorithms_enabled()
    return "not deterministic" if varies and _VARYING.match(node.__name__) else ""


def rerun_op(
    compute: Callable[..., Any], op_type: str, inputs: Sequence[Any], is_recorded: bool
) -> list[Any]:
    """Run an op again on the inputs of an execution that has ended; return its outputs.

    is_recorded: autograd recorded that execution.  Hooks and modes of the program do not see the run.
    """
    import torch

    arguments = list(inputs)
    if op_type in ("batch_norm", "instance_norm"):
        # Clones of the running mean and variance, which these ops write.
        arguments[3:5] = [None if average is None else average.clone() for average in arguments[3:5]]
    hooks = torch.autograd.graph.saved_tensors_hooks
    with undisturbed(), ExitStack() as stack:
        # Some kernels take another path where nothing is recorded, with other bits.
        if is_recorded:
            stack.enter_context(torch.enable_grad())
            native: Any = torch._C
            # Hooks of the program, as of a checkpoint, must not see what this run saves.
            if native._autograd._saved_tensors_hooks_is_enabled():
                stack.enter_context(hooks(lambda tensor: tensor, lambda tensor: tensor))
        return [output.detach() for output in torch_tensors([compute(arguments)])]


def compare_reruns(first: Sequence[Any], rerun: Callable[[], list[Any]]) -> tuple[str, str]:
    """Run an op again and compare the bits; return "same", "corruption" or "varies", and the difference.

    first: outputs of the program's run.  If two runs differ, more follow: if all runs but one agree, that run
    is corrupt; else the op varies.
    """
    # Two equal runs settle it, which is nearly always; only a difference costs more.
    second = rerun()
    if have_equal_bits(first, second):
        return "same", ""
    groups: list[list[Sequence[Any]]] = [[first], [second]]  # runs with equal bits
    for _ in range(_RUNS - 1):
        outputs = rerun()
        for group in groups:
            if have_equal_bits(group[0], outputs):
                group.append(outputs)
                break
        else:
            groups.append([outputs])
    groups.sort(key=len)
    largest_group = groups[-1]
    # `_RUNS` + 1 runs: one differs from all others, which agree, or the op varies.
    if len(largest_group) < _RUNS:
        return "varies", ""
    (corrupt_run,), _ = groups
    prefix = "" if corrupt_run is first else "the second run of the op is the odd one: "
    return "corruption", prefix + difference(corrupt_run, largest_group[0])


def node_rerunner(incoming: Sequence[Any], outgoing: Sequence[Any]) -> Callable[[], list[Any]] | None:
    """Return a function that runs the present backward node again; None if Python cannot call the node.

    incoming: gradients that the node was given.  outgoing: those that left it, as autograd reduced them.
    """
    import torch

    # No public name leads to the node under way.
    node = torch._C._current_autograd_node()
    if node is None or not callable(node):
        return None

    def rerun_node() -> list[Any]:
        """Run the node again; return its gradients, in the shapes and types of the outgoing ones."""
        with undisturbed():
            outputs = torch_tensors([node(*incoming)])
        # Another number of gradients is a difference by itself.
        if len(outputs) != len(outgoing):
            return outputs
        # Autograd does the same to what a node returns, after the node.
        return [
            output.sum_to_size(reference.shape).to(reference.dtype)
            for output, reference in zip(outputs, outgoing, strict=True)
        ]

    return rerun_node


_BLOCK = 1 << 22
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def is_plain(value: Any) -> bool:
    """Return True for a strided tensor with elements that is of no subclass but Parameter."""
    import torch

    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_quantized or value.is_nested)
        and value.numel() > 0
    )


def is_view_of(x: Any, bases: Sequence[Any]) -> bool:
    """Return True for a view of one of these tensors, but not for one of these tensors itself."""
    if not x._is_view() or any(x is base for base in bases):
        return False
    return any(x._base is (base if base._base is None else base._base) for base in bases)


def norm_of(x: Any) -> Any:
    """Return the Euclidean norm of a floating tensor, computed in float32 or wider, as a float64 tensor."""
    import torch

    # Squares of float16 overflow beyond 256.
    narrow = x.element_size() < 4
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float32 if narrow else None).double().real


def bits(x: Any) -> Any:
    """Return a tensor's elements as integers, in one row."""
    import torch

    x = x.detach().resolve_conj().resolve_neg()
    # Integers are compared: NaN differs from itself, and -0.0 equals 0.0.
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.reshape(-1).contiguous().view(getattr(torch, _INTEGERS[x.element_size()]))


def digest(x: Any) -> Any:
    """Return a hash of a tensor's bits as an int64 tensor on its device.

    On the host it is the CRC-32 of the bytes; elsewhere the sum of all integers, each times an odd number of
    its own, modulo 2**64: no change of a single element leaves it the same.
    """
    import torch

    row = bits(x)
    if row.device.type == "cpu":
        size = row.numel() * row.element_size()
        return torch.tensor(zlib.crc32((ctypes.c_char * size).from_address(row.data_ptr())))
    total = torch.zeros((), dtype=torch.int64, device=row.device)
    # In blocks, since int64 copies take up to eight times the memory of the tensor.
    for start in range(0, row.numel(), _BLOCK):
        block = row[start : start + _BLOCK].long()
        weights = torch.arange(start, start + len(block), device=row.device).mul_(2).add_(1)
        # Odd factors have inverses modulo 2**64, so no change of one element cancels.
        total += (block * weights).sum()
    return total


def have_equal_bits(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
    """Return True if two lists of tensors have the same shapes, element types and bits."""
    return len(xs) == len(ys) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(bits(a).equal(bits(b)))
        for a, b in zip(xs, ys, strict=True)
    )


def difference(outputs: Sequence[Any], rerun_outputs: Sequence[Any]) -> str:
    """Return a sentence on the first output that differs between two runs: how many elements, the first."""
    import torch

    for i, (output, rerun) in enumerate(zip(outputs, rerun_outputs, strict=True)):
        if output.shape != rerun.shape or output.dtype != rerun.dtype:
            return (
                f"output {i} is {tuple(output.shape)} {output.dtype}, and {tuple(rerun.shape)} {rerun.dtype} "
                "when run again"
            )
        different_integers = (bits(output) != bits(rerun)).nonzero()[:, 0]
        if len(different_integers):
            # A complex number counts as two, its real and its imaginary part.
            first = int(different_integers[0]) // (2 if output.is_complex() else 1)
            wide_type = torch.complex128 if output.is_complex() else torch.float64
            row, rerun_row = output.detach().reshape(-1), rerun.detach().reshape(-1)
            wide_row, wide_rerun = row.to(wide_type), rerun_row.to(wide_type)
            share = float((wide_row - wide_rerun).abs().max() / wide_rerun.abs().max())
            size = f", by at most {share:.1e} of the largest" if math.isfinite(share) else ""
            return (
                f"{len(different_integers):,} of {output.numel():,} elements of output {i} differ from those "
                f"of a run with the same inputs{size}, the first at {first:,}: {row[first].item()!r} instead "
                f"of {rerun_row[first].item()!r}"
            )
    return f"{len(outputs)} outputs, and {len(rerun_outputs)} when run again"


def to_host(norms: Sequence[Any]) -> list[float]:
    """Return scalars on any devices as floats, with one transfer for each device."""
    import torch

    indices_by_device: dict[Any, list[int]] = {}
    for i, norm in enumerate(norms):
        indices_by_device.setdefault(norm.device, []).append(i)
    values = [0.0] * len(norms)
    for indices in indices_by_device.values():
        host_values = torch.stack([norms[i] for i in indices]).tolist()
        for index, value in zip(indices, host_values, strict=True):
            values[index] = value
    return values
