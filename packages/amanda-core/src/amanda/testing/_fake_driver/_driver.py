"""The fake framework's operators, modules and backward passes, brought to Amanda."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from amanda.backend import Call, EagerDriver, OpFacts, Trace, recomputed
from amanda.interceptor import Detour, Site
from amanda.testing import fake
from amanda.testing._fake_driver._backward import NodeRange, followed, mark
from amanda.testing._fake_driver._call import FakeCall
from amanda.testing._fake_driver._tensors import FakeTensors
from amanda.testing.fake import Tensor, _autograd, _modules, _operators


class FakeDriver(FakeTensors, EagerDriver):
    """The fake framework, eager."""

    api = 1
    framework = "amanda.testing.fake"
    modes = ("eager",)
    identity_types = (fake.Parameter,)

    def __init__(self) -> None:
        self._sites = [self.site(operator, operator, operator.__name__) for operator in fake.OPERATORS]

    def introduce(self) -> None:
        """Mark the code that is not the user's: what a checkpoint calls belongs to where it ran first."""
        super().introduce()
        checkpoint = _modules.checkpoint
        self.skip(checkpoint.__code__, _code_of(checkpoint, "backward"))

    def attach(self) -> None:
        """Replace every operator, enclose module calls, follow backward passes and checkpoints."""
        run_backward, checkpoint = _autograd.run_backward, _modules.checkpoint
        stand_ins = {site.target: Detour(site) for site in self._sites}
        functions = {run_backward: followed(self, run_backward), checkpoint: _replaying(checkpoint)}
        self.attributes.replace({**stand_ins, **functions}, [fake, _operators, _autograd, _modules])
        self.attributes.enclose(fake.Module)

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its inputs in the order of the operator's signature."""
        return FakeCall(site, args, kwargs)

    def obstacle(self, site: Site) -> tuple[str, str] | None:
        """Return what keeps a call from being instrumented, and why."""
        return ("opaque", "it has no operators inside") if site.op.__name__ == "opaque" else None

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op, with the calling module and the parameters that the op reads."""
        facts = super().describe(call, subjects)
        facts.scope = _module_path(subjects)
        facts.variable_of, facts.path_of = _parameter_of, _parameter_paths(subjects)
        return facts

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An operator's result as a list, and how to put it back into its form."""
        if isinstance(outputs, fake.Halves):
            return list(outputs), lambda values: fake.Halves(*values)
        return [outputs], lambda values: values[0]

    def tracing(self) -> NodeRange:
        """Context that brackets the nodes made by an operator."""
        return NodeRange()

    def attach_trace(self, trace: Trace, nodes: NodeRange, values: list[Any]) -> None:
        """Mark the nodes that the operator made."""
        mark(trace, nodes, values)


def _replaying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `checkpoint` for functions whose second run is their first run again."""

    @functools.wraps(original)
    def checkpoint(function: Callable[[Tensor], Tensor], input: Tensor) -> Any:
        return original(recomputed(function), input)

    return checkpoint


def _code_of(function: Any, name: str) -> CodeType:
    return next(
        constant
        for constant in function.__code__.co_consts
        if isinstance(constant, CodeType) and constant.co_name == name
    )


def _module_path(subjects: Sequence[Any]) -> str:
    """Path of the last module within the first."""
    paths = (
        path
        for outer, inner in pairwise(subjects)
        for path, module in outer.named_modules()
        if module is inner
    )
    return ".".join(path for path in paths if path)


def _parameter_of(value: Any) -> fake.Parameter | None:
    """Return the parameter that an input is; None for another value."""
    return value if isinstance(value, fake.Parameter) else None


def _parameter_paths(subjects: Sequence[Any]) -> Callable[[Any], str | None]:
    """Return a function from a parameter to its path in the outermost module; None where it is not in."""
    modules = subjects[0].named_modules() if subjects else ()
    paths = {
        value: f"{path}.{name}".lstrip(".")
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, fake.Parameter)
    }
    return WeakKeyDictionary(paths).get
