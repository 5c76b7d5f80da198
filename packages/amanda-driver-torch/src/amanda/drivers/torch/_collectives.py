"""Collectives: the native methods of process groups, and results that are still on their way."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from amanda.backend import Patches, report_unseen
from amanda.interceptor import Suspension

_GATHER = "Any group, Tensor(a!)[][] output_tensors, Tensor[] input_tensors, Any? opts=None"
_INTO = "Any group, Tensor(a!) output, Tensor input, Any? opts=None"
_INTO_EACH = "Any group, Tensor(a!)[] outputs, Tensor[] inputs, Any? opts=None"
_IN_PLACE = "Any group, Tensor(a!)[] tensors, Any? opts=None"
_SCATTER = "Any group, Tensor(a!)[] output_tensors, Tensor[][] input_tensors, Any? opts=None"
_EXCHANGE = "Any group, Tensor(a!)[] output_tensors, Tensor[] input_tensors, Any? opts=None"
_SPLIT = (
    "Any group, Tensor(a!) output, Tensor input, int[] output_split_sizes, int[] input_split_sizes, "
    "Any? opts=None"
)

COLLECTIVE_METHODS = {
    "allreduce": ("all_reduce", _IN_PLACE),
    "allreduce_coalesced": ("all_reduce", _IN_PLACE),
    "broadcast": ("broadcast", _IN_PLACE),
    "reduce": ("reduce", _IN_PLACE),
    "allgather": ("all_gather", _GATHER),
    "allgather_coalesced": ("all_gather", _GATHER),
    "all_gather_single": ("all_gather_into_tensor", _INTO),
    "_allgather_base": ("all_gather_into_tensor", _INTO),
    "all_gather_single_coalesced": ("all_gather_into_tensor", _INTO_EACH),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", _INTO_EACH),
    "gather": ("gather", _GATHER),
    "scatter": ("scatter", _SCATTER),
    "reduce_scatter": ("reduce_scatter", _SCATTER),
    "reduce_scatter_single": ("reduce_scatter_tensor", _INTO),
    "_reduce_scatter_base": ("reduce_scatter_tensor", _INTO),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", _INTO_EACH),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", _INTO_EACH),
    "all_to_all_single": ("all_to_all_single", _SPLIT),
    "alltoall_base": ("all_to_all_single", _SPLIT),
    "alltoall": ("all_to_all", _EXCHANGE),
    "send": ("send", "Any group, Tensor[] tensors, int dstRank, int tag"),
    "recv": ("recv", "Any group, Tensor(a!)[] tensors, int srcRank, int tag"),
    "recv_anysource": ("recv", "Any group, Tensor(a!)[] tensors, int tag"),
}  # fmt: skip
"""By the name of a method of `ProcessGroup`: name of the op in `torch.distributed`, and its signature."""

# Builds of torch without distributed support lack the class.
PROCESS_GROUP = getattr(getattr(torch._C, "_distributed_c10d", None), "ProcessGroup", None)

REDUCER_ENTRY = (
    "collectives of DistributedDataParallel",
    "its reducer calls them in C++; ops read the gradients before, and find the reduced ones after",
)


def collectives() -> Iterator[tuple[str, str, Any]]:
    """Yield the name of each collective method of process groups, its op's name, and its native callable.

    Yields nothing in a build of torch without c10d, and skips methods that this torch lacks.
    """
    members = vars(PROCESS_GROUP) if PROCESS_GROUP else {}
    for method_name, (op_name, _) in COLLECTIVE_METHODS.items():
        # pybind11 wraps a native method into an instancemethod: the callable proper is within.
        function = getattr(members.get(method_name), "__func__", None)
        if type(function).__name__ == "builtin_function_or_method":
            yield method_name, f"c10d::{op_name}", function


def is_functional_collective(op: Any) -> bool:
    """Return True if an op returns results that have no values before `wait_tensor`."""
    name: str = getattr(op, "_qualified_op_name", "")
    return name.startswith("_c10d_functional") and not name.endswith(("wait_tensor", "_wrap_tensor_autograd"))


def wait_for_results(values: Sequence[Any]) -> None:
    """Wait for the results of a functional collective; values that are not tensors are skipped."""
    wait_tensor = torch.ops._c10d_functional.wait_tensor
    with Suspension():  # a wait is not an op of the program
        for value in values:
            if isinstance(value, torch.Tensor):
                wait_tensor(value)


def patch_reducers_to_report(patches: Patches) -> None:
    """Patch DistributedDataParallel to report, when it runs, that its reducer's collectives go unseen.

    Does nothing in builds of torch without the class.
    """
    parallel_class: Any = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    original: Callable[..., Any] | None = getattr(parallel_class, "_pre_forward", None)
    if original is None:
        return

    @functools.wraps(original)
    def pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Report the reducer if it will reduce gradients of this pass, then run torch's function."""
        # Under `no_sync` the reducer does nothing; a comm hook is Python, whose collectives tools see.
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronises and not getattr(self, "_comm_hooks", ()):
            report_unseen(*REDUCER_ENTRY)
        return original(self, *inputs, **kwargs)

    patches.set(parallel_class, "_pre_forward", pre_forward)
