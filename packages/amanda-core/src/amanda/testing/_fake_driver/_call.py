"""A call of an operator of the fake framework."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

from amanda.backend import Call
from amanda.interceptor import Site
from amanda.testing.fake import Tensor


class FakeCall(Call):
    """A call bound to the operator's signature; trailing defaults are left out."""

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._site = site
        self._given = args, kwargs
        self._signature = inspect.signature(site.original)
        bound = self._signature.bind(*args, **kwargs)
        self.op = site.op
        self.inputs = list(bound.arguments.values())
        self.names = list(bound.arguments)
        self.mutable = (
            [0] if site.key == "add_" else [i for i, name in enumerate(self.names) if name == "out"]
        )
        self.targets = self.mutable

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the operator."""
        if inputs is self.inputs:
            return self._site.invoke(*self._given)
        arguments = OrderedDict(zip(self.names, inputs, strict=True))
        bound = inspect.BoundArguments(self._signature, arguments)
        return self._site.invoke(bound.args, bound.kwargs)

    def attributes(self) -> dict[str, Any]:
        """The arguments that are no tensors."""
        named = zip(self.names, self.inputs, strict=True)
        return {name: value for name, value in named if not isinstance(value, (Tensor, list, tuple))}
