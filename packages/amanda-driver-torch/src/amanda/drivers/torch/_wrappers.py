"""Wrapper modules that libraries put around a model, which are left out of the paths in the model.

So results from under DDP, FSDP, peft or torch.compile have the paths of the bare model.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

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


@cache
def wrapped_attribute(kind: Any) -> str | None:
    """Return the attribute that holds the wrapped module in modules of a class; None for other classes."""
    # By name, so that no library need be imported to recognise its wrappers.
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((WRAPPERS[name] for name in names if name in WRAPPERS), None)


def without_wrappers(outer: torch.nn.Module, path: str) -> str:
    """Return the path of a submodule or a parameter in a module, without the attributes of wrappers.

    path: as `named_modules` or `named_parameters` spells it.
    """
    parts, module = [], outer
    for part in path.split("."):
        kind: Any = type(module)
        if part and part != wrapped_attribute(kind):
            parts.append(part)
        inner = module._modules.get(part)
        module = module if inner is None else inner
    return ".".join(parts)


def stack_without_wrappers(path: str, stack: Iterable[tuple[str, Any]]) -> str:
    """Return a path without the attributes of wrappers, from a compiler's stack of module calls.

    stack: path and class, or the class' full name, of each of the modules that enclose the last.
    """
    parts = path.split(".") if path else []
    dropped = set()
    for outer, kind in stack:
        attribute = WRAPPERS.get(kind) if isinstance(kind, str) else wrapped_attribute(kind)
        start = outer.split(".") if outer else []
        if attribute is not None and parts[: len(start) + 1] == [*start, attribute]:
            dropped.add(len(start))
    return ".".join(part for i, part in enumerate(parts) if i not in dropped)
