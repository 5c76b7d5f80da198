"""Assertions about what a function or a test runs: counts of ops, FLOPs, finite values, and its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from difflib import get_close_matches, unified_diff
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import amanda
from amanda.errors import OptionError
from amanda.files import naming, write_file
from amanda.options import Name, NonNegativeFloat, NonNegativeInt, checked
from amanda.tools.mapping import StandardMapping
from amanda.tools.results import parsing

if TYPE_CHECKING:
    from amanda.tools.trace import Graph, Op, Position, TraceResult

T = TypeVar("T")
Phase = Literal["forward", "backward"]
Compiled = Literal["eager", "instrument"]
"""As of `amanda.apply`: what becomes of callables that torch.compile made."""


@checked
def assert_flops(
    function: Callable[..., T], *inputs: Any, macs: NonNegativeInt | None = None,
    flops: NonNegativeInt | None = None, rel: NonNegativeFloat = 0.0, phase: Name | None = None,
    compiled: Compiled = "eager",
) -> T:  # fmt: skip
    """Run a function and check its cost; return what the function returns.

    Args:
        function: Model, or a function that runs it.
        *inputs: Arguments of the call.
        macs: Expected multiply-accumulates; None not to check them.
        flops: Expected FLOPs; None not to check them.
        rel: Relative error that is allowed.
        phase: "forward" or another word of StandardMapping; None for all phases.
        compiled: As in `amanda.apply`.

    Raises:
        AssertionError: For another cost, with the costliest types of ops.
        OptionError: Where nothing is expected.
    """
    # pytest then shows the line of the test, not this one.
    __tracebackhide__ = True
    from amanda.tools.flops import FlopsTool

    expectations = {"macs": macs, "flops": flops}
    if macs is None and flops is None:
        raise OptionError("assert_flops was given nothing to compare with; give macs=... or flops=...")
    tool = FlopsTool()
    with amanda.apply(tool, compiled=compiled):
        output = function(*inputs)
    result = tool.result
    mismatches = [
        f"{quantity}: {result.total(quantity, phase):,} counted, {expected:,} expected"
        + (f" within {rel:.2%}" if rel else "")
        for quantity, expected in expectations.items()
        if expected is not None and abs(result.total(quantity, phase) - expected) > rel * expected
    ]
    if mismatches:
        raise AssertionError("\n".join([*mismatches, str(result.by("phase", "type"))]))
    return output


@checked
def assert_op_counts(
    wanted: Mapping[Name, NonNegativeInt], function: Callable[..., T], *inputs: Any, phase: Phase = "forward",
    exact: bool = False, compiled: Compiled = "eager",
) -> T:  # fmt: skip
    """Run a function and check how often ops are executed; return what the function returns.

    Args:
        wanted: Number of executions by type, a word of StandardMapping.
        function: As in `assert_flops`.
        *inputs: As in `assert_flops`.
        phase: Phase of the ops.
        exact: True if ops of other types are not allowed.
        compiled: As in `amanda.apply`.

    Raises:
        AssertionError: For other numbers.
    """
    __tracebackhide__ = True
    tool = Counts()
    with amanda.apply(tool, compiled=compiled):
        output = function(*inputs)
    check_counts(wanted, tool.of(phase), phase, exact)
    return output


@checked
def assert_finite(
    function: Callable[..., T], *inputs: Any, inf: bool = True, backward: bool = True,
    compiled: Compiled = "eager",
) -> T:  # fmt: skip
    """Run a function and check that no op makes NaN or is given any; return what the function returns.

    Args:
        function: As in `assert_flops`.
        *inputs: As in `assert_flops`.
        inf: True if no op may make Inf either.
        backward: True to check backward ops too.
        compiled: As in `amanda.apply`.

    Raises:
        AssertionError: At such an op, with its line and its inputs.
    """
    __tracebackhide__ = True
    from amanda.tools.nan import NanTool

    tool = NanTool(inf=inf, backward=backward)
    with amanda.apply(tool, compiled=compiled):
        output = function(*inputs)
    if tool.result:
        raise AssertionError(tool.result.sentence)
    return output


class Counts(amanda.Tool):
    """Count executions of ops by phase and type."""

    def __init__(self) -> None:
        super().__init__()
        self.executions: Counter[tuple[str, str]] = Counter()
        self.depends_on(StandardMapping())
        for backward in (False, True):
            self.add_inst_for_op(self._insert_counter, backward)

    def _insert_counter(self, context: amanda.OpContext) -> None:
        """Insert the routine that counts an op."""
        if context.is_forward():
            context.insert_before_op(self._count, inputs=[], op=("forward", context["type"]))
        else:
            op = ("backward", context["backward_type"])
            context.insert_before_backward_op(self._count, grad_outputs=[], op=op)

    @amanda.observer
    def _count(self, op: tuple[str, str]) -> None:
        self.executions[op] += 1

    def of(self, phase: str) -> dict[str, int]:
        """Return executions by type."""
        counts = sorted(self.executions.items())
        return {kind: count for (op_phase, kind), count in counts if op_phase == phase}


def check_counts(
    expected_counts: Mapping[str, int], counts: Mapping[str, int], phase: str, exact: bool
) -> None:
    """Raise AssertionError where the count of a type is another; with `exact` also for types not expected."""
    __tracebackhide__ = True
    lines = []
    for kind in dict.fromkeys([*expected_counts, *(sorted(counts) if exact else ())]):
        if counts.get(kind, 0) == expected_counts.get(kind, 0):
            continue
        # A count of 0 is most often a type that is spelt differently.
        close_types = get_close_matches(
            kind, [counted for counted in counts if counted not in expected_counts], n=1, cutoff=0.5
        )
        hint = f" (did you mean {close_types[0]!r}?)" if close_types and kind not in counts else ""
        lines.append(f"{kind}: {counts.get(kind, 0)} executed, {expected_counts.get(kind, 0)} expected{hint}")
    if lines:
        raise AssertionError("\n".join([f"op counts differ ({phase}):", *lines]))


def listing(graph: Graph, backward: bool = True) -> str:
    """Return a line for each op: what it makes, its type, what it reads and its module.

    Tensors from outside have their names or shapes, others the op that made them and how far back that is, so
    that one op more changes the lines about it alone.
    """
    ops = [op for op in graph.ops if backward or op.phase == "forward"]
    number_by_op_index = {op.index: number for number, op in enumerate(ops)}
    return "".join(f"{_op_line(graph, op, number_by_op_index)}\n" for op in ops)


def _op_line(graph: Graph, op: Op, number_by_op_index: dict[int, int]) -> str:
    """Return the line of an op: its type, what it reads, what it makes, and its module."""
    outputs = ", ".join(str(tensor) for tensor in graph.outputs(op)) or "nothing"
    last_tensor = max((i for i, position in enumerate(op.inputs) if position is not None), default=-1)
    inputs = ", ".join(
        _input_text(graph, position, number_by_op_index[op.index], number_by_op_index)
        for position in op.inputs[: last_tensor + 1]
    )
    name = f"{op.type}{'_' if op.in_place else ''}"
    return f"{name}({inputs}) -> {outputs}" + (f"  # {op.module}" if op.module else "")


def _input_text(
    graph: Graph, position: Position, reader_number: int, number_by_op_index: dict[int, int]
) -> str:
    """Return an input's name, or its op and how far back that is; "_" for no tensor; lists in brackets."""
    if isinstance(position, tuple):
        texts = [_input_text(graph, element, reader_number, number_by_op_index) for element in position]
        return f"[{', '.join(texts)}]"
    if position is None:
        return "_"
    tensor = graph.tensors[position]
    # Distances, not numbers, lest one new op change every later line.
    if tensor.producer is None or tensor.producer not in number_by_op_index:
        return tensor.name or f"{tensor.kind} {tensor}"
    op = graph.ops[tensor.producer]
    output = f".{op.makes.index(tensor.index)}" if len(op.makes) > 1 else ""  # which of several
    return f"{op.type}{output}@-{reader_number - number_by_op_index[op.index]}"


