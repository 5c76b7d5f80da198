"""Signatures of operators: names and defaults of their arguments.

Generated classes have signatures in Python. Native functions have signatures in their documentation, one for
each overload.
"""

import ast
import inspect
import re
from functools import cache
from typing import Any, NamedTuple

from mindspore import Tensor
from mindspore.ops import functional_overload

from ._writes import declaration_of

NO_DEFAULT = inspect.Parameter.empty


class Signature(NamedTuple):
    """The signature of an operator.

    names, defaults: of the arguments in order.  positional: maximal number of positional arguments.
    gathered: position of the argument that takes all the rest, such as `*shape` of `reshape`.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    positional: int
    gathered: int | None = None

    def trailing_defaults(self, values: list[Any]) -> int:
        """Return the number of values at the end that are defaults."""
        count = 0
        for value, default in zip(reversed(values), reversed(self.defaults[: len(values)]), strict=False):
            if default is NO_DEFAULT or type(value) is not type(default) or value != default:
                break
            count += 1
        return count

    def accepts(self, count: int, keywords: Any) -> bool:
        """Return True if a call may have `count` positional arguments and these keywords."""
        most = count if self.gathered is not None else self.positional
        return count <= most and all(name in self.names[min(count, len(self.names)) :] for name in keywords)


@cache
def kernel_signature(primitive: Any, count: int) -> Signature:
    """Return the signature of a generated class: arguments of the call, then those of the constructor."""
    parameters = parameters_of(primitive.__call__)
    made_with = parameters_of(primitive.__init__) if len(parameters) < count else []
    return fill_names([*parameters, *made_with], count)


def primitive_signature(primitive: Any, count: int) -> Signature:
    """Return the signature of a primitive that the executor runs by name."""
    kind: Any = type(primitive)
    parameters = parameters_of(kind.__call__)
    if len(parameters) != count:
        attributes = getattr(primitive, "attrs", None) or {}
        names = attributes.get("input_names") or declaration_of(kind).names
        parameters = [(name, NO_DEFAULT) for name in names]
    return fill_names(parameters, count)


@cache
def overload_signatures(operator: str, name: str, method: bool) -> tuple[Signature, ...]:
    """Return the signatures of a function or method, one for each overload; `self` is named `input`."""
    if method:
        documented, head = getattr(Tensor, name, None), ["input"]
    else:
        documented, head = getattr(functional_overload, operator, None), []
    lines = (getattr(documented, "__doc__", None) or "").splitlines()
    texts = [match[1] for line in lines if (match := _SIGNATURE.match(line))]
    return tuple(_parse_signature(text, head) for text in texts) or (
        Signature(tuple(head), (NO_DEFAULT,), 99),
    )


_SIGNATURE = re.compile(r"^\s*(?:\.\. (?:method|function):: (?:\w+\.)*)?\w+\((.*)\)\s*(?:->.*)?$")


def parameters_of(function: Any) -> list[tuple[str, Any]]:
    """Return name and default of each parameter after `self`; none for a native function."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    return [
        (parameter.name, parameter.default)
        for parameter in parameters[1:]
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def fill_names(parameters: list[tuple[str, Any]], count: int) -> Signature:
    parameters = parameters[:count] + [(f"argument{i}", NO_DEFAULT) for i in range(len(parameters), count)]
    return Signature(
        tuple(name for name, _ in parameters), tuple(default for _, default in parameters), count
    )


def _parse_signature(text: str, head: list[str]) -> Signature:
    """Parse a signature of the documentation.  head: names ahead of it."""
    names, defaults = list(head), [NO_DEFAULT] * len(head)
    positional, gathered = None, None
    for part in _split(text):
        if part in ("*", "/"):
            positional = len(names) if part == "*" and positional is None else positional
            continue
        name, _, default = part.partition("=")
        if name.startswith("*"):
            gathered, name = len(names), name[1:]
        names.append(name.strip())
        defaults.append(_literal(default.strip()) if default else NO_DEFAULT)
        if gathered is not None and positional is None:
            positional = len(names)
    return Signature(
        tuple(names), tuple(defaults), len(names) if positional is None else positional, gathered
    )


def _split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _literal(text: str) -> Any:
    try:
        # Defaults are read from documentation, which may contain anything.
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return NO_DEFAULT
