"""Kinds: what an annotation accepts, and its words for messages, for the command line and `amanda info`."""

from __future__ import annotations

import operator
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, islice
from math import isfinite
from numbers import Integral, Rational, Real
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from amanda.errors import FileError
from amanda.files import check_file_to_write, check_folder_to_write
from amanda.options.ranges import WHOLE, Length, PathTarget, Range, Where

# A tensor's repr has hundreds of lines, and the end of a message says what to do.
_MAX_REPR_LENGTH = 120
_MAX_NAME_BYTES = 255
"""Length of a name that file systems take."""
_LISTS = (Sequence, list, Iterable, Collection)
_SETS = (set, frozenset, Set)


MarkT = TypeVar("MarkT")


class Mismatch(Exception):
    """A value is not of a kind; the message tells which part of it, or why, or is empty."""


@dataclass(frozen=True)
class Kind:
    """The values that an annotation accepts.

    words: with an article, as Python writes values ("an integer >= 1", "True or False").
    text: without an article, as a command line writes values ("integer >= 1", "2 to 16, e4m3 or none").
    many: in the plural ("integers >= 1").
    accept: returns the value, numpy's numbers as Python's own; raises Mismatch.
    is_table: True for mappings, which configuration files have and command lines have not.
    """

    words: str
    text: str
    many: str
    accept: Callable[[Any], Any]
    is_table: bool = False


def shown(value: Any) -> str:
    """Return the repr of any value for a message, at most some 120 letters of it; the name of a class."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"  # often in place of an instance
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits has none, nor a list nested too deep
        return f"a {type(value).__name__} that has no repr"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= _MAX_REPR_LENGTH else f"{text[:_MAX_REPR_LENGTH]}..."


def kind_of(annotation: Any) -> Kind:
    """Return the kind of an annotation; whatever is unknown to this module accepts all values."""
    try:
        return _cached_kind(annotation)
    except TypeError:  # not hashable
        return _kind_of_annotation(annotation, ())


def _kind_of_annotation(annotation: Any, marks: tuple[Any, ...]) -> Kind:
    """Return the kind of an annotation.  marks: metadata of the `Annotated` types around it."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind_of_annotation(members[0], (*marks, *annotation.__metadata__))
    where = _find_mark(marks, Where)
    if where is not None:
        other_marks = tuple(mark for mark in marks if mark is not where)
        return _restricted_kind(_kind_of_annotation(annotation, other_marks), where)
    path_target = _find_mark(marks, PathTarget)
    if origin in (Union, types.UnionType):
        # A path may be a text, too: the union is then that of a path, not of texts and paths.
        if path_target is not None:
            return _kind_of_path(path_target)
        return _kind_of_union([_kind_of_annotation(member, marks) for member in members])
    if origin is Literal:
        return _kind_of_literal(members)
    if isinstance(annotation, TypeVar):
        return _ANY if annotation.__bound__ is None else _kind_of_annotation(annotation.__bound__, marks)
    # The type without the types of its items, if it has such.
    plain_type = origin or annotation
    if plain_type in _KINDS_OF_TYPES:
        return _KINDS_OF_TYPES[plain_type](marks)
    if plain_type in _LISTS or plain_type in _SETS:
        return _kind_of_list(plain_type, members, marks)
    if plain_type is tuple:
        return _kind_of_tuple(members, marks)
    if isinstance(plain_type, type) and issubclass(plain_type, Mapping):
        return _kind_of_mapping(members)
    if plain_type is Callable or plain_type is typing.Callable:
        return _FUNCTION
    if plain_type is type:
        return _kind_by_condition("class", lambda value: isinstance(value, type))
    if not isinstance(plain_type, type):
        return _ANY
    if issubclass(plain_type, os.PathLike):
        return _kind_of_path(path_target)
    # `isinstance` works with runtime protocols alone; for others nothing can be checked.
    if getattr(plain_type, "_is_protocol", False):
        is_runtime_protocol = getattr(plain_type, "_is_runtime_protocol", False)
        return _kind_of_protocol(plain_type) if is_runtime_protocol else _ANY
    return _kind_by_condition(plain_type.__name__, lambda value: isinstance(value, plain_type))


