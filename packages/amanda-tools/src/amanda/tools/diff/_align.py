"""Alignment of two runs: ops, or modules, of one that are the same as those of the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from amanda.tools.diff._likeness import Likeness
from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry
from amanda.tools.mapping import MATRIX_PRODUCTS, PRODUCTS

_KINDS = {
    **dict.fromkeys((*MATRIX_PRODUCTS, "einsum"), "product"),
    "depthwise_conv2d": "conv2d", "depthwise_conv3d": "conv3d",
}  # fmt: skip
# Attention is one op in some frameworks, and several in others.
_COMPUTE = frozenset([*PRODUCTS, "embedding"]) - {"scaled_dot_product_attention"}


def kind(type: str) -> str:
    """Return one word for what frameworks call differently."""
    return _KINDS.get(type, type)


def is_compute(type: str) -> bool:
    """Return True if an op is a product, a convolution or a look-up: what layers of frameworks share."""
    return type in _COMPUTE


def common(one: Sequence[Hashable], other: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Return positions of equal keys in order, with as few left out as difflib finds between equal ends."""
    shorter = min(len(one), len(other))
    start = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    end = next((i for i in range(shorter - start) if one[-1 - i] != other[-1 - i]), shorter - start)
    yield from ((i, i) for i in range(start))
    middle = one[start : len(one) - end], other[start : len(other) - end]
    for first, second, size in SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
        yield from ((start + first + i, start + second + i) for i in range(size))
    yield from ((len(one) - i, len(other) - i) for i in range(end, 0, -1))


def same_ops(
    run: Run, other: Run, indices: tuple[Sequence[int], Sequence[int]], renamed: Mapping[str, str]
) -> list[tuple[int, int]]:
    """Pair ops of equal module and type, in order; where their values differ, in the way that fits best."""
    ones, others = indices
    rename = renaming(renamed)
    keys = [(rename(run.ops[i].module), run.ops[i].type) for i in ones]
    other_keys = [(dotted(other.ops[i].module), other.ops[i].type) for i in others]
    likeness = Likeness((run, ones, keys), (other, others, other_keys))
    known = list(common(keys, other_keys))
    sure = [pair for pair in known if likeness.near(*pair)]
    found = list(sure)
    for (i, j), (k, m) in pairwise([(-1, -1), *sure, (len(ones), len(others))]):
        gap = range(i + 1, k), range(j + 1, m)
        found += likeness.best(*gap) or [one for one in known if one[0] in gap[0] and one[1] in gap[1]]
    return [(ones[i], others[j]) for i, j in sorted(found)]


def dotted(path: str) -> str:
    """Return a path of modules or name scopes, with one way to separate them."""
    return path.replace("/", ".")


def renaming(renamed: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function from a module's path to that in the other run: by the longest name it begins with."""
    names = sorted(renamed, key=len, reverse=True)

    def rename(path: str) -> str:
        path = dotted(path)
        for name in names:
            if path == name or path.startswith(f"{name}."):
                return renamed[name] + path[len(name) :]
        return path

    return rename


def within(run: Run, name: str) -> Callable[[str], bool]:
    """Return a test of paths in a module: from the root, or else wherever the module's name is in the path.

    TensorFlow adds a number to a name scope that was there before: `conv` may be `conv_1`.
    """
    name = re.escape(dotted(name))
    patterns = [rf"{name}(\.|$)", rf"(.*\.)?{name}(\.|$)", rf"(.*\.)?{name}_\d+(\.|$)"]
    paths = {dotted(op.module) for op in run.ops}
    chosen = next((one for one in patterns if any(re.match(one, path) for path in paths)), patterns[0])
    found = re.compile(chosen)
    return lambda path: found.match(dotted(path)) is not None


def same_modules(run: Run, other: Run) -> dict[str, str]:
    """Return modules of equal names, or, where the runs share few names, those with equal numbers of weights.

    Modules with as many elements in their weights are paired in the order of execution.
    """
    paths, other_paths = (_paths(one) for one in (run, other))
    shared = {path: path for path in paths if path in other_paths}
    if shared and 2 * len(shared) >= min(len(paths), len(other_paths)):
        return shared
    ones, others = _with_weights(run), _with_weights(other)
    keys, other_keys = ([key for _, key in found] for found in (ones, others))
    found: dict[str, str] = {}
    for i, j in common(keys, other_keys):
        found.setdefault(ones[i][0], others[j][0])
    return found


def alone(run: Run, names: Iterable[str]) -> list[str]:
    """Return modules with ops in the forward pass that are not among some names."""
    known = set(names)
    return [path for path in _paths(run) if path not in known]


def _paths(run: Run) -> dict[str, None]:
    """Return modules in which ops of the forward pass ran, in order."""
    return dict.fromkeys(path for i in run.indices("forward") if (path := dotted(run.ops[i].module)))


def _with_weights(run: Run) -> list[tuple[str, Hashable]]:
    """Return modules with products, and a key of the first weight; the root is one if it has one product."""
    found: dict[str, Hashable] = {}
    at_root = 0
    for index in run.indices("forward"):
        op = run.ops[index]
        weight: Entry | None = next((e for e in run.by_op[index] if e.role == "weight"), None)
        if weight is not None and is_compute(op.type):
            found.setdefault(dotted(op.module), (kind(op.type), weight.summary.statistics.elements))
            at_root += not op.module
    if at_root > 1:  # a graph without modules: what its last product gives is not what the first one does
        found.pop("")
    return list(found.items())
