"""A run in float64 as a control, which measures the rounding error of a run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import amanda
from amanda.tools.kit import RequiredNames, leaves

_REQUIRED = RequiredNames(
    "amanda.tools.diff",
    "torch",
    "torch:_C._current_graph_task_id",
    "torch:ops.aten._to_copy.default._schema",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:tree_map_only",
)


class Float64Tool(amanda.Tool):
    """Run floating-point ops of PyTorch in float64, from the first op of a scope until the scope closes.

    Random ops run in float32, so they draw the same numbers as without the tool.  In-place ops keep the
    element type of their tensor.  narrow: ops without a float64 kernel; they ran in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow: set[str] = set()
        self._mode: Any = None
        self.add_inst_for_op(self._begin)

    def _begin(self, context: amanda.OpContext) -> None:
        if self._mode is None and str(context.namespace).startswith("pytorch"):
            self._mode = _modes(self.narrow)

    def scope_left(self) -> None:
        """End the run in float64."""
        if self._mode is not None:
            self._mode.close()
            self._mode = None


def _modes(narrow: set[str]) -> Any:
    _REQUIRED.check()
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    less = {torch.float32, torch.float16, torch.bfloat16}
    statistics = ("running_mean", "running_var")

    def to(dtype: torch.dtype, value: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)

    class Float64(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Casts what each kernel reads; autograd, above it, differentiates what ran."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with amanda.disabled():
                return self._run(func, args, kwargs or {})

        def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
            given = [x for x in leaves((args, kwargs), structures=True) if isinstance(x, torch.Tensor)]
            if _moves(func) or not any(x.is_floating_point() for x in given):
                return func(*args, **kwargs)
            if func._schema.is_mutable:
                return self._write(func, args, kwargs)
            if _is_random(func, args, kwargs):
                return func(*to(torch.float32, args), **to(torch.float32, kwargs))
            wide = {
                name: torch.float64 if isinstance(value, torch.dtype) and value in less else value
                for name, value in to(torch.float64, kwargs).items()
            }
            wider = to(torch.float64, args)
            try:
                found = func(*wider, **wide)
            except (RuntimeError, NotImplementedError):
                narrow.add(str(func))
                return func(*to(torch.float32, args), **to(torch.float32, kwargs))
            for known, own, copy in zip(func._schema.arguments, args, wider, strict=False):
                if known.name in statistics and own is not None:
                    own.copy_(copy)  # a normalisation writes into them, and its schema does not say so
            return found

        def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
            known = {one.name: one for one in func._schema.arguments}
            named = {**dict(zip(known, args, strict=False)), **kwargs}
            written = {
                name for name in named
                if (alias := known[name].alias_info) is not None and alias.is_write
            }  # fmt: skip
            into = [x for name in written for x in leaves([named[name]]) if isinstance(x, torch.Tensor)]
            dtype = next((x.dtype for x in into if x.is_floating_point()), None)
            if dtype is None:
                return func(*args, **kwargs)
            cast = {name: x if name in written else to(dtype, x) for name, x in named.items()}
            first = [cast.pop(name) for name in list(known)[: len(args)]]
            return func(*first, **cast)

    def _is_random(func: Any, args: Any, kwargs: Any) -> bool:
        """Return True for ops that draw random numbers, and not for attention without dropout."""
        named = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}
        attends = "scaled_dot_product" in str(func) and not named.get("dropout_p")
        return torch.Tag.nondeterministic_seeded in func.tags and not attends

    def _moves(func: Any) -> bool:
        """Return True for views, for copies, and where autograd converts a gradient to the type of a leaf."""
        if func is torch.ops.aten._to_copy.default:
            return torch._C._current_graph_task_id() != -1
        views = (one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        return func is torch.ops.aten.clone.default or any(views)

    class Alike(TorchFunctionMode):
        """Casts what a function reads where it refuses tensors of several types, before any kernel runs."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return func(*args, **(kwargs or {}))
            except RuntimeError:
                given = [x for x in leaves((args, kwargs), structures=True) if isinstance(x, torch.Tensor)]
                if len({x.dtype for x in given if x.is_floating_point()}) < 2 or func.__name__.endswith("_"):
                    raise
                with amanda.disabled():
                    wide = to(torch.float64, args), to(torch.float64, kwargs or {})
                return func(*wide[0], **wide[1])

    stack = ExitStack()
    stack.enter_context(Float64())  # type: ignore[no-untyped-call]
    stack.enter_context(Alike())
    return stack
