"""Tensors that traceable routines hold, such as masks: inputs of the graph that they are traced into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map


class Held:
    """The tensors that the routines of one node hold."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Note a tensor."""
        if all(one is not tensor for one in self.tensors):
            self.tensors.append(tensor)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Note every tensor with data that is used."""
        with _Collecting(self):
            yield

    def replaced_by(self, values: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Use these values instead of the tensors."""
        pairs = zip(self.tensors, values, strict=True)
        changed = {id(own): value for own, value in pairs if own is not value}
        return _StandingIn(changed) if changed else nullcontext()


class _Collecting(TorchFunctionMode):
    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                self._held.add(leaf)
        return func(*args, **(kwargs or {}))


class _StandingIn(TorchFunctionMode):
    def __init__(self, pairs: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._pairs = pairs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda one: self._pairs.get(id(one), one), (args, kwargs or {}))
        return func(*args, **kwargs)
