"""The higher-order op `map`, which torch compiles by itself, made to run op by op in scopes."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from amanda import interceptor
from amanda.backend import Attributes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ._compiled_callables import asks_for_graphs

UTILS = "torch._higher_order_ops.utils"
_RUN_FUNCTION = "_maybe_compile_and_run_fn"


def run_map_op_by_op(attributes: Attributes) -> None:
    """Make torch's `map` run its body op by op, on flat results as compiled code returns them.

    Otherwise `map` takes a single result tensor for a list of tensors when gradients are recorded.  Does
    nothing before torch 2.7.
    """
    module = sys.modules[UTILS]
    original = getattr(module, _RUN_FUNCTION, None)
    if original is None:  # before torch 2.7
        return

    @functools.wraps(original)
    def run(fn: Callable[..., Any], *args: Any) -> Any:
        """Run the body of `map` on flat results, which get their form back; run all else as torch does."""
        if torch.compiler.is_dynamo_compiling():  # dynamo would trace what follows
            return original(fn, *args)
        activation = interceptor.active()
        runs_op_by_op = activation is not None and not asks_for_graphs(activation.state)
        if getattr(fn, "__name__", "") != "run_flattened_map" or not runs_op_by_op:
            return original(fn, *args)
        body, *operands = args
        spec: Any = None

        def flat_body(*inputs: Any) -> list[Any]:
            nonlocal spec
            leaves, spec = tree_flatten(body(*inputs))
            return leaves

        results = original(fn, flat_body, *operands)
        return results if spec is None else tree_unflatten(results, spec)

    attributes.set(module, _RUN_FUNCTION, run)
