"""A run to compare: the tensors of a dump, or of a file of statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from amanda.errors import AmandaError, OptionError
from amanda.options import shown
from amanda.tools.dump import Dump, Entry, Op, Summary
from amanda.tools.stats import Measured, StatsResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda.tools.diff._programs import Command

Compiled = Literal["eager", "instrument"]
Source: TypeAlias = "str | Path | Dump | StatsResult | Run | Command | Callable[..., Any]"


OUTPUT_ROLES = ("output", "gradient", "weight gradient")
"""Roles of what ops give."""
_HERE = str(Path(__file__).parent)
_SAME_IN_GRAPHS = frozenset({"pytorch"})
"""Frameworks whose graphs are instrumented at the ops of eager mode, and run them in the program's order."""
_BY_DATA = frozenset({"jax"})
"""Frameworks whose eager mode has compiled functions in it, which run in the order of data."""


@dataclass
class Run:
    """Ops in the order in which they were met, and what is known of their tensors.

    name: for messages.  dump: where tensors are read, None where there are summaries alone.  op_by_op: names
    of compiled callables that ran as eager code.  remarks: sentences on how it ran.
    """

    name: str
    ops: Sequence[Op]
    entries: Sequence[Entry]
    dump: Dump | None = None
    op_by_op: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.by_op: dict[int, list[Entry]] = {}
        for entry in self.entries:
            self.by_op.setdefault(entry.op, []).append(entry)
        self._derived: dict[int, tuple[Entry, Callable[[], NDArray[Any]] | None]] = {}

    def derived(self, entry: Entry, array: Callable[[], NDArray[Any]] | None) -> Entry:
        """Return an entry that is not in the dump; array: gives its numbers, None where none are known."""
        self._derived[id(entry)] = entry, array
        return entry

    def is_derived(self, entry: Entry) -> bool:
        """Return True for what `derived` returned."""
        return id(entry) in self._derived

    def array(self, entry: Entry) -> NDArray[Any] | None:
        """Return the numbers of a tensor; None where they are not known."""
        if self.is_derived(entry):
            array = self._derived[id(entry)][1]
            return None if array is None else array()
        return None if self.dump is None else self.dump.array(entry)

    def indices(self, phase: str) -> list[int]:
        """Return the ops of a phase that gave something, in the order in which they ended."""
        ends: dict[int, int] = {}  # an op ends after those that it calls
        for index, op in enumerate(self.ops):
            orders = (entry.order for entry in self.by_op.get(index, ()) if entry.role in OUTPUT_ROLES)
            if op.phase == phase and (end := next(orders, None)) is not None:
                ends[index] = end
        return sorted(ends, key=ends.__getitem__) if self.ordered else list(ends)

    def results(self, index: int) -> dict[int, list[Entry]]:
        """Return what an op gave, by execution."""
        executions: dict[int, list[Entry]] = {}
        for entry in self.by_op.get(index, ()):
            if entry.role in OUTPUT_ROLES:
                executions.setdefault(entry.execution, []).append(entry)
        return executions

    def read(self, index: int, execution: int, *roles: str) -> list[Entry]:
        """Return what an op was given at an execution."""
        entries = self.by_op.get(index, ())
        return [entry for entry in entries if entry.execution == execution and entry.role in roles]

    @property
    def framework(self) -> str:
        """Tag of the framework of most ops; empty where it is not known."""
        tags = [op.namespace.split("/")[0] for op in self.ops]
        return max(set(tags), key=tags.count) if tags else ""

    def is_like(self, other_run: Run) -> bool:
        """Return True if both have the same kind of ops, as far as that is known."""
        if not self.framework or not other_run.framework:
            return True
        alike = self.in_graph == other_run.in_graph or self.framework in _SAME_IN_GRAPHS
        return alike and self.framework == other_run.framework

    @property
    def ordered(self) -> bool:
        """Return whether ops ran in the program's order, and not in that of data alone."""
        in_order = not self.in_graph or self.framework in _SAME_IN_GRAPHS
        return in_order and self.framework not in _BY_DATA

    @property
    def in_graph(self) -> bool:
        """Return whether ops ran as nodes of graphs."""
        return any(op.namespace and not op.namespace.endswith("/eager") for op in self.ops)


