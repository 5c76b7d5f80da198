"""Overloads of a callable: the signature that fits a call best, and the input that each argument fills."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Number
from typing import Any

import torch

from ._signatures import Argument, Signature


@dataclass(frozen=True)
class ArgumentLayout:
    """The input that each argument of one form of call fills. Indices are positions among the inputs.

    positional: the input of each positional argument, without arguments that are spread sizes.
    spread: the input that takes all remaining positional arguments.
    keywords: the input of each keyword argument, in the order of the call.
    mutable: inputs that the op writes.  unreturned: written inputs that the op does not return.
    filled: defaults of arguments that stand before a given one.
    optional_tensors: inputs whose schema type is a tensor or None.
    """

    names: tuple[str, ...]
    positional: tuple[int, ...]
    spread: int | None
    keywords: tuple[tuple[str, int], ...]
    mutable: tuple[int, ...]
    unreturned: tuple[int, ...]
    optional_tensors: frozenset[int]
    filled: Mapping[int, Any] = field(hash=False)
    defaults: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class CallForm:
    """A form of call matched with one signature.

    bound: for each positional and keyword argument of the call, the argument of the signature, None if the
    signature has none.  missing_count: of required arguments that the call lacks.  unknown_count: of
    arguments that the signature lacks.
    """

    signature: Signature
    bound: tuple[int | None, ...]
    keywords: tuple[str, ...]
    spread: bool = False

    @cached_property
    def missing_count(self) -> int:
        required = (not argument.has_default for argument in self.signature.arguments)
        return sum(is_required and i not in self.bound for i, is_required in enumerate(required))

    @cached_property
    def unknown_count(self) -> int:
        return self.bound.count(None)

    @cached_property
    def layout(self) -> ArgumentLayout:
        return _layout_of_form(self)


def call_forms(
    candidates: Iterable[Signature], nargs: int, keywords: tuple[str, ...]
) -> tuple[CallForm, ...]:
    """Return the forms that a call with `nargs` positional arguments and these keywords may have.

    If no signature takes the call, its only form is the order of the call itself.
    """
    fitting = [form for signature in candidates for form in _forms_of_signature(signature, nargs, keywords)]
    fitting = _with_fewest_missing(fitting)
    # An `out=` of several tensors is spelled otherwise in the schema: types will tell.
    tolerance = 1 if "out" in keywords else 0
    fewest = min((form.unknown_count for form in fitting), default=0)
    fitting = [form for form in fitting if form.unknown_count <= fewest + tolerance]
    return tuple(fitting) or (_in_call_order(nargs, keywords),)


def best_form(candidates: Sequence[CallForm], kinds: str) -> CallForm:
    """Return the form whose signature fits the kinds of the arguments best; the first among equals."""
    return max(candidates, key=lambda form: _fitness(form, kinds))


def kinds_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """Return one letter for each argument, its kind; overloads differ in the kinds that they accept."""
    values = (*args, *kwargs.values()) if kwargs else args
    return "".join([_KINDS.get(type(value)) or _kind_of(value) for value in values])


def _with_fewest_missing(candidates: list[CallForm]) -> list[CallForm]:
    """Return the forms that lack the fewest required arguments."""
    fewest = min((form.missing_count for form in candidates), default=0)
    return [form for form in candidates if form.missing_count == fewest]


def _forms_of_signature(signature: Signature, nargs: int, keywords: tuple[str, ...]) -> Iterator[CallForm]:
    """Yield the form of a call by one signature, and the form with a size spread over the last arguments."""
    keyword_arguments = tuple(signature.index(keyword) for keyword in keywords)
    positional = signature.positional
    if nargs <= len(positional):
        form = CallForm(signature, positional[:nargs] + keyword_arguments, keywords)
        if _fills_each_input_once(form):
            yield form
    if signature.spreads and nargs >= len(positional):
        sizes = (positional[-1],) * (nargs - len(positional))
        bound = positional + sizes + keyword_arguments
        yield CallForm(signature, bound, keywords, spread=True)


def _fills_each_input_once(form: CallForm) -> bool:
    """Return False if two arguments of the call would fill the same input."""
    indices = [i for i in form.bound if i is not None]
    return len(set(indices)) == len(indices)


def _in_call_order(nargs: int, keywords: tuple[str, ...]) -> CallForm:
    """Return the form of a call without a signature: inputs arg0, arg1, ..., then the keywords."""
    arguments = tuple(Argument(f"arg{i}", "Any") for i in range(nargs))
    order = tuple(range(nargs))
    return CallForm(Signature(arguments, order), order + (None,) * len(keywords), keywords)


def _layout_of_form(form: CallForm) -> ArgumentLayout:
    """Return where a form puts each argument; keywords that the signature lacks become inputs at the end."""
    arguments, bound = form.signature.arguments, form.bound
    nargs = len(bound) - len(form.keywords)
    bound_indices = {i for i in bound if i is not None}
    length = max(bound_indices, default=-1) + 1
    pairs = list(zip(form.keywords, bound[nargs:], strict=True))
    appended = [keyword for keyword, i in pairs if i is None]
    keywords = [(keyword, length + appended.index(keyword) if i is None else i) for keyword, i in pairs]
    written = [i for i in range(length) if i in bound_indices and arguments[i].is_written]
    written += [length + i for i, name in enumerate(appended) if name == "out"]
    positional = form.signature.positional[:nargs]
    return ArgumentLayout(
        names=(*(argument.name for argument in arguments[:length]), *appended),
        positional=positional[:-1] if form.spread else positional,
        spread=positional[-1] if form.spread else None,
        keywords=tuple(keywords),
        mutable=tuple(written),
        unreturned=tuple(i for i in written if i < length and arguments[i].is_unreturned),
        optional_tensors=frozenset(
            i for i in range(length) if arguments[i].type == "Tensor" and arguments[i].is_optional
        ),
        filled={i: arguments[i].default for i in range(length) if i not in bound_indices},
        defaults={
            argument.name: argument.default
            for i, argument in enumerate(arguments)
            if i not in bound_indices and argument.has_default and argument.type != "Tensor"
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


def _fitness(form: CallForm, kinds: str) -> tuple[int, int, int]:
    """Rate a form for arguments of these kinds: fewest misfits, then unknown keywords, then best types."""
    # A tuple, compared from the left: a misfit outweighs any number of less exact types.
    misfits, distance = 0, 0
    nargs = len(kinds) - len(form.keywords)
    # The arguments from here to `nargs` are the elements of a spread size.
    first_size = len(form.signature.positional) - 1 if form.spread else nargs
    for position, (i, kind) in enumerate(zip(form.bound, kinds, strict=True)):
        if i is None:
            continue
        argument = form.signature.arguments[i]
        if first_size <= position < nargs:
            accepted = _ACCEPTS["SymInt"]
        elif kind == "n" and argument.is_optional:
            continue
        elif argument.is_list:
            accepted = _ACCEPTS_LISTS.get(argument.type, _ANYTHING)
            # A single int is a spread size of one element, for which there is another form.
            if form.signature.spreads and i == form.signature.positional[-1]:
                accepted = accepted.replace("i", "")
        else:
            accepted = _ACCEPTS.get(argument.type, _ANYTHING)
        misfits += kind not in accepted
        distance += accepted.find(kind)  # how far the kind is from the best type
    return (-misfits, -form.unknown_count, -distance)


def _kind_of(value: Any) -> str:
    """Return the letter of a value whose very type has none, by its base classes."""
    if isinstance(value, torch.Tensor):
        return "T"
    if isinstance(value, list | tuple):
        return _list_kind(value)
    if isinstance(value, Integral):
        return "i"
    return "f" if isinstance(value, Number) else "o"


def _list_kind(values: Sequence[Any]) -> str:
    """Return the letter of a list by the kinds of its items."""
    # Mixed lists count as the kind that only one schema type takes: tensors, then names.
    kinds = {_KINDS.get(type(value)) or _kind_of(value) for value in values}
    if not kinds:
        return "E"
    if "T" in kinds:
        return "L"
    if "s" in kinds:
        return "S"
    return "I" if kinds <= set("iobn") else "F"
