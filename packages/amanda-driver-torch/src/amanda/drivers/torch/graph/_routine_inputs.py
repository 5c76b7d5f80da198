"""Tensors and other values that traceable routines use from outside their arguments.

Tensors that they hold, such as masks, become inputs of the graph. Other values that they read, such as
attributes of a tool, become constants of the graph, which guards watch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from amanda.backend import Reads
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class HeldTensors:
    """The tensors from outside their arguments that the routines of one node use: they hold them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Note a tensor, once."""
        if all(held_tensor is not tensor for held_tensor in self.tensors):
            self.tensors.append(tensor)

    def collecting(
        self, make_stand_in: Callable[[torch.Tensor], torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context that notes each tensor with data that code uses.

        make_stand_in: makes the tensor without data that the code gets instead.
        """
        return _CollectingMode(self, make_stand_in)

    def replaced_by(self, values: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which code that uses the tensors gets these values instead."""
        pairs = zip(self.tensors, values, strict=True)
        value_by_id = {id(tensor): value for tensor, value in pairs if tensor is not value}
        return _SubstitutingMode(value_by_id) if value_by_id else nullcontext()


class _CollectingMode(TorchFunctionMode):
    """Mode that notes tensors with data among the arguments, and passes on stand-ins without data."""

    def __init__(
        self, held_tensors: HeldTensors, make_stand_in: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """held_tensors: takes the tensors.  make_stand_in: is called once for each of them."""
        super().__init__()
        self._held_tensors = held_tensors
        self._make_stand_in = make_stand_in
        self._stand_in_by_id: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._note_and_stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _note_and_stand_in(self, leaf: Any) -> Any:
        """Note a tensor with data, and return its stand-in without data; return other leaves as they are."""
        # Tensors without data are values of the graph; one with data comes from outside of the routine.
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        self._held_tensors.add(leaf)
        if id(leaf) not in self._stand_in_by_id:
            self._stand_in_by_id[id(leaf)] = self._make_stand_in(leaf)
        return self._stand_in_by_id[id(leaf)]


class _SubstitutingMode(TorchFunctionMode):
    """Mode that replaces tensors among the arguments; value_by_id: what takes the place of each."""

    def __init__(self, value_by_id: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._value_by_id = value_by_id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda leaf: self._value_by_id.get(id(leaf), leaf), (args, kwargs or {}))
        return func(*args, **kwargs)


class TorchReads(Reads):
    """`Reads` that knows tensors, modules, and PyTorch's plain values."""

    plain_types: ClassVar = (
        *Reads.plain_types, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
    )  # fmt: skip
    # torch's own code reads nothing that tools change.
    opaque_packages: ClassVar = Reads.opaque_packages | {"torch"}
    dynamic_types: ClassVar = (torch.nn.Module,)

    def follows_attributes(self, value: Any) -> bool:
        """Return True for a value whose attributes are read; of a module, they are recorded here at once.

        Those are `training`, parameters, buffers and submodules of each module in it.  False for a tensor,
        which becomes an input of the graph.
        """
        if not isinstance(value, torch.nn.Module):
            return not isinstance(value, torch.Tensor) and super().follows_attributes(value)
        self.follow_value(type(value).forward)
        for module in value.modules():
            self.record_attribute(module, "training")
            for members in (module._parameters, module._buffers, module._modules):
                self.follow_value(members)
        return True
