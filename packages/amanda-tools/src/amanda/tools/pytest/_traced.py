"""The fixture: a trace of what a test runs, and what can be said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import unified_diff
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import amanda
from amanda.files import naming, write_file
from amanda.tools.pytest._asserts import Compiled, Counts, Phase, check_counts
from amanda.tools.pytest._snapshot import listing
from amanda.tools.results import parsing

if TYPE_CHECKING:
    from amanda.tools.trace import Graph, TraceResult

T = TypeVar("T")
_UPDATE = "pytest --amanda-update"


class Traced:
    """A trace of all that ran in `with traced:` or `traced(function, ...)` since the last `clear`.

    file: snapshots are beside it: `file.txt`, `file.NAME.txt`.  update: write them instead of comparing.
    compiled: as of `amanda.apply`; a test may set it.
    """

    compiled: Compiled = "eager"

    def __init__(self, file: Path, update: bool) -> None:
        from amanda.tools.trace import TraceTool

        self._file, self._update = file, update
        self._tracer, self._counts = TraceTool(), Counts()
        self._scope: amanda.Scope | None = None

    def __enter__(self) -> Traced:
        self._scope = amanda.apply(self._tracer, self._counts, compiled=self.compiled).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, error, trace)

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function and trace it."""
        with self:
            return function(*args, **kwargs)

    def clear(self) -> None:
        """Forget what ran."""
        self._tracer.clear()
        self._counts.executions.clear()

    @property
    def graph(self) -> Graph:
        """The graph of what ran."""
        return self._tracer.graph

    @property
    def result(self) -> TraceResult:
        """The same as a table and in its forms."""
        return self._tracer.result

    def op_counts(self, phase: Phase = "forward") -> dict[str, int]:
        """Return how often ops of each type were executed."""
        return self._counts.of(phase)

    def assert_op_counts(
        self, wanted: Mapping[str, int], phase: Phase = "forward", exact: bool = False
    ) -> None:
        """Check that ops of each type were executed so often, and with `exact` no others."""
        __tracebackhide__ = True
        check_counts(wanted, self.op_counts(phase), phase, exact)

    def assert_snapshot(self, name: str = "", backward: bool = True) -> None:
        """Compare the graph with that in a file beside the test: ops, modules, shapes, and what reads what.

        name: tells several snapshots of a test apart.  `pytest --amanda-update` writes the file.
        Raises AssertionError, with the lines that differ.
        """
        __tracebackhide__ = True
        path = self._file.with_name(f"{self._file.name}{f'.{name}' if name else ''}.txt")
        text = listing(self.graph, backward)
        if self._update:
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text)
            return
        if not path.exists():
            raise AssertionError(f"there is no graph to compare with: {path}; {_UPDATE} writes it")
        with parsing(path, "snapshot"):
            stored = path.read_text(encoding="utf-8")
        if stored != text:
            lines = unified_diff(stored.splitlines(), text.splitlines(), "stored", "traced", lineterm="", n=2)
            message = [f"the graph is not that of {path}", *lines, f"{_UPDATE} writes it anew"]
            raise AssertionError("\n".join(message))