_UPDATE_COMMAND = "pytest --amanda-update"


class Traced:
    """A trace of all that ran in `with traced:` or `traced(function, ...)` since the last `clear`.

    `compiled` is as of `amanda.apply`; a test may set it.

    Args:
        file: Snapshots are beside it: `file.txt`, `file.NAME.txt`.
        update: Write them instead of comparing.
    """

    compiled: Compiled = "eager"

    def __init__(self, file: Path, update: bool) -> None:
        from amanda.tools.trace import TraceTool

        self._file, self._writes_snapshots = file, update
        self._tracer, self._counts = TraceTool(), Counts()
        self._scope: amanda.Scope | None = None

    def __enter__(self) -> Traced:
        self._scope = amanda.apply(self._tracer, self._counts, compiled=self.compiled).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the trace."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, error, trace)

    def __call__(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function and trace it."""
        with self:
            return function(*args, **kwargs)

    def clear(self) -> None:
        """Forget the traced ops."""
        self._tracer.clear()
        self._counts.executions.clear()

    @property
    def graph(self) -> Graph:
        """The graph of the traced ops."""
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
        """Check how often ops were executed.

        Args:
            wanted: As in `assert_op_counts`.
            phase: As in `assert_op_counts`.
            exact: As in `assert_op_counts`.
        """
        __tracebackhide__ = True
        check_counts(wanted, self.op_counts(phase), phase, exact)

    def assert_snapshot(self, name: str = "", backward: bool = True) -> None:
        """Compare the graph with that in a file beside the test: ops, modules, shapes, and what reads what.

        Raises AssertionError, with the lines that differ.

        Args:
            name: Tells several snapshots of a test apart.  `pytest --amanda-update` writes the file.
            backward: True to compare backward ops too.
        """
        __tracebackhide__ = True
        suffix = f".{name}.txt" if name else ".txt"
        path = self._file.with_name(f"{self._file.name}{suffix}")
        text = listing(self.graph, backward)
        if self._writes_snapshots:
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text)
            return
        if not path.exists():
            raise AssertionError(f"there is no graph to compare with: {path}; {_UPDATE_COMMAND} writes it")
        with parsing(path, "snapshot"):
            stored = path.read_text(encoding="utf-8")
        if stored != text:
            lines = unified_diff(stored.splitlines(), text.splitlines(), "stored", "traced", lineterm="", n=2)
            message = [f"the graph is not that of {path}", *lines, f"{_UPDATE_COMMAND} writes it anew"]
            raise AssertionError("\n".join(message))
