"""The rewriting of an FX graph: tools analyse its ops, and nodes with routines take the place of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from amanda.backend import GraphAnalysis, Namespace, OpFacts, digest
from amanda.errors import ActionError
from torch.utils._pytree import tree_flatten

from .._autograd import LEAF_PLACE, AccumulateGrad
from .._modules import Paths, part_of
from ._gathering import can_wait
from ._instrumented import BackwardSite, Inlet, Instrumented, Last, Leaf, Step
from ._making import Making
from ._memory import check_views, is_outside, seen_and_written, unlike_eager
from ._ops import TENSORS, Program
from ._places import scope_of, source_of
from ._record import NativeCall, Ran, run, uninstrumented
from ._routines import Routines
from ._symbols import Symbols
from ._trials import Trials

if TYPE_CHECKING:
    from amanda.backend import Action
    from amanda.graph import History
    from amanda.plan import Actions
    from torch.fx import GraphModule, Node

    from ._whole import Whole


class Rewriting:
    """One graph on its way to another.

    symbols: the graph's inputs without data, and what they stand for.  prefix: path of the module whose code
    the graph is of.  instance: what tells the graph's ops from those of another model with the same code.
    path_of: what tells paths of parameters in the model; by default it is the graph's module.
    analysis: of the ops; by default one of the program's state.  history: of what routines have read.
    whole: takes the observers that are called when the graph has run; None where the graph calls all.
    """

    def __init__(
        self,
        module: GraphModule,
        symbols: Symbols,
        program: Program,
        namespace: Namespace,
        prefix: str = "",
        instance: int = 0,
        analysis: GraphAnalysis | None = None,
        history: History | None = None,
        path_of: Paths | None = None,
        whole: Whole | None = None,
    ) -> None:
        self.module = module
        self.symbols = symbols
        self.program = program
        self.namespace = namespace
        self._prefix = prefix
        self._instance = instance
        self._path_of = path_of or Paths([module])
        self._whole = whole
        self._reached: set[int] | None = None
        self._analysis = GraphAnalysis(program.state, TENSORS) if analysis is None else analysis
        self._routines = Routines(program, None)
        self._occurrences: Counter[int] = Counter()
        self._steps: dict[Node, list[Step]] = {}
        self._leaves: dict[int, BackwardSite] = {}
        self._leaf_actions: dict[int, Sequence[Action]] = {}
        self._sites: dict[int, tuple[OpFacts, bool]] = {}
        self._seen: set[int] = set()
        self._others = 0
        self._trials = Trials(self._routines, symbols, history)

    def rewritten(self) -> GraphModule | None:
        """The graph with routines in it; None where tools insert nothing."""
        try:
            with uninstrumented():
                with self.symbols.mode():
                    ran = run(self.module, self.symbols.inputs, self.symbols.attribute)
                self.symbols.learn(ran)
                for one in ran.values():
                    self._analyse(one)
                if any(stack.wants_backward for stack in self._analysis.stack.chain):
                    self._reached = _reached(ran)
                    for one in reversed(ran.values()):
                        self._analyse_backward(one)
                    self.program.leaves = list(self._watched_leaves(ran))
                    for facts, reason in unlike_eager(ran, self._sites, self._whole is not None):
                        self.program.report(f"{facts.name} of {facts.op_type}", reason, facts.source)
                check_views(ran, self._steps)
                changed = {one: steps for one, steps in self._steps.items() if any(steps)}
                if not changed and not self._leaves:
                    return None
                with self.symbols.mode():
                    return self._made(ran, changed)
        except BaseException:
            self._analysis.forget()
            raise
        finally:
            self._analysis.finish()

    def _analyse(self, one: Ran) -> None:
        node = one.node
        if one.obstacle:
            name = one.what or getattr(node.target, "__name__", str(node.target))
            self.program.report(name, one.obstacle, "" if one.what else source_of(node))
        if one.replay is None:
            return
        self._steps[node] = []
        for call in one.calls:
            facts = self._facts(node, call)
            facts.inputs = list(call.call.inputs)
            plan = self._analysis.forward(facts, call.values)
            if plan.replace is not None and plan.replace.reads:
                error = ActionError(
                    f"{plan.replace} of {facts.name} is to read inputs of other ops, which graphs of "
                    "PyTorch do not hand on: replace one op alone, or run op by op"
                )
                raise facts.explain(error, plan.replace)
            self._steps[node].append(
                Step(facts, plan if self._whole is None else self._whole.take(plan, facts))
            )

    def _facts(self, node: Node, call: NativeCall) -> OpFacts:
        scope, source = scope_of(node, self._prefix), source_of(node)
        native = call.call
        variables = [self.symbols.variable(value) for value in native.inputs]
        pairs = zip(native.inputs, variables, strict=True)
        ordinals = tuple(self._read(value, one) for value, one in pairs if one is not None)
        told = (one for pair in ordinals for one in pair)
        place = digest(
            "graph", self._instance, scope, native.op_type(), node.meta.get("stack_trace") or "", *told
        )
        self._occurrences[place] += 1
        return OpFacts(
            native.op, digest(place, self._occurrences[place]), self.namespace, native.names,
            list(native.inputs), attributes=native.attributes(), scope=scope, source=source,
            op_type=native.op_type(), parameters=native.parameters(), graph=("graph", self.program.number),
            read_variables=lambda: ordinals, read_value=self.symbols.value, variable_of=self.symbols.variable,
            path_of=self._path_of, part_of=part_of, device_of=_device_of, compute=native.computation(),
        )  # fmt: skip

    def _read(self, value: torch.Tensor, variable: Any) -> tuple[int, str]:
        """Return which parameter an op reads, and which part of it, where another graph may read another."""
        if value._base is None or value.numel() == variable.numel():
            return self.symbols.ordinal(variable), ""
        return self.symbols.ordinal(variable), f"{tuple(value.shape)}@{int(value.storage_offset())}"

    def _analyse_backward(self, one: Ran) -> None:
        for call, step in reversed(list(zip(one.calls, self._steps.get(one.node, ()), strict=False))):
            for node, place in call.nodes:
                with self.symbols.mode():
                    entering, leaving = _gradients(node)
                plan, facts = self._plan(step.facts, node, place, entering, leaving)
                if plan:
                    step.backward[place] = BackwardSite(facts, plan)
            for leaf in call.leaves:
                if call.nodes and self.symbols.is_leaf(leaf) and id(leaf) not in self._seen:
                    self._seen.add(id(leaf))
                    place = self._leaf_place(leaf)
                    with self.symbols.mode():
                        entering = [_like(leaf)]
                    plan, facts = self._plan(step.facts, leaf, place, entering, [])
                    if plan:
                        self._leaves[id(leaf)] = BackwardSite(facts, plan)

    def _watched_leaves(
        self, ran: Mapping[Node, Ran]
    ) -> Iterator[tuple[int | torch.Tensor, str, Sequence[Any]]]:
        """Yield the leaves that routines see the gradient of, as the program has them."""
        for i, (node, one) in enumerate(ran.items()):  # the first are what the graph is given
            actions = self._leaf_actions.get(id(one.value))
            if actions is None:
                continue
            variable = self.symbols.variable(one.value)
            name = (None if variable is None else self._path_of(variable)) or node.name
            given = i if node.op == "placeholder" else variable
            if given is not None:
                yield given, name, [action.tool for action in actions]

    def _leaf_place(self, leaf: torch.Tensor) -> int:
        variable = self.symbols.variable(leaf)
        if variable is not None:
            return LEAF_PLACE + self.symbols.ordinal(variable)
        self._others += 1
        return 2 * LEAF_PLACE + self._others - 1

    def _plan(
        self, forward: OpFacts, node: Any, place: int, entering: list[Any], leaving: list[Any]
    ) -> tuple[Actions, OpFacts]:
        """Return the actions of a backward op; node: of autograd, or the leaf whose gradient is stored."""
        kind = AccumulateGrad if isinstance(node, torch.Tensor) else type(node)
        identity = forward.backward_id(kind.__name__, place)
        facts = forward.at_backward(kind, identity, kind is not AccumulateGrad)
        facts.grad_outputs = entering
        plan = self._analysis.backward(facts, leaving)
        acts = bool(plan)
        if acts and kind is AccumulateGrad:
            self._leaf_actions[id(node)] = plan.all
        if self._whole is not None:
            plan = self._whole.take(plan, facts, self._reached is None or id(node) in self._reached)
        if acts:
            self._sites[id(node)] = facts, bool(plan)
        return plan, facts

    def _made(self, ran: dict[Node, Ran], changed: dict[Node, list[Step]]) -> GraphModule:
        inlets: dict[Node, Inlet] = {}
        for node, steps in changed.items():
            replay = ran[node].replay
            assert replay is not None
            instrumented = inlets[node] = Instrumented(node.name, self.program, replay, steps)
            self._trials.forward(instrumented, ran[node], steps)
        leaves: dict[Node, Inlet] = {}
        for node, one in ran.items():
            site = self._leaves.get(id(one.value))
            if site is not None:
                leaves[node] = Leaf(node.name, self.program, site)
                self._trials.backward(leaves[node], site)
        actions = self._actions(changed.values())
        calls_python = not all(self._routines.inlines(action) for action in actions)
        making = Making(self.module, self.program, calls_python)
        for node, inlet in inlets.items():
            making.replace(node, inlet, list(ran[node].held))
        for node, inlet in leaves.items():
            making.read_through(node, inlet)
        if calls_python and self._whole is not None:
            self.program.gathering = making.end_with(Last("outputs", self.program))
            self.program.in_turn.update(id(action.tool) for action in actions if not can_wait(action))
            self.program.at_once.update(seen_and_written(ran, changed))
        for one in ran.values():
            one.calls.clear()
            if one.replay is not None:
                one.replay.forget_symbols()
        return making.finished()

    def _actions(self, changed: Iterable[Sequence[Step]]) -> list[Action]:
        """Return the actions that are left for the graph."""
        steps = [step for each in changed for step in each]
        sites = [*self._leaves.values(), *(site for step in steps for site in step.backward.values())]
        plans = [site.plan for site in sites] + [step.plan for step in steps]
        return [action for plan in plans for action in plan.all]


def _reached(ran: Mapping[Node, Ran]) -> set[int] | None:
    """Ids of autograd's nodes, and of the leaves, that the graph's outputs and written inputs lead to.

    None where a higher-order op hides the way.
    """
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in ran):
        return None
    outside = [one.value for node, one in ran.items() if is_outside(node)]
    made = [one for one in tree_flatten(outside)[0] if isinstance(one, torch.Tensor)]
    waiting: list[Any] = [one.grad_fn for one in made if one.grad_fn is not None]
    found: dict[int, Any] = {id(one): one for one in made if one.requires_grad and one.is_leaf}
    while waiting:
        node = waiting.pop()
        if id(node) not in found:
            found[id(node)] = node
            if type(node) is AccumulateGrad:
                found[id(node.variable)] = node.variable
            waiting += [child for child, _ in node.next_functions if child is not None]
    return set(found)


def _gradients(node: Any) -> tuple[list[Any], list[Any]]:
    """Gradients without data that enter a backward op, and that leave it; None where there is none."""
    entering = [_empty(one) for one in node._input_metadata]
    leaving: list[Any] = []
    for child, position in node.next_functions:
        if child is None:
            leaving.append(None)
        elif type(child) is AccumulateGrad:
            leaving.append(_like(child.variable))
        else:
            leaving.append(_empty(child._input_metadata[position]))
    return entering, leaving


def _empty(metadata: Any) -> torch.Tensor:
    return torch.empty(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device)


def _device_of(value: Any) -> str:
    return str(value.device) if isinstance(value, torch.Tensor) else ""


def _like(leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(leaf.detach())
