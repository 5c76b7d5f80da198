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
        self.entries_by_op: dict[int, list[Entry]] = {}
        for entry in self.entries:
            self.entries_by_op.setdefault(entry.op, []).append(entry)
        # By id, with the entry itself, so that no other entry gets the id while the run lives.
        self._derived: dict[int, tuple[Entry, Callable[[], NDArray[Any]] | None]] = {}

    def add_derived(self, entry: Entry, array: Callable[[], NDArray[Any]] | None) -> Entry:
        """Keep and return an entry that is not in the dump; array: gives its numbers, None without any."""
        self._derived[id(entry)] = entry, array
        return entry

    def is_derived(self, entry: Entry) -> bool:
        return id(entry) in self._derived

    def array(self, entry: Entry) -> NDArray[Any] | None:
        """Read or compute the numbers of a tensor; None where they are not known."""
        if self.is_derived(entry):
            _, read_numbers = self._derived[id(entry)]
            return None if read_numbers is None else read_numbers()
        return None if self.dump is None else self.dump.array(entry)

    def op_indices(self, phase: str) -> list[int]:
        """Return indices of a phase's ops that gave something, by their ends; of graphs, as they are met."""
        # Ops are sorted by their ends, as modules are: the result of an op that calls others is after theirs.
        end_by_op: dict[int, int] = {}  # by index, the order of the op's first output
        for index, op in enumerate(self.ops):
            entries = self.entries_by_op.get(index, ()) if op.phase == phase else ()
            first_output = next((entry for entry in entries if entry.role in OUTPUT_ROLES), None)
            if first_output is not None:
                end_by_op[index] = first_output.order
        return sorted(end_by_op, key=end_by_op.__getitem__) if self.is_in_program_order else list(end_by_op)

    def outputs_by_execution(self, index: int) -> dict[int, list[Entry]]:
        """Return the outputs or gradients that an op gave, by the number of the execution."""
        outputs: dict[int, list[Entry]] = {}
        for entry in self.entries_by_op.get(index, ()):
            if entry.role in OUTPUT_ROLES:
                outputs.setdefault(entry.execution, []).append(entry)
        return outputs

    def tensors_read(self, index: int, execution: int) -> list[Entry]:
        """Return the inputs and weights that an op read at an execution."""
        entries = self.entries_by_op.get(index, ())
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

    def has_same_kind_of_ops(self, other_run: Run) -> bool:
        """Return True if both have ops of one framework, and in one mode, as far as that is known."""
        if not self.framework or not other_run.framework:
            return True
        have_same_mode = self.in_graph == other_run.in_graph or self.framework in _SAME_IN_GRAPHS
        return have_same_mode and self.framework == other_run.framework

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
        return run_of_dump(source)
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
        return run_of_dump(Dump(path if path.is_dir() else path.parent))
    return _statistics_run(StatsResult.load(path), str(path))


def run_of_dump(dump: Dump) -> Run:
    """Return the run of a dump, with ops over lists split, and without lines of this module as the user's."""
    op_by_op = [f"{name} ({line})" if line else name for name, line in dump.op_by_op]
    ops = [replace(op, source="") if op.source.startswith(_HERE) else op for op in dump.ops]
    return Run(str(dump.folder), *split_list_ops(ops, dump.entries), dump, op_by_op)


def _statistics_run(result: StatsResult, name: str) -> Run:
    """Return statistics as a run without arrays, in which each op executed once."""
    ops: list[Op] = []
    entries: list[Entry] = []
    for tensor in result.measured:
        op = Op(tensor.phase, tensor.type, tensor.module, tensor.source, namespace="", id=0)
        # "output 0" has a position, "weight" has none.
        role, _, number = tensor.tensor.rpartition(" ")
        role, position = (role, int(number)) if number.isdigit() else (tensor.tensor, 0)
        place = len(ops) - 1, role, position
        is_repeated = any((entry.op, entry.role, entry.position) == place for entry in entries)
        # Statistics have no ids of ops: a tensor that comes again belongs to the next op of the same names.
        if not ops or ops[-1] != op or is_repeated:
            ops.append(op)
        entries.append(Entry(
            op=len(ops) - 1, order=len(entries), execution=0, role=role, position=position,
            shape=(tensor.statistics.elements,), dtype=tensor.dtype, summary=Summary(tensor.statistics, ()),
        ))  # fmt: skip
    return Run(name, ops, entries)


