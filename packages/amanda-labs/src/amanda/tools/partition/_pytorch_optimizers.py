"""Steps of PyTorch's optimizers for protected parameters, taken in the process that holds these."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from amanda.tools.partition._channel import ProtectError
from amanda.tools.partition._pytorch_ops import PLAIN
from amanda.tools.partition._pytorch_stand_ins import StandIn, StandIns


class Optimizers:
    """The optimizers that have stepped stand-ins, by number."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._numbers = itertools.count()
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def step(
        self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Return the message that steps an optimizer's protected parameters; None where it has none.

        args, kwargs: of its `step`.  Raises ProtectError for an optimizer that the process does not know.
        """
        groups = [
            [one for one in map(self._stand_ins.of, group["params"]) if one]
            for group in optimizer.param_groups
        ]
        if not any(groups):
            return None
        import torch

        name = type(optimizer).__name__
        if getattr(torch.optim, name, None) is not type(optimizer) or any((*args[1:], *kwargs.values())):
            raise ProtectError(
                f"{name} steps protected parameters; the protected process knows the optimizers of "
                "torch.optim, without a closure"
            )
        if optimizer not in self._stepped:
            known = [one.path for group in groups for one in group if optimizer.state.get(one.tensor)]
            if known:
                raise ProtectError(
                    f"{name} has stepped {known[0]} before it was protected; apply the tool earlier"
                )
            self._stepped[optimizer] = next(self._numbers)
        told = [_group(*one) for one in zip(optimizer.param_groups, groups, strict=True)]
        return {"kind": "step", "optimizer": self._stepped[optimizer], "name": name, "groups": told}


def _group(group: Mapping[str, Any], stand_ins: Sequence[StandIn]) -> Mapping[str, Any]:
    for one in stand_ins:
        if one.tensor.grad is not None and one.is_fresh:
            raise ProtectError(
                f"the gradient of {one.path} was written between the backward pass and the step, as "
                "clipping and scaling do; it lies in the protected process, so protect cannot follow that"
            )
    options = {key: value for key, value in group.items() if key != "params"}
    for key, value in options.items():
        if not all(isinstance(one, PLAIN) for one in (value if isinstance(value, tuple) else (value,))):
            raise ProtectError(f"option {key} of an optimizer is {value!r}; protect sends numbers and texts")
    gradients = [one.tensor.grad is not None for one in stand_ins]
    return {"options": options, "paths": [one.path for one in stand_ins], "gradients": gradients}
