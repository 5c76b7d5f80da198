"""Alignment of two runs: ops, or modules, of one that are the same as those of the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import chain, pairwise
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
    """Yield positions of equal keys, in order: those of equal ends, and what difflib finds between them."""
    # difflib's time grows with the square of repeated keys, as layers have them: equal ends, which nearly
    # always are all, go without it.  autojunk would drop every key that makes up over 1 % of the ops.
    length = min(len(keys), len(other_keys))
    equal_at_start = next((i for i in range(length) if keys[i] != other_keys[i]), length)
    rest_length = length - equal_at_start
    equal_at_end = next((i for i in range(rest_length) if keys[-1 - i] != other_keys[-1 - i]), rest_length)
    yield from ((i, i) for i in range(equal_at_start))
    end, other_end = len(keys) - equal_at_end, len(other_keys) - equal_at_end
    middle = keys[equal_at_start:end], other_keys[equal_at_start:other_end]
    for start, other_start, size in SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
        yield from ((equal_at_start + start + i, equal_at_start + other_start + i) for i in range(size))
    yield from ((len(keys) - i, len(other_keys) - i) for i in range(equal_at_end, 0, -1))


def pair_same_ops(
    run: Run, other_run: Run, indices: tuple[Sequence[int], Sequence[int]],
    b_path_by_a_path: Mapping[str, str],
) -> list[tuple[int, int]]:  # fmt: skip
    """Pair ops of equal module and type, in order; where their values differ, in the way that fits best."""
    # Indices of ops among those of a run; pairs of positions in these lists until the end.
    ops_a, ops_b = indices
    rename = renamer(b_path_by_a_path)
    keys_a = [(rename(run.ops[i].module), run.ops[i].type) for i in ops_a]
    keys_b = [(dotted(other_run.ops[i].module), other_run.ops[i].type) for i in ops_b]
    similarity = OpSimilarity((run, ops_a, keys_a), (other_run, ops_b, keys_b))
    common_pairs = list(matching_positions(keys_a, keys_b))
    # Ops with near values are fixed points; in the gaps between two of them the best pairs are looked for.
    near_pairs = [pair for pair in common_pairs if similarity.are_near(*pair)]
    pairs = list(near_pairs)
    for (i, j), (next_i, next_j) in pairwise([(-1, -1), *near_pairs, (len(ops_a), len(ops_b))]):
        gap_a, gap_b = range(i + 1, next_i), range(j + 1, next_j)
        # Where there are too many ops to align, those that difflib has paired stay together.
        pairs_in_gap = [(m, n) for m, n in common_pairs if m in gap_a and n in gap_b]
        pairs += similarity.align(gap_a, gap_b) or pairs_in_gap
    return [(ops_a[i], ops_b[j]) for i, j in sorted(pairs)]


def dotted(path: str) -> str:
    """Return a path of modules or name scopes, with one way to separate them."""
    return path.replace("/", ".")


def renamer(b_path_by_a_path: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function from a module's path to that in the other run: by the longest name it begins with."""
    names = sorted(b_path_by_a_path, key=len, reverse=True)

    def rename(path: str) -> str:
        """Return the path in the other run; a path under no module of the mapping with dots alone."""
        path = dotted(path)
        for name in names:
            if path == name or path.startswith(f"{name}."):
                return b_path_by_a_path[name] + path[len(name) :]
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
    patterns_that_fit = (pattern for pattern in patterns if any(re.match(pattern, path) for path in paths))
    regex = re.compile(next(patterns_that_fit, patterns[0]))
    return lambda path: regex.match(dotted(path)) is not None


