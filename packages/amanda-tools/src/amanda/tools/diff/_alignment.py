"""Alignment of two runs: ops, or modules, of one that are the same as those of the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import TYPE_CHECKING

from amanda.tools.diff._errors import summary_distance
from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import MATRIX_PRODUCTS, PRODUCTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNIFIED_TYPES = {
    **dict.fromkeys((*MATRIX_PRODUCTS, "einsum"), "product"),
    "depthwise_conv2d": "conv2d", "depthwise_conv3d": "conv3d",
}  # fmt: skip
"""One word for what frameworks call differently."""
# Attention is one op in some frameworks, and several in others.
_COMPUTE = frozenset([*PRODUCTS, "embedding"]) - {"scaled_dot_product_attention"}


def is_compute(type: str) -> bool:
    """Return True if an op is a product, a convolution or a look-up: what layers of frameworks share."""
    return type in _COMPUTE


def matching_positions(keys: Sequence[Hashable], other_keys: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Return positions of equal keys in order, with as few left out as difflib finds between equal ends."""
    # difflib's time grows with the square of repeated keys, as layers have them: equal ends, which nearly
    # always are all, go without it.  autojunk would drop every key that makes up over 1 % of the ops.
    shorter = min(len(keys), len(other_keys))
    equal_at_start = next((i for i in range(shorter) if keys[i] != other_keys[i]), shorter)
    rest = shorter - equal_at_start
    equal_at_end = next((i for i in range(rest) if keys[-1 - i] != other_keys[-1 - i]), rest)
    yield from ((i, i) for i in range(equal_at_start))
    middle = (
        keys[equal_at_start : len(keys) - equal_at_end],
        other_keys[equal_at_start : len(other_keys) - equal_at_end],
    )
    for first, second, size in SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
        yield from ((equal_at_start + first + i, equal_at_start + second + i) for i in range(size))
    yield from ((len(keys) - i, len(other_keys) - i) for i in range(equal_at_end, 0, -1))


def pair_same_ops(
    run: Run, other_run: Run, indices: tuple[Sequence[int], Sequence[int]], renamed: Mapping[str, str]
) -> list[tuple[int, int]]:
    """Pair ops of equal module and type, in order; where their values differ, in the way that fits best."""
    ops_a, ops_b = indices
    rename = renamer(renamed)
    keys = [(rename(run.ops[i].module), run.ops[i].type) for i in ops_a]
    other_keys = [(dotted(other_run.ops[i].module), other_run.ops[i].type) for i in ops_b]
    similarity = OpSimilarity((run, ops_a, keys), (other_run, ops_b, other_keys))
    common_pairs = list(matching_positions(keys, other_keys))
    # Ops with near values are fixed points; in the gaps between two of them the best pairs are looked for.
    near_pairs = [pair for pair in common_pairs if similarity.are_near(*pair)]
    pairs = list(near_pairs)
    for (i, j), (next_i, next_j) in pairwise([(-1, -1), *near_pairs, (len(ops_a), len(ops_b))]):
        gap = range(i + 1, next_i), range(j + 1, next_j)
        pairs += similarity.align(*gap) or [(n, o) for n, o in common_pairs if n in gap[0] and o in gap[1]]
    return [(ops_a[i], ops_b[j]) for i, j in sorted(pairs)]


def dotted(path: str) -> str:
    """Return a path of modules or name scopes, with one way to separate them."""
    return path.replace("/", ".")


