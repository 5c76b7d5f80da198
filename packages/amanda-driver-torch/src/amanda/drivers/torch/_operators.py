"""Operators that torch wraps in Python, which take a TypeError from within for "not my operand"."""

from types import CodeType, FunctionType
from typing import Any

import torch

from ._requirements import found


def _made(f: Any, wrapped: Any = None) -> FunctionType:
    """Return what torch makes of `f`, except that a tool's TypeError stays what it is.

    Its names are those of torch's own, so that its code can serve torch's functions: it finds its globals
    in torch.
    """

    def operator(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            given = self, *args
            if has_torch_function(given):  # type: ignore[name-defined] # noqa: F821
                return handle_torch_function(wrapped, given, self, *args, **kwargs)  # type: ignore[name-defined] # noqa: F821
            return f(self, *args, **kwargs)
        except TypeError as error:
            from amanda.interceptor import failure

            if failure() is error:
                raise
            return NotImplemented

    return operator  # type: ignore[return-value]


class Operators:
    """Lets the exceptions of tools through torch's operators, which stay the functions that they are."""

    def __init__(self) -> None:
        self._before: list[tuple[FunctionType, CodeType]] = []

    def open(self) -> None:
        """Put the code in place; nothing happens where torch's operators are made otherwise."""
        code = _made(None).__code__
        theirs = getattr(found("Tensor.__rsub__"), "__code__", code)
        if (theirs.co_freevars, theirs.co_name) != (code.co_freevars, "wrapped"):
            return
        for operator in vars(torch.Tensor).values():
            if isinstance(operator, FunctionType) and operator.__code__ is theirs:
                self._before.append((operator, theirs))
                operator.__code__ = code.replace(co_name=theirs.co_name)

    def close(self) -> None:
        """Put torch's own code back."""
        while self._before:
            operator, code = self._before.pop()
            operator.__code__ = code