def _find_mark(marks: tuple[Any, ...], mark_type: type[MarkT]) -> MarkT | None:
    return next((mark for mark in marks if isinstance(mark, mark_type)), None)


# Typed, since Literal[1] and Literal[True] are equal.
_cached_kind = lru_cache(maxsize=1024, typed=True)(lambda annotation: _kind_of_annotation(annotation, ()))


def _kind_by_condition(noun: str, holds: Callable[[Any], bool], suffix: str = "") -> Kind:
    """Return the kind of all values for which a condition holds, named by a noun."""

    def accept(value: Any) -> Any:
        if not holds(value):
            raise Mismatch
        return value

    return _kind_from_noun(noun, accept, suffix)


def _kind_from_noun(noun: str, accept: Callable[[Any], Any], suffix: str = "") -> Kind:
    """Return a kind with words of a noun in singular and plural.  suffix: follows the noun, " >= 1"."""
    article = "an" if noun[0] in "aeiouAEIO" else "a"
    many = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return Kind(f"{article} {noun}{suffix}", f"{noun}{suffix}", f"{many}{suffix}", accept)


def _kind_of_protocol(protocol: type) -> Kind:
    """Return the kind of objects that have a protocol's methods."""
    methods = [name for base in protocol.__mro__[:-1] for name in vars(base) if name[0] != "_"]

    def has_methods(value: Any) -> bool:
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)

    return _kind_by_condition("object", has_methods, f" with {' and '.join(methods)}")


def _restricted_kind(kind: Kind, where: Where) -> Kind:
    """Return a kind of those values for which a mark's condition holds, with words of the mark."""

    def accept(value: Any) -> Any:
        """Return the value as the kind accepts it; raise Mismatch unless the mark's condition holds."""
        value = kind.accept(value)
        if not where.holds(value):  # holds for all values if the mark has words alone
            raise Mismatch
        return value

    return Kind(words=where.words, text=where.words, many=where.words, accept=accept)


def _kind_of_bool(marks: tuple[Any, ...]) -> Kind:
    """Return the kind of True and False alone."""

    def accept(value: Any) -> bool:
        """Return a bool; raise Mismatch for any other value, also for 0 and 1."""
        # 1 and 0 are not switches: who writes steps=True, or flag=1, has mixed up two options.
        if type(value) is not bool:
            raise Mismatch
        return value

    return Kind("True or False", "true or false", "True or False", accept)


def _kind_of_none(marks: tuple[Any, ...]) -> Kind:
    """Return the kind of None."""

    def accept(value: Any) -> None:
        if value is not None:
            raise Mismatch

    return Kind("None", "none", "None", accept)


def _kind_of_int(marks: tuple[Any, ...]) -> Kind:
    """Return the kind of whole numbers within the range among the marks, by default of 64 bits."""
    bounds = _find_mark(marks, Range) or WHOLE

    def accept(value: Any) -> int:
        """Return a whole number as an int; raise Mismatch for a bool, any other value, or out of bounds."""
        if type(value) is not int:
            # A bool is an int to Python, but True is not a number of steps.
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise Mismatch
            value = int(value)
        if not bounds.least <= value <= bounds.most:
            has_64_bits = WHOLE.least <= value <= WHOLE.most
            raise Mismatch("" if has_64_bits else "it has more than 64 bits")
        return int(value)

    # The limits of 64 bits go without saying.
    bounds_to_say = Range(
        bounds.least if bounds.least > WHOLE.least else -float("inf"),
        bounds.most if bounds.most < WHOLE.most else float("inf"),
    )
    kind = _kind_from_noun("integer", accept, str(bounds_to_say))
    # A command line says "1 to 8" for "integer from 1 to 8".
    return replace(kind, text=kind.text.removeprefix("integer from "))


