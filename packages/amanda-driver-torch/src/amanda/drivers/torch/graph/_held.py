"""Tensors that traceable routines hold, such as masks: inputs of the graph that they are traced into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class Held:
    """The tensors that the routines of one node hold."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Note a tensor."""
        if all(one is not tensor for one in self.tensors):
            self.tensors.append(tensor)

    def collecting(self, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[Any]:
        """Note every tensor with data that is used; `stand_in` makes what is used instead, without data."""
        return _Collecting(self, stand_in)

    def replaced_by(self, values: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Use these values instead of the tensors."""
        pairs = zip(self.tensors, values, strict=True)
        changed = {id(own): value for own, value in pairs if own is not value}
        return _StandingIn(changed) if changed else nullcontext()


class _Collecting(TorchFunctionMode):
    def __init__(self, held: Held, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._held = held
        self._stand_in = stand_in
        self._stand_ins: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._without_data, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _without_data(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        self._held.add(leaf)
        if id(leaf) not in self._stand_ins:
            self._stand_ins[id(leaf)] = self._stand_in(leaf)
        return self._stand_ins[id(leaf)]


class _StandingIn(TorchFunctionMode):
    def __init__(self, pairs: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._pairs = pairs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda one: self._pairs.get(id(one), one), (args, kwargs or {}))
        return func(*args, **kwargs)
