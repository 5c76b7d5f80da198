"""A `Pipe` of `torch.distributed.pipelining` whose stages know each tensor of the model by one path.

PyTorch's `pipeline` looks up a tied parameter by any of its paths, in the order of a set, also by those that
no op reads and by those of modules that a stage lacks, and then fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from inspect import signature
from typing import Any

from amanda.tools.partition._pytorch_graph import CutGraph


def pipe(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: CutGraph) -> Any:
    """Export a model, and return the Pipe of its graph as a policy cuts it."""
    from torch.distributed.pipelining import Pipe

    program = Pipe._trace_with_export(model, args, dict(kwargs))
    made = Pipe._from_traced(_tensors_by_path(program), program, split_policy=policy)
    _accept_keywords(made, program.module())
    return made


def _tensors_by_path(program: Any) -> Any:
    """Return a module with the parameters and buffers of a program, each at the path by which it is read."""
    from torch import nn

    root, traced = nn.Module(), program.module()
    for node in traced.graph.find_nodes(op="get_attr"):
        if not node.users:
            continue
        *names, last = node.target.split(".")
        source: Any = traced
        target: Any = root
        for name in names:
            source = getattr(source, name)
            if name not in target._modules:
                target.add_module(name, nn.Module())
            target = target._modules[name]
        if last in source._parameters:
            target.register_parameter(last, source._parameters[last])
        elif last in (buffers := dict(source.named_buffers(recurse=False, remove_duplicate=False))):
            target.register_buffer(last, buffers[last])
        else:
            setattr(target, last, getattr(source, last))
    return root


def _accept_keywords(made: Any, traced: Any) -> None:
    """Give the first stage the signature of the model, as PyTorch's `pipeline` does."""
    first = made.get_stage_module(0)
    if len(signature(first.forward).parameters) == len(signature(traced.forward).parameters):
        first.graph._codegen = deepcopy(traced.graph._codegen)
        first.graph._codegen.pytree_info = first.graph._codegen.pytree_info._replace(out_spec=None)
        first.recompile()
