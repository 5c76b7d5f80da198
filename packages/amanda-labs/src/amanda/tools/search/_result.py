"""The ops with a choice, before anything is tried."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.results import Column, Result, shortened

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


class ChoicesResult(Result):
    """The ops with a choice: candidates, and the chosen one."""

    name: ClassVar[str] = "search_choices"
    title = "Choices"
    columns: ClassVar[Sequence[Column]] = (
        *(Column(key, show=partial(shortened, width=36)) for key in ("phase", "type", "module", "source")),
        Column("op"), Column("choice"), Column("candidates"), Column("chosen"), Column("mixture"),
        Column("calls", show="{:,}".format, total=True),
    )  # fmt: skip

    def __init__(self, sites: Sequence[Site]) -> None:
        self._rows = [
            ("forward", one.type, one.module, one.source, one.name, one.decision.name, " ".join(one.labels),
             one.chosen, " ".join(map("{:.3f}".format, one.decision.probabilities().values())),
             one.executions.calls)
            for one in sites
        ]  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return the ops in the order in which they were met."""
        return self._rows
