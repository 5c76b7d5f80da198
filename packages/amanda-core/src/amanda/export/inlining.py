"""Routines written into the file of a model, so that they run without Amanda."""

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
from amanda.export.artefacts import Artefact, artefact_kind, check_target
from amanda.files import replacing_all
from amanda.graph.rewriting import GraphAnalysis
from amanda.options import checked
from amanda.plan.plan import Actions, Plan
from amanda.plan.tool_stack import stack_for
from amanda.plan.tools import in_dependency_order
from amanda.scope.report import Uninstrumented
from amanda.scope.state import State, disabled
from amanda.tool import Tool, preparation

if TYPE_CHECKING:
    from amanda.graph.rewriting import Rewriting
    from amanda.plan.action import Action
    from amanda.plan.context import OpContext
    from amanda.plan.facts import OpFacts
    from amanda.plan.tensors import TensorOps

# A model may have thousands of ops; a message of so many lines hides its end, which says what to do.
_MAX_LISTED = 12
_MAX_LISTED_OPS = 3


class _Refusal(NamedTuple):
    """A routine that cannot be inlined: its op, the op's module path, its tool and action, and the reason."""

    op: str
    scope: str
    tool: str
    action: str
    reason: str


class Inlined(NamedTuple):
    """A routine at an op that was written into the file.

    type: type of the op, StandardMapping's word if a tool uses the mapping.  action: "insert_before_op", ...
    stored: whether the routine's result was stored instead, since all its inputs are constants of the file.
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
    """The file that `amanda.instrument` wrote: its path and kind, the number of ops, and the routines.

    left: parts that could not be instrumented, with reasons.
    """

    path: Path
    kind: str
    analysed: int
    inlined: list[Inlined]
    left: list[Uninstrumented]


@dataclass
class Inlining:
    """The routines of some tools, collected while a driver writes them into a file.

    state: the state with the tools, for the driver's rewriter.
    analysed: number of ops.  left: parts that could not be instrumented.
    """

    state: State
    analysed: int = 0
    left: list[Uninstrumented] = field(default_factory=list)
    _actions: list[tuple[Action, OpFacts, str]] = field(default_factory=list)  # with the type of the op
    _op_types: dict[str, None] = field(default_factory=dict)  # an ordered set
    _admitted_tool_ids: set[int] = field(default_factory=set)
    _stored_action_ids: set[int] = field(default_factory=set)
    _refusals: list[_Refusal] = field(default_factory=list)

    def analysis(
        self, ops: TensorOps, on_plan: Callable[[Plan, OpFacts], object] | None = None
    ) -> GraphAnalysis:
        """Return an analysis of a graph's forward ops, whose plans have only routines that may be inlined.

        Args:
            ops: Primitives of the framework's tensors.
            on_plan: Called with the plan and the facts of each op, before the facts drop their values; None
                for no call.
        """
        return _InliningAnalysis(self, ops, on_plan)

    def record_stored(self, action: Action) -> None:
        """Record that a routine's result was computed and stored in the file instead of the routine."""
        # Actions live in `_actions` until the result is read, so no other object gets their ids.
        self._stored_action_ids.add(id(action))

    def refuse(self, action: Action, facts: OpFacts, why: str) -> None:
        """Record that a routine cannot be inlined; then nothing is written.

        Args:
            action: Action of the routine.
            facts: Facts of its op.
            why: Reason for the error that `amanda.instrument` raises.
        """
        # Names, not facts: the error outlives the model.
        tool_name = type(action.tool).__name__
        self._refusals.append(_Refusal(facts.name, facts.scope, tool_name, str(action), why))

    def record_uninstrumented(self, subject: str, reason: str, where: str = "") -> None:
        """Record an uninstrumented part for the result, once.

        Args:
            subject: Description of the part.
            reason: Reason why it is not instrumented.
            where: Line of the program; "" if unknown.
        """
        entry = Uninstrumented(subject, reason, where)
        # `instrument` of an artefact may be called more than once, for preparation and for the file.
        if entry not in self.left:
            self.left.append(entry)

    def record_rewriting(self, rewriting: Rewriting) -> None:
        """Record the stored, refused and uninstrumented parts of a rewrite for the file."""
        for action in rewriting.folded_actions:
            self.record_stored(action)
        for facts, action, reason in rewriting.refused:
            self.refuse(action, facts, reason)
        for subject, reason in rewriting.reports:
            self.record_uninstrumented(subject, reason)

    @property
    def inlined(self) -> list[Inlined]:
        """Return the routines, in the order of their ops."""
        return [
            Inlined(
                type=op_type, scope=facts.scope, op=str(getattr(facts.op, "name", "") or facts.name),
                action=action.type.value, routine=getattr(action.func, "__qualname__", str(action.func)),
                tool=type(action.tool).__name__, stored=id(action) in self._stored_action_ids,
            )
            for action, facts, op_type in self._actions
        ]  # fmt: skip

    def record_plan(self, plan: Plan, facts: OpFacts) -> None:
        """Record an op and the actions of its plan; refuse actions that cannot be inlined, and drop them.

        Args:
            plan: Plan of the op.
            facts: Facts of the op, with their values.
        """
        self.analysed += 1
        op_type = str(plan.context.get("type") or facts.op_type or facts.name)
        self._op_types.setdefault(op_type)
        self._record_admitted_tools(plan.context)
        refused_actions = []
        for action in plan.all:
            obstacle = _inlining_obstacle(action)
            if obstacle:
                self.refuse(action, facts, obstacle)
                refused_actions.append(action)
            else:
                self._actions.append((action, facts, op_type))
        # Dropped although nothing is written then: the other routines are tried, and one error names all.
        plan.before = tuple(action for action in plan.before if action not in refused_actions)
        plan.after = tuple(action for action in plan.after if action not in refused_actions)
        if plan.replace in refused_actions:
            plan.replace = None

    def _record_admitted_tools(self, context: OpContext) -> None:
        """Record the tools with no restriction that excludes an op, for `report_idle_tool`."""
        tools = () if self.state.stack is None else self.state.stack.tools
        for tool in tools:
            if id(tool) in self._admitted_tool_ids:
                continue
            if all(admits(context) for admits in tool._amanda.admissions):
                self._admitted_tool_ids.add(id(tool))

    def report_idle_tool(self, tool: Tool) -> None:
        """Add an entry to `left` where neither this tool nor one that it depends on inserts anything."""
        tools = in_dependency_order([tool])
        # A mapping inserts nothing itself, and a tool may leave all work to one that it depends on.
        if tool.follows_dependents or any(action.tool in tools for action, _, _ in self._actions):
            return
        if id(tool) in self._admitted_tool_ids:
            why = (
                "its options leave nothing for it to do at these ops, or it only looks, which `amanda run` "
                "and amanda.apply are for"
            )
        else:
            why = "it is restricted to other ops (type=, module=)"
        self.record_uninstrumented(type(tool).__name__, f"it inserts nothing at any op: {why}")

    def check_result(self, source: Path) -> None:
        """Raise NotTraceableError where a routine was refused, ArtefactError where none was recorded."""
        if self._refusals:
            # All at once: a user marks several routines before the next attempt.
            raise NotTraceableError(_refusal_text(source, self._refusals), self._refusals)
        # A copy without any routine would look like a success.
        if not self._actions:
            reasons = "".join(f"\n  {entry.what}: {entry.reason}" for entry in self.left[:_MAX_LISTED])
            op_types = _listed_names(self._op_types)
            raise ArtefactError(
                f"the tools insert nothing at any of the {self.analysed} ops of {source}, so nothing was "
                f"written{f'; there are {op_types}' if op_types else ''}{reasons}"
            )


