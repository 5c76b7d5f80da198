"""The tool: at each execution of the selected ops, elements that chance picks are changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.inject._faults import Fault, Field, InjectError, Kind, as_numbers, check_known, check_least
from amanda.tools.inject._result import Injection, InjectResult
from amanda.tools.kit import parameters_read, tensors_of
from amanda.tools.mapping import StandardMapping, weight_gradient
from amanda.tools.select import Paths, Patterns, as_remarks, unmatched

Target = Literal["outputs", "inputs", "weights", "grad_outputs", "grad_inputs", "weight_grads"]


class Site(NamedTuple):
    """One execution of one op in which faults can be put; elements: how many its tensors have."""

    op: int
    execution: int
    elements: int
    phase: str
    type: str
    module: str
    source: str


class _Place(NamedTuple):
    """One op that is selected."""

    op: int
    phase: str
    type: str
    module: str
    source: str


class _Spot(NamedTuple):
    """A tensor among the values that a routine is given: at a position, or an item of a list there."""

    value: Any
    dtype: np.dtype[Any]
    name: str
    position: int
    item: int | None

    @property
    def size(self) -> int:
        """Return how many elements it has."""
        return prod(self.value.shape)


def _any(position: int, value: Any) -> bool:
    return True


class InjectTool(amanda.Tool):
    """Changes elements of what the selected ops read or give; `result` tells which, `clear` starts anew.

    fault: "bit_flip", "stuck_at_0" and "stuck_at_1" of `flips` bits in each element; "value" and "zero";
        "gaussian" (standard deviation `scale`), "uniform" (within `scale` of the old value) and "relative"
        (times 1 + gaussian) noise.
    target: "outputs"; "inputs" other than parameters; "weights", the values of the parameters that an op
        reads, where the parameter itself is left as it is; "grad_outputs" that enter a backward op,
        "grad_inputs" that leave it; "weight_grads", those of the latter that belong to the weight.
    type, module: globs of StandardMapping's word or the framework's name ("conv2d", "conv*"), and of module
        paths ("layer1.*"); None for all.  A backward op is selected by its own word ("linear_backward"); the
        word of a forward op selects the first of that op's backward ops alone, which the gradient enters, and
        for "weight_grads" the one that gives the weight's gradient.
    index: position of the tensor among the target; None for all of them together.
    probability: of each element, at each execution.  count: so many elements of each execution, which
        is 1 where neither is given.
    bits, field: which bits may be hit: positions, 0 the least significant; "sign", "exponent", "mantissa".
    seed: what is changed depends on it, on the op's id and on how often the op was executed before, on
        nothing else; generators of a framework are not touched.
    permanent: the same elements and bits at every execution of an op.
    start, end, frequency: at which executions of each op, counted from 0: each `frequency`th before `end`.
    limit: so many injections are kept for the result.

    Raises InjectError for options that do not go together.
    """

    def __init__(
        self,
        fault: Kind = "bit_flip",
        target: Target = "outputs",
        type: list[str] | str | None = None,
        module: list[str] | str | None = None,
        index: int | None = None,
        probability: float | None = None,
        count: int | None = None,
        bits: list[int] | None = None,
        field: Field = "any",
        flips: int = 1,
        value: float = 0.0,
        scale: float = 1.0,
        seed: int = 0,
        permanent: bool = False,
        start: int = 0,
        end: int | None = None,
        frequency: int = 1,
        limit: int = 10_000,
    ) -> None:
        super().__init__()
        check_known("target", target, Target)
        if count is not None and probability is not None:
            raise InjectError("give either a count of elements or the probability of each, not both")
        if probability is not None and not 0 <= probability <= 1:
            raise InjectError(f"probability is {probability}; it lies between 0 and 1")
        if not 0 <= seed < 1 << 64:
            raise InjectError(f"seed is {seed}; it lies between 0 and 2**64 - 1")
        for name, given, least in (
            ("count", count, 1), ("frequency", frequency, 1), ("start", start, 0), ("end", end, start),
            ("index", index, 0),
        ):  # fmt: skip
            check_least(name, given, least)
        self.seed = seed
        self._fault = Fault(fault, bits, field, flips, value, scale)
        self._target, self._index = target, index
        self._types, self._modules = Patterns("type", type), Paths("module", module)
        self._probability, self._count = probability, count
        self._start, self._end, self._frequency = start, end, frequency
        self._permanent, self._limit = permanent, limit
        self._seen: dict[str, bool] = {}
        self._numbers: dict[int, int] = {}
        self._next = itertools.count()
        self._backward_of: dict[int, int | None] = {}
        self._places: dict[int, set[int]] = {}
        self._sites: list[Site] | None = None
        self._only: Site | None = None
        self._trial = 0
        self.clear()
        self.depends_on(StandardMapping())
        if target in ("outputs", "inputs", "weights"):
            self.add_inst_for_op(self._forward)
        else:
            self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> InjectResult:
        """The elements that were changed so far, in an order that does not depend on that of threads."""
        injections = sorted(self._injections, key=self._order)
        executions = self._executed_before + sum(self._executed.values())
        result = InjectResult(injections, self._total, executions, self._seen)
        result.remarks = as_remarks(self.unmatched())
        return result

    def unmatched(self) -> list[str]:
        """Say which options no op fitted."""
        return [*super().unmatched(), *unmatched([self._types, self._modules])]

    def clear(self) -> None:
        """Forget what was changed, and count executions from 0 again; what was analysed stays."""
        self._injections: list[Injection] = []
        self._total = 0
        self._executed: dict[int, int] = {}
        self._executed_before = 0  # by ops that are gone
        self._told: set[int] = set()  # ops of injections and sites

    def op_gone(self, op_id: int) -> None:
        """Keep of an op that is gone only how often it executed, and what was changed there."""
        self._backward_of.pop(op_id, None)
        for op in self._places.pop(op_id, ()):
            self._executed_before += self._executed.pop(op, 0)
            if op not in self._told:
                self._numbers.pop(op, None)

    def _order(self, one: Injection | Site) -> tuple[int, int]:
        return one.execution, self._numbers[one.op]

    # ---- for campaigns ----

    def look(self) -> None:
        """Change nothing from now on, and note in which executions faults would fit."""
        self.clear()
        self._sites, self._only, self._trial = [], None, 0

    @property
    def sites(self) -> list[Site]:
        """The sites that were noted since `look`."""
        return sorted(self._sites or (), key=self._order)

    def try_at(self, trial: int, site: Site | None) -> None:
        """Change elements at one site alone, or at all of them, as chance has it for this trial."""
        self.clear()
        self._sites, self._only, self._trial = None, site, trial

    # ---- analysis ----

    def _forward(self, context: amanda.OpContext) -> None:
        if not self._notes_selected(context, context["type"], context.get_op_type()):
            return
        place = self._place(context, context.get_op_id(), context["phase"], context["type"])
        if self._target == "outputs":
            context.insert_after_op(self._inject, place=place)
            return
        owned = {*parameters_read(context), context["weight_index"]}
        positions = range(len(context.get_inputs()))
        wanted = [i for i in positions if (i in owned) == (self._target == "weights")]
        if wanted:
            context.insert_before_op(self._inject, inputs=wanted, place=place, positions=wanted)

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        own = (kind, context.get_backward_op().__name__)
        if not self._notes_selected(context, *own) and not self._selects_by_forward(context, kind):
            return
        place = self._place(context, context.get_backward_op_id() or 0, "backward", kind)
        if self._target == "grad_outputs":
            context.insert_before_backward_op(self._inject, place=place)
        elif self._target == "grad_inputs":
            context.insert_after_backward_op(self._inject, place=place)
        elif context["weight_grad_index"] is not None:
            wanted = [context["weight_grad_index"]]
            context.insert_after_backward_op(
                self._inject, grad_inputs=wanted, place=place, positions=wanted, fits=weight_gradient(context)
            )

    def _selects_by_forward(self, context: amanda.OpContext, kind: str) -> bool:
        """Return True for the one backward op that the word of its forward op selects."""
        forward = (context["type"], context.get_op_type())
        if kind == "accumulate_grad" or not self._selects(context, *forward):
            return False
        if self._target == "weight_grads" and context["weight_grad_index"] is None:
            return False
        own = context.get_backward_op_id()
        selected = self._backward_of.setdefault(context.get_op_id(), own) == own
        self._seen[kind] = self._seen[kind] or selected
        return selected

    def _notes_selected(self, context: amanda.OpContext, *names: str) -> bool:
        selected = self._selects(context, *names)
        self._seen[names[0]] = self._seen.get(names[0], False) or selected
        return selected

    def _selects(self, context: amanda.OpContext, *names: str) -> bool:
        return self._types(*names) and self._modules(*context.get_scopes())

    def _place(self, context: amanda.OpContext, op: int, phase: str, kind: str) -> _Place:
        self._numbers.setdefault(op, next(self._next))
        self._places.setdefault(context.get_op_id(), set()).add(op)
        return _Place(op, phase, kind, context.get_scope(), context.get_source())

    # ---- execution ----

    def _inject(
        self,
        *values: Any,
        place: _Place,
        positions: Sequence[int] | None = None,
        fits: Callable[[int, Any], bool] = _any,
    ) -> Any:
        execution = self._executed.get(place.op, 0)
        self._executed[place.op] = execution + 1
        after = execution - self._start
        if after < 0 or after % self._frequency or (self._end is not None and execution >= self._end):
            return None
        if self._only is not None and (place.op, execution) != self._only[:2]:
            return None
        spots = list(self._spots(values, positions or range(len(values)), fits))
        size = sum(spot.size for spot in spots)
        if self._sites is not None:
            if size:
                self._told.add(place.op)
                self._sites.append(Site(place.op, execution, size, *place[1:]))
            return None
        random = self._random(place.op, 0 if self._permanent else execution)
        picked = self._picked(size, random)
        return self._changed(values, spots, picked, place, execution, random) if len(picked) else None

    def _spots(
        self, values: Sequence[Any], positions: Sequence[int], fits: Callable[[int, Any], bool]
    ) -> Iterator[_Spot]:
        """Yield the tensors that can have the fault; positions: those of the values in the target."""
        for position, (index, value) in enumerate(zip(positions, values, strict=True)):
            if self._index not in (None, index) or not fits(index, value):
                continue
            listed = isinstance(value, (list, tuple))
            for item, one in enumerate(value if listed else (value,)):
                dtype = tensors_of(one).element_type(one)
                if dtype is not None and self._fault.fits(dtype):
                    name = f"{self._target}[{index}]" + (f"[{item}]" if listed else "")
                    yield _Spot(one, dtype, name, position, item if listed else None)

    def _random(self, op: int, execution: int) -> np.random.Generator:
        """A generator by what is to be random, and by nothing that was drawn before."""
        counter = [0, execution, self._trial, get_args(Target).index(self._target)]
        key = np.array([self.seed, op], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=np.array(counter, np.uint64)))

    def _picked(self, size: int, random: np.random.Generator) -> Any:
        """Positions among so many elements, in order."""
        if self._probability is None:
            count = min(self._count or 1, size)
        else:
            count = int(random.binomial(size, self._probability))
        return np.sort(random.choice(size, count, replace=False, shuffle=False)) if count else ()

    def _changed(
        self, values: Sequence[Any], spots: Sequence[_Spot], picked: Any, place: _Place, execution: int,
        random: np.random.Generator,
    ) -> tuple[Any, ...]:  # fmt: skip
        results: list[Any] = list(values)
        first = 0
        for spot in spots:
            mine = picked[(picked >= first) & (picked < first + spot.size)] - first
            first += spot.size
            if not len(mine):
                continue
            tensors = tensors_of(spot.value)
            old = tensors.take(spot.value, mine)
            new, bits = self._fault.applied(old, random)
            made = tensors.put(spot.value, mine, new)
            self._note(spot, mine, (old, new), bits, place, execution)
            if spot.item is None:
                results[spot.position] = made
            else:
                results[spot.position] = [*results[spot.position]]
                results[spot.position][spot.item] = made
        return tuple(results)

    def _note(
        self, spot: _Spot, positions: Any, elements: tuple[NDArray[Any], NDArray[Any]], bits: Any,
        place: _Place, execution: int,
    ) -> None:  # fmt: skip
        self._total += len(positions)
        kept = max(0, self._limit - len(self._injections))
        if kept:
            self._told.add(place.op)
        old, new = (as_numbers(one[:kept]).tolist() for one in elements)
        where = (*place[1:], place.op, execution, spot.name, spot.dtype.name)
        for i, position in enumerate(positions[:kept]):
            element = tuple(int(one) for one in np.unravel_index(position, tuple(spot.value.shape)))
            hit = () if bits is None else tuple(map(int, bits[i]))
            self._injections.append(Injection(*where, element, hit, old[i], new[i]))
