"""Costs of ops, the shapes that formulas read, and the result: a row for each op, module, type or phase."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import isqrt, prod
from typing import Any, ClassVar, NamedTuple, get_args

from amanda.errors import AmandaError, did_you_mean
from amanda.tools.mapping import TENSORFLOW_HANDLES
from amanda.tools.results import NOTHING, Column, PlacesResult, Result, amount, check_schema, count_of
from amanda.tools.select import Phase

Shape = tuple[int, ...]
UNKNOWN = (None,)
"""The shape of a tensor whose rank is not known."""


class Cost(NamedTuple):
    """Multiply-accumulates of convolutions, matrix products and attention; all floating-point operations.

    A multiply-accumulate is two operations, and those are in `flops` too.
    """

    macs: int = 0
    flops: int = 0

    @classmethod
    def of_macs(cls, macs: int, other_flops: int = 0) -> Cost:
        """Return the cost of multiply-accumulates.

        Args:
            macs: Their number.
            other_flops: Operations besides.
        """
        return cls(macs, 2 * macs + other_flops)

    def with_complex(self, products: int) -> Cost:
        """Return the cost if each multiply-accumulate takes `products` of real numbers."""
        # Operations that are no multiply-accumulates stay as they are counted.
        return Cost(products * self.macs, self.flops + 2 * (products - 1) * self.macs)

    def part(self, share: float) -> Cost:
        """Return the part of the cost that one process pays of an op that several compute together."""
        # DTensor and its like run one op on several processes, each of which pays for its part.
        return self if share == 1.0 else Cost(round(self.macs * share), round(self.flops * share))


class Components(tuple[Shape, ...]):
    """Shapes of the tensors that a nested tensor consists of."""

    __slots__ = ()


@dataclass(frozen=True)
class Shapes:
    """One execution of an op, without its values.

    type: the word of StandardMapping.  inputs, outputs: for each value a shape, a list of shapes where it
    is a list of tensors, or None where it is none.  values: the inputs that are not tensors, as they are.
    A formula is given an op on nested tensors component by component.
    weight, weight_layout: index of the weight among the inputs, and its axes.
    """

    type: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    values: Sequence[Any] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    weight: int | None = None
    weight_layout: str | None = None

    @classmethod
    def of(
        cls, type: str, inputs: Sequence[Any], outputs: Sequence[Any], shape: Callable[[Any], Any], *more: Any
    ) -> Shapes:
        """Return the shapes of values.

        Args:
            type: Word of StandardMapping for the op.
            inputs: Values that the op reads.
            outputs: Values that it gives.
            shape: Function that StandardMapping writes.
            *more: Attributes, the index of the weight among the inputs, and its axes.
        """
        input_shapes = [shape_of(value, shape) for value in inputs]
        # Inputs without a known shape, such as numbers, which formulas read themselves.
        values = [
            value for value, extents in zip(inputs, input_shapes, strict=True) if extents in (None, UNKNOWN)
        ]
        return cls(type, input_shapes, [shape_of(value, shape) for value in outputs], values, *more)

    @property
    def out(self) -> Shape:
        """Shape of the first output."""
        output_shapes = tensor_shapes(self.outputs)
        return output_shapes[0] if output_shapes else ()

    @property
    def elements(self) -> int:
        """Elements of the largest input or output: those that an elementwise op or a reduction visits."""
        all_shapes = tensor_shapes([*self.inputs, *self.outputs])
        # A reduction over a list, such as a sum of tensors, visits the elements of all of them.
        lists = [shapes for shapes in self.inputs if isinstance(shapes, list)]
        sizes = [*map(prod, all_shapes), *(sum(map(prod, shapes)) for shapes in lists)]
        return max(sizes, default=0)

    @property
    def are_known(self) -> bool:
        """True if every extent is known; in graphs some are known only at execution."""
        return are_known([*self.inputs, *self.outputs])

    @property
    def estimate(self) -> int:
        """Multiply-accumulates if this is the product of its two largest inputs; 0 with fewer than two.

        (n, k) by (k, m) gives (n, m), and n k m is the root of the product of the three sizes.
        """
        # A nested tensor has one product for each component, and no two largest inputs.
        is_nested = any(isinstance(shape, Components) for shape in (*self.inputs, *self.outputs))
        if is_nested or not self.are_known:
            return 0
        factors = sorted(prod(shape) for shape in tensor_shapes(self.inputs) if len(shape) > 1)[-2:]
        results = [prod(shape) for shape in tensor_shapes(self.outputs)]
        return isqrt(prod(factors) * max(results)) if len(factors) == 2 and results else 0


Formula = Callable[[Shapes], Cost]
"""A formula of an op: the cost of one execution, by the shapes of its tensors."""


def table(*entries: tuple[Formula, str]) -> dict[str, Formula]:
    """Return formulas by the names, separated by spaces, that each comes with."""
    return {name: formula for formula, names in entries for name in names.split()}


def tensor_shapes(shapes: Iterable[Any]) -> list[Shape]:
    """Return the shapes of tensors, those in lists too."""
    lists = [group if isinstance(group, list) else (group,) for group in shapes]
    return [shape for group in lists for shape in group if shape is not None]


def are_known(shapes: Iterable[Any]) -> bool:
    """Return True if every extent is known."""
    return True not in [None in shape for shape in tensor_shapes(shapes)]


def components(sides: Sequence[Sequence[Any]]) -> list[tuple[list[list[Any]], int]]:
    """Return the shapes of components of nested tensors, each set of shapes once, and how many have it.

    sides: shapes of inputs, of outputs and so on; without a nested tensor they are one component themselves.
    A dense tensor of their rank has a matrix for each component.
    """
    all_shapes: list[Any] = [shape for side in sides for shape in tensor_shapes(side)]
    nested_shapes = [shape for shape in all_shapes if isinstance(shape, Components)]
    if not nested_shapes:
        return [([list(side) for side in sides], 1)]
    component_count = len(nested_shapes[0])
    rank = 1 + max((len(shape[0]) for shape in nested_shapes if shape), default=0)

    def component_shape(shape: Any, i: int) -> Any:
        """Return the shape of component i; that of a tensor which all components share as it is."""
        if isinstance(shape, list):
            return [component_shape(inner, i) for inner in shape]
        if isinstance(shape, Components):
            return shape[i]
        # A dense tensor beside nested ones has a row for each component, unless all components share it.
        is_batch = isinstance(shape, tuple) and len(shape) == rank and shape[0] == component_count
        return shape[1:] if is_batch else shape

    sides_by_component = [
        [[component_shape(shape, i) for shape in side] for side in sides] for i in range(component_count)
    ]
    # Components of equal length cost the same, and batches have many of them: each form is computed once.
    counts = Counter(map(str, sides_by_component))
    component_by_text = {str(component): component for component in sides_by_component}
    return [(component, counts[text]) for text, component in component_by_text.items()]


def size(shape: Any) -> int:
    """Return the elements of a tensor; 0 where the shape is None, or not known."""
    if isinstance(shape, Components):
        return sum(map(prod, shape))
    return 0 if shape is None or None in shape else prod(shape)


def elements(shapes: Iterable[Any]) -> int:
    """Return the elements of tensors, those in lists too, whose shapes are known."""
    return sum(map(size, tensor_shapes(shapes)))


def shape_of(value: Any, shape: Callable[[Any], Any]) -> Any:
    """Return a tensor's shape, by StandardMapping's `shape`; of a list those of its tensors; else None."""
    if isinstance(value, (list, tuple)):
        return [extents for element in value if (extents := _extents(element, shape)) is not None] or None
    return _extents(value, shape)


def _extents(value: Any, shape: Callable[[Any], Any]) -> Any:
    """Return the shape of a value; UNKNOWN for a tensor without known rank, None for no tensor."""
    extents = shape(value)
    if extents is None and hasattr(type(value), "shape"):
        # A handle has no elements of its own, so its size counts nothing; other tensors without rank are
        # unknown.
        return None if getattr(getattr(value, "dtype", None), "name", "") in TENSORFLOW_HANDLES else UNKNOWN
    return extents


class Extents:
    """A tensor of which the shape and the element type are known, and nothing else."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)


