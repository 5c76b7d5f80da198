"""Routines that are written into the file of a model for good, so that they run without Amanda."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.errors import ArtefactError, NotTraceableError
from amanda.export.artefacts import Artefact, artefact_kind
from amanda.export.targets import check_target
from amanda.files import replacing_all
from amanda.graph.analysis import GraphAnalysis
from amanda.options import checked
from amanda.plan.layer import layer_of
from amanda.plan.order import in_order
from amanda.plan.plan import Actions, Plan
from amanda.scope.report import Uninstrumented
from amanda.scope.state import State, disabled
from amanda.tool import Tool, preparation

if TYPE_CHECKING:
    from amanda.graph.rewriting import Rewriting
    from amanda.plan.action import Action
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps

_LISTED = 12


class Inlined(NamedTuple):
    """A routine at an op, which is in the file now.

    type: of the op, StandardMapping's word if a tool asked for it.  action: "insert_before_op" and its like.
    stored: whether what it gives was computed and stored, since all that it is given is in the file.
    """

    type: str
    scope: str
    op: str
    action: str
    routine: str
    tool: str
    stored: bool


@dataclass
class Instrumented:
    """The file that `amanda.instrument` wrote, its kind, how many ops were analysed, and the routines.

    left: what could not be instrumented, and why.
    """

    path: Path
    kind: str
    analysed: int
    inlined: list[Inlined]
    left: list[Uninstrumented]


@dataclass
class Inlining:
    """The routines of some tools on their way into a file.

    state: the tools in force, for what a driver's engine needs of it.
    """

    state: State
    analysed: int = 0
    left: list[Uninstrumented] = field(default_factory=list)
    _actions: list[tuple[Action, OpFacts, str]] = field(default_factory=list)
    _types: dict[str, None] = field(default_factory=dict)
    _meant: set[int] = field(default_factory=set)
    _stored: set[int] = field(default_factory=set)
    _refused: list[tuple[str, str, str, str, str]] = field(default_factory=list)

    def analysis(
        self, ops: TensorOps, seen: Callable[[Plan, OpFacts], object] | None = None
    ) -> GraphAnalysis:
        """The analysis of a graph's forward ops; the plans that it gives have what may be inlined alone.

        seen: is called with the plan of each op, while its inputs are known.
        """
        return _Analysis(self, ops, seen)

    def stored(self, action: Action) -> None:
        """Note that a routine's result was computed and put into the file instead of the routine."""
        self._stored.add(id(action))

    def refuse(self, action: Action, facts: OpFacts, why: str) -> None:
        """Note that a routine cannot be inlined; then nothing is written."""
        self._refused.append((facts.name, facts.scope, type(action.tool).__name__, str(action), why))

    def leave(self, what: str, reason: str, where: str = "") -> None:
        """Note something else that could not be instrumented, for the result."""
        entry = Uninstrumented(what, reason, where)
        if entry not in self.left:
            self.left.append(entry)

    def take_over(self, rewriting: Rewriting) -> None:
        """Note what a rewrite for the file has stored, refused and left."""
        for action in rewriting.folded:
            self.stored(action)
        for facts, action, why in rewriting.refused:
            self.refuse(action, facts, why)
        for what, why in rewriting.reports:
            self.leave(what, why)

    @property
    def inlined(self) -> list[Inlined]:
        """The routines, in the order of their ops."""
        return [
            Inlined(
                kind, facts.scope, str(getattr(facts.op, "name", "") or facts.name), action.type.value,
                getattr(action.func, "__qualname__", str(action.func)), type(action.tool).__name__,
                id(action) in self._stored,
            )
            for action, facts, kind in self._actions
        ]  # fmt: skip

    def take(self, plan: Plan, facts: OpFacts) -> Plan:
        """Of what is recorded at an op, what may be inlined; the rest is refused."""
        self.analysed += 1
        context = plan.context
        kind = str(context.get("type") or facts.op_type or facts.name)
        self._types.setdefault(kind)
        for tool in self.state.layer.tools if self.state.layer is not None else ():
            if id(tool) not in self._meant and all(admits(context) for admits in tool._amanda.admissions):
                self._meant.add(id(tool))
        for action in plan.all:
            why = _why_not(action)
            if why:
                self.refuse(action, facts, why)
            else:
                self._actions.append((action, facts, kind))
        plan.before = tuple(one for one in plan.before if not _why_not(one))
        plan.after = tuple(one for one in plan.after if not _why_not(one))
        plan.replace = None if plan.replace and _why_not(plan.replace) else plan.replace
        return plan

    def leave_idle(self, tool: Tool) -> None:
        """Add an entry to `left` where neither this tool nor one that it depends on inserts anything."""
        own = in_order([tool])
        if tool.follows_dependents or any(action.tool in own for action, _, _ in self._actions):
            return
        if id(tool) in self._meant:
            why = (
                "its options leave nothing for it to do at these ops, or it only looks, which `amanda run` "
                "and amanda.apply are for"
            )
        else:
            why = "it is restricted to other ops (type=, module=)"
        self.leave(type(tool).__name__, f"it inserts nothing at any op: {why}")

    def check(self, source: Path) -> None:
        """Raise where a routine was refused, or none was recorded."""
        if self._refused:
            raise NotTraceableError(_refusal(source, self._refused), self._refused)
        if not self._actions:
            reasons = "".join(f"\n  {one.what}: {one.reason}" for one in self.left[:_LISTED])
            types = _shown(self._types)
            raise ArtefactError(
                f"the tools insert nothing at any of the {self.analysed} ops of {source}, so nothing was "
                f"written{f'; there are {types}' if types else ''}{reasons}"
            )