def open_run(source: Source, option: str) -> Run:
    """Return the run of a dump or of statistics, or of a path to one of these; option: its name, for errors.

    Raises AmandaError for a path to something else.
    """
    if isinstance(source, Run):
        return source
    if isinstance(source, Dump):
        return run_of(source)
    if isinstance(source, StatsResult):
        return _statistics_run(source, "statistics")
    if not isinstance(source, (str, Path)):
        raise OptionError(
            f"diff: {option} is {shown(source)}; give a function, a Command, a dump, statistics or a path"
        )
    path = Path(source)
    if not path.exists():
        raise AmandaError(
            f"{option}: {path} does not exist; give the folder of a dump or a file of statistics"
        )
    if path.is_dir():
        return run_of(Dump(path))
    if path.name == "index.json":
        return run_of(Dump(path.parent))
    return _statistics_run(StatsResult.load(path), str(path))


def run_of(dump: Dump) -> Run:
    """Return the run that a dump has; a line that called the program from here is no line of the user's."""
    op_by_op = [f"{name} ({line})" if line else name for name, line in dump.op_by_op]
    ops = [replace(op, source="") if op.source.startswith(_HERE) else op for op in dump.ops]
    return Run(str(dump.folder), *expand_lists(ops, dump.entries), dump, op_by_op)


def _statistics_run(result: StatsResult, name: str) -> Run:
    """Return what was measured, as if each op had executed once."""
    ops: list[Op] = []
    entries: list[Entry] = []
    for tensor in result.measured:
        op = Op(tensor.phase, tensor.type, tensor.module, tensor.source, "", 0)
        role, position = _role(tensor)
        repeated = any(e.op == len(ops) - 1 and (e.role, e.position) == (role, position) for e in entries)
        if not ops or ops[-1] != op or repeated:
            ops.append(op)
        summary = Summary(tensor.statistics, ())
        shape = (tensor.statistics.elements,)
        entries.append(Entry(len(ops) - 1, len(entries), 0, role, position, shape, tensor.dtype, summary))
    return Run(name, ops, entries)


def _role(tensor: Measured) -> tuple[str, int]:
    role, _, position = tensor.tensor.rpartition(" ")
    return (role, int(position)) if position.isdigit() else (tensor.tensor, 0)


def visits(run: Run, inside: Callable[[str], bool]) -> Iterator[list[int]]:
    """Yield the forward ops within a module, those that follow one another together."""
    visit: list[int] = []
    for index in run.indices("forward"):
        if inside(run.ops[index].module):
            visit.append(index)
        elif visit:
            yield visit
            visit = []
    if visit:
        yield visit


_FOREACH, _FUSED = "_foreach_", "_fused_"
"""PyTorch's private prefixes: of an op on each tensor of a list, and of a whole optimizer in one op."""
_OUTPUT = "output"


def expand_lists(ops: Sequence[Op], entries: Sequence[Entry]) -> tuple[list[Op], list[Entry]]:
    """Replace each op over lists by ops for single tensors, which come after all others.

    An op on each tensor of a list becomes that op, once for each tensor.  A fused optimizer becomes an op for
    each tensor that it writes.
    """
    over_lists = {i for i, op in enumerate(ops) if op.type.startswith((_FOREACH, _FUSED))}
    if not over_lists:
        return list(ops), list(entries)
    all_ops, all_entries, waiting = list(ops), [], defaultdict(list)
    for entry in entries:
        if entry.op in over_lists:
            waiting[entry.op].append(entry)
        else:
            all_entries.append(entry)
    for index, list_entries in waiting.items():
        lists: dict[tuple[int, str, int], list[Entry]] = defaultdict(list)
        for entry in list_entries:
            lists[entry.execution, entry.role, entry.position].append(entry)
        singles: dict[tuple[int, int], int] = {}
        for (execution, role, position), tensors in lists.items():
            if role != _OUTPUT:
                continue
            for number, tensor in enumerate(tensors):
                single = singles.setdefault((position, number), len(all_ops))
                if single == len(all_ops):
                    all_ops.append(replace(ops[index], type=ops[index].type.removeprefix(_FOREACH)))
                all_entries.append(replace(tensor, op=single, position=0))
                all_entries += [
                    replace(read[number if len(read) == len(tensors) else 0], op=single)
                    for (read_execution, kind, _), read in lists.items()
                    if read_execution == execution
                    and kind in ("input", "weight")
                    and len(read) in (1, len(tensors))
                ]
    all_entries.sort(key=lambda entry: entry.order)
    return all_ops, all_entries
