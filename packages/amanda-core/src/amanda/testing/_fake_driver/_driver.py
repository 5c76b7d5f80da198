"""The fake framework's operators, modules and backward passes, brought to Amanda."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

from amanda import interceptor
from amanda.backend import (
    BOUNDARY,
    DRIVER_API,
    FRAMEWORK,
    SKIPPED,
    Attributes,
    Call,
    EagerDriver,
    Namespace,
    Trace,
    codes,
    digest,
    replace_references,
)
from amanda.interceptor import Detour, Enclosure, Site
from amanda.testing import fake
from amanda.testing._fake_driver._backward import Made, followed, mark, replayed
from amanda.testing._fake_driver._call import FakeCall
from amanda.testing._fake_driver._tensors import FakeTensors
from amanda.testing.fake import _autograd, _modules, _operators


class FakeDriver(FakeTensors, EagerDriver):
    """The fake framework, eager."""

    api = DRIVER_API
    framework = "amanda.testing.fake"
    modes = ("eager",)
    identity_types = (fake.Parameter,)

    def __init__(self) -> None:
        self._attributes = Attributes()
        self._sites = [
            Site(function, function, function.__name__, digest("fake", function.__name__), self.handle)
            for function in fake.OPERATORS
        ]

    @property
    def namespace(self) -> Namespace:
        """`fake/1.0/eager`."""
        return Namespace(f"fake/{fake.__version__}/eager")

    def attach(self) -> None:
        """Replace every operator, enclose module calls, follow backward passes and checkpoints."""
        codes.add_root(f"{Path(fake.__file__).parent}/", FRAMEWORK)
        codes.add_root(f"{Path(__file__).parent}/", SKIPPED)
        interceptor.add_identity_type(fake.Parameter)
        codes.add_code(fake.Module.__call__.__code__, BOUNDARY)
        codes.add_code(_code_of(_modules.checkpoint, "backward"), SKIPPED)
        codes.add_code(_modules.checkpoint.__code__, SKIPPED)
        stand_ins = [(site.target, Detour(site)) for site in self._sites]
        replace_references(self._attributes, stand_ins, [fake, _operators])
        self._attributes.set(fake.Module, "__call__", Enclosure(vars(fake.Module)["__call__"]))
        run_backward = followed(self, _autograd.run_backward)
        checkpoint = replayed(_modules.checkpoint)
        for module in (fake, _autograd, _modules):
            for stand_in in (run_backward, checkpoint):
                if hasattr(module, stand_in.__name__):
                    self._attributes.set(module, stand_in.__name__, stand_in)

    def detach(self) -> None:
        """Put every attribute back."""
        self._attributes.restore()

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its inputs in the order of the operator's signature."""
        return FakeCall(site, args, kwargs)

    def obstacle(self, site: Site) -> tuple[str, str] | None:
        """Return what keeps a call from being instrumented, and why."""
        return ("opaque", "it has no operators inside") if site.op.__name__ == "opaque" else None

    def scope_name(self, subjects: Sequence[Any]) -> str:
        """Path of the last module within the first."""
        paths = (
            path
            for outer, inner in pairwise(subjects)
            for path, module in outer.named_modules()
            if module is inner
        )
        return ".".join(path for path in paths if path)

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An operator's result as a list, and how to put it back into its form."""
        if isinstance(outputs, fake.Halves):
            return list(outputs), lambda values: fake.Halves(*values)
        return [outputs], lambda values: values[0]

    def tracing(self) -> Made:
        """Context that brackets the nodes made by an operator."""
        return Made()

    def attach_trace(self, trace: Trace, made: Made, values: list[Any]) -> None:
        """Mark the nodes that the operator made."""
        mark(trace, made, values)


def _code_of(function: Any, name: str) -> CodeType:
    return next(
        one for one in function.__code__.co_consts if isinstance(one, CodeType) and one.co_name == name
    )