class _Analysis(GraphAnalysis):
    """An analysis that tells what it comes to."""

    def __init__(
        self, inlining: Inlining, ops: TensorOps, seen: Callable[[Plan, OpFacts], object] | None
    ) -> None:
        super().__init__(inlining.state, ops)
        self._inlining = inlining
        self._seen = seen

    def forward(self, facts: OpFacts, outputs: Sequence[Any]) -> Plan:
        plan = self._inlining.take(super().forward(facts, outputs), facts)
        if self._seen is not None:
            self._seen(plan, facts)
        return plan

    def backward(self, facts: OpFacts, grad_inputs: Sequence[Any]) -> Actions:
        return Actions()


@checked
def instrument(
    model: str | PathLike[str],
    *tools: Tool,
    out: str | PathLike[str],
    force: bool = False,
    about: Sequence[str] = (),
) -> Instrumented:
    """Write a copy of a model's file that has the routines of tools in it, and runs without Amanda.

    model: an ONNX file, a folder with a SavedModel, a file of torch.export, or what else a driver reads; it
    is never changed.  out: what is written, all of it or nothing.  force: replace what is there.
    about: what the file's metadata say of the tools; by default their classes' names.

    Only routines that are `@amanda.traceable` can be written; a tool tells by `amanda.is_static(context)`
    that they have to be.  Backward ops are not in a file, so their analyses do not run.
    A tool that has a `write_parts` of its own writes a folder of files instead.
    Raises NotTraceableError, which lists the other routines, ArtefactError, and FileError where `out` cannot
    be written.
    """
    source, target = Path(model), Path(out)
    kind = artefact_kind(source)
    ordered = in_order(tools)
    cutting = [tool for tool in tools if type(tool).write_parts is not Tool.write_parts]
    check_target(source, target, force, is_folder=bool(cutting) or source.is_dir())
    told = {
        "amanda-core": version("amanda-core"),
        "tools": list(about) or [f"{type(one).__module__}.{type(one).__qualname__}" for one in tools],
        "model": source.name,
    }
    if cutting:
        _check_alone(tools)
        return _in_parts(cutting[0], kind, source, target, force, told)
    with disabled():
        artefact = kind(source)
        _prepare(artefact, ordered)
        inlining = _inlining(ordered)
        artefact.instrument(inlining)
        _tell_backward(inlining, ordered)
        for tool in tools:
            inlining.leave_idle(tool)
        inlining.check(source)
        _check_state(ordered, source)
        with replacing_all(target, force) as path:
            artefact.write(path, told)
    return Instrumented(target, kind.kind, inlining.analysed, inlining.inlined, inlining.left)


