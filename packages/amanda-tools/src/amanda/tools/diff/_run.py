"""A run to compare, from a dump, statistics or a bundle, and the data flow between its ops."""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from zipfile import ZipFile

from amanda.errors import AmandaError, OptionError
from amanda.files import replacing
from amanda.options import shown
from amanda.tools.dump import Dump, Entry, Op, Summary
from amanda.tools.results import check_size, parsing, to_json
from amanda.tools.stats import StatsResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda.tools.diff._recording import Command
    from amanda.tools.diff._result import DiffResult

Compiled = Literal["eager", "instrument"]
Source: TypeAlias = "str | Path | Dump | StatsResult | Run | Command | Callable[..., Any]"

INPUT_ROLES = ("input", "weight")
"""Roles of what ops read."""
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
        """Group the entries by their op."""
        self.by_op: dict[int, list[Entry]] = {}
        for entry in self.entries:
            self.by_op.setdefault(entry.op, []).append(entry)
        # By id, with the entry itself, so that no other entry gets the id while the run lives.
        self._derived: dict[int, tuple[Entry, Callable[[], NDArray[Any]] | None]] = {}

    def add_derived(self, entry: Entry, array: Callable[[], NDArray[Any]] | None) -> Entry:
        """Return an entry that is not in the dump; array: gives its numbers, None where none are known."""
        self._derived[id(entry)] = entry, array
        return entry

    def is_derived(self, entry: Entry) -> bool:
        return id(entry) in self._derived

    def array(self, entry: Entry) -> NDArray[Any] | None:
        """Return the numbers of a tensor; None where they are not known."""
        if self.is_derived(entry):
            array = self._derived[id(entry)][1]
            return None if array is None else array()
        return None if self.dump is None else self.dump.array(entry)

    def indices(self, phase: str) -> list[int]:
        """Return the ops of a phase that gave something, in the order in which they ended."""
        # Ops are sorted by their ends, as modules are: the result of an op that calls others is after theirs.
        end_of_op: dict[int, int] = {}  # an op ends after those that it calls
        for index, op in enumerate(self.ops):
            orders = (entry.order for entry in self.by_op.get(index, ()) if entry.role in OUTPUT_ROLES)
            if op.phase == phase and (end := next(orders, None)) is not None:
                end_of_op[index] = end
        return sorted(end_of_op, key=end_of_op.__getitem__) if self.is_in_program_order else list(end_of_op)

    def results(self, index: int) -> dict[int, list[Entry]]:
        """Return what an op gave, by execution."""
        executions: dict[int, list[Entry]] = {}
        for entry in self.by_op.get(index, ()):
            if entry.role in OUTPUT_ROLES:
                executions.setdefault(entry.execution, []).append(entry)
        return executions

    def read(self, index: int, execution: int) -> list[Entry]:
        """Return the inputs and weights that an op read at an execution."""
        entries = self.by_op.get(index, ())
        return [entry for entry in entries if entry.execution == execution and entry.role in INPUT_ROLES]

    def layout(self, entry: Entry) -> str | None:
        """Return the axes of a tensor by StandardMapping; None where they have no fixed meaning."""
        op = self.ops[entry.op]
        return op.weight_layout if "weight" in entry.role else op.layout

    @property
    def framework(self) -> str:
        """Tag of the framework of most ops; empty where it is not known."""
        # A program may mix frameworks: the one with most ops decides.
        tags = [op.namespace.split("/")[0] for op in self.ops]
        return max(set(tags), key=tags.count) if tags else ""

    def is_like(self, other_run: Run) -> bool:
        """Return True if both have the same kind of ops, as far as that is known."""
        if not self.framework or not other_run.framework:
            return True
        alike = self.in_graph == other_run.in_graph or self.framework in _SAME_IN_GRAPHS
        return alike and self.framework == other_run.framework

    @property
    def is_in_program_order(self) -> bool:
        """Return True if ops ran in the program's order, and not in that of data alone."""
        in_order = not self.in_graph or self.framework in _SAME_IN_GRAPHS
        return in_order and self.framework not in _BY_DATA

    @property
    def in_graph(self) -> bool:
        """Return True if ops ran as nodes of graphs."""
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
    if path.is_dir() or path.name == "index.json":
        return run_of(Dump(path if path.is_dir() else path.parent))
    return _statistics_run(StatsResult.load(path), str(path))


def run_of(dump: Dump) -> Run:
    """Return the run that a dump has, without lines of this module among the lines of the user."""
    op_by_op = [f"{name} ({line})" if line else name for name, line in dump.op_by_op]
    ops = [replace(op, source="") if op.source.startswith(_HERE) else op for op in dump.ops]
    return Run(str(dump.folder), *expand_lists(ops, dump.entries), dump, op_by_op)