def pair_same_modules(run: Run, other_run: Run) -> dict[str, str]:
    """Return paths of modules of the other run by those of this one: equal paths, or else alike weights.

    Where the runs share few paths, modules with as many elements in their weights are paired in order.
    """
    paths, other_paths = map(module_paths, (run, other_run))
    # Names of a few modules may be equal by chance; half of them are not.
    shared_paths = {path: path for path in paths if path in other_paths}
    if shared_paths and 2 * len(shared_paths) >= min(len(paths), len(other_paths)):
        return shared_paths
    modules_a, modules_b = _weight_keys(run), _weight_keys(other_run)
    keys, other_keys = ([key for _, key in modules] for modules in (modules_a, modules_b))
    other_path_by_path: dict[str, str] = {}
    for i, j in matching_positions(keys, other_keys):
        other_path_by_path.setdefault(modules_a[i][0], modules_b[j][0])
    return other_path_by_path


def module_paths(run: Run) -> dict[str, None]:
    """Return modules in which ops of the forward pass ran, in order."""
    return dict.fromkeys(path for i in run.op_indices("forward") if (path := dotted(run.ops[i].module)))


def _weight_keys(run: Run) -> list[tuple[str, Hashable]]:
    """Return modules with products, each with a key of its first weight: kind of product, and elements."""
    # The program itself is a module of path "".
    key_by_module: dict[str, Hashable] = {}
    root_count = 0
    for index in run.op_indices("forward"):
        op = run.ops[index]
        weight: Entry | None = next((e for e in run.entries_by_op[index] if e.role == "weight"), None)
        if weight is not None and is_compute(op.type):
            # Layouts of weights differ between frameworks, numbers of elements do not.
            product_type = _UNIFIED_TYPES.get(op.type, op.type)
            key_by_module.setdefault(dotted(op.module), (product_type, weight.summary.statistics.elements))
            root_count += not op.module
    if root_count > 1:  # a graph without modules: what its last product gives is not what the first one does
        key_by_module.pop("")
    return list(key_by_module.items())


def weight_gradients(run: Run, is_inside: Callable[[str], bool]) -> list[list[Entry]]:
    """Return a list for each weight that ops in a module read: its gradients at all executions."""
    gradients: dict[tuple[int, int], list[Entry]] = {}
    for index in run.op_indices("backward"):
        for entry in run.entries_by_op[index] if is_inside(run.ops[index].module) else ():
            if entry.role == "weight gradient":
                gradients.setdefault((index, entry.position), []).append(entry)
    return list(gradients.values())


_READS = frozenset({"ReadVariableOp", "Const", "Shape", "StopGradient", "VarHandleOp"})
_SUMS = ("add", "BiasAdd")


def module_outputs(run: Run, visit: Sequence[int]) -> list[Entry]:
    """Return the first output of the last op of a visit, and of its last product with its bias."""
    visited_ops = [i for i in visit if run.ops[i].type not in _READS]
    last_ops = {visited_ops[-1]} if visited_ops else set()
    # The ops of a module alone have the shortest path among those of its visit.
    module = min((run.ops[i].module for i in visited_ops), key=len, default="")
    own_ops = [i for i in visited_ops if run.ops[i].module == module]  # a product of a child is the child's
    products = [i for i in own_ops if is_compute(run.ops[i].type)]
    if products:
        last_ops.add(_last_op_of_product(run, visited_ops[visited_ops.index(products[-1]) :]))
    return [
        entry for i in sorted(last_ops) for entry in run.entries_by_op[i]
        if entry.role == "output" and entry.position == 0
    ]  # fmt: skip


def _last_op_of_product(run: Run, ops_from_product: Sequence[int]) -> int:
    """Return the last of the ops that belong to the first, a product: those that shape it and add a bias."""
    last_op, product_size = ops_from_product[0], _output_size(run, ops_from_product[0])
    for index in ops_from_product[1:]:
        op_type = run.ops[index].type
        if _output_size(run, index) != product_size:
            continue  # of another tensor
        # Some frameworks add the bias in the product, others in an op of its own after it.
        if op_type not in (*_SUMS, "reshape", "squeeze"):
            break
        last_op = index
        if op_type in _SUMS:
            break
    return last_op