def visits(run: Run, inside: Callable[[str], bool]) -> Iterator[list[int]]:
    """Yield the forward ops within a module, those that follow one another together."""
    for is_inside, indices in groupby(run.op_indices("forward"), lambda i: inside(run.ops[i].module)):
        if is_inside:
            yield list(indices)


_FOREACH, _FUSED = "_foreach_", "_fused_"
"""PyTorch's private prefixes: of an op on each tensor of a list, and of a whole optimizer in one op."""


def split_list_ops(ops: Sequence[Op], entries: Sequence[Entry]) -> tuple[list[Op], list[Entry]]:
    """Replace each op over lists by ops for single tensors, behind all others; return all ops and entries.

    An op on each tensor of a list becomes that op, once for each tensor.  A fused optimizer becomes an op for
    each tensor that it writes.
    """
    # One run may call an optimizer's op per parameter and the other once for a list: as single ops both
    # compare.
    list_ops = {i for i, op in enumerate(ops) if op.type.startswith((_FOREACH, _FUSED))}
    # New ops come last: the positions of all others stay those of the dump.
    all_ops, all_entries = list(ops), [entry for entry in entries if entry.op not in list_ops]
    for index in sorted(list_ops):
        # By execution, role and position of the list among the op's arguments or outputs.
        tensors_by_place: dict[tuple[int, str, int], list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.op == index:
                tensors_by_place[entry.execution, entry.role, entry.position].append(entry)
        # By position of an output list and place in it: index of the op for that tensor at all executions.
        single_ops: dict[tuple[int, int], int] = {}
        for (execution, role, position), outputs in tensors_by_place.items():
            if role != "output":
                continue
            for number, output in enumerate(outputs):
                single_op = single_ops.setdefault((position, number), len(all_ops))
                if single_op == len(all_ops):
                    all_ops.append(replace(ops[index], type=ops[index].type.removeprefix(_FOREACH)))
                all_entries.append(output._replace(op=single_op, position=0))
                for (read_execution, read_role, _), read_entries in tensors_by_place.items():
                    is_input = read_execution == execution and read_role in INPUT_ROLES
                    # A list of one tensor, such as the count of steps, is read with every tensor.
                    if is_input and len(read_entries) in (1, len(outputs)):
                        all_entries.append(read_entries[number % len(read_entries)]._replace(op=single_op))
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
    name_by_label = {label: run.name for label, run in runs.items()}
    with replacing(path) as temporary_path, ZipFile(temporary_path, "w") as bundle:
        bundle.writestr(_RESULT_FILE, to_json({**result.to_dict(), "runs": name_by_label}))
        for label, dump in dumps.items():
            for name in ("index.json", *dump.files):
                bundle.write(dump.folder / name, f"{label}/{name}")


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
            name_by_label = _extract_dumps(Path(path), folder)
            runs = {
                label: replace(run_of_dump(Dump(Path(folder) / label)), name=f"{name} of {path}")
                for label, name in name_by_label.items() if label in ("a", "b", "control")
            }  # fmt: skip
        yield runs


def _extract_dumps(path: Path, folder: str) -> dict[str, str]:
    """Write the dumps of a bundle into a folder; return names by label; raise ValueError for other files."""
    with ZipFile(path) as file:
        # A small archive may unpack to any size.
        check_size(path, sum(member.file_size for member in file.infolist()))
        name_by_label = json.loads(file.read(_RESULT_FILE))["runs"]
        if not isinstance(name_by_label, dict):
            raise ValueError(f"its runs are {type(name_by_label).__name__}, no object")
        for member_name in file.namelist():
            # Only names that `write_bundle` gives: others could lead out of the folder.
            if _MEMBER.fullmatch(member_name):
                file.extract(member_name, folder)
            elif member_name != _RESULT_FILE:
                raise ValueError(f"it has {member_name!r} in it, which is no part of a bundle")
    return name_by_label


_NEAR = 1e-5
"""Relative difference of two sums of the same numbers in another order."""
Execution = tuple[int, int]
"""Index of an op, and the number of one of its executions."""


class DataFlow:
    """Which op produced a tensor that was read, and whether an output was read, by equal numbers in a run.

    A dump has no references between tensors.  Tensors are the same if shape, type, extremes, zeros and
    samples are equal; sums are not compared, as strided memory is summed in another order.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._outputs_by_content: dict[Hashable, list[Entry]] = {}
        self._last_read_by_content: dict[Hashable, int] = {}
        for entry in sorted(run.entries, key=lambda entry: entry.order):
            if entry.role in OUTPUT_ROLES:
                self._outputs_by_content.setdefault(content_key(entry), []).append(entry)
            elif entry.role in INPUT_ROLES and not reads_shape(run.ops[entry.op]):
                self._last_read_by_content[content_key(entry)] = entry.order

    def producer(self, read_entry: Entry) -> Entry | None:
        """Return the last output, before it was read, with the numbers of a tensor; None if no op gave it."""
        equal_outputs = self._outputs_by_content.get(content_key(read_entry), [])
        # Equal numbers may be made several times: the tensor that was read is the last one before.
        earlier_count = bisect_left(equal_outputs, read_entry.order, key=lambda entry: entry.order)
        return equal_outputs[earlier_count - 1] if earlier_count else None

    def is_read(self, output: Entry) -> bool:
        """Return True if a later op read an output."""
        return self._last_read_by_content.get(content_key(output), -1) > output.order

    def last_overwrite(self, read_entry: Entry, after: int) -> Entry | None:
        """Return the output of the last op that overwrote a tensor, maybe through a view, before it was read.

        after: order of the op that produced the tensor.  None where no op in place did so.
        """
        producer = self.producer(read_entry)
        # A write of the whole tensor leaves numbers that are found as they are; through a view they are
        # rearranged.
        if producer is not None:
            return producer if self._run.ops[producer.op].in_place and producer.order > after else None
        outputs = (entry for entries in self._outputs_by_content.values() for entry in entries)
        overwrites = [
            entry for entry in outputs if after < entry.order < read_entry.order
            and self._run.ops[entry.op].in_place and _is_rearranged(entry, read_entry)
        ]  # fmt: skip
        return max(overwrites, key=lambda entry: entry.order, default=None)


def reads_shape(op: Op) -> bool:
    """Return True for an op that reads the shape of a tensor alone, as `ones_like` of a loss does."""
    return op.type.endswith("_like")


def content_key(entry: Entry) -> Hashable:
    """Return a key that is equal for tensors of one shape and type with the same statistics and samples."""
    summary = entry.summary
    stats = summary.statistics
    # NaN is unequal to itself, and a key with it to every other.
    sample = tuple(None if number != number else number for number in summary.sample)
    return entry.shape, entry.dtype, stats.count, stats.nan, stats.zeros, stats.least, stats.most, sample


def _is_rearranged(entry: Entry, other_entry: Entry) -> bool:
    """Return True if two tensors of any shapes have statistics as the same numbers in another order have."""
    statistics, other_statistics = entry.summary.statistics, other_entry.summary.statistics
    names_of_exact = ("count", "nan", "inf", "negative_inf", "zeros", "least", "most")
    if any(getattr(statistics, name) != getattr(other_statistics, name) for name in names_of_exact):
        return False
    # Of permuted numbers only sums differ, by the order in which they are added up.
    return abs(statistics.l2 - other_statistics.l2) <= _NEAR * max(statistics.l2, other_statistics.l2)