class _InliningAnalysis(GraphAnalysis):
    """An analysis that passes each forward plan to an `Inlining`, and records no backward actions."""

    def __init__(
        self, inlining: Inlining, ops: TensorOps, on_plan: Callable[[Plan, OpFacts], object] | None
    ) -> None:
        super().__init__(inlining.state, ops)
        self._inlining = inlining
        self._on_plan = on_plan

    def analyse_forward(self, facts: OpFacts, outputs: Sequence[Any]) -> Plan:
        """Return the plan of an op with only the actions that may be inlined; record these."""
        plan = super().analyse_forward(facts, outputs)
        self._inlining.record_plan(plan, facts)
        if self._on_plan is not None:
            self._on_plan(plan, facts)
        return plan

    def analyse_backward(self, facts: OpFacts, grad_inputs: Sequence[Any]) -> Actions:
        """Return no actions, without analysis: a file has no backward ops."""
        return Actions()


@checked
def instrument(
    model: str | PathLike[str],
    *tools: Tool,
    out: str | PathLike[str],
    force: bool = False,
    about: Sequence[str] = (),
) -> Instrumented:
    """Write a copy of a model's file that contains the routines of tools, and runs without Amanda.

    Only `@amanda.traceable` routines can be written; a tool sees by `context.is_static()` that its
    routines have to be traceable.  Backward ops are not in a file, so their analyses do not run.
    A tool that overrides `write_parts` writes a folder of files instead.

    Args:
        model: An ONNX file, a folder with a SavedModel, a file of torch.export, or another file that a driver
            reads; it is never changed.
        *tools: Tools, in the order in which their routines run.
        out: Path of the copy, written completely or not at all.
        force: Replace an existing file.
        about: Description of the tools in the file's metadata; by default the names of their classes.

    Returns:
        The path of the copy, with the ops and the routines that were written and the parts that were not
        instrumented.

    Raises:
        NotTraceableError: If a routine is Python that cannot be written into a file; it lists them.
        ArtefactError: If the model cannot be read or written, or the tools insert nothing.
        FileError: Where `out` cannot be written.
        PluginError: If several drivers read the model, or its driver is for another core.
    """
    source, target = Path(model), Path(out)
    kind = artefact_kind(source)
    ordered_tools = in_dependency_order(tools)
    # They write the model in several files.
    cutting_tools = [tool for tool in tools if type(tool).write_parts is not Tool.write_parts]
    # Before anything is read: a large model takes minutes, and a mistake in the path is seen at once.
    check_target(source, target, force, is_folder=bool(cutting_tools) or source.is_dir())
    metadata = {
        "amanda-core": version("amanda-core"),
        "tools": list(about) or [f"{type(tool).__module__}.{type(tool).__qualname__}" for tool in tools],
        "model": source.name,
    }
    if cutting_tools:
        _check_only_tool(tools)
        return _write_in_parts(cutting_tools[0], kind, source, target, force, metadata)
    with disabled():
        artefact = kind(source)
        _prepare_tools(artefact, ordered_tools)
        inlining = _new_inlining(ordered_tools)
        artefact.instrument(inlining)
        _report_backward_tools(inlining, ordered_tools)
        for tool in tools:
            inlining.report_idle_tool(tool)
        inlining.check_result(source)
        _check_loaded_state_used(ordered_tools, source)
        with replacing_all(target, force) as path:
            artefact.write(path, metadata)
    return Instrumented(target, kind.kind, inlining.analysed, inlining.inlined, inlining.left)