def _statistics_run(result: StatsResult, name: str) -> Run:
    """Return what was measured, as if each op had executed once."""
    ops: list[Op] = []
    entries: list[Entry] = []
    for tensor in result.measured:
        op = Op(tensor.phase, tensor.type, tensor.module, tensor.source, namespace="", id=0)
        # "output 0" has a position, "weight" has none.
        role, _, number = tensor.tensor.rpartition(" ")
        role, position = (role, int(number)) if number.isdigit() else (tensor.tensor, 0)
        repeated = any(e.op == len(ops) - 1 and (e.role, e.position) == (role, position) for e in entries)
        # Statistics have no ids of ops: a tensor that comes again belongs to the next op of the same names.
        if not ops or ops[-1] != op or repeated:
            ops.append(op)
        entries.append(Entry(
            op=len(ops) - 1, order=len(entries), execution=0, role=role, position=position,
            shape=(tensor.statistics.elements,), dtype=tensor.dtype, summary=Summary(tensor.statistics, ()),
        ))  # fmt: skip
    return Run(name, ops, entries)


def visits(run: Run, inside: Callable[[str], bool]) -> Iterator[list[int]]:
    """Yield the forward ops within a module, those that follow one another together."""
    for is_inside, indices in groupby(run.indices("forward"), lambda i: inside(run.ops[i].module)):
        if is_inside:
            yield list(indices)


_FOREACH, _FUSED = "_foreach_", "_fused_"
"""PyTorch's private prefixes: of an op on each tensor of a list, and of a whole optimizer in one op."""


