"""What `amanda run` says at the end, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from amanda.plugins import driven_frameworks
from amanda.tools.command._spec import Tooling


class Teller:
    """Tables on a terminal, plain text elsewhere; nothing where it is to be quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self._is_there = sys.stderr is not None and not sys.stderr.closed
        self._quiet = quiet or not self._is_there
        self._console = Console(file=sys.stderr, highlight=False)

    def result(self, tooling: Tooling, result: Any, labels: Sequence[str], saved: Sequence[str]) -> None:
        """A result, of how many processes it is, and the files that have it."""
        several = f" of {len(labels)} processes ({', '.join(labels)})" if len(labels) > 1 else ""
        if several:
            self._say(f"amanda: {tooling.name}{several}")
        self._print(result if self._console.is_terminal else Text(str(result)))
        self._saved(tooling, saved)

    def text(self, tooling: Tooling, text: str | None, label: str, saved: str | None) -> None:
        """The result of another process, which cannot be merged."""
        self._say(f"amanda: {tooling.name} of {label}")
        if text is not None:
            self._say(text)
        self._saved(tooling, [saved] if saved else [])

    def nothing(self, tooling: Tooling) -> None:
        """That no op of any framework ran."""
        frameworks = " or ".join(driven_frameworks())
        if frameworks:
            self._say(f"amanda: {tooling.name}: no op of {frameworks} was executed")
        else:
            self._say('amanda: no driver is installed: pip install "amanda-core[torch]" or "amanda-core[tf]"')

    def unmatched(self, tooling: Tooling) -> None:
        """Which selections no op fitted."""
        for text in tooling.tool.unmatched():
            self._say(f"amanda: {tooling.name}: {text}")

    def messages(self, messages: Sequence[str]) -> None:
        """What was logged, such as what could not be instrumented."""
        for message in messages:
            self._say(f"amanda: {message}")

    def losses(self, losses: Sequence[str]) -> None:
        """Which results are lost, also where no results are to be printed."""
        if self._is_there:
            self._quiet = False
        self.messages(losses)

    def _saved(self, tooling: Tooling, saved: Sequence[str]) -> None:
        if saved:
            self._say(f"amanda: {tooling.name} is in {', '.join(saved)}")

    def _say(self, text: str) -> None:
        self._print(Text(text))

    def _print(self, what: Any) -> None:
        if self._quiet:
            return
        try:
            self._console.print(what, soft_wrap=isinstance(what, Text))
        except (OSError, ValueError):  # nobody reads it any more
            self._quiet, self._is_there = True, False