logger = logging.getLogger("amanda")

KEYS = ("phase", "type", "module", "source")


@dataclass
class OpCost:
    """The cost of one execution of an op, forward or backward, at certain shapes, and its number of calls.

    calls: how often it was executed; 0 where that cannot be seen.  macs, flops: of one execution; None where
    no formula knows, or shapes are not known even as it runs.
    parameters: key and elements of each parameter that it reads; a key is of one parameter in a whole result.
    bytes: of the tensors that it reads and writes.
    estimate: where no formula knows, the MACs of one execution if the op is a product of its largest inputs.
    """

    phase: str
    type: str
    module: str
    source: str
    calls: int = 0
    macs: int | None = 0
    flops: int | None = 0
    parameters: tuple[tuple[str, int], ...] = ()
    bytes: int = 0
    estimate: int = 0

    def for_samples(self, samples: int) -> OpCost:
        """Return the cost of executions that a vmap maps over so many samples."""
        macs, flops = (None if n is None else n * samples for n in (self.macs, self.flops))
        return replace(
            self, macs=macs, flops=flops, bytes=self.bytes * samples, estimate=self.estimate * samples
        )


class FlopsResult(PlacesResult[OpCost]):
    """Table of FLOPs, MACs, parameters and bytes per operator.

    ops: the counts of each op.  by: the keys of a row, of `KEYS`; rows by module are printed as a tree.
    depth: of that tree; None for the depth that a screen shows.
    """

    name: ClassVar[str] = "flops"
    version: ClassVar[int] = 2
    keys: ClassVar[Sequence[str]] = KEYS
    _op_class = OpCost
    _summed = ("calls",)
    _order: ClassVar[str] = "FLOPs"
    _leading = 1
    _counted: ClassVar[Sequence[Column]] = (
        Column("calls", show="{:,}".format, total=True, priority=1),
        Column("MACs", show=amount, total=True), Column("FLOPs", show=amount, total=True, priority=2),
        Column("parameters", show=amount, number=True, folded="sum"),
        Column("bytes", show=partial(amount, unit="B"), total=True, unit="B"),
        Column("FLOPs/byte", show="{:.2f}".format, number=True, folded="mean"),
    )  # fmt: skip

    def __init__(self, places: Iterable[OpCost], by: Sequence[str] = KEYS, depth: int | None = None) -> None:
        # Places of ops that never ran are dropped, except for those whose executions cannot be seen.
        self.ops = [op_cost for op_cost in places if op_cost.calls or op_cost.flops is None]
        self._is_warned, self._depth = False, depth
        self._set_keys(by, "FLOPs")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> FlopsResult:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""
        version = check_schema(content, cls.name, cls.version)

        def parameters(fields: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
            """Return what an op reads; in version 1 ops of one line are taken for readers of the same."""
            if version == 1:
                place = f"{fields['module']} {fields['source']} {fields['type']}"
                return ((place, int(fields["parameters"])),)
            return tuple((str(number), int(elements)) for number, elements in fields["parameters"])

        op_costs = [{**fields, "parameters": parameters(fields)} for fields in content["places"]]
        return super().from_dict({**content, "places": op_costs})

    def tree(self, depth: int | None = None) -> Result:
        """Return a row for each module, with the sums of all modules within, and the share of the FLOPs.

        Args:
            depth: Levels of modules below the model; None for as many as a screen shows.
        """
        all_flops = self._sum("flops")

        def numbers(node: Any) -> Sequence[Any]:
            calls, macs, flops, parameters, *_ = _totals(list(node.all_ops()))
            return calls, parameters, macs, flops, (flops or 0) / all_flops if all_flops else 0.0

        return self._tree(depth, _TREE, numbers)

    def _printed(self, view: Any) -> Result:
        """Return a tree of modules if rows or view ask for it and nothing is sorted; else the flat table."""
        # A sorted view is a flat table too, with a remark.
        is_tree = self._by == ("module",) or (view.tree and self._by == KEYS)
        if is_tree and view.sort:
            flat = copy(self)
            flat.remarks = (*self.remarks, "Sorted rows are a flat table, without a sort a tree of modules.")
            return flat
        if not is_tree or not self.ops:
            return self
        return self.tree(_ANY_DEPTH if view.whole else view.depth or self._depth)

    def total(self, what: str = "flops", phase: str | None = None) -> int:
        """Return the sum of a quantity.

        Calls whose cost is unknown count as 0 macs and flops: `unsupported` and `unseen` list them, and a
        warning is logged once.

        Args:
            what: "macs", "flops", "bytes" or "calls".
            phase: "forward" or "backward"; None for all.

        Raises:
            AmandaError: For another quantity, and for a phase that does not exist.
        """
        if what not in ("macs", "flops", "bytes", "calls"):
            raise AmandaError(f"there are totals of macs, flops, bytes and calls, not of {what!r}")
        phases = sorted({*get_args(Phase), *(op_cost.phase for op_cost in self.ops)})
        if phase is not None and phase not in phases:
            raise AmandaError(f"there is no phase {phase!r}; {did_you_mean(phase, phases)}")
        # Once for each result: totals are read in loops.
        if what in ("macs", "flops") and not self._is_warned:
            self._is_warned = True
            for sentence in self._gaps():
                logger.warning("FLOPs: %s", sentence)
        return self._sum(what, phase)

    def _sum(self, quantity: str, phase: str | None = None) -> int:
        """Return the sum of a quantity over all calls, of one phase or of all."""
        op_costs = [op_cost for op_cost in self.ops if phase in (None, op_cost.phase)]
        if quantity == "calls":
            return sum(op_cost.calls for op_cost in op_costs)
        return sum((getattr(op_cost, quantity) or 0) * op_cost.calls for op_cost in op_costs)

    @property
    def unsupported(self) -> Mapping[str, int]:
        """Types of ops whose cost is not known, with their calls: no formula knows them, or their shapes."""
        return self._sums_without_cost(lambda op_cost: op_cost.calls)

    @property
    def unseen(self) -> Mapping[str, int]:
        """Types of ops whose executions cannot be seen, as in ONNX' control flow, with their number."""
        return Counter(op_cost.type for op_cost in self.ops if not op_cost.calls)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return rows by their keys, those with most FLOPs first."""
        rows = [(*key, *_totals(op_costs)) for key, op_costs in self._grouped(self.ops).items()]
        flops = len(self._by) + 2
        return sorted(rows, key=lambda row: -(row[flops] or 0))

    def _facts(self) -> Mapping[str, Any]:
        """Return totals by phase, types of ops without a formula, and what the base class gives: each op."""
        phases = dict.fromkeys(op_cost.phase for op_cost in self.ops)
        totals = {
            phase: {quantity: self._sum(quantity, phase) for quantity in ("macs", "flops", "bytes")}
            for phase in phases
        }
        return {"totals": totals, "unsupported": dict(self.unsupported), **super()._facts()}

    def notes(self) -> Sequence[str]:
        """Return the totals, the convention, and the share of what no formula knows; or that nothing ran."""
        if not self.ops:
            return [NOTHING]
        phases = dict.fromkeys(op_cost.phase for op_cost in self.ops)
        parts = ", ".join(f"{phase} {amount(self._sum('flops', phase))}" for phase in phases)
        flops = f"{amount(self._sum('flops'))} FLOPs{f' ({parts})' if len(phases) > 1 else ''}"
        return [
            f"{flops}, {amount(self._sum('macs'))} MACs, {count_of(self._sum('calls'), 'call')}.",
            "A multiply-accumulate (MAC) of a convolution, matrix product or attention is two FLOPs.",
            *self._gaps(),
        ]

    def _gaps(self) -> Sequence[str]:
        """Return sentences on what is not counted: ops without a formula, unseen ops, perhaps products."""
        sentences = []
        if unsupported := self.unsupported:
            share = 100 * sum(unsupported.values()) / self._sum("calls")
            sentences.append(
                f"No formula, or no shapes, for {share:.1f} % of the calls, which count as 0: "
                f"{_listing(unsupported)}."
            )
        if unseen := self.unseen:
            total = sum(unseen.values())
            sentences.append(f"Executions of {total} ops cannot be seen, and count as 0: {_listing(unseen)}.")
        if missing := self.missing:
            all_macs = self._sum("macs") + sum(missing.values())
            listed = ", ".join(f"{name} ({100 * macs / all_macs:.1f} %)" for name, macs in missing.items())
            sentences.append(
                f"Perhaps products, which would be so much of all MACs: {listed}. Give `formulas` for them."
            )
        return sentences

    @property
    def missing(self) -> Mapping[str, int]:
        """Types of ops that no formula knows and that may be products, with their MACs if they are."""
        return self._sums_without_cost(lambda op_cost: op_cost.calls * op_cost.estimate)

    def _sums_without_cost(self, count_of: Callable[[OpCost], int]) -> Mapping[str, int]:
        """Return sums of `count_of` by the types of ops of unknown cost; types with 0 are left out."""
        numbers = Counter[str]()
        for op_cost in self.ops:
            if op_cost.flops is None and (count := count_of(op_cost)):
                numbers[op_cost.type] += count
        return numbers


_TREE = (
    Column("calls", show="{:,}".format, number=True),
    Column("parameters", show=amount, number=True, priority=2),
    Column("MACs", show=amount, number=True), Column("FLOPs", show=amount, number=True, priority=3),
    Column("share", show="{:.1%}".format, number=True, unit="share", priority=4),
)  # fmt: skip
_ANY_DEPTH = 1000


def _listing(types: Mapping[str, int]) -> str:
    """Return types with their numbers, in alphabetical order: "fft (2), sort (1)"."""
    return ", ".join(f"{name} ({number})" for name, number in sorted(types.items()))


def _totals(ops: Sequence[OpCost]) -> tuple[Any, ...]:
    """Return calls, MACs and FLOPs (None if no cost is known), parameters, bytes and FLOPs per byte."""
    with_cost = [op for op in ops if op.flops is not None]
    macs = sum((op.macs or 0) * op.calls for op in with_cost) if with_cost else None
    flops = sum((op.flops or 0) * op.calls for op in with_cost) if with_cost else None
    bytes_moved = sum(op.bytes * op.calls for op in ops)
    # Several ops may read one parameter, and one op has a cost for each set of shapes.
    parameters = dict(chain.from_iterable(op.parameters for op in ops))
    intensity = flops / bytes_moved if flops is not None and bytes_moved else None
    calls = sum(op.calls for op in ops)
    return calls, macs, flops, sum(parameters.values()), bytes_moved, intensity