def renamer(renamed: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function from a module's path to that in the other run: by the longest name it begins with."""
    names = sorted(renamed, key=len, reverse=True)

    def rename(path: str) -> str:
        """Return the path in the other run; a path under no renamed module with dots alone."""
        path = dotted(path)
        for name in names:
            if path == name or path.startswith(f"{name}."):
                return renamed[name] + path[len(name) :]
        return path

    return rename


def module_test(run: Run, name: str) -> Callable[[str], bool]:
    """Return a test of paths in a module: from the root, or else wherever the module's name is in the path.

    TensorFlow adds a number to a name scope that was there before: `conv` may be `conv_1`.
    """
    escaped = re.escape(dotted(name))
    # The strictest pattern that fits anything counts.
    patterns = [rf"{escaped}(\.|$)", rf"(.*\.)?{escaped}(\.|$)", rf"(.*\.)?{escaped}_\d+(\.|$)"]
    paths = {dotted(op.module) for op in run.ops}
    fitting = (pattern for pattern in patterns if any(re.match(pattern, path) for path in paths))
    regex = re.compile(next(fitting, patterns[0]))
    return lambda path: regex.match(dotted(path)) is not None


def pair_same_modules(run: Run, other_run: Run) -> dict[str, str]:
    """Return modules of equal names, or, where the runs share few names, those with equal numbers of weights.

    Modules with as many elements in their weights are paired in the order of execution.
    """
    paths, other_paths = map(module_paths, (run, other_run))
    # Names of a few modules may be equal by chance; half of them are not.
    shared = {path: path for path in paths if path in other_paths}
    if shared and 2 * len(shared) >= min(len(paths), len(other_paths)):
        return shared
    modules_a, modules_b = _weight_keys(run), _weight_keys(other_run)
    keys, other_keys = ([key for _, key in modules] for modules in (modules_a, modules_b))
    names: dict[str, str] = {}
    for i, j in matching_positions(keys, other_keys):
        names.setdefault(modules_a[i][0], modules_b[j][0])
    return names


def module_paths(run: Run) -> dict[str, None]:
    """Return modules in which ops of the forward pass ran, in order."""
    return dict.fromkeys(path for i in run.indices("forward") if (path := dotted(run.ops[i].module)))


def _weight_keys(run: Run) -> list[tuple[str, Hashable]]:
    """Return modules with products, and a key of the first weight; the root is one if it has one product."""
    keys: dict[str, Hashable] = {}
    at_root = 0
    for index in run.indices("forward"):
        op = run.ops[index]
        weight: Entry | None = next((e for e in run.by_op[index] if e.role == "weight"), None)
        if weight is not None and is_compute(op.type):
            # Layouts of weights differ between frameworks, numbers of elements do not.
            kind = _UNIFIED_TYPES.get(op.type, op.type)
            keys.setdefault(dotted(op.module), (kind, weight.summary.statistics.elements))
            at_root += not op.module
    if at_root > 1:  # a graph without modules: what its last product gives is not what the first one does
        keys.pop("")
    return list(keys.items())


def weight_gradients(run: Run, inside: Callable[[str], bool]) -> list[list[Entry]]:
    """Return the gradients of weights of the ops in a module: for each tensor those of all executions."""
    gradients: dict[tuple[int, int], list[Entry]] = {}
    for index in run.indices("backward"):
        for entry in run.by_op[index] if inside(run.ops[index].module) else ():
            if entry.role == "weight gradient":
                gradients.setdefault((index, entry.position), []).append(entry)
    return list(gradients.values())


_READS = frozenset({"ReadVariableOp", "Const", "Shape", "StopGradient", "VarHandleOp"})
_SUMS = ("add", "BiasAdd")


def module_outputs(run: Run, visit: Sequence[int]) -> list[Entry]:
    """Return what the last op gave, and what the last product gave with its bias."""
    ops = [i for i in visit if run.ops[i].type not in _READS]
    last_ops = {ops[-1]} if ops else set()
    # The ops of a module alone have the shortest path among those of its visit.
    module = min((run.ops[i].module for i in ops), key=len, default="")  # a product of a child is the child's
    products = [n for n, i in enumerate(ops) if is_compute(run.ops[i].type) and run.ops[i].module == module]
    if products:
        last_ops.add(_last_op_of_product(run, ops[products[-1] :]))
    return [
        entry for i in sorted(last_ops) for entry in run.by_op[i]
        if entry.role == "output" and entry.position == 0
    ]  # fmt: skip


def _last_op_of_product(run: Run, ops: Sequence[int]) -> int:
    """Return the last op of a product with its bias: ops that add to it or shape it, and keep its size."""
    last, size = ops[0], _output_size(run, ops[0])
    for index in ops[1:]:
        kind = run.ops[index].type
        if _output_size(run, index) != size:
            continue
        # Some frameworks add the bias in the product, others in an op of its own after it.
        if kind not in (*_SUMS, "reshape", "squeeze"):
            break
        last = index
        if kind in _SUMS:
            break
    return last


def _output_size(run: Run, index: int) -> int:
    output = next(entry for entry in run.by_op[index] if entry.role == "output")
    return output.summary.statistics.elements


NEAR = 0.05
"""Relative error of statistics and samples up to which values are taken for those of the same op."""
_CELLS = 1 << 20
"""Pairs among which the best are looked for at once."""
_LATE = 1e-4
"""Of ops that fit as well, such as a product and its reshaped self, the first are paired."""
Key = tuple[str, str]
"""Module and type of an op."""
Side = tuple[Run, Sequence[int], Sequence[Key]]
"""A run, its ops of one phase, and their keys."""


class OpSimilarity:
    """Ops of two runs, each by its position among those of a phase."""

    def __init__(self, *sides: Side) -> None:
        self._first_outputs = [[_first_results(run, index) for index in indices] for run, indices, _ in sides]
        self._keys = [keys for _, _, keys in sides]
        self._shapes = [[_shapes(run, index) for index in indices] for run, indices, _ in sides]
        self._sources = [[run.ops[index].source for index in indices] for run, indices, _ in sides]
        statistics = [[entries[0].summary.statistics for entries in side] for side in self._first_outputs]
        self._sizes_and_norms = [
            np.array([(s.elements, s.l2) for s in side], np.float64).reshape(-1, 2) for side in statistics
        ]
        self._are_distinctive = [
            np.array([is_distinctive(entries[0]) for entries in side], bool) for side in self._first_outputs
        ]

    def are_near(self, i: int, j: int) -> bool:
        """Return True if what two ops gave at their first execution is about the same."""
        entries_a, entries_b = self._first_outputs[0][i], self._first_outputs[1][j]
        distances = map(summary_distance, entries_a, entries_b)
        return len(entries_a) == len(entries_b) and all(distance.relative <= NEAR for distance in distances)

    def align(self, range_a: range, range_b: range) -> list[tuple[int, int]]:
        """Pair ops in order so that the pairs fit best altogether; none where there are too many to try."""
        if not len(range_a) * len(range_b) or len(range_a) * len(range_b) > _CELLS:
            return []
        fits = self._fit_scores(range_a, range_b)
        # Needleman and Wunsch 1970, without a penalty for gaps: `total[i, j]` is the best sum from ops i and
        # j on, filled from the end so that the walk below goes forward.  A row at a time, as Python loops are
        # slow.
        total = np.zeros((len(range_a) + 1, len(range_b) + 1))
        for i in range(len(range_a) - 1, -1, -1):
            paired = np.where(fits[i] > 0, fits[i] + total[i + 1, 1:], 0.0)
            total[i, :-1] = np.maximum(paired, total[i + 1, :-1])
            # To leave out ops of b costs nothing: a running maximum from the right.
            total[i] = np.maximum.accumulate(total[i, ::-1])[::-1]
        pairs, i, j = [], 0, 0
        while i < len(range_a) and j < len(range_b):
            if fits[i, j] > 0 and total[i, j] == fits[i, j] + total[i + 1, j + 1]:
                pairs.append((range_a[i], range_b[j]))
                i, j = i + 1, j + 1
            elif total[i, j] == total[i + 1, j]:
                i += 1
            else:
                j += 1
        return pairs

    def _fit_scores(self, range_a: range, range_b: range) -> NDArray[np.float64]:
        """Return a number for each pair of ops, 0 for two that do not fit."""
        rows, columns = slice(range_a.start, range_a.stop), slice(range_b.start, range_b.stop)
        keys = self._keys[0][rows], self._keys[1][columns]
        modules, types = ([[key[part] for key in side] for side in keys] for part in (0, 1))
        same_module, same_type = _equal_pairs(*modules), _equal_pairs(*types)
        same_key = same_module & same_type
        same_shape = _equal_pairs(self._shapes[0][rows], self._shapes[1][columns])
        same_source = _equal_pairs(self._sources[0][rows], self._sources[1][columns])
        # A program without modules has the path "" everywhere, which says nothing: then shapes have to fit as
        # well.
        is_in_module = np.array([path != "" for path, _ in keys[0]])[:, None]
        fits = (
            1.5 * (same_key & (is_in_module | same_shape))
            + 1.0 * (same_shape & same_module & (same_type | same_source))
            + 1.0 * (same_source & same_type)
            + 0.5 * (same_shape & same_type)
        )
        # A cheap test of all pairs at once, before samples are compared pair by pair.
        a, b = self._sizes_and_norms[0][rows, None], self._sizes_and_norms[1][None, columns]
        scale = np.maximum(np.abs(a[..., 1]), np.abs(b[..., 1]))
        may_be_near = (a[..., 0] == b[..., 0]) & (np.abs(a[..., 1] - b[..., 1]) <= NEAR * scale)
        may_be_near &= self._are_distinctive[0][rows, None] & self._are_distinctive[1][None, columns]
        for i, j in zip(*np.nonzero(may_be_near), strict=True):
            if self.are_near(range_a[i], range_b[j]):
                # Values say more than names: two ops of one kind and module are less alike than two with the
                # same numbers.
                fits[i, j] += 3.0 + (same_shape[i, j] & same_module[i, j])
        lateness = np.add.outer(np.linspace(0, _LATE, len(range_a)), np.linspace(0, _LATE, len(range_b)))
        return np.where(fits > 0, fits - lateness, 0.0)


def _first_results(run: Run, index: int) -> list[Entry]:
    results = run.results(index)
    return results[min(results)]


def is_distinctive(entry: Entry) -> bool:
    """Return False for scalars and constants: equal ones may come from any two ops."""
    s = entry.summary.statistics
    return s.elements > 1 and (s.least < s.most or bool(s.nan or s.inf))


def _shapes(run: Run, index: int) -> tuple[Hashable, ...]:
    """Return positions and shapes of all that an op gave, to compare with those of another op."""
    return tuple(sorted((e.position, e.shape) for entries in run.results(index).values() for e in entries))


def _equal_pairs(values_a: Sequence[Hashable], values_b: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Return for each pair of values whether they are equal."""
    codes: dict[Hashable, int] = {}
    codes_a, codes_b = (
        [codes.setdefault(value, len(codes)) for value in values] for values in (values_a, values_b)
    )
    equal: NDArray[np.bool_] = np.array(codes_a)[:, None] == np.array(codes_b)[None, :]
    return equal