def _kind_of_float(marks: tuple[Any, ...]) -> Kind:
    """Return the kind of numbers within the range among the marks; whole numbers stay whole."""
    bounds = _find_mark(marks, Range) or Range()

    def accept(value: Any) -> Any:
        """Return a number as int or float; raise Mismatch for a bool, a fraction, or out of bounds."""
        if type(value) is not float and type(value) is not int:
            # A fraction is a number, but no framework and no file takes one.
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or (isinstance(value, Rational) and not isinstance(value, Integral)):
                raise Mismatch
            value = int(value) if isinstance(value, Integral) else float(value)
        try:
            number = float(value)
        except OverflowError:
            raise Mismatch("it is beyond the largest float") from None
        if not bounds.holds(number):
            raise Mismatch("" if isfinite(number) else "it is not finite")
        return value

    return _kind_from_noun("number", accept, str(bounds))


def _kind_of_str(marks: tuple[Any, ...]) -> Kind:
    """Return the kind of texts, of the length that is among the marks, by default of any."""
    length = _find_mark(marks, Length) or Length()

    def accept(value: Any) -> str:
        """Return a text; raise Mismatch for another type or length."""
        if not isinstance(value, str):
            raise Mismatch
        if not length.holds(len(value)):
            raise Mismatch("" if value else "it is empty")
        return value

    return Kind("a string", "string", "strings", accept)


def _kind_of_any(marks: tuple[Any, ...]) -> Kind:
    return _ANY


def _kind_of_path(path_target: PathTarget | None) -> Kind:
    """Return the kind of paths.  path_target: what has to be at the path; None for anything or nothing."""
    name = "path" if path_target is None else f"path of a {path_target.target.removeprefix('output ')}"

    def accept(value: Any) -> Any:
        """Return the value as it came, also a text; raise Mismatch with the reason if it is no such path."""
        if not isinstance(value, (str, os.PathLike)) or isinstance(value, bytes):
            raise Mismatch
        text = os.fspath(value)
        # The system's own error for these says nothing of the option.
        if not isinstance(text, str) or not text or "\0" in text:
            raise Mismatch("it is empty" if not text else "")
        try:
            problem = "" if path_target is None else _path_problem(Path(text), path_target.target)
        except OSError as error:
            raise Mismatch(str(error.strerror).lower()) from None
        except UnicodeError:
            raise Mismatch("it is not a valid file name") from None
        if problem:
            raise Mismatch(problem)
        return value

    return Kind(f"the {name}" if path_target else "a path", name, f"{name}s", accept)


def _path_problem(path: Path, target: str) -> str:
    """Return what keeps a path from leading to a target, as `PathTarget` names it; "" if nothing does."""
    if target in ("file", "folder"):
        # From Python 3.14 on, is_file and is_dir hide errors of the system, such as a name that is too long.
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    if target == "file":
        return "" if path.is_file() else "it is a folder" if path.is_dir() else "there is no such file"
    if target == "folder":
        return "" if path.is_dir() else "it is not a folder" if path.exists() else "there is no such folder"
    # Found here, before hours of work are to be written there.
    if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in path.parts):
        return "a name in it is too long"
    check = check_file_to_write if target == "output file" else check_folder_to_write
    try:
        check(path)
    except FileError as error:
        return str(error).partition(" cannot be written: ")[2]
    return ""


def _kind_of_literal(members: tuple[Any, ...]) -> Kind:
    """Return the kind of some values; the Mismatch of a mistyped text names the nearest."""
    # With the class, since 1 == True == 1.0.
    member_of = {(member.__class__, member): member for member in members}
    texts = [
        str(member).lower() if member is None or isinstance(member, bool) else str(member)
        for member in members
    ]

    def accept(value: Any) -> Any:
        """Return the member that equals the value; raise Mismatch, with the nearest text, if none does."""
        try:
            # Values of subclasses are right as well, and numpy's integers.
            if isinstance(value, str):
                return member_of[str, value]
            if isinstance(value, Integral) and not isinstance(value, bool):
                return member_of[int, value]
            return member_of[type(value), value]
        except Exception:  # an object may raise anything where it is compared
            similar_texts = get_close_matches(value, texts, n=1) if isinstance(value, str) else []
            raise Mismatch(f"did you mean {similar_texts[0]!r}?" if similar_texts else "") from None

    representations = list(map(repr, members))
    if len(members) > 3:
        words = "one of " + _join_words(representations, ",")
    else:
        words = _join_words(representations, " or")
    return Kind(words, _join_words(texts), _join_words(representations), accept)


