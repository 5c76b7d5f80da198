"""Operators of Tensor that torch wraps in Python, whose wrapper turns any TypeError into NotImplemented."""

from types import CodeType, FunctionType
from typing import Any

import torch

from ._requirements import torch_attribute


def _as_torch_wraps(f: Any, wrapped: Any = None) -> FunctionType:
    """Wrap a method of Tensor as torch does, but let the TypeErrors of tools through.

    Torch's functions get the code of this wrapper. So its free variables and globals have torch's names, and
    torch's module provides the globals.
    """

    def operator(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            operands = self, *args
            if has_torch_function(operands):  # type: ignore[name-defined] # noqa: F821
                return handle_torch_function(wrapped, operands, self, *args, **kwargs)  # type: ignore[name-defined] # noqa: F821
            return f(self, *args, **kwargs)
        except TypeError as error:
            # Imported here: the code runs with torch's globals, which lack Amanda's names.
            from amanda.interceptor import failure

            if failure() is error:
                raise
            return NotImplemented

    return operator  # type: ignore[return-value]


class OperatorCode:
    """Exchange of the code of torch's operators, so that exceptions of tools pass through.

    The operators stay the function objects that they are: programs may hold references to them.
    """

    def __init__(self) -> None:
        self._changed_operators: list[tuple[FunctionType, CodeType]] = []

    def exchange(self) -> None:
        """Exchange the code; do nothing if this torch wraps its operators in another way."""
        # Code can be exchanged only between functions with the same free variables. If torch's wrapper has
        # others, or another name, it is not the wrapper that this code was copied from.
        code = _as_torch_wraps(None).__code__
        torch_code = getattr(torch_attribute("Tensor.__rsub__"), "__code__", code)
        if (torch_code.co_freevars, torch_code.co_name) != (code.co_freevars, "wrapped"):
            return
        for operator in vars(torch.Tensor).values():
            if isinstance(operator, FunctionType) and operator.__code__ is torch_code:
                self._changed_operators.append((operator, torch_code))
                operator.__code__ = code.replace(co_name=torch_code.co_name)

    def restore(self) -> None:
        """Put torch's code back."""
        while self._changed_operators:
            operator, code = self._changed_operators.pop()
            operator.__code__ = code
