"""Stand-ins of PyTorch: tensors of the program whose values lie in the protected process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import amanda
from amanda.tools.partition._channel import Bytes, Form, ProtectError
from amanda.tools.partition._pytorch_bytes import packed
from amanda.tools.partition._pytorch_ops import path, tensors

Hold = Callable[[str, Any, Form, Bytes], None]


@dataclass(eq=False)
class StandIn:
    """A tensor of the program whose values lie in the protected process; NaN is in their place.

    trained: whether it needed a gradient when it was moved.
    gradient, version: the stand-in of its gradient, and autograd's count of writes when it was made.
    """

    path: str
    tensor: Any
    trained: bool
    gradient: Any = None
    version: int = 0

    def check(self, value: Any, where: str) -> None:
        """Raise ProtectError for a tensor in this memory that the process cannot take for the parameter."""
        if value.shape != self.tensor.shape or value.stride() != self.tensor.stride():
            raise ProtectError(f"{where} reads a view of {self.path}; protect knows whole parameters")
        if self.tensor.requires_grad != self.trained:
            raise ProtectError(
                f"{where} reads {self.path}, whose requires_grad was changed after it was protected: freeze "
                "parameters before, or finalize and protect anew"
            )

    @property
    def is_fresh(self) -> bool:
        """Return True if the program has dropped or zeroed the gradient since."""
        grad = self.tensor.grad
        return grad is None or grad is not self.gradient or grad._version != self.version

    def give_gradient(self) -> None:
        """Give the program's tensor a gradient of NaN."""
        import torch

        with amanda.disabled(), torch.no_grad():
            if self.tensor.grad is None:
                self.tensor.grad = torch.full_like(self.tensor, float("nan"))
            else:
                self.tensor.grad.fill_(float("nan"))
        self.gradient, self.version = self.tensor.grad, self.tensor.grad._version


class StandIns:
    """The stand-ins of a program, and the parameters that its other ops have read."""

    def __init__(self) -> None:
        self._found: dict[int, StandIn] = {}
        self._read_openly: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[StandIn]:
        return iter(self._found.values())

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()

    def of(self, value: Any) -> StandIn | None:
        """Return the stand-in in whose memory a value lies."""
        return self._found.get(value.untyped_storage().data_ptr())

    def are_read_by(self, context: amanda.OpContext) -> bool:
        """Return True if an op reads a stand-in, or a parameter or buffer, which may become one."""
        return any(
            self.of(value) is not None or path(value) is not None for value in tensors(context.get_inputs())
        )

    def adopt(self, context: amanda.OpContext, hold: Hold) -> None:
        """Move the parameters and buffers that a selected op reads to the process.

        hold: has the process hold a tensor, given its path, itself, its form and its bytes.
        Raises ProtectError where one cannot be moved, or is read by an op that is not selected.
        """
        import torch

        where = f"{context['type']} at {context.get_source()}"
        if torch.is_autocast_enabled("cpu"):
            raise ProtectError(f"{where} is selected and runs under autocast, which protect does not know")
        for value in tensors(context.get_inputs()):
            if value.device.type != "cpu" or value.layout != torch.strided:
                raise ProtectError(
                    f"{where} is given a tensor on {value.device} with layout {value.layout}; protect runs "
                    "ops on dense tensors of the CPU"
                )
            found = None if self.of(value) else path(value)
            if found is None or not value.numel():
                continue
            if self._read_openly.get(id(value)) is value:
                raise ProtectError(
                    f"{where} is selected, and {found} is read by an op that is not: select both"
                )
            self.move(found, value, hold)
        if self._is_secret(context):
            raise ProtectError(
                f"{where} computes a value of protected parameters alone, which would reach this process; "
                "protect modules whose ops read parameters together with activations"
            )

    def move(self, path: str, value: Any, hold: Hold) -> None:
        """Have the process hold a tensor, and put NaN in its place."""
        import torch

        form, content = packed(value)
        if value.untyped_storage().nbytes() != form.size:
            raise ProtectError(
                f"{path} shares its memory with other tensors; protect needs parameters of their own"
            )
        hold(path, value, form, content)
        with torch.no_grad():
            value.detach().fill_(float("nan") if value.is_floating_point() or value.is_complex() else 0)
        self._found[value.untyped_storage().data_ptr()] = StandIn(path, value, value.requires_grad)

    def check(self, context: amanda.OpContext) -> None:
        """Raise ProtectError where an op that is not selected reads a stand-in."""
        import torch

        for value in tensors(context.get_inputs()):
            found = self.of(value)
            if found is not None:
                raise ProtectError(
                    f"{context['type']} at {context.get_source()} in module {context.get_scope()!r} reads "
                    f"{found.path}, which lies in the protected process: select this op too, or leave it out"
                )
            if isinstance(value, torch.nn.Parameter):
                self._read_openly[id(value)] = value

    def _is_secret(self, context: amanda.OpContext) -> bool:
        given = tensors(context.get_inputs())
        return bool(given) and all(map(self.of, given)) and not context["in_place"]