def words_of(annotation: Any) -> list[str]:
    """Return the strings of the Literals in an annotation, at any depth.

    Args:
        annotation: Any annotation of an option, such as `Literal["a", "b"] | None`.
    """
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [member for member in members if isinstance(member, str)]
    return [word for member in members for word in words_of(member)]


def _join_words(words: Sequence[str], last_separator: str = " or") -> str:
    """Return the words with commas between them, but `last` before the last one."""
    return ", ".join(words[:-1]) + (f"{last_separator} " if len(words) > 1 else "") + words[-1]


def _kind_of_union(kinds: Sequence[Kind]) -> Kind:
    """Return the kind of values that any of the kinds accepts, tried in order."""

    def accept(value: Any) -> Any:
        """Return the value as the first kind that takes it does; raise Mismatch with a reason if none."""
        reasons = []
        for kind in kinds:
            try:
                return kind.accept(value)
            except Mismatch as mismatch:
                reasons.append(str(mismatch))
        raise Mismatch(next((reason for reason in reasons if reason), ""))

    # "or None" is read best at the end, wherever the annotation has it.
    ordered_kinds = sorted(kinds, key=lambda kind: kind.words == "None")
    has_list_of_words = any(" of " in kind.words and " or " in kind.words for kind in kinds)
    last_separator = ", or" if len(kinds) > 2 or has_list_of_words else " or"
    words = _join_words([kind.words for kind in ordered_kinds], last_separator)
    return Kind(words, _union_text(ordered_kinds), _join_words([kind.many for kind in ordered_kinds]), accept)


def _union_text(kinds: Sequence[Kind]) -> str:
    """Return what a command line takes for one of the kinds: each alternative once, tables at the end."""
    texts: list[str] = []
    for kind in kinds:
        if not kind.is_table:
            texts += [kind.text] if kind.text.startswith("list of ") else re.split(", | or ", kind.text)
    # A single text is a list of one to the command line.
    texts = [text for text in texts if f"list of {text}s" not in texts]
    # A list of words has an "or" of its own.
    last_separator = ", or" if any(" or " in text for text in texts) else " or"
    alternatives = _join_words(texts, last_separator)
    if any(kind.is_table for kind in kinds):
        return f"{alternatives}; by name in a configuration file"
    return alternatives


def _kind_of_list(plain_type: Any, members: tuple[Any, ...], marks: tuple[Any, ...]) -> Kind:
    """Return the kind of lists, sets or iterables whose items are of one kind."""
    item_kind = kind_of(members[0]) if members else _ANY
    length = _find_mark(marks, Length) or Length()
    is_set, takes_any_iterable = plain_type in _SETS, plain_type in (Iterable, Collection)

    def accept(value: Any) -> Any:
        """Return the value, or a new list or set if it was converted or is an iterator; no text fits."""
        # A text is a sequence of texts, but type="conv2d" is not meant as six types.
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            raise Mismatch
        if takes_any_iterable and isinstance(value, Iterable) and not isinstance(value, Sequence):
            try:
                items = iter(value)
            except TypeError:  # a tensor of no axes says that it can be iterated
                raise Mismatch from None
            value = list(islice(items, length.most + 1))  # an iterator may have no end
        if not isinstance(value, Set if is_set else Sequence):
            raise Mismatch
        if not length.holds(len(value)):
            raise Mismatch("it is empty" if not len(value) else f"it has {len(value)} items")
        accepted_items = _accept_items([item_kind] * len(value), value)
        # The caller's own list, unless a number in it had to be converted.
        if all(map(operator.is_, accepted_items, value)):
            return value
        return set(accepted_items) if is_set else accepted_items

    nonempty = "non-empty " if length.least == 1 else ""
    noun = "set" if is_set else "list"
    # The plural of a Literal is that of Python, with quotation marks, which a command line has not.
    is_literal = bool(members) and get_origin(members[0]) is Literal
    return Kind(
        words=f"a {nonempty}{noun} of {item_kind.many}",
        text=f"{noun} of {item_kind.text if is_literal else item_kind.many}",
        many=f"{noun}s of {item_kind.many}",
        accept=accept,
    )