def _check_only_tool(tools: Sequence[Tool]) -> None:
    """Raise ArtefactError where a tool that writes several files comes with other tools."""
    if len(tools) > 1:
        names = ", ".join(type(tool).__name__ for tool in tools)
        raise ArtefactError(
            f"{names}: a tool that writes a model in several files goes alone; write a copy with the other "
            "tools first, and give the copy to that tool"
        )


def _write_in_parts(
    tool: Tool, kind: type[Artefact], source: Path, target: Path, force: bool, metadata: Mapping[str, Any]
) -> Instrumented:
    """Call a tool's `write_parts`, which writes a folder of files; no file stays if that raises.

    The number of ops in the result, and what is left, come from the tool's last analysis of the model.
    """
    with disabled():
        artefact = kind(source)
        last_inlining = _new_inlining([])

        def analyse(part_tool: Tool) -> None:
            """Analyse the model by a tool, whose routines are not written."""
            nonlocal last_inlining
            last_inlining = _new_inlining(in_dependency_order([part_tool]))
            artefact.instrument(last_inlining)

        with replacing_all(target, force) as folder:
            folder.mkdir()
            tool.write_parts(source, folder, analyse, metadata)
    return Instrumented(
        target, f"{kind.kind} in parts", last_inlining.analysed, inlined=[], left=last_inlining.left
    )


