"""The stages of a cut: costs, memory, tensors that cross, and the files and sessions of an ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from amanda.errors import ArtefactError
from amanda.options import Folder, checked
from amanda.tools.partition._cut import (
    CutRequest,
    PartitionError,
    Plan,
    PlannedOp,
    Slot,
    Stages,
    bubble_share,
    cut,
    schedule_slots,
)
from amanda.tools.partition._step_work import StepWork
from amanda.tools.plots import PlottedResult
from amanda.tools.results import Column, amount, read_json, shortened
from amanda.tools.trace import Tensor, TraceResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amanda.tools.partition._pytorch_pipeline import Pipeline


class Crossing(NamedTuple):
    """A tensor that stage `source` makes and stage `target` reads.

    made_by, module: type and module of the op that makes the tensor.
    """

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
    """A row for each stage; `crossings` are the tensors that cross, `slots` the schedule.

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

    def __init__(self, work: StepWork, request: CutRequest) -> None:
        self.work, self.request = work, request

    @cached_property
    def stage_of(self) -> Stages | None:
        """Return the stage of each forward op of the graph, in their order; None where nothing ran.

        The first read computes the cut; raises PartitionError if no cut meets the request.
        """
        return cut(self.work, self.request) if self.work.ops else None

    @cached_property
    def stages(self) -> Sequence[Stage]:
        """Return the stages in order."""
        return (
            []
            if self.stage_of is None
            else [self._describe_stage(i, self.stage_of) for i in range(self.request.stages)]
        )

    def _describe_stage(self, number: int, stage_of: Stages) -> Stage:
        """Return the costs, the bytes and the first and last op of the stage of a number."""
        work, request = self.work, self.request
        in_stage = stage_of == number  # by position of the op
        ops = [op for op, stage in zip(work.ops, stage_of, strict=True) if stage == number]
        # A parameter that several ops of the stage read is held once.
        parameter_bytes = sum(
            work.parameter_bytes[index]
            for index, reader_positions in work.parameters.items()
            if in_stage[list(reader_positions)].any()
        )
        activation_bytes = int(work.activations[in_stage].sum())
        memory = (
            request.parameter_copies(work) * parameter_bytes + request.in_flight(number) * activation_bytes
        )
        return Stage(
            number=number,
            ops=len(ops),
            first=_op_label(ops[0]),
            last=_op_label(ops[-1]),
            forward=float(work.forward[in_stage].sum()),
            backward=float(work.backward[in_stage].sum()),
            parameters=parameter_bytes,
            activations=activation_bytes,
            memory=int(memory),
            sent=sum(crossing.tensor.bytes or 0 for crossing in self.crossings if crossing.source == number),
        )

    @cached_property
    def crossings(self) -> Sequence[Crossing]:
        """Return each tensor that crosses, once for each stage that reads it; gradients cross backwards."""
        return [] if self.stage_of is None else list(self._find_crossings(self.stage_of))

    def _find_crossings(self, stage_of: Stages) -> Iterator[Crossing]:
        """Yield each tensor that another stage reads, once for each of these stages."""
        for span in self.work.spans:
            source = int(stage_of[span.produced_at])
            assert span.tensor.producer is not None  # as of every span
            producer = self.work.graph.ops[span.tensor.producer]
            for target in sorted({int(stage_of[i]) for i in span.read_at} - {source}):
                yield Crossing(span.tensor, source, target, producer.type, producer.module)

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """Return the stages that read each parameter or buffer, by its path; {} if nothing was executed.

        One without a name is "tensor" and its index.
        """
        stages_by_path: dict[str, Sequence[int]] = {}
        if self.stage_of is not None:
            for index, reader_positions in self.work.parameters.items():
                # Graphs of some frameworks have tensors without names.
                path = self.work.graph.tensors[index].name or f"tensor {index}"
                stages_by_path[path] = sorted({int(self.stage_of[i]) for i in reader_positions})
        return stages_by_path

    @property
    def shared(self) -> Mapping[str, Sequence[int]]:
        """Return the parameters that several stages read, by path, with the numbers of these stages."""
        return {name: stages for name, stages in self.readers.items() if len(stages) > 1}

    @property
    def plan(self) -> Plan:
        """Return the plan from which stages can be built.  Raises PartitionError if nothing was executed."""
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
        """Return a model of PyTorch, cut into these stages; see `Plan.pipeline`.

        Args:
            model: The model that was traced.
            mb_args: Example of the positional inputs, of the size of one micro-batch.
            mb_kwargs: Example of the inputs by name.
        """
        return self.plan.pipeline(model, mb_args, mb_kwargs)

    @cached_property
    def slots(self) -> Sequence[Slot]:
        """Return when each stage computes each micro-batch, by the costs of the stages."""
        times = ([stage.forward for stage in self.stages], [stage.backward for stage in self.stages])
        return schedule_slots(self.request.schedule, *times, self.request.microbatches)

    @property
    def bubble(self) -> float:
        """Return the share of the stages' time in which they wait."""
        return bubble_share(self.slots, self.request.stages)

    @property
    def imbalance(self) -> float:
        """Return the share by which the slowest stage is slower than the mean: 0.1 for 10 %."""
        costs = [stage.cost for stage in self.stages]
        return max(costs) * len(costs) / sum(costs) - 1 if any(costs) else 0.0

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return the share of the slowest stage, the bytes that cross, and the bubble."""
        if not self.stages:
            return "No stages: nothing was executed"
        total_cost = sum(stage.cost for stage in self.stages)
        slowest_share = max(stage.cost for stage in self.stages) / total_cost if total_cost else 0.0
        crossing_bytes = amount(sum(crossing.tensor.bytes or 0 for crossing in self.crossings), unit="B")
        schedule_name = {"1f1b": "1F1B", "gpipe": "GPipe"}[self.request.schedule]
        quantity = "time" if self.work.unit == "s" else self.work.unit
        return (
            f"{len(self.stages)} stages: the slowest has {slowest_share:.1%} of the {quantity}, "
            f"{crossing_bytes} cross, the bubble is {self.bubble:.1%} ({schedule_name}, "
            f"{self.request.microbatches} micro-batches)"
        )

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each stage."""
        total_cost = sum(stage.cost for stage in self.stages)
        return [
            (stage.number, stage.ops, stage.first, stage.last, stage.cost,
             stage.cost / total_cost if total_cost else 0.0, stage.parameters, stage.activations,
             stage.memory, stage.sent)
            for stage in self.stages
        ]  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Return the tensors that cross each cut, and what the numbers leave out."""
        if not self.stages:
            return []
        work, request, stages = self.work, self.request, self.request.stages
        notes = [self._cut_note(number) for number in range(1, stages)]
        unit = "seconds" if work.unit == "s" else work.unit
        equal_bubble = (stages - 1) / (request.microbatches + stages - 1)
        notes.append(
            f"Cost is {unit} of a step; `memory` is {request.parameter_copies(work)} x parameters and the "
            f"activations in flight. Equal stages would wait {equal_bubble:.1%} of the time."
        )
        if self.shared:
            listed = ", ".join(
                f"{name} ({', '.join(map(str, readers))})" for name, readers in self.shared.items()
            )
            notes.append(f"{self.about_shared}: {listed}.")
        if work.unstaged_ops:
            notes.append(f"{work.unstaged_ops:,} ops of optimizers and constructors are in no stage.")
        if work.graph.dropped:
            notes.append(f"{work.graph.dropped:,} ops came after the limit of the trace and are in no stage.")
        if not all((*work.parameter_bytes.values(), *(span.tensor.bytes is not None for span in work.spans))):
            notes.append("Tensors whose size is not known count as 0 bytes.")
        return [*notes, *work.remarks]

    def _cut_note(self, number: int) -> str:
        """Return a sentence on the tensors that cross the cut ahead of a stage, in each direction."""
        # A tensor that skips a stage crosses every cut between the two.
        forward = [crossing for crossing in self.crossings if crossing.source < number <= crossing.target]
        backward = [crossing for crossing in self.crossings if crossing.target < number <= crossing.source]
        directions = []
        for word, crossings in (("forward", forward), ("backward", backward)):
            if crossings:
                size = amount(sum(crossing.tensor.bytes or 0 for crossing in crossings), unit="B")
                listed = ", ".join(f"{crossing.made_by} {crossing.tensor}" for crossing in crossings[:2])
                further = f" and {len(crossings) - 2} more" if len(crossings) > 2 else ""
                directions.append(f"{size} {word} ({listed}{further})")
        return f"Cut {number}: {'; '.join(directions) or 'nothing crosses'}."

    def _facts(self) -> Mapping[str, Any]:
        """Return the bubble, what crosses, what is shared, and the stage of each op."""
        request = self.request
        return {
            "unit": self.work.unit, "method": request.method, "schedule": request.schedule,
            "microbatches": request.microbatches, "bubble": self.bubble, "imbalance": self.imbalance,
            "shared": {name: list(stages) for name, stages in self.shared.items()},
            "parameters": {name: list(stages) for name, stages in self.readers.items()},
            "crossings": [
                {"from": source, "to": target, "name": tensor.name, "type": op_type, "module": module,
                 "shape": tensor.shape, "dtype": tensor.dtype, "bytes": tensor.bytes}
                for tensor, source, target, op_type, module in self.crossings
            ],
            "ops": list(self._op_stages()),
        }  # fmt: skip

    def _op_stages(self) -> Iterator[Mapping[str, Any]]:
        """Yield the names and the stage of each op, for the saved plan."""
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
        axes.set_yticks(range(len(self.stages)), [f"stage {stage.number}" for stage in self.stages])
        axes.invert_yaxis()

    def to_page(self) -> str:
        """Return a page of `amanda view` with the graph in the colours of the stages."""
        from amanda.tools.view import to_page

        return to_page(TraceResult(self.work.graph), self, title=self.title)

    def _forms(self) -> dict[str, Callable[[], str]]:
        return {**super()._forms(), ".graph.html": self.to_page}


def _op_label(op: Any) -> str:
    """Return the module and the type of an op, the type alone outside of modules."""
    return f"{op.module}: {op.type}" if op.module else str(op.type)


@dataclass(frozen=True)
class Part:
    """A file with a part of the model.  kind: "stage", "public" or "protected".

    inputs, outputs: names of values of the whole model.  bytes: of initializers.
    """

    file: str
    kind: str
    ops: int
    inputs: list[str]
    outputs: list[str]
    bytes: int


class PartsResult(PartitionResult):
    """Stages of a file that was cut; `parts` are the files in the order in which they run.

    inputs, outputs: of the whole model.
    """

    about_shared = "In the files of several parts"

    def __init__(
        self, work: StepWork, request: CutRequest, inputs: list[str], outputs: list[str],
        stage_of: Stages | None = None,
    ) -> None:  # fmt: skip
        super().__init__(work, request)
        self.inputs, self.outputs = inputs, outputs
        self.parts: list[Part] = []
        # Set over the cached property: protected parts are not the result of a cut.
        if stage_of is not None:
            self.stage_of = stage_of

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return the title of the stages, or the numbers of protected ops and bytes."""
        if all(part.kind == "stage" for part in self.parts):
            return super().title
        protected_parts = [part for part in self.parts if part.kind == "protected"]
        crossing = amount(sum(crossing.tensor.bytes or 0 for crossing in self.crossings), unit="B")
        return (
            f"{sum(part.ops for part in protected_parts)} of {len(self.work.ops)} ops and "
            f"{amount(sum(part.bytes for part in protected_parts), unit='B')} of initializers are in "
            f"{', '.join(part.file for part in protected_parts)} alone; {crossing} cross"
        )

    def _facts(self) -> Mapping[str, Any]:
        """Return the files in the order in which they run, and the inputs and outputs of the whole model."""
        files = [asdict(part) for part in self.parts]
        return {**super()._facts(), "files": files, "inputs": self.inputs, "outputs": self.outputs}

    def notes(self) -> Sequence[str]:
        """Return the order of the files, and the notes on the stages."""
        files = ", ".join(part.file for part in self.parts)
        return [
            f"Run in this order: {files}. Each is given the model's inputs that it reads.",
            *super().notes(),
        ]


