"""Undocumented names of frameworks that tools lean on, and the check that they are there."""

from __future__ import annotations

import sys

from amanda.backend import lacking
from amanda.errors import ToolError


class RequiredNames:
    """Undocumented names of one framework that a tool leans on.

    tool: import path of the tool, for the error.  framework: its import name.
    names: "module:attribute" each, such as "torch:Tensor._base".

    >>> required = RequiredNames("amanda.tools.example", "math", "math:tau", "math:pie")
    >>> required.check()
    Traceback (most recent call last):
    amanda.errors.ToolError: math of an unknown version lacks math.pie, which amanda...
    """

    def __init__(self, tool: str, framework: str, *names: str) -> None:
        self.tool, self.framework, self.names = tool, framework, names
        self._is_complete = False

    def check(self) -> None:
        """Raise ToolError, which says what is missing, where the framework lacks a name."""
        if self._is_complete:
            return
        absent = [name.replace(":", ".") for name in lacking(self.names)]
        if absent:
            version = getattr(sys.modules.get(self.framework), "__version__", "of an unknown version")
            raise ToolError(
                f"{self.framework} {version} lacks {', '.join(absent)}, which {self.tool} leans on; install "
                f"another version of {self.framework}, or upgrade the distribution of {self.tool}"
            )
        self._is_complete = True
