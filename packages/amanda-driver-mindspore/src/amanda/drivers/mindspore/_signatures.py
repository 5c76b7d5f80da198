"""The names of an operator's arguments, as far as MindSpore tells them.

Generated classes have them in Python; of native functions the documentation begins with the signature,
several where there are overloads.
"""

import ast
import inspect
import re
from functools import cache
from typing import Any, NamedTuple

from mindspore import Tensor
from mindspore.ops import functional_overload

from ._writes import declared

_NO_DEFAULT = inspect.Parameter.empty


class Signature(NamedTuple):
    """names, defaults: of the arguments in order.  positional: how many may be given without a name.
    gathered: position of the one that takes all the rest, such as the `*shape` of `reshape`.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    positional: int
    gathered: int | None = None

    def trailing(self, values: list[Any]) -> int:
        """Return how many of the values, from the last on, are defaults."""
        count = 0
        for value, default in zip(reversed(values), reversed(self.defaults[: len(values)]), strict=False):
            if default is _NO_DEFAULT or type(value) is not type(default) or value != default:
                break
            count += 1
        return count

    def accepts(self, count: int, keywords: Any) -> bool:
        """Return True if so many positional arguments and these keywords can be given."""
        most = count if self.gathered is not None else self.positional
        return count <= most and all(name in self.names[min(count, len(self.names)) :] for name in keywords)


@cache
def of_kernel(primitive: Any, count: int) -> Signature:
    """Of a generated class, whose kernel is given the arguments of its call and then those of its making."""
    parameters = _parameters(primitive.__call__)
    made_with = _parameters(primitive.__init__) if len(parameters) < count else []
    return _filled([*parameters, *made_with], count)


def of_primitive(primitive: Any, count: int) -> Signature:
    """Of a primitive that is run by its name."""
    kind: Any = type(primitive)
    own = _parameters(kind.__call__)
    if len(own) != count:
        attributes = getattr(primitive, "attrs", None) or {}
        names = attributes.get("input_names") or declared(kind).names
        own = [(name, _NO_DEFAULT) for name in names]
    return _filled(own, count)


@cache
def of_overloads(operator: str, name: str, method: bool) -> tuple[Signature, ...]:
    """Of a function or a method, one for each overload, the tensor that a method is of being `input`."""
    if method:
        documented, head = getattr(Tensor, name, None), ["input"]
    else:
        documented, head = getattr(functional_overload, operator, None), []
    lines = (getattr(documented, "__doc__", None) or "").splitlines()
    found = [match[1] for line in lines if (match := _SIGNATURE.match(line))]
    return tuple(_parsed(text, head) for text in found) or (Signature(tuple(head), (_NO_DEFAULT,), 99),)


_SIGNATURE = re.compile(r"^\s*(?:\.\. (?:method|function):: (?:\w+\.)*)?\w+\((.*)\)\s*(?:->.*)?$")


def _parameters(function: Any) -> list[tuple[str, Any]]:
    try:
        own = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    return [(one.name, one.default) for one in own[1:] if one.kind is one.POSITIONAL_OR_KEYWORD]


def _filled(parameters: list[tuple[str, Any]], count: int) -> Signature:
    parameters = parameters[:count] + [(f"argument{i}", _NO_DEFAULT) for i in range(len(parameters), count)]
    return Signature(tuple(name for name, _ in parameters), tuple(one for _, one in parameters), count)


def _parsed(text: str, head: list[str]) -> Signature:
    names, defaults = list(head), [_NO_DEFAULT] * len(head)
    positional, gathered = None, None
    for one in _split(text):
        if one in ("*", "/"):
            positional = len(names) if one == "*" and positional is None else positional
            continue
        name, _, default = one.partition("=")
        if name.startswith("*"):
            gathered, name = len(names), name[1:]
        names.append(name.strip())
        defaults.append(_literal(default.strip()) if default else _NO_DEFAULT)
        if gathered is not None and positional is None:
            positional = len(names)
    return Signature(
        tuple(names), tuple(defaults), len(names) if positional is None else positional, gathered
    )


def _split(text: str) -> list[str]:
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
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return _NO_DEFAULT