class StageChain:
    """Sessions of the files that `PartitionTool` wrote into a folder, run in the order of `partition.json`.

    Args:
        folder: Folder with "partition.json" and the parts.
        options: Of each session, as onnxruntime.InferenceSession has them.
        providers: See `options`.

    Raises:
        FileError: For a folder without such a file.
        ArtefactError: For another file of this name.
    """

    @checked(error=ArtefactError)
    def __init__(
        self, folder: Folder, options: Any = None, providers: Sequence[Any] = ("CPUExecutionProvider",)
    ) -> None:
        from onnxruntime import InferenceSession

        plan_path = Path(folder, "partition.json")
        self.outputs: list[str]
        files, self.outputs = read_json(
            plan_path, "plan of files that amanda instrument wrote", _read_plan, ArtefactError
        )
        self.sessions = [InferenceSession(Path(folder, file), options, list(providers)) for file in files]

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the parts in order, and return outputs of the whole model.

        Args:
            feeds: Inputs of the whole model.  A value is dropped once no later part reads it.
            output_names: Names of outputs of the whole model; None for all.

        Raises:
            ArtefactError: For a name that is no output.
        """
        requested_names = self.outputs if output_names is None else list(output_names)
        unknown_names = [name for name in requested_names if name not in self.outputs]
        if unknown_names:
            raise ArtefactError(
                f"there is no output {unknown_names[0]!r}; there are {', '.join(self.outputs)}"
            )
        # Inputs with a default, which ONNX Runtime lists apart, may be fed as well.
        input_names = [
            {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}
            for session in self.sessions
        ]
        values = dict(feeds)
        for number, session in enumerate(self.sessions):
            names = [value.name for value in session.get_outputs()]
            outputs = session.run(names, {name: values[name] for name in input_names[number] & values.keys()})
            values |= zip(names, outputs, strict=True)
            # Activations of earlier parts are freed as early as in one session.
            names_needed = set(requested_names).union(*input_names[number + 1 :])
            values = {name: value for name, value in values.items() if name in names_needed}
        return [values[name] for name in requested_names]


def _read_plan(plan: Any) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the outputs; raise ValueError for a file in another folder."""
    files, outputs = [str(entry["file"]) for entry in plan["files"]], [str(name) for name in plan["outputs"]]
    for name in files:
        # A plan from elsewhere must not open files outside of its folder.
        if Path(name).name != name:
            raise ValueError(f"it names {name!r}, which is no file of its folder")
    return files, outputs
