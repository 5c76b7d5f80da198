"""Declarations of operators: names and defaults of their arguments, and the arguments that they write.

Generated classes have signatures in Python. Native functions have signatures in their documentation, one for
each overload. A primitive declares the arguments that it writes (`sig_rw.RW_WRITE`).
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mindspore import Tensor
from mindspore.ops import functional_overload

NO_DEFAULT = inspect.Parameter.empty


class OperatorSignature(NamedTuple):
    """Names and defaults of an operator's arguments, as a call of it may pass them.

    names, defaults: of the arguments in order.  positional: maximal number of positional arguments.
    gathered: position of the argument that takes all the rest, such as `*shape` of `reshape`.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    positional: int
    gathered: int | None = None

    def count_trailing_defaults(self, values: list[Any]) -> int:
        """Return the number of values at the end that are defaults."""
        count = 0
        for value, default in zip(reversed(values), reversed(self.defaults[: len(values)]), strict=False):
            # Types are compared first: 1 equals True, and `!=` of a tensor gives a tensor.
            if default is NO_DEFAULT or type(value) is not type(default) or value != default:
                break
            count += 1
        return count

    def accepts(self, count: int, keywords: Any) -> bool:
        """Return True if a call may have `count` positional arguments and these keywords."""
        # An argument such as `*shape` takes any number of positional values.
        max_count = count if self.gathered is not None else self.positional
        names_by_keyword = self.names[min(count, len(self.names)) :]
        return count <= max_count and all(name in names_by_keyword for name in keywords)


@cache
def kernel_signature(primitive: Any, count: int) -> OperatorSignature:
    """Return the signature of a generated class: arguments of the call, then those of the constructor."""
    parameters = parameters_of(primitive.__call__)
    constructor_parameters = parameters_of(primitive.__init__) if len(parameters) < count else []
    return signature_of_count([*parameters, *constructor_parameters], count)


def primitive_signature(primitive: Any, count: int) -> OperatorSignature:
    """Return the signature of a primitive that the executor runs by name."""
    kind: Any = type(primitive)
    parameters = parameters_of(kind.__call__)
    # Primitives that are not generated take `*args`, so their names are in an attribute or in a declaration.
    if len(parameters) != count:
        attributes = getattr(primitive, "attrs", None) or {}
        names = attributes.get("input_names") or declaration_of(kind).names
        parameters = [(name, NO_DEFAULT) for name in names]
    return signature_of_count(parameters, count)


@cache
def overload_signatures(operator: str, name: str, method: bool) -> tuple[OperatorSignature, ...]:
    """Return the documented signatures of a function or method, one for each overload; `self` is `input`.

    Without documentation the only one takes any positional arguments.
    """
    if method:
        documented_object, first_names = getattr(Tensor, name, None), ["input"]
    else:
        documented_object, first_names = getattr(functional_overload, operator, None), []
    lines = (getattr(documented_object, "__doc__", None) or "").splitlines()
    argument_texts = [match["arguments"] for line in lines if (match := _SIGNATURE.match(line))]
    return tuple(_parse_signature(text, first_names) for text in argument_texts) or (
        OperatorSignature(tuple(first_names), defaults=(NO_DEFAULT,), positional=_ANY_NUMBER),
    )


_ANY_NUMBER = 99
"""Number of positional arguments of an operator without documentation: more than any call has."""
_SIGNATURE = re.compile(
    r"^\s*(?:\.\. (?:method|function):: (?:\w+\.)*)?\w+\((?P<arguments>.*)\)\s*(?:->.*)?$"
)


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


def signature_of_count(parameters: list[tuple[str, Any]], count: int) -> OperatorSignature:
    """Return a signature of `count` arguments; those beyond the parameters are "argument2" and so on."""
    parameters = parameters[:count] + [(f"argument{i}", NO_DEFAULT) for i in range(len(parameters), count)]
    return OperatorSignature(
        tuple(name for name, _ in parameters), tuple(default for _, default in parameters), count
    )


def _parse_signature(text: str, first_names: list[str]) -> OperatorSignature:
    """Parse the arguments in a documented signature, "*size, dtype=None"; `first_names` come before."""
    names, defaults = list(first_names), [NO_DEFAULT] * len(first_names)
    positional, gathered = None, None
    for argument in _split_arguments(text):
        if argument in ("*", "/"):
            # Behind the first "*" arguments are passed by name; "/" makes no difference here.
            positional = len(names) if argument == "*" and positional is None else positional
            continue
        name, _, default = argument.partition("=")
        if name.startswith("*"):
            gathered, name = len(names), name[1:]
        names.append(name.strip())
        defaults.append(_parse_default(default.strip()) if default else NO_DEFAULT)
        if gathered is not None and positional is None:  # the gathering argument is the last positional one
            positional = len(names)
    positional = len(names) if positional is None else positional
    return OperatorSignature(tuple(names), tuple(defaults), positional, gathered)


def _split_arguments(text: str) -> list[str]:
    """Split the text of arguments at the commas outside of brackets; drop empty ones."""
    arguments, depth = [""], 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and not depth:
            arguments.append("")
        else:
            arguments[-1] += character
    return [argument.strip() for argument in arguments if argument.strip()]


