"""Holders of weights between executions, of any framework: identities, parts, values.

A part of a holder is what `Holders.held` says beside the identity; None for all of it, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from amanda import interceptor
from amanda.errors import AmandaError
from amanda.tools._libraries import do, to_numpy
from amanda.tools._libraries import numpy as np
from amanda.tools.mapping import backend_of

Changed = Callable[[Any], Any]
Undo = list[Callable[[], Any]]
"""Functions that give holders the values back that they had, for a change of several that fails."""
Change = Callable[[Any, Changed, Undo], None]
"""`change(part, changed, undo)`: give a part of a holder the values that `changed` makes of its present ones.

Before it writes it adds to `undo`.
"""


class HeldError(AmandaError, ValueError):
    """A model without parameters, or a parameter that cannot be written."""


class Holders:
    """Parameters of a library whose `to_numpy`, and `assign(parameter, array)`, autoray knows.

    A parameter is read as a whole and as it is there: no part of one is a weight.
    """

    def identity(self, holder: Any) -> Any:
        """Return what tells the holder from others as long as it lives."""
        return interceptor.ordinal(holder)

    def is_parameter(self, holder: Any) -> bool:
        """Return True for what a model holds, False for a leaf of autograd that a program made."""
        return True

    def name(self, holder: Any) -> str:
        """Return the name that the framework has given to a parameter; "" without one."""
        return ""

    def held(self, holder: Any, weight: Any) -> tuple[Any, Any] | None:
        """Return the identity of the holder and the part that a weight is; None where that is unknown."""
        return (self.identity(holder), None) if holder is weight else None

    def whole(self, holder: Any) -> Any:
        """Return the part that is all of a holder, where parts overlap; None where they do not."""
        return None

    def parts(self, holder: Any) -> Sequence[Any]:
        """Return the holders of the weights in a stack, of which an op reads one at a time; else none."""
        return ()

    def current(self, holder: Any) -> Any:
        """Return the one of `parts` that the op reads whose routine runs; None where that is unknown."""
        return None

    def value(self, holder: Any, part: Any) -> Any:
        """Return the present value of a part."""
        return holder

    def overlaps(self, part: Any, other: Any, whole: Any) -> bool:
        """Return True if two parts have elements in common."""
        return True

    def covers(self, part: Any, other: Any, whole: Any) -> bool:
        """Return True if a part has every element of another."""
        return True

    def carried(self, pieces: Sequence[tuple[Any, Any]], part: Any, whole: Any, fill: Any) -> Any:
        """Return what a part has of values at other parts, `fill` elsewhere; the last of several counts."""
        return pieces[-1][0]

    def summed(self, gradient: Any, part: Any) -> Any:
        """Return the gradient of a part in which elements that it has several times come once each."""
        return gradient

    def parameters(self, model: Any) -> Iterator[tuple[Any, Change]]:
        """Yield the identity of each parameter of a model or a list, and what changes its values.

        Raises HeldError where there are none.
        """
        names = ("get_parameters", "parameters")
        listed = next((getattr(model, name) for name in names if callable(getattr(model, name, None))), None)
        try:
            found = list(model if listed is None else listed())
        except TypeError as error:
            raise HeldError(
                f"{type(model).__name__} has no parameters; give a model or a list of parameters"
            ) from error
        for parameter in found:
            yield self.identity(parameter), _changing(parameter)

    def written(self, model: Any, changes: Sequence[tuple[Any, Any, Changed]]) -> tuple[Any, int]:
        """Give parameters of a model other values; return the model with them, and how many were changed.

        changes: the identity of a parameter, the part of it, and what makes the values of present ones.
        After an exception, also KeyboardInterrupt, the parameters have the values that they had.
        """
        count = 0
        with undone() as undo:
            for identity, change in self.parameters(model):
                for holder, part, changed in changes:
                    if holder == identity:
                        change(part, changed, undo)
                        count += 1
        return model, count


@contextmanager
def undone() -> Iterator[Undo]:
    """Return a context of changes that are undone, the last one first, after an exception."""
    undo: Undo = []
    try:
        yield undo
    except BaseException:
        for back in reversed(undo):
            with suppress(HeldError):  # of the one that cannot be written
                back()
        raise


def _changing(parameter: Any) -> Change:
    def change(part: Any, changed: Changed, undo: Undo) -> None:
        old = np.array(to_numpy(parameter))
        new = changed(old.copy())
        undo.append(lambda: do("assign", parameter, old, like=parameter))
        do("assign", parameter, new, like=parameter)

    return change


class Initializers(Holders):
    """Initializers of an ONNX model, which are told by its graph and their names."""

    def identity(self, holder: Any) -> Any:
        """Return the graph and the name."""
        return holder

    def held(self, holder: Any, weight: Any) -> tuple[Any, Any]:
        """Return the initializer, of which a weight is all, if in another form."""
        return holder, None

    def parameters(self, model: Any) -> Iterator[tuple[Any, Change]]:
        """Raise HeldError: a session of ONNX Runtime keeps its weights to itself."""
        raise HeldError(
            f"{type(model).__name__} holds its weights for itself; amanda.drivers.onnxruntime.instrument "
            "writes a changed model"
        )


def holders_of(tensor: Any) -> Holders:
    """Return what knows the parameters of the framework of a tensor, or of a slot that says its own."""
    return _holders(getattr(tensor, "framework", None) or backend_of(tensor))


@cache
def _holders(backend: str) -> Holders:
    if backend == "torch":
        from amanda.tools.kit._holders_torch import Parameters

        return Parameters()
    if backend == "tensorflow":
        from amanda.tools.kit._holders_tensorflow import Variables

        return Variables()
    if backend == "jax":
        from amanda.tools.kit._holders_jax import Slots

        return Slots()
    if backend == "mindspore":
        from amanda.tools.kit._holders_mindspore import MindSporeParameters

        return MindSporeParameters()
    return Initializers() if backend in ("numpy", "builtins") else Holders()
