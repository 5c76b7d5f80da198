"""Ops of PyTorch that are run again on the same inputs, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import amanda
from amanda.tools.mapping import UNINITIALISED, Rerun, undisturbed
from amanda.tools.sentinel._pytorch import difference, same, tensors

_RERUNS = 4
_VARYING = re.compile(
    r"(Embedding|EmbeddingBag|Index|IndexSelect|IndexAdd|IndexPut|Gather|Scatter|ScatterAdd|Put|Take|Repeat"
    r"|Cumsum|NllLoss2D|Ctc|MaxPool3D|AdaptiveMaxPool|AdaptiveAvgPool|AvgPool3D|FractionalMaxPool|MaxUnpool"
    r"|Upsample|GridSampler|ReflectionPad|ReplicationPad|Convolution|Cudnn|Scaled|Flash|Efficient).*"
)
"""Backward nodes whose kernels on accelerators may add in another order each time, by the list of
torch.use_deterministic_algorithms."""


def reason_to_leave(context: amanda.OpContext) -> str:
    """Return why a forward op is not run again; "" if it may be."""
    import torch

    rerun: Rerun | None = context.get("rerun")
    if rerun is None:
        return "of a compiled graph"
    if context["in_place"] or rerun.written is None or (rerun.written and rerun.written != rerun.scratch):
        return "in place, or into out="
    if not rerun.pure:
        return "not a native op of PyTorch"
    if rerun.random and context["type"] != "scaled_dot_product_attention":
        return "random"
    if context["type"] in UNINITIALISED:
        return "uninitialised"
    packet = getattr(torch.ops.aten, context.get_op_type(), None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    varies = any(torch.Tag.nondeterministic_bitwise in one.tags for one in overloads)
    if varies and not context.get_device().startswith("cpu"):
        return "not deterministic"
    return ""


def reason_to_leave_node(node: Any, device: str) -> str:
    """Return why a backward node is not run again; "" if it may be."""
    import torch

    if isinstance(node, torch.autograd.function.BackwardCFunction) or not hasattr(node, "_sequence_nr"):
        return "not a native op of PyTorch"
    if node.__name__.startswith("CopySlices"):
        return "in place, or into out="
    varies = device != "cpu" and not torch.are_deterministic_algorithms_enabled()
    return "not deterministic" if varies and _VARYING.match(node.__name__) else ""


def forward_again(compute: Callable[..., Any], kind: str, inputs: Sequence[Any], records: bool) -> list[Any]:
    """Run an op on the inputs of an execution that has ended; records: whether autograd recorded that one."""
    import torch

    given = list(inputs)
    if kind in ("batch_norm", "instance_norm"):  # which write their statistics
        given[3:5] = [None if one is None else one.clone() for one in given[3:5]]
    hooks = torch.autograd.graph.saved_tensors_hooks
    with undisturbed(), ExitStack() as stack:
        if records:
            stack.enter_context(torch.enable_grad())
            native: Any = torch._C
            if native._autograd._saved_tensors_hooks_is_enabled():
                stack.enter_context(hooks(lambda one: one, lambda one: one))
        return [one.detach() for one in tensors([compute(given)])]


def compared(first: Sequence[Any], again: Callable[[], list[Any]]) -> tuple[str, str]:
    """Run an op again and compare the bits; return "same", "corruption" or "varies", and the difference.

    Where two runs differ there are more: if all but one agree, that one is corrupt; else the op varies.
    """
    second = again()
    if same(first, second):
        return "same", ""
    groups: list[list[Sequence[Any]]] = [[first], [second]]
    for _ in range(_RERUNS - 1):
        found = again()
        for group in groups:
            if same(group[0], found):
                group.append(found)
                break
        else:
            groups.append([found])
    most = max(map(len, groups))
    if most < _RERUNS:
        return "varies", ""
    odd = next(group[0] for group in groups if len(group) == 1)
    usual = next(group[0] for group in groups if len(group) == most)
    which = "" if odd is first else "the second run of the op is the odd one: "
    return "corruption", which + difference(odd, usual)


def node_again(gradients: Sequence[Any], left: Sequence[Any]) -> Callable[[], list[Any]] | None:
    """Return what runs the backward node that runs now once more; None where there is none to be called.

    left: the gradients that left it, to whose shape and type autograd reduces what a node gives.
    """
    import torch

    node = torch._C._current_autograd_node()
    if node is None or not callable(node):
        return None

    def again() -> list[Any]:
        with undisturbed():
            found = tensors([node(*gradients)])
        if len(found) != len(left):
            return found
        pairs = zip(found, left, strict=True)
        return [one.sum_to_size(like.shape).to(like.dtype) for one, like in pairs]

    return again
