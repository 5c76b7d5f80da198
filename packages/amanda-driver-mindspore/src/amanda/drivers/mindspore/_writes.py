"""Inputs that an operator writes, and outputs that its kernel leaves unwritten.

A primitive declares the arguments that it writes (`sig_rw.RW_WRITE`). The objects of this declaration have no
attribute for it, so the declaration is read from the source of the primitive's class.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class ArgumentDeclaration(NamedTuple):
    """The declaration of arguments in the class of a primitive.

    names: of the arguments.  written: positions of those that the operator writes.
    """

    names: tuple[str, ...] = ()
    written: tuple[int, ...] = ()


_UNDECLARED: Mapping[str, tuple[int, ...]] = {
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
"""Written inputs of primitives that declare them in their documentation only."""

_STATISTICS: Mapping[str, tuple[int, ...]] = {
    "BatchNorm": (3, 4),
    "BatchNormExt": (3, 4),
    "InstanceNorm": (3, 4),
    "SyncBatchNorm": (3, 4),
}
"""Running statistics, which a normalisation writes in training.  Some declare that they write the scale, too,
which no kernel does."""
_MAX_NORM: Mapping[str, tuple[int, ...]] = {"Embedding": (1,)}
"""Weights that are written if there is a `max_norm`."""

_DECLARATION = re.compile(r"^    __mindspore_signature__ =(.*?)(?=^    [@\w]|\Z)", re.DOTALL | re.MULTILINE)
_ARGUMENT = re.compile(r"make_sig\(\s*['\"](\w+)['\"](.*?)(?=make_sig\(|\Z)", re.DOTALL)


@cache
def declaration_of(primitive: Any) -> ArgumentDeclaration:
    """Return what a class of primitives declares, or the first of its bases that has a declaration."""
    for kind in primitive.__mro__:
        source = _classes(kind.__module__).get(kind.__name__, "")
        declaration = _DECLARATION.search(source)
        if declaration is not None:
            arguments = _ARGUMENT.findall(declaration[1])
            names = tuple(name for name, _ in arguments)
            written = tuple(i for i, (_, options) in enumerate(arguments) if "RW_WRITE" in options)
            return ArgumentDeclaration(names, _UNDECLARED.get(kind.__name__, written))
        if kind.__name__ in _UNDECLARED:
            return ArgumentDeclaration((), _UNDECLARED[kind.__name__])
    return ArgumentDeclaration()


@cache
def _classes(module: str) -> Mapping[str, str]:
    """Return the source of each class of a module of MindSpore."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    if not module.startswith("mindspore.") or not path.endswith(".py"):
        return {}
    parts = re.split(r"^class (\w+)", Path(path).read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=False))


class Writes(NamedTuple):
    """The inputs that a call writes.

    inputs: positions of the inputs that are written.
    returned: positions of those inputs that the first outputs stand for.
    """

    inputs: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


def writes_of(primitive: type, attributes: Callable[[], Mapping[str, Any]]) -> Writes:
    """Return what a call of a primitive writes.

    attributes: returns the arguments that are no tensors, by name.
    """
    name = primitive.__name__
    if name in _STATISTICS:
        return Writes(_STATISTICS[name]) if is_training(attributes()) else Writes()
    if name in _MAX_NORM:
        return Writes(_MAX_NORM[name]) if attributes().get("max_norm") is not None else Writes()
    written = declaration_of(primitive).written
    return Writes(written, () if name == "AdamNoUpdateParam" else written)


def is_training(attributes: Mapping[str, Any]) -> bool:
    """Return True for a normalisation that reads the statistics of its batch."""
    return bool(attributes.get("is_training", attributes.get("training", True)))


def unwritten_outputs(operator: str, attributes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the positions of outputs that the operator's kernel leaves as memory that nobody has written."""
    if operator == "batch_norm":
        return (1, 2) if is_training(attributes) else (1, 2, 3, 4)
    return (3, 4) if operator == "lstm" else ()


HAS_UNWRITTEN = frozenset({"batch_norm", "lstm"})
"""Operators with unwritten outputs."""