def _parse_default(text: str) -> Any:
    """Return the value of a default in a signature's text; NO_DEFAULT for text that is not a literal."""
    try:
        # Defaults are read from documentation, which may contain anything.
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return NO_DEFAULT


class ArgumentDeclaration(NamedTuple):
    """The declaration of arguments in the class of a primitive.

    names: of the arguments.  written: positions of those that the operator writes.
    """

    names: tuple[str, ...] = ()
    written: tuple[int, ...] = ()


_WRITTEN_UNDECLARED: Mapping[str, tuple[int, ...]] = {
    "AdamNoUpdateParam": (0, 1),
    "ApplyCenteredRMSProp": (0, 1, 2, 3),
    "ApplyRMSProp": (0, 1, 2),
    "CopyWithSlice": (0,),
    "FusedAdaFactor": (7, 8, 9, 10, 11),
    "FusedCastAdamWeightDecay": (0, 1, 2),
    "Lamb": (0, 1, 2),
    "LambApplyOptimizerAssign": (1, 2),
    "LambApplyWeightAssign": (4,),
    "SGD": (0, 3, 5),
}
"""Positions of written inputs of primitives that declare them in their documentation only."""

_WRITTEN_IN_TRAINING: Mapping[str, tuple[int, ...]] = {
    "BatchNorm": (3, 4),
    "BatchNormExt": (3, 4),
    "InstanceNorm": (3, 4),
    "SyncBatchNorm": (3, 4),
}
"""Running statistics, which a normalisation writes in training.  Some declare that they write the scale, too,
which no kernel does."""
_WRITTEN_WITH_MAX_NORM: Mapping[str, tuple[int, ...]] = {"Embedding": (1,)}
"""Weights that are written if there is a `max_norm`."""

# The objects of a declaration have no attribute for written arguments, so the source of the class is read.
_DECLARATION = re.compile(r"^    __mindspore_signature__ =(.*?)(?=^    [@\w]|\Z)", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"make_sig\(\s*['\"](\w+)['\"](.*?)(?=make_sig\(|\Z)", re.DOTALL)


@cache
def declaration_of(primitive: Any) -> ArgumentDeclaration:
    """Return what a class of primitives, or the first of its bases that does, declares in its source.

    What only the documentation declares comes first. A class without any has an empty declaration.
    """
    for kind in primitive.__mro__:
        documented_positions = _WRITTEN_UNDECLARED.get(kind.__name__)
        declaration = _DECLARATION.search(_source_by_class(kind.__module__).get(kind.__name__, ""))
        if declaration is not None:
            arguments = _ARGUMENT.findall(declaration[1])  # pairs of a name and the options after it
            names = tuple(name for name, _ in arguments)
            declared_positions = tuple(i for i, (_, options) in enumerate(arguments) if "RW_WRITE" in options)
            return ArgumentDeclaration(
                names, declared_positions if documented_positions is None else documented_positions
            )
        if documented_positions is not None:
            return ArgumentDeclaration((), documented_positions)
    return ArgumentDeclaration()


@cache
def _source_by_class(module: str) -> Mapping[str, str]:
    """Return the source of each class of a module of MindSpore, by name; none for other modules."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    if not module.startswith("mindspore.") or not path.endswith(".py"):
        return {}
    # The text before the first class, and then by turns a name and the source up to the next class.
    _, *names_and_sources = re.split(r"^class (\w+)", Path(path).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(names_and_sources[::2], names_and_sources[1::2], strict=False))


class Writes(NamedTuple):
    """The inputs that a call writes.

    inputs: positions of the inputs that are written.
    returned: positions of those inputs that the first outputs stand for.
    """

    inputs: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


def writes_of(primitive: type, attributes: Callable[[], Mapping[str, Any]]) -> Writes:
    """Return what a call of a primitive writes, by its declaration and, for a few, by its attributes.

    attributes: returns the arguments that are not tensors, by name; called for these few alone.
    """
    name = primitive.__name__
    if name in _WRITTEN_IN_TRAINING:
        return Writes(_WRITTEN_IN_TRAINING[name]) if is_training(attributes()) else Writes()
    if name in _WRITTEN_WITH_MAX_NORM:
        return Writes(_WRITTEN_WITH_MAX_NORM[name]) if attributes().get("max_norm") is not None else Writes()
    written = declaration_of(primitive).written
    # AdamNoUpdateParam returns an update; the outputs of other primitives stand for the written inputs.
    return Writes(written, returned=() if name == "AdamNoUpdateParam" else written)


def is_training(attributes: Mapping[str, Any]) -> bool:
    """Return True for a normalisation that reads the statistics of its batch."""
    return bool(attributes.get("is_training", attributes.get("training", True)))


def unwritten_outputs(operator: str, attributes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the positions of outputs that the operator's kernel leaves as memory that nobody has written."""
    if operator == "batch_norm":
        return (1, 2) if is_training(attributes) else (1, 2, 3, 4)
    return (3, 4) if operator == "lstm" else ()


HAS_UNWRITTEN = frozenset({"batch_norm", "lstm"})
"""Operators for which `unwritten_outputs` has positions."""