def _accept_items(kinds: Sequence[Kind], values: Collection[Any]) -> list[Any]:
    """Return the items as their kinds accept them; raise Mismatch with the position of a wrong one."""
    items = []
    for position, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        try:
            items.append(kind.accept(value))
        except Mismatch as mismatch:
            why = f": {mismatch}" if str(mismatch) else ""
            raise Mismatch(f"item {position} is {shown(value)}{why}") from None
    return items


def _kind_of_tuple(members: tuple[Any, ...], marks: tuple[Any, ...]) -> Kind:
    """Return the kind of tuples: of any length with items of one kind, or of fixed items."""
    if not members or members[-1] is Ellipsis:
        list_kind = _kind_of_list(Sequence, members[:1], marks)
        # "a list of integers" becomes "a tuple of integers".
        words, many = (text.replace("list", "tuple", 1) for text in (list_kind.words, list_kind.many))
        return Kind(words, list_kind.text, many, lambda value: tuple(list_kind.accept(value)))
    kinds = [kind_of(member) for member in members]

    def accept(value: Any) -> Any:
        """Return a list or tuple as a tuple of accepted items; raise Mismatch for another number of these."""
        if not isinstance(value, (list, tuple)):
            raise Mismatch
        if len(value) != len(kinds):
            raise Mismatch(f"it has {len(value)} item{'s' * (len(value) != 1)}")
        return tuple(_accept_items(kinds, value))

    has_one_kind = len({kind.words for kind in kinds}) == 1
    contents = f"{len(kinds)} {kinds[0].many}" if has_one_kind else ", ".join(kind.words for kind in kinds)
    return Kind(f"a tuple of {contents}", f"list of {kinds[0].text}", f"tuples of {contents}", accept)


def _kind_of_mapping(members: tuple[Any, ...]) -> Kind:
    """Return the kind of mappings with keys and values of two kinds."""
    kinds = [kind_of(member) for member in members] or [_ANY, _ANY]
    key_kind, item_kind = kinds[0], kinds[-1]  # some mappings have one parameter

    def accept(value: Any) -> Any:
        """Return the mapping, or a dict if a key or value was converted; raise Mismatch for a wrong one."""
        if not isinstance(value, Mapping):
            raise Mismatch
        items, accepted_items = list(value.items()), []
        for key, item in items:
            try:
                accepted_key = key_kind.accept(key)
            except Mismatch:
                raise Mismatch(f"its key is {shown(key)}") from None
            try:
                # A key that becomes a list or set, as of an Iterable, could not be a key.
                new_key = accepted_key if isinstance(accepted_key, Hashable) else key
                accepted_items.append((new_key, item_kind.accept(item)))
            except Mismatch:
                raise Mismatch(f"its value of {shown(key)} is {shown(item)}") from None
        is_unchanged = all(map(operator.is_, chain(*accepted_items), chain(*items)))
        return value if is_unchanged else dict(accepted_items)

    words = f"a dict from {key_kind.many} to {item_kind.many}" if members else "a dict"
    if item_kind.accept is _FUNCTION.accept:  # which no file has
        return Kind(words, f"{words.removeprefix('a ')} in Python", "dicts", accept)
    return Kind(words, "table in a configuration file", "dicts", accept, is_table=True)


_ANY = Kind("any value", "text", "values", lambda value: value)
_FUNCTION = _kind_by_condition("function", callable)
_KINDS_OF_TYPES: dict[Any, Callable[[tuple[Any, ...]], Kind]] = {
    bool: _kind_of_bool, int: _kind_of_int, float: _kind_of_float, str: _kind_of_str,
    type(None): _kind_of_none, None: _kind_of_none, Any: _kind_of_any, object: _kind_of_any,
    Path: lambda marks: _kind_of_path(next((mark for mark in marks if isinstance(mark, PathTarget)), None)),
    PurePath: lambda marks: _kind_of_path(None), os.PathLike: lambda marks: _kind_of_path(None),
}  # fmt: skip