def _new_inlining(tools: Sequence[Tool]) -> Inlining:
    # Without the cache: plans lack the actions that cannot be inlined, so no scope may find them later.
    return Inlining(State(stack_for(tools, None), cache=False))


def _prepare_tools(artefact: Artefact, tools: Sequence[Tool]) -> None:
    """Analyse every op in advance for tools that ask for it, such as a tool with one budget for all ops.

    Does nothing where no tool asks.  This analysis records nothing for the result.
    """
    tools_to_prepare = []
    with ExitStack() as preparations:
        for tool in tools:
            preparation_context = preparation(tool)
            if preparation_context is not None:
                preparations.enter_context(preparation_context)
                tools_to_prepare.append(tool)
        if tools_to_prepare:
            artefact.instrument(_new_inlining(in_dependency_order(tools_to_prepare)))


def _report_backward_tools(inlining: Inlining, tools: Sequence[Tool]) -> None:
    """Note in `inlining` each tool with routines for backward ops: a file holds the forward pass alone.

    Tools with `follows_dependents`, such as a mapping, are not noted: they have these routines for the tools
    that depend on them.
    """
    for tool in tools:
        has_backward_routines = any(routine.point.is_backward for routine in tool._amanda.analyses)
        if has_backward_routines and not tool.follows_dependents:
            inlining.record_uninstrumented(
                f"backward ops for {type(tool).__name__}", "a file holds the forward pass alone"
            )


def _check_loaded_state_used(tools: Iterable[Tool], source: Path) -> None:
    """Raise ArtefactError for loaded state that no op has used: it belongs to another model."""
    for tool in tools:
        unused_keys = list(tool._amanda.loaded)
        if unused_keys:
            raise ArtefactError(
                f"no op of {source} has the state that {type(tool).__name__} was given for "
                f'{_listed_names(unused_keys)}; state is kept by "module path/op/name", as tool.state_dict() '
                "tells"
            )


def _listed_names(names: Collection[str]) -> str:
    """Return the names in one line, the first few of many."""
    ellipsis = ["..."] if len(names) > _MAX_LISTED else []
    return ", ".join([*islice(names, _MAX_LISTED), *ellipsis])


def _inlining_obstacle(action: Action) -> str:
    """Return the reason why a routine cannot be inlined, as far as its marks tell; "" where it may be."""
    if not action.traceable:
        return "it is not marked @amanda.traceable"
    if action.observer or action.opening:
        return "it gives nothing to what the model computes"
    return "it takes `run`, which belongs to one execution" if action.takes_run else ""


def _refusal_text(source: Path, refusals: Sequence[_Refusal]) -> str:
    """Return the message that lists routines which cannot be written, grouped by tool, action and reason."""
    ops_by_routine: dict[tuple[str, str, str], list[str]] = {}
    for op, scope, tool, action, reason in refusals:
        ops_by_routine.setdefault((tool, action, reason), []).append(f"{op} {scope}".strip())
    lines = []
    for (tool, action, reason), ops in list(ops_by_routine.items())[:_MAX_LISTED]:
        first_ops, unlisted_op_count = ", ".join(ops[:_MAX_LISTED_OPS]), len(ops) - _MAX_LISTED_OPS
        suffix = f" and {unlisted_op_count} more" if unlisted_op_count > 0 else ""
        lines.append(f"  {tool}, {action}: {reason}; at {first_ops}{suffix}")
    if len(ops_by_routine) > _MAX_LISTED:
        lines.append(f"  and {len(ops_by_routine) - _MAX_LISTED} more routines")
    return "\n".join(
        [
            f"routines that run as Python at each execution cannot be written into a copy of {source}, and "
            "nothing was written:",
            *lines,
            "mark a routine that is pure tensor code @amanda.traceable; apply other tools while the model "
            "runs, by amanda.apply or `amanda run`; or let them select other ops (type=, module=)",
        ]
    )
