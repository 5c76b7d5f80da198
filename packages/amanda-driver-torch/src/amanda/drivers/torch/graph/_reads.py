"""Values of PyTorch that traceable routines read."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from amanda.backend import Reads


class TorchReads(Reads):
    """`Reads` that knows tensors, modules, and PyTorch's plain values."""

    plain: ClassVar = (
        *Reads.plain, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
    )  # fmt: skip
    opaque: ClassVar = Reads.opaque | {"torch"}
    dynamic: ClassVar = (torch.nn.Module,)

    def look_into(self, value: Any) -> bool:
        """Take up what the modules in a module hold; tensors are inputs of the graph."""
        if not isinstance(value, torch.nn.Module):
            return not isinstance(value, torch.Tensor) and super().look_into(value)
        self.reach(type(value).forward)
        for module in value.modules():
            self.read(module, "training")
            for held in (module._parameters, module._buffers, module._modules):
                self.reach(held)
        return True