def _output_size(run: Run, index: int) -> int:
    output = next(entry for entry in run.entries_by_op[index] if entry.role == "output")
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
    """How alike the ops of two runs are, each by its position among those of a phase."""

    def __init__(self, *sides: Side) -> None:
        self._first_outputs = [
            [(results := run.outputs_by_execution(index))[min(results)] for index in indices]
            for run, indices, _ in sides
        ]
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
        """Return how well each op of range_a, a row, fits each of range_b; 0 for two that do not fit."""
        # By module, type, shapes, source line and values, in matrices of True and False.
        rows, columns = slice(range_a.start, range_a.stop), slice(range_b.start, range_b.stop)
        keys_a, keys_b = self._keys[0][rows], self._keys[1][columns]
        same_module = _equal_pairs([module for module, _ in keys_a], [module for module, _ in keys_b])
        same_type = _equal_pairs([type for _, type in keys_a], [type for _, type in keys_b])
        same_key = same_module & same_type
        same_shape = _equal_pairs(self._shapes[0][rows], self._shapes[1][columns])
        same_source = _equal_pairs(self._sources[0][rows], self._sources[1][columns])
        # A program without modules has the path "" everywhere, which says nothing: then shapes have to fit as
        # well.
        is_in_module = np.array([module != "" for module, _ in keys_a])[:, None]
        fits = (
            1.5 * (same_key & (is_in_module | same_shape))
            + 1.0 * (same_shape & same_module & (same_type | same_source))
            + 1.0 * (same_source & same_type) + 0.5 * (same_shape & same_type)
        )  # fmt: skip
        # A cheap test of all pairs at once, before samples are compared pair by pair.
        size_a, norm_a = np.moveaxis(self._sizes_and_norms[0][rows, None], -1, 0)
        size_b, norm_b = np.moveaxis(self._sizes_and_norms[1][None, columns], -1, 0)
        scale = np.maximum(np.abs(norm_a), np.abs(norm_b))
        may_be_near = (size_a == size_b) & (np.abs(norm_a - norm_b) <= NEAR * scale)
        may_be_near &= self._are_distinctive[0][rows, None] & self._are_distinctive[1][None, columns]
        for i, j in zip(*np.nonzero(may_be_near), strict=True):
            if self.are_near(range_a[i], range_b[j]):
                # Values say more than names: two ops of one kind and module are less alike than two with the
                # same numbers.
                fits[i, j] += 3.0 + (same_shape[i, j] & same_module[i, j])
        # Of pairs that fit as well, the earlier one is better.
        lateness = np.add.outer(np.linspace(0, _LATE, len(range_a)), np.linspace(0, _LATE, len(range_b)))
        return np.where(fits > 0, fits - lateness, 0.0)


def is_distinctive(entry: Entry) -> bool:
    """Return False for scalars and constants: equal ones may come from any two ops."""
    s = entry.summary.statistics
    return s.elements > 1 and (s.least < s.most or bool(s.nan or s.inf))


def _shapes(run: Run, index: int) -> tuple[Hashable, ...]:
    """Return positions and shapes of all that an op gave, to compare with those of another op."""
    entries = chain.from_iterable(run.outputs_by_execution(index).values())
    return tuple(sorted((entry.position, entry.shape) for entry in entries))


def _equal_pairs(values_a: Sequence[Hashable], values_b: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Return a matrix: True where a value of the first list, the row, equals one of the second."""
    # Values as numbers, which NumPy compares: equal values have one code.
    codes: dict[Hashable, int] = {}
    codes_a = [codes.setdefault(value, len(codes)) for value in values_a]
    codes_b = [codes.setdefault(value, len(codes)) for value in values_b]
    are_equal: NDArray[np.bool_] = np.array(codes_a)[:, None] == np.array(codes_b)[None, :]
    return are_equal