def expand_lists(ops: Sequence[Op], entries: Sequence[Entry]) -> tuple[list[Op], list[Entry]]:
    """Replace each op over lists by ops for single tensors, which come after all others.

    An op on each tensor of a list becomes that op, once for each tensor.  A fused optimizer becomes an op for
    each tensor that it writes.
    """
    # One run may call an optimizer's op per parameter and the other once for a list: as single ops both
    # compare.
    over_lists = {i for i, op in enumerate(ops) if op.type.startswith((_FOREACH, _FUSED))}
    # New ops come last: the positions of all others stay those of the dump.
    all_ops, all_entries = list(ops), [entry for entry in entries if entry.op not in over_lists]
    for index in sorted(over_lists):
        lists: dict[tuple[int, str, int], list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.op == index:
                lists[entry.execution, entry.role, entry.position].append(entry)
        singles: dict[tuple[int, int], int] = {}
        for (execution, role, position), tensors in lists.items():
            if role != "output":
                continue
            for number, tensor in enumerate(tensors):
                single = singles.setdefault((position, number), len(all_ops))
                if single == len(all_ops):
                    all_ops.append(replace(ops[index], type=ops[index].type.removeprefix(_FOREACH)))
                all_entries.append(tensor._replace(op=single, position=0))
                all_entries += [
                    # A list of one tensor, such as the count of steps, is read with every tensor.
                    read[number if len(read) == len(tensors) else 0]._replace(op=single)
                    for (read_execution, kind, _), read in lists.items()
                    if read_execution == execution and kind in INPUT_ROLES and len(read) in (1, len(tensors))
                ]
    all_entries.sort(key=lambda entry: entry.order)
    return all_ops, all_entries


_RESULT_FILE = "diff.json"
_MEMBER = re.compile(r"(a|b|control)/(index\.json|tensors-\d+\.(safetensors|npz))")


def write_bundle(path: Path, runs: Mapping[str, Run], result: DiffResult) -> None:
    """Write the dumps of runs and a result into one file, which is whole or as it was before.

    runs: by "a", "b" and "control".  Raises AmandaError for statistics, which have no tensors, and FileError.
    """
    dumps: dict[str, Dump] = {}
    for label, run in runs.items():
        if run.dump is None:
            raise AmandaError(f"a bundle holds dumps, and {label} is a file of statistics: {run.name}")
        dumps[label] = run.dump
    names = {label: run.name for label, run in runs.items()}
    with replacing(path) as part, ZipFile(part, "w") as file:
        file.writestr(_RESULT_FILE, to_json({**result.to_dict(), "runs": names}))
        for label, dump in dumps.items():
            for name in ("index.json", *dump.files):
                file.write(dump.folder / name, f"{label}/{name}")


@contextmanager
def open_bundle(path: Path | str | None) -> Iterator[dict[str, Run]]:
    """Give the runs of a bundle by "a", "b" and "control", while the context is open; none for None.

    Raises AmandaError for another file, and for one that is larger than what is read.
    """
    if path is None:
        yield {}
        return
    # A dump reads its tensors when they are asked for, so the files stay until the context closes.
    with tempfile.TemporaryDirectory() as folder:
        with parsing(path, "bundle of amanda diff"):
            names = _extract_dumps(Path(path), folder)
            runs = {
                label: replace(run_of(Dump(Path(folder) / label)), name=f"{name} of {path}")
                for label, name in names.items() if label in ("a", "b", "control")
            }  # fmt: skip
        yield runs


def _extract_dumps(path: Path, folder: str) -> dict[str, str]:
    """Write the dumps of a bundle into a folder; return the names of its runs."""
    with ZipFile(path) as file:
        # A small archive may unpack to any size.
        check_size(path, sum(member.file_size for member in file.infolist()))
        names = json.loads(file.read(_RESULT_FILE))["runs"]
        if not isinstance(names, dict):
            raise ValueError(f"its runs are {type(names).__name__}, no object")
        for name in file.namelist():
            # Only names that `write_bundle` gives: others could lead out of the folder.
            if _MEMBER.fullmatch(name):
                file.extract(name, folder)
            elif name != _RESULT_FILE:
                raise ValueError(f"it has {name!r} in it, which is no part of a bundle")
    return names


_NEAR = 1e-5
"""Relative difference of two sums of the same numbers in another order."""
Execution = tuple[int, int]
"""Index of an op, and the number of one of its executions."""


class DataFlow:
    """Producers and readers of the tensors of a run.

    A dump has no references between tensors.  Tensors are the same if shape, type, extremes, zeros and
    samples are equal; sums are not compared, as strided memory is summed in another order.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._outputs: dict[Hashable, list[Entry]] = {}
        self._reads: dict[Hashable, int] = {}
        for entry in sorted(run.entries, key=lambda entry: entry.order):
            if entry.role in OUTPUT_ROLES:
                self._outputs.setdefault(content_key(entry), []).append(entry)
            elif entry.role in INPUT_ROLES and not reads_shape(run.ops[entry.op]):
                self._reads[content_key(entry)] = entry.order

    def producer(self, read: Entry) -> Entry | None:
        """Return the last tensor with these numbers that an op gave before; None for one from elsewhere."""
        outputs = self._outputs.get(content_key(read), [])
        # Equal numbers may be made several times: the tensor that was read is the last one before.
        before = bisect_left(outputs, read.order, key=lambda entry: entry.order)
        return outputs[before - 1] if before else None

    def is_read(self, output: Entry) -> bool:
        """Return True if a later op read an output."""
        return self._reads.get(content_key(output), -1) > output.order

    def last_overwrite(self, read: Entry, after: int) -> Entry | None:
        """Return the output of the last op that overwrote a tensor, maybe through a view, before it was read.

        after: order of the op that produced the tensor.
        """
        exact = self.producer(read)
        # A write of the whole tensor leaves numbers that are found as they are; through a view they are
        # rearranged.
        if exact is not None:
            return exact if self._run.ops[exact.op].in_place and exact.order > after else None
        writes = [
            entry for entries in self._outputs.values() for entry in entries
            if after < entry.order < read.order
            and self._run.ops[entry.op].in_place and _is_rearranged(entry, read)
        ]  # fmt: skip
        return max(writes, key=lambda entry: entry.order, default=None)


def reads_shape(op: Op) -> bool:
    """Return True for an op that reads the shape of a tensor alone, as `ones_like` of a loss does."""
    return op.type.endswith("_like")


def content_key(entry: Entry) -> Hashable:
    """Return a key that is equal for tensors of one shape with the same numbers."""
    summary = entry.summary
    exact = summary.statistics
    # NaN is unequal to itself, and a key with it to every other.
    sample = tuple(None if number != number else number for number in summary.sample)
    return entry.shape, entry.dtype, exact.count, exact.nan, exact.zeros, exact.least, exact.most, sample


def _is_rearranged(entry: Entry, other_entry: Entry) -> bool:
    """Return True for two tensors with the same numbers, in any shape."""
    first, second = entry.summary.statistics, other_entry.summary.statistics
    exact = ("count", "nan", "inf", "negative_inf", "zeros", "least", "most")
    if any(getattr(first, name) != getattr(second, name) for name in exact):
        return False
    # Of permuted numbers only sums differ, by the order in which they are added up.
    return abs(first.l2 - second.l2) <= _NEAR * max(first.l2, second.l2)