def _check_alone(tools: Sequence[Tool]) -> None:
    """Raise ArtefactError where a tool that writes several files is given with others."""
    if len(tools) > 1:
        names = ", ".join(type(one).__name__ for one in tools)
        raise ArtefactError(
            f"{names}: a tool that writes a model in several files goes alone; write a copy with the other "
            "tools first, and give the copy to that tool"
        )


def _in_parts(
    tool: Tool, kind: type[Artefact], source: Path, target: Path, force: bool, about: Mapping[str, Any]
) -> Instrumented:
    """Call a tool's `write_parts`, which writes a folder of files."""
    with disabled():
        artefact = kind(source)
        inlining = _inlining([])

        def analyse(one: Tool) -> None:
            nonlocal inlining
            inlining = _inlining(in_order([one]))
            artefact.instrument(inlining)

        with replacing_all(target, force) as folder:
            folder.mkdir()
            tool.write_parts(source, folder, analyse, about)
    return Instrumented(target, f"{kind.kind} in parts", inlining.analysed, [], inlining.left)


def _inlining(tools: Sequence[Tool]) -> Inlining:
    return Inlining(State(layer_of(tools, None), cache=False))


def _prepare(artefact: Artefact, tools: Sequence[Tool]) -> None:
    """Show every op once before to tools that ask for that, such as those whose budget is of all weights."""
    prepared = [(tool, context) for tool in tools if (context := preparation(tool)) is not None]
    if prepared:
        with ExitStack() as stack:
            for _, context in prepared:
                stack.enter_context(context)
            artefact.instrument(_inlining(in_order([tool for tool, _ in prepared])))


def _tell_backward(inlining: Inlining, tools: Sequence[Tool]) -> None:
    for tool in tools:
        if not tool.follows_dependents and any(one.point.is_backward for one in tool._amanda.analyses):
            inlining.leave(f"backward ops for {type(tool).__name__}", "a file holds the forward pass alone")


def _check_state(tools: Iterable[Tool], source: Path) -> None:
    """Raise for state that was loaded and that no op asked for: it belongs to another model."""
    for tool in tools:
        unused = list(tool._amanda.loaded)
        if unused:
            raise ArtefactError(
                f"no op of {source} has the state that {type(tool).__name__} was given for {_shown(unused)}; "
                'state is kept by "module path/op/name", as tool.state_dict() tells'
            )


def _shown(names: Collection[str]) -> str:
    return ", ".join([*islice(names, _LISTED), *(["..."] if len(names) > _LISTED else [])])


def _why_not(action: Action) -> str:
    """Return why a routine cannot be inlined; "" where it may."""
    if not action.traceable:
        return "it is not marked @amanda.traceable"
    if action.observer or action.opening:
        return "it gives nothing to what the model computes"
    return "it takes `run`, which belongs to one execution" if action.takes_run else ""


def _refusal(source: Path, refused: Sequence[tuple[str, str, str, str, str]]) -> str:
    places: dict[tuple[str, str, str], list[str]] = {}
    for name, scope, tool, action, why in refused:
        places.setdefault((tool, action, why), []).append(f"{name} {scope}".strip())
    lines = []
    for (tool, action, why), where in list(places.items())[:_LISTED]:
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        lines.append(f"  {tool}, {action}: {why}; at {', '.join(where[:3])}{more}")
    if len(places) > _LISTED:
        lines.append(f"  and {len(places) - _LISTED} more routines")
    return "\n".join(
        [
            f"routines that run as Python at each execution cannot be written into a copy of {source}, and "
            "nothing was written:",
            *lines,
            "mark a routine that is pure tensor code @amanda.traceable; apply other tools while the model "
            "runs, by amanda.apply or `amanda run`; or let them select other ops (type=, module=)",
        ]
    )
