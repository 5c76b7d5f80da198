"""Choices: which ops have candidates, and candidates by their labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from amanda.options import Length, Name, checked
from amanda.tools.search._candidates import ACTIVATIONS, Activation, Candidate, Function, Keep, Skip
from amanda.tools.search._errors import SearchError
from amanda.tools.search._weight_candidates import Bits, Convolution, Width
from amanda.tools.select import Globs, Selection

_FORMS = "keep, skip, conv5, conv3g2 (kernel 3, 2 groups), width0.5, bits4"
_SHARED = "all "


class Choice:
    """Candidates for the ops of a selection; the first is in force as long as no other is chosen.

    candidates: "keep", the op itself; "skip", its input, or of an addition that ends a residual block the
        input of the block; an activation, such as "gelu"; "conv5", another kernel size, and "conv3g2", other
        groups too; "width0.5", the half of the output channels, the others masked; "bits4", the weight
        quantised; or a function that gets the op's inputs and gives its output.
    type, module, exclude: see `amanda.tools.select.Selection`.
    shared: whether all the ops have the same candidate, one of those that each of them can have; `name` is
        then what architectures call the decision. Otherwise each op chooses for itself.

    Raises SearchError for what is no candidate, and SelectionError.

    >>> choice = Choice(["keep", "conv5", "conv3g2"], type="conv2d", module="features")
    """

    @checked(error=SearchError)
    def __init__(
        self,
        candidates: Annotated[Sequence[Name | Callable[..., Any]], Length(2)],
        type: Globs = None,
        module: Globs = None,
        shared: bool = False,
        exclude: Globs = None,
    ) -> None:
        self.selection, self.shared = Selection(type, module, exclude=exclude), shared
        self.name = f"all {self.selection}"
        where = f"the choice at {self.selection}"
        self.candidates = [candidate(one, where) for one in candidates]
        labels = [one.label for one in self.candidates]
        twice = {label for label in labels if labels.count(label) > 1}
        if twice:
            raise SearchError(f"SearchTool: {where} has {', '.join(sorted(twice))} twice; name each once")

    @classmethod
    @checked(error=SearchError)
    def of(cls, text: Name) -> Choice:
        """Return the choice of a text: "conv2d@features=keep|conv5"; "all sigmoid=keep|relu" is a shared one.

        Raises SearchError for another text.
        """
        selection, found, candidates = text.partition("=")
        shared = selection.startswith(_SHARED)
        type, _, module = selection.removeprefix(_SHARED).partition("@")
        if not found or not (type or module) or "|" not in candidates:
            raise SearchError(f"SearchTool: choices has {text!r}; write type@module=candidate|candidate")
        return cls(candidates.split("|"), type or None, module or None, shared)


def candidate(given: str | Callable[..., Any], where: str) -> Candidate:
    """Return the candidate of a label, or of a function; where: the choice, for errors.

    Raises SearchError for a label that is none.
    """
    if callable(given):
        return Function(given)
    if given == "keep" or given == "skip":
        return Keep(given) if given == "keep" else Skip(given)
    if given in ACTIVATIONS:
        return Activation(given)
    found = re.fullmatch(r"conv([1-9]\d*)(?:g([1-9]\d*))?", str(given))
    if found:
        return Convolution(given, int(found[1]), int(found[2] or 1))
    found = re.fullmatch(r"width(0?\.\d+|1)|bits([2-8])", str(given))
    if found and (found[2] or float(found[1])):
        return Bits(given, int(found[2])) if found[2] else Width(given, float(found[1]))
    told = f"{_FORMS}, {', '.join(ACTIVATIONS)}, or a function"
    raise SearchError(f"SearchTool: a candidate of {where} is {given!r}; it is one of {told}")
