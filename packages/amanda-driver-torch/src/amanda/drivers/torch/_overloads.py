"""Overloads of a callable: the signature that a call means, and where it puts each argument."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Number
from typing import Any

import torch

from ._signatures import Argument, Signature


@dataclass(frozen=True)
class Layout:
    """The sources of the inputs of one form of call. Indices are positions among the inputs.

    positional: the input of each positional argument, the spread ones left out.
    spread: the input that takes all remaining positional arguments.
    keywords: the input of each keyword argument, in the order of the call.
    mutable: inputs that the op writes.  apart: those of an op that returns other values.
    filled: defaults of arguments that stand before a given one.
    optional_tensors: inputs whose schema type is a tensor or None.
    """

    names: tuple[str, ...]
    positional: tuple[int, ...]
    spread: int | None
    keywords: tuple[tuple[str, int], ...]
    mutable: tuple[int, ...]
    apart: tuple[int, ...]
    optional_tensors: frozenset[int]
    filled: Mapping[int, Any] = field(hash=False)
    defaults: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Form:
    """One signature laid over one form of call.

    bound: the argument that each positional and keyword argument gives, None where the
    signature has none; missing: how many required arguments the call leaves out.
    """

    signature: Signature
    bound: tuple[int | None, ...]
    keywords: tuple[str, ...]
    spread: bool = False

    @cached_property
    def missing(self) -> int:
        required = (not argument.has_default for argument in self.signature.arguments)
        return sum(each and i not in self.bound for i, each in enumerate(required))

    @cached_property
    def unknown(self) -> int:
        return self.bound.count(None)

    @cached_property
    def layout(self) -> Layout:
        return _layout(self)


def forms(candidates: Iterable[Signature], nargs: int, keywords: tuple[str, ...]) -> tuple[Form, ...]:
    """The forms that a call with nargs positional arguments and these keywords may have.

    Where no signature takes the call, its one form is the order of the call itself.
    """
    fitting = [form for each in candidates for form in _laid_over(each, nargs, keywords)]
    fitting = _least(fitting, "missing")
    # An `out=` of several tensors is spelled otherwise in the schema: types will tell.
    slack = 1 if "out" in keywords else 0
    fewest = min((form.unknown for form in fitting), default=0)
    fitting = [form for form in fitting if form.unknown <= fewest + slack]
    return tuple(fitting) or (_in_call_order(nargs, keywords),)


def pick(candidates: Sequence[Form], kinds: str) -> Form:
    """The form whose signature fits argument kinds best; the first among equals."""
    return max(candidates, key=lambda form: _fit(form, kinds))


def kinds_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """One letter for each argument: what overloads are told apart by."""
    values = (*args, *kwargs.values()) if kwargs else args
    return "".join([_KINDS.get(type(value)) or _kind(value) for value in values])


def _least(found: list[Form], quality: str) -> list[Form]:
    least = min((getattr(form, quality) for form in found), default=0)
    return [form for form in found if getattr(form, quality) == least]


def _laid_over(signature: Signature, nargs: int, keywords: tuple[str, ...]) -> Iterator[Form]:
    by_name = tuple(signature.index(keyword) for keyword in keywords)
    positional = signature.positional
    if nargs <= len(positional):
        yield from _without_repeats(Form(signature, positional[:nargs] + by_name, keywords))
    if signature.spreads and nargs >= len(positional):
        sizes = (positional[-1],) * (nargs - len(positional))
        bound = positional + sizes + by_name
        yield Form(signature, bound, keywords, spread=True)


def _without_repeats(form: Form) -> Iterator[Form]:
    given = [i for i in form.bound if i is not None]
    if len(set(given)) == len(given):
        yield form


def _in_call_order(nargs: int, keywords: tuple[str, ...]) -> Form:
    arguments = tuple(Argument(f"arg{i}", "Any") for i in range(nargs))
    order = tuple(range(nargs))
    return Form(Signature(arguments, order), order + (None,) * len(keywords), keywords)


def _layout(form: Form) -> Layout:
    arguments, bound = form.signature.arguments, form.bound
    nargs = len(bound) - len(form.keywords)
    given = {i for i in bound if i is not None}
    length = max(given, default=-1) + 1
    appended = [name for name, i in zip(form.keywords, bound[nargs:], strict=True) if i is None]
    places = iter(range(length, length + len(appended)))
    named = ((next(places) if i is None else i) for i in bound[nargs:])
    written = [i for i in range(length) if i in given and arguments[i].is_written]
    written += [length + i for i, name in enumerate(appended) if name == "out"]
    positional = form.signature.positional[:nargs]
    return Layout(
        names=(*(argument.name for argument in arguments[:length]), *appended),
        positional=positional[:-1] if form.spread else positional,
        spread=positional[-1] if form.spread else None,
        keywords=tuple(zip(form.keywords, named, strict=True)),
        mutable=tuple(written),
        apart=tuple(i for i in written if i < length and arguments[i].is_apart),
        optional_tensors=frozenset(
            i for i in range(length) if arguments[i].type == "Tensor" and arguments[i].is_optional
        ),
        filled={i: arguments[i].default for i in range(length) if i not in given},
        defaults={
            argument.name: argument.default
            for i, argument in enumerate(arguments)
            if i not in given and argument.has_default and argument.type != "Tensor"
        },
    )


# T tensor, b bool, i int, f float, c complex, s str, n None, d dtype, D device, l layout,
# m memory format, g generator; I L S F lists of ints, tensors, names, numbers; E an empty
# list; o anything else.
_KINDS: dict[type, str] = {
    torch.Tensor: "T",
    torch.nn.Parameter: "T",
    bool: "b",
    int: "i",
    float: "f",
    complex: "c",
    str: "s",
    type(None): "n",
    torch.dtype: "d",
    torch.device: "D",
    torch.layout: "l",
    torch.memory_format: "m",
    torch.Generator: "g",
    torch.SymInt: "i",
    torch.SymFloat: "f",
    torch.SymBool: "b",
    torch.Size: "I",
}
_ANYTHING = "TbifcsndDlmgILSFEo"
# What each schema type takes, best first.
_ACCEPTS = {
    "Tensor": "Toifcb",
    "Number": "ifcbTo",
    "Complex": "cfiTo",
    "Float": "fibTo",
    "Int": "iboT",
    "SymInt": "ioT",
    "Bool": "bo",
    "String": "s",
    "ScalarType": "do",
    "Layout": "l",
    "MemoryFormat": "m",
    "DeviceObj": "Dsi",
    "Generator": "g",
    "Any": _ANYTHING,
}
_ACCEPTS_LISTS = {
    "Tensor": "LET",
    "Int": "IEoLi",
    "SymInt": "IEoLi",
    "String": "SEs",
    "Number": "FIEo",
    "Float": "FIEo",
    "Any": _ANYTHING,
}


def _fit(form: Form, kinds: str) -> tuple[int, int, int]:
    misfits, distance = 0, 0
    nargs = len(kinds) - len(form.keywords)
    first_size = len(form.signature.positional) - 1 if form.spread else nargs
    for place, (i, kind) in enumerate(zip(form.bound, kinds, strict=True)):
        if i is None:
            continue
        argument = form.signature.arguments[i]
        if first_size <= place < nargs:
            accepted = "ioT"
        elif kind == "n" and argument.is_optional:
            continue
        elif argument.is_list:
            accepted = _ACCEPTS_LISTS.get(argument.type, _ANYTHING)
            if form.signature.spreads and i == form.signature.positional[-1]:
                accepted = accepted.replace("i", "")
        else:
            accepted = _ACCEPTS.get(argument.type, _ANYTHING)
        misfits += kind not in accepted
        distance += accepted.find(kind)
    return (-misfits, -form.unknown, -distance)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "T"
    if isinstance(value, list | tuple):
        return _list_kind(value)
    if isinstance(value, Integral):
        return "i"
    return "f" if isinstance(value, Number) else "o"


def _list_kind(values: Sequence[Any]) -> str:
    kinds = {_KINDS.get(type(value)) or _kind(value) for value in values}
    if not kinds:
        return "E"
    if "T" in kinds:
        return "L"
    if "s" in kinds:
        return "S"
    return "I" if kinds <= set("iobn") else "F"
