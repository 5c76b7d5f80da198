"""The tool: at each execution of the selected ops, elements that chance picks are changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import amanda
from amanda.tools.inject import _numpy, _pytorch, _tensorflow
from amanda.tools.inject._faults import Fault, Kind
from amanda.tools.inject._formats import Field
from amanda.tools.inject._options import TARGETS, Options, Target
from amanda.tools.inject._result import Injection, InjectResult
from amanda.tools.inject._sites import Fits, Place, Site, Tensor, always, tensors_of
from amanda.tools.mapping import MappingTool, StandardMapping, weight_gradient
from amanda.tools.select import Paths, Patterns, as_remarks, unmatched


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
        self._options = Options(
            Fault(fault, bits, field, flips, value, scale), target,
            Patterns("type", type), Paths("module", module), index, probability, count, seed, permanent,
            start, end, frequency,
        )  # fmt: skip
        self._limit = limit
        self._seen: dict[str, bool] = {}
        self._numbers: dict[int, int] = {}
        self._next = itertools.count()
        self._backward_of: dict[int, int | None] = {}
        self._places: dict[int, set[int]] = {}
        self._sites: list[Site] | None = None
        self._only: Site | None = None
        self._trial = 0
        self.clear()
        self.depends_on(
            StandardMapping(),
            MappingTool(
                [
                    ["pytorch", _pytorch.describe],
                    ["tensorflow", _tensorflow.describe],
                    ["onnxruntime", _numpy.describe],
                ]
            ),
        )
        self.add_inst_for_op(self._forward)
        if target in ("grad_outputs", "grad_inputs", "weight_grads"):
            self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> InjectResult:
        """What was changed so far, in an order that does not depend on that of threads."""
        injections = sorted(self._injections, key=self._order)
        executions = self._executed_before + sum(self._executed.values())
        result = InjectResult(injections, self._total, executions, self._seen)
        result.remarks = as_remarks(self.unmatched())
        return result

    def unmatched(self) -> list[str]:
        """Say which options no op fitted."""
        return [*super().unmatched(), *unmatched([self._options.types, self._options.modules])]

    @property
    def seed(self) -> int:
        """The seed."""
        return self._options.seed

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
        """What `look` let be noted."""
        return sorted(self._sites or (), key=self._order)

    def try_at(self, trial: int, site: Site | None) -> None:
        """Change elements at one site alone, or at all of them, as chance has it for this trial."""
        self.clear()
        self._sites, self._only, self._trial = None, site, trial

    # ---- analysis ----

    def _forward(self, context: amanda.OpContext) -> None:
        target = self._options.target
        if target not in ("outputs", "inputs", "weights"):
            return
        if not self._selects(context, context["type"], context.get_op_type()):
            return
        place = self._place(context, context.get_op_id(), context["phase"], context["type"])
        if target == "outputs":
            context.insert_after_op(self._inject, place=place)
            return
        owned = {*context["parameters_read"], context["weight_index"]}
        positions = range(len(context.get_inputs()))
        wanted = [i for i in positions if (i in owned) == (target == "weights")]
        if wanted:
            context.insert_before_op(self._inject, inputs=wanted, place=place, positions=wanted)

    def _backward(self, context: amanda.OpContext) -> None:
        kind, target = context["backward_type"], self._options.target
        own = (kind, context.get_backward_op().__name__)
        if not self._selects(context, *own) and not self._selects_by_forward(context, kind):
            return
        place = self._place(context, context.get_backward_op_id() or 0, "backward", kind)
        if target == "grad_outputs":
            context.insert_before_backward_op(self._inject, place=place)
        elif target == "grad_inputs":
            context.insert_after_backward_op(self._inject, place=place)
        elif context["weight_grad_index"] is not None:
            wanted = [context["weight_grad_index"]]
            context.insert_after_backward_op(
                self._inject, grad_inputs=wanted, place=place, positions=wanted, fits=weight_gradient(context)
            )

    def _selects_by_forward(self, context: amanda.OpContext, kind: str) -> bool:
        """Return True for the one backward op that the word of its forward op selects."""
        forward = (context["type"], context.get_op_type())
        if kind == "accumulate_grad" or not self._options.selects(context.get_scopes(), *forward):
            return False
        if self._options.target == "weight_grads" and context["weight_grad_index"] is None:
            return False
        own = context.get_backward_op_id()
        selected = self._backward_of.setdefault(context.get_op_id(), own) == own
        self._seen[kind] = self._seen[kind] or selected
        return selected

    def _selects(self, context: amanda.OpContext, *names: str) -> bool:
        selected = self._options.selects(context.get_scopes(), *names)
        self._seen[names[0]] = self._seen.get(names[0], False) or selected
        return selected

    def _place(self, context: amanda.OpContext, op: int, phase: str, kind: str) -> Place:
        self._numbers.setdefault(op, next(self._next))
        self._places.setdefault(context.get_op_id(), set()).add(op)
        where = (context.get_scope(), context.get_source())
        return Place(op, phase, kind, *where, context["elements"], context["dtype"])

    # ---- execution ----

    def _inject(
        self, *values: Any, place: Place, positions: Sequence[int] | None = None, fits: Fits = always
    ) -> Any:
        execution = self._executed.get(place.op, 0)
        self._executed[place.op] = execution + 1
        if not self._options.at(execution):
            return None
        if self._only is not None and (place.op, execution) != self._only[:2]:
            return None
        numbered = list(zip(positions or range(len(values)), values, strict=True))
        tensors = list(tensors_of(numbered, place, self._options, fits))
        size = sum(tensor.size for tensor in tensors)
        if self._sites is not None:
            if size:
                where = (place.phase, place.type, place.module, place.source)
                self._told.add(place.op)
                self._sites.append(Site(place.op, execution, size, *where))
            return None
        random = self._random(place.op, 0 if self._options.permanent else execution)
        picked = self._picked(size, random)
        return self._changed(values, tensors, picked, place, execution, random) if len(picked) else None

    def _random(self, op: int, execution: int) -> np.random.Generator:
        """A generator by what is to be random, and by nothing that was drawn before."""
        counter = [0, execution, self._trial, TARGETS.index(self._options.target)]
        key = np.array([self._options.seed, op], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=np.array(counter, np.uint64)))

    def _picked(self, size: int, random: np.random.Generator) -> Any:
        """Positions among so many elements, in order."""
        if self._options.probability is None:
            count = min(self._options.count or 1, size)
        else:
            count = int(random.binomial(size, self._options.probability))
        return np.sort(random.choice(size, count, replace=False, shuffle=False)) if count else ()

    def _changed(
        self, values: Sequence[Any], tensors: Sequence[Tensor], picked: Any, place: Place,
        execution: int, random: np.random.Generator,
    ) -> tuple[Any, ...]:  # fmt: skip
        results: list[Any] = list(values)
        elements, first = place.elements, 0
        for tensor in tensors:
            mine = picked[(picked >= first) & (picked < first + tensor.size)] - first
            first += tensor.size
            if not len(mine):
                continue
            old = elements.read(tensor.value, mine)
            new, bits = self._options.fault.applied(old, tensor.dtype, elements, random)
            made = elements.replaced(tensor.value, mine, new)
            self._note(tensor, mine, (old, new), bits, place, execution)
            if tensor.item is None:
                results[tensor.position] = made
            else:
                results[tensor.position] = [*results[tensor.position]]
                results[tensor.position][tensor.item] = made
        return tuple(results)

    def _note(
        self, tensor: Tensor, positions: Any, raw: tuple[Any, Any], bits: Any, place: Place, execution: int
    ) -> None:
        self._total += len(positions)
        kept = max(0, self._limit - len(self._injections))
        old, new = (place.elements.numbers(one[:kept], tensor.dtype).tolist() for one in raw)
        where = (place.phase, place.type, place.module, place.source, place.op, execution)
        if kept:
            self._told.add(place.op)
        for i, position in enumerate(positions[:kept]):
            element = tuple(int(one) for one in np.unravel_index(position, tensor.shape))
            hit = () if bits is None else tuple(map(int, bits[i]))
            self._injections.append(
                Injection(*where, tensor.name, tensor.dtype, element, hit, old[i], new[i])
            )
