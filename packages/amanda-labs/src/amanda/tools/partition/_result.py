"""The stages of a cut: what each costs and holds, what crosses between them, and the bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from amanda.tools.partition._cut import PartitionError, Request, Stages, cut
from amanda.tools.partition._plan import Plan, PlannedOp
from amanda.tools.partition._schedule import Slot, bubble, slots
from amanda.tools.partition._work import Work
from amanda.tools.results import Column, PlottedResult, amount, shortened
from amanda.tools.trace import Tensor, TraceResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amanda.tools.partition._pytorch_pipeline import Pipeline


class Crossing(NamedTuple):
    """A tensor that one stage makes and another reads.  name: of the op that made it."""

    tensor: Tensor
    source: int
    target: int
    made_by: str
    module: str


@dataclass(frozen=True)
class Stage:
    """One stage.  forward, backward: cost in a step.  parameters, activations, memory: bytes."""

    number: int
    ops: int
    first: str
    last: str
    forward: float
    backward: float
    parameters: int
    activations: int
    memory: int
    sent: int

    @property
    def cost(self) -> float:
        """Return the cost of a step, forward and backward."""
        return self.forward + self.backward


class PartitionResult(PlottedResult):
    """A row for each stage; `crossings` has what crosses, `slots` the schedule.

    `save` also writes a timeline of the schedule (.svg, .png, .pdf), and with `.graph.html` a page of
    `amanda view` that shows the graph in the colours of the stages.
    """

    name: ClassVar[str] = "partition"
    columns: ClassVar[Sequence[Column]] = (
        Column("stage", number=True), Column("ops", show="{:,}".format, total=True),
        Column("from", show=partial(shortened, width=28)), Column("to", show=partial(shortened, width=28)),
        Column("cost", show=lambda value: amount(value, unit=""), total=True),
        Column("share", show="{:.1%}".format, number=True, unit="share"),
        Column("parameters", show=partial(amount, unit="B"), number=True, unit="B"),
        Column("activations", show=partial(amount, unit="B"), number=True, unit="B"),
        Column("memory", show=partial(amount, unit="B"), number=True, unit="B"),
        Column("sent", show=partial(amount, unit="B"), total=True, unit="B"),
    )  # fmt: skip

    about_shared: ClassVar[str] = "Held by several stages, which have to add up its gradients"

    def __init__(self, work: Work, request: Request) -> None:
        self.work, self.request = work, request

    @cached_property
    def stage_of(self) -> Stages | None:
        """Return the stage of each forward op of the graph, in their order; None where nothing ran."""
        return cut(self.work, self.request) if self.work.ops else None

    @cached_property
    def stages(self) -> Sequence[Stage]:
        """Return the stages in order."""
        return (
            []
            if self.stage_of is None
            else [self._stage(i, self.stage_of) for i in range(self.request.stages)]
        )

    def _stage(self, number: int, stage_of: Stages) -> Stage:
        work = self.work
        chosen = stage_of == number
        ops = [op for op, is_in in zip(work.ops, chosen, strict=True) if is_in]
        held = [index for index, read in work.parameters.items() if chosen[list(read)].any()]
        parameters = sum(work.parameter_bytes[index] for index in held)
        activations = int(work.activations[chosen].sum())
        memory = self.request.copies_of(work) * parameters + self.request.in_flight(number) * activations
        sent = sum(one.tensor.bytes or 0 for one in self.crossings if one.source == number)
        return Stage(
            number, len(ops), _place(ops[0]), _place(ops[-1]), float(work.forward[chosen].sum()),
            float(work.backward[chosen].sum()), parameters, activations, int(memory), sent,
        )  # fmt: skip

    @cached_property
    def crossings(self) -> Sequence[Crossing]:
        """Return each tensor that crosses, once for each stage that reads it; gradients cross backwards."""
        return [] if self.stage_of is None else list(self._crossings(self.stage_of))

    def _crossings(self, stage_of: Stages) -> Iterator[Crossing]:
        graph = self.work.graph
        for span in self.work.spans:
            source = int(stage_of[span.made])
            for target in sorted({int(stage_of[i]) for i in span.positions} - {source}):
                op = graph.ops[span.tensor.producer or 0]
                yield Crossing(span.tensor, source, target, op.type, op.module)

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """Return the stages that read each parameter or buffer, by its path."""
        found: dict[str, Sequence[int]] = {}
        for index, read in self.work.parameters.items() if self.stage_of is not None else ():
            name = self.work.graph.tensors[index].name or f"tensor {index}"
            found[name] = sorted({int(self.stage_of[i]) for i in read})  # type: ignore[index]
        return found

    @property
    def shared(self) -> Mapping[str, Sequence[int]]:
        """Return the stages that read a parameter of which several do, by its path."""
        return {name: stages for name, stages in self.readers.items() if len(stages) > 1}

    @property
    def plan(self) -> Plan:
        """Return what the stages of a model are made by.  Raises PartitionError where nothing ran."""
        if self.stage_of is None:
            raise PartitionError("nothing was executed, so there is no plan; run the model in the scope")
        ops = [
            PlannedOp(op.type, op.module, int(stage))
            for op, stage in zip(self.work.ops, self.stage_of, strict=True)
        ]
        return Plan(self.request.stages, self.request.schedule, self.request.microbatches, ops, self.readers)

    def pipeline(
        self, model: Any, mb_args: tuple[Any, ...], mb_kwargs: Mapping[str, Any] | None = None
    ) -> Pipeline:
        """Return a model of PyTorch, cut into these stages; see `Plan.pipeline`."""
        return self.plan.pipeline(model, mb_args, mb_kwargs)

    @cached_property
    def slots(self) -> Sequence[Slot]:
        """Return when each stage computes each micro-batch, by the costs of the stages."""
        times = ([one.forward for one in self.stages], [one.backward for one in self.stages])
        return slots(self.request.schedule, *times, self.request.microbatches)

    @property
    def bubble(self) -> float:
        """Return the share of the stages' time in which they wait."""
        return bubble(self.slots, self.request.stages)

    @property
    def imbalance(self) -> float:
        """Return by how much the slowest stage is slower than if all took the same: 0.1 for 10 %."""
        costs = [one.cost for one in self.stages]
        return max(costs) * len(costs) / sum(costs) - 1 if any(costs) else 0.0

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return the answer: how even the stages are, what crosses, and how long they wait."""
        if not self.stages:
            return "No stages: nothing was executed"
        costs = sum(one.cost for one in self.stages)
        slowest = max(one.cost for one in self.stages) / costs if costs else 0.0
        crossing = amount(sum(one.tensor.bytes or 0 for one in self.crossings), unit="B")
        name = {"1f1b": "1F1B", "gpipe": "GPipe"}[self.request.schedule]
        how = f"{name}, {self.request.microbatches} micro-batches"
        what = "time" if self.work.unit == "s" else self.work.unit
        return (
            f"{len(self.stages)} stages: the slowest has {slowest:.1%} of the {what}, {crossing} cross, "
            f"the bubble is {self.bubble:.1%} ({how})"
        )

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each stage."""
        whole = sum(one.cost for one in self.stages)
        return [
            (one.number, one.ops, one.first, one.last, one.cost, one.cost / whole if whole else 0.0,
             one.parameters, one.activations, one.memory, one.sent)
            for one in self.stages
        ]  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Return what crosses each cut, and what the numbers leave out."""
        if not self.stages:
            return []
        work, request, stages = self.work, self.request, self.request.stages
        notes = [self._cut_note(number) for number in range(1, stages)]
        unit = "seconds" if work.unit == "s" else work.unit
        equal = (stages - 1) / (request.microbatches + stages - 1)
        notes.append(
            f"Cost is {unit} of a step; `memory` is {request.copies_of(work)} x parameters and the "
            f"activations in flight. Equal stages would wait {equal:.1%} of the time."
        )
        if self.shared:
            listed = ", ".join(f"{name} ({', '.join(map(str, read))})" for name, read in self.shared.items())
            notes.append(f"{self.about_shared}: {listed}.")
        if work.others:
            notes.append(f"{work.others:,} ops of optimizers and constructors are in no stage.")
        if work.graph.dropped:
            notes.append(f"{work.graph.dropped:,} ops came after the limit of the trace and are in no stage.")
        if not all((*work.parameter_bytes.values(), *(one.tensor.bytes is not None for one in work.spans))):
            notes.append("Tensors whose size is not known count as 0 bytes.")
        return [*notes, *work.remarks]

    def _cut_note(self, number: int) -> str:
        ways = []
        for is_ahead, word in ((True, "forward"), (False, "backward")):
            across = [
                one for one in self.crossings
                if (one.source < number <= one.target if is_ahead else one.target < number <= one.source)
            ]  # fmt: skip
            size = amount(sum(one.tensor.bytes or 0 for one in across), unit="B")
            listed = ", ".join(f"{one.made_by} {one.tensor}" for one in across[:2])
            more = f" and {len(across) - 2} more" if len(across) > 2 else ""
            ways += [f"{size} {word} ({listed}{more})"] if across else []
        return f"Cut {number}: {'; '.join(ways) or 'nothing crosses'}."

    def facts(self) -> Mapping[str, Any]:
        """Return the bubble, what crosses, what is shared, and the stage of each op."""
        request = self.request
        return {
            "unit": self.work.unit, "method": request.method, "schedule": request.schedule,
            "microbatches": request.microbatches, "bubble": self.bubble, "imbalance": self.imbalance,
            "shared": {name: list(stages) for name, stages in self.shared.items()},
            "parameters": {name: list(stages) for name, stages in self.readers.items()},
            "crossings": [
                {"from": one.source, "to": one.target, "name": one.tensor.name, "type": one.made_by,
                 "module": one.module, "shape": one.tensor.shape, "dtype": one.tensor.dtype,
                 "bytes": one.tensor.bytes}
                for one in self.crossings
            ],
            "ops": list(self._ops()),
        }  # fmt: skip

    def _ops(self) -> Iterator[Mapping[str, Any]]:
        for op in self.work.graph.ops:
            position = self.work.position(op)
            if position is not None and self.stage_of is not None:
                names = {"phase": op.phase, "type": op.type, "module": op.module, "source": op.source}
                yield {"id": f"{op.id:016x}", **names, "stage": int(self.stage_of[position])}

    def draw(self, axes: Axes) -> None:
        """Draw when each stage computes which micro-batch; backward passes are hatched."""
        for slot in self.slots:
            axes.barh(
                slot.stage, slot.end - slot.begin, left=slot.begin, height=0.8, color=f"C{slot.stage % 10}",
                alpha=0.5 if slot.backward else 1.0, hatch="//" if slot.backward else None, edgecolor="white",
            )  # fmt: skip
            middle = (slot.begin + slot.end) / 2
            axes.text(middle, slot.stage, str(slot.microbatch), ha="center", va="center", fontsize=7)
        axes.set_title(self.title, fontsize=9, loc="left")
        axes.set_xlabel("seconds" if self.work.unit == "s" else f"{self.work.unit} of one device")
        axes.set_yticks(range(len(self.stages)), [f"stage {one.number}" for one in self.stages])
        axes.invert_yaxis()

    def to_page(self) -> str:
        """Return a page of `amanda view` with the graph in the colours of the stages."""
        from amanda.tools.view import to_page

        return to_page(TraceResult(self.work.graph), self, title=self.title)

    def _forms(self) -> dict[str, Callable[[], str]]:
        return {**super()._forms(), ".graph.html": self.to_page}


def _place(op: Any) -> str:
    return f"{op.module}: {op.type}" if op.module else str(op.type)
