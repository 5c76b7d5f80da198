"""Overloads of a callable: the signature that fits a call's arguments best, and the input that each fills."""

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
    size_input: the input that takes all remaining positional arguments, which are a spread size; or None.
    keywords: each keyword of the call with its input, in the order of the call.
    written_positions: inputs that the op writes.  unreturned_positions: those that it does not return.
    filled: defaults of arguments that the call leaves out and that stand before a given one, by input.
    optional_tensors: inputs whose schema type is a tensor or None.
    """

    names: tuple[str, ...]
    positional: tuple[int, ...]
    size_input: int | None
    keywords: tuple[tuple[str, int], ...]
    written_positions: tuple[int, ...]
    unreturned_positions: tuple[int, ...]
    optional_tensors: frozenset[int]
    filled: Mapping[int, Any] = field(hash=False)
    defaults: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class CallForm:
    """A form of call (its number of positional arguments, and its keywords) matched with one signature.

    filled_arguments: for each positional and keyword argument of the call, the index of the signature's
    argument that it fills; None if the signature has none.  has_spread_size: whether the last positional
    arguments are elements of one size.  missing_count: of required arguments that the call lacks.
    unknown_count: of the call's arguments that the signature lacks.
    """

    signature: Signature
    filled_arguments: tuple[int | None, ...]
    keywords: tuple[str, ...]
    has_spread_size: bool = False

    @property
    def missing_count(self) -> int:
        required = (not argument.has_default for argument in self.signature.arguments)
        return sum(is_required and i not in self.filled_arguments for i, is_required in enumerate(required))

    @cached_property
    def unknown_count(self) -> int:
        return self.filled_arguments.count(None)

    @cached_property
    def layout(self) -> ArgumentLayout:
        return _layout_of_form(self)


def call_forms(
    candidates: Iterable[Signature], nargs: int, keywords: tuple[str, ...]
) -> tuple[CallForm, ...]:
    """Return the forms that a call with `nargs` positional arguments and these keywords may have.

    They are those in which the fewest arguments are missing or unknown.  If no signature takes the call, its
    only form is the order of the call itself.
    """
    forms = [form for signature in candidates for form in _forms_of_signature(signature, nargs, keywords)]
    forms = _with_fewest_missing(forms)
    # An `out=` of several tensors has other keywords in the schema, so `out` may be unknown: types will tell.
    tolerated_count = 1 if "out" in keywords else 0
    fewest_unknown = min((form.unknown_count for form in forms), default=0)
    forms = [form for form in forms if form.unknown_count <= fewest_unknown + tolerated_count]
    return tuple(forms) or (_in_call_order(nargs, keywords),)


def best_form(candidates: Sequence[CallForm], kinds: str) -> CallForm:
    """Return the form whose signature fits the kinds of the arguments best; the first among equals."""
    return max(candidates, key=lambda form: _fitness(form, kinds))


def kinds_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """Return one letter of `_KINDS` for each argument, positional then keyword arguments."""
    values = (*args, *kwargs.values()) if kwargs else args
    return "".join([_KINDS.get(type(value)) or _kind_by_base_class(value) for value in values])


def _with_fewest_missing(candidates: list[CallForm]) -> list[CallForm]:
    """Return the forms that lack the fewest required arguments."""
    missing_counts = [form.missing_count for form in candidates]
    fewest_missing = min(missing_counts, default=0)
    return [form for form, count in zip(candidates, missing_counts, strict=True) if count == fewest_missing]


def _forms_of_signature(signature: Signature, nargs: int, keywords: tuple[str, ...]) -> Iterator[CallForm]:
    """Yield the form of a call by one signature, and the form with a size spread over the last arguments."""
    keyword_arguments = tuple(signature.index(keyword) for keyword in keywords)
    positional = signature.positional
    if nargs <= len(positional):
        form = CallForm(signature, positional[:nargs] + keyword_arguments, keywords)
        if _fills_each_input_once(form):
            yield form
    if signature.may_spread_size and nargs >= len(positional):
        further_elements = (positional[-1],) * (nargs - len(positional))
        filled_arguments = positional + further_elements + keyword_arguments
        yield CallForm(signature, filled_arguments, keywords, has_spread_size=True)


def _fills_each_input_once(form: CallForm) -> bool:
    """Return False if two arguments of the call would fill the same input."""
    indices = [i for i in form.filled_arguments if i is not None]
    return len(set(indices)) == len(indices)


def _in_call_order(nargs: int, keywords: tuple[str, ...]) -> CallForm:
    """Return the form of a call without a signature: inputs arg0, arg1, ..., then the keywords."""
    arguments = tuple(Argument(f"arg{i}", "Any") for i in range(nargs))
    order = tuple(range(nargs))
    return CallForm(Signature(arguments, order), order + (None,) * len(keywords), keywords)


def _layout_of_form(form: CallForm) -> ArgumentLayout:
    """Return the input that each argument of a form fills.

    The inputs are the signature's arguments up to the last filled one, then keywords that it lacks.
    """
    arguments = form.signature.arguments
    nargs = len(form.filled_arguments) - len(form.keywords)
    given_arguments = {i for i in form.filled_arguments if i is not None}
    length = max(given_arguments, default=-1) + 1
    argument_of_keyword = dict(zip(form.keywords, form.filled_arguments[nargs:], strict=True))
    unknown_keywords = [keyword for keyword, i in argument_of_keyword.items() if i is None]
    keyword_inputs = [
        (keyword, length + unknown_keywords.index(keyword) if i is None else i)
        for keyword, i in argument_of_keyword.items()
    ]
    written = [i for i in range(length) if i in given_arguments and arguments[i].is_written]
    written += [length + i for i, keyword in enumerate(unknown_keywords) if keyword == "out"]
    positional = form.signature.positional[:nargs]
    return ArgumentLayout(
        names=(*(argument.name for argument in arguments[:length]), *unknown_keywords),
        positional=positional[:-1] if form.has_spread_size else positional,
        size_input=positional[-1] if form.has_spread_size else None,
        keywords=tuple(keyword_inputs),
        written_positions=tuple(written),
        unreturned_positions=tuple(i for i in written if i < length and arguments[i].is_unreturned),
        optional_tensors=frozenset(
            i for i in range(length) if arguments[i].type == "Tensor" and arguments[i].is_optional
        ),
        filled={i: arguments[i].default for i in range(length) if i not in given_arguments},
        defaults={
            argument.name: argument.default
            for i, argument in enumerate(arguments)
            if i not in given_arguments and argument.has_default and argument.type != "Tensor"
        },
    )


# Letters for kinds of arguments:
# T tensor, b bool, i int, f float, c complex, s str, n None, d dtype, D device, l layout,
# m memory format, g generator; I L S F lists of ints, tensors, names, numbers; E an empty
# list; o anything else.
_KINDS: dict[type, str] = {
    torch.Tensor: "T", torch.nn.Parameter: "T", bool: "b", int: "i", float: "f", complex: "c", str: "s",
    type(None): "n", torch.dtype: "d", torch.device: "D", torch.layout: "l", torch.memory_format: "m",
    torch.Generator: "g", torch.SymInt: "i", torch.SymFloat: "f", torch.SymBool: "b", torch.Size: "I",
}  # fmt: skip
_ANYTHING = "TbifcsndDlmgILSFEo"
# What each schema type takes, best first.
_ACCEPTS = {
    "Tensor": "Toifcb", "Number": "ifcbTo", "Complex": "cfiTo", "Float": "fibTo", "Int": "iboT",
    "SymInt": "ioT", "Bool": "bo", "String": "s", "ScalarType": "do", "Layout": "l", "MemoryFormat": "m",
    "DeviceObj": "Dsi", "Generator": "g", "Any": _ANYTHING,
}  # fmt: skip
_ACCEPTS_LISTS = {
    "Tensor": "LET", "Int": "IEoLi", "SymInt": "IEoLi", "String": "SEs", "Number": "FIEo",
    "Float": "FIEo", "Any": _ANYTHING,
}  # fmt: skip


def _fitness(form: CallForm, kinds: str) -> tuple[int, int, int]:
    """Rate a form for arguments of these kinds: fewest misfits, then unknown keywords, then best types."""
    # A tuple, compared from the left: a misfit outweighs any number of less exact types.
    misfit_count, distance = 0, 0
    nargs = len(kinds) - len(form.keywords)
    # Positional arguments from this one on are the elements of a spread size.
    first_element = len(form.signature.positional) - 1 if form.has_spread_size else nargs
    for position, (i, kind) in enumerate(zip(form.filled_arguments, kinds, strict=True)):
        if i is None:
            continue
        is_size_element = first_element <= position < nargs
        if kind == "n" and form.signature.arguments[i].is_optional and not is_size_element:
            continue  # None for an optional argument fits exactly
        accepted_kinds = _ACCEPTS["SymInt"] if is_size_element else _accepted_kinds(form.signature, i)
        misfit_count += kind not in accepted_kinds
        distance += accepted_kinds.find(kind)  # how far the kind is from the best one
    return (-misfit_count, -form.unknown_count, -distance)


def _accepted_kinds(signature: Signature, i: int) -> str:
    """Return the letters of the kinds that an argument of a signature accepts, the best first."""
    argument = signature.arguments[i]
    if not argument.is_list:
        return _ACCEPTS.get(argument.type, _ANYTHING)
    accepted_kinds = _ACCEPTS_LISTS.get(argument.type, _ANYTHING)
    # A single int is a spread size of one element, for which there is another form.
    if signature.may_spread_size and i == signature.positional[-1]:
        return accepted_kinds.replace("i", "")
    return accepted_kinds


def _kind_by_base_class(value: Any) -> str:
    """Return the letter of a value whose very type `_KINDS` lacks, by the value's base classes."""
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
    kinds = {_KINDS.get(type(value)) or _kind_by_base_class(value) for value in values}
    if not kinds:
        return "E"
    if "T" in kinds:
        return "L"
    if "s" in kinds:
        return "S"
    return "I" if kinds <= set("iobn") else "F"
