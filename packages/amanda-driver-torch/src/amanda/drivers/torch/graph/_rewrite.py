"""Rewriting of an FX graph: tools analyse its ops, and calls with routines replace nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from amanda.backend import GraphAnalysis, Namespace, OpFacts, digest
from amanda.errors import ActionError
from amanda.plan import Actions
from torch.utils._pytree import tree_flatten

from .._autograd import LEAF_PLACE
from .._modules import ParameterPaths, part_of
from .._nodes import AccumulateGrad
from ._bodies import ControlFlowBodies, analyse_bodies
from ._dynamo import module_path_of, user_line_of
from ._graph_copy import GraphCopy
from ._instrumented import (
    BackwardSite,
    InstrumentedCall,
    InstrumentedLeaf,
    InstrumentedNode,
    OpStep,
    WaitingObserversCall,
)
from ._memory import (
    BackwardOpWithRoutines,
    backward_views_unlike_eager,
    check_views,
    is_input_or_output,
    observers_of_written_memory,
)
from ._node_runs import NativeCall, NodeRun, run_graph, uninstrumented
from ._observers import can_wait
from ._ops import TENSORS, GraphProgram
from ._routines import NodeRoutines, RoutineTrials
from ._symbols import GraphSymbols

if TYPE_CHECKING:
    from amanda.backend import Action
    from amanda.graph import ValueHistory
    from torch.fx import GraphModule, Node

    from ._observers import LateObservers


IN_TRANSFORM = "torch.func transforms in a graph"
NO_PYTHON = "routines that are called as Python do not run there"
NO_BACKWARD = "backward ops are not instrumented there"


class FxRewriting:
    """Rewriting of one FX graph: a copy, in which calls with the routines of tools replace nodes.

    symbols: the graph's inputs without data.  prefix: path of the module whose code the graph is of.
    model_ordinal: tells the graph's ops from those of other models of its class.
    path_of: finds paths of parameters in the model; the default looks in the graph's module.
    analysis: asks tools for actions; the default asks the tools of the program's state.
    history: of values that routines have read.
    late_observers: takes the observers that are called when the graph has run; None if the graph calls all.
    inlines_only: whether routines that are called as Python are left out, as in the body of an op.
    bodies: of control flow ops.  left_out_counts: by name, of ops at which such routines do not run.
    """

    def __init__(
        self, module: GraphModule, symbols: GraphSymbols, program: GraphProgram, namespace: Namespace,
        prefix: str = "", model_ordinal: int = 0, analysis: GraphAnalysis | None = None,
        history: ValueHistory | None = None, path_of: ParameterPaths | None = None,
        late_observers: LateObservers | None = None, inlines_only: bool = False,
    ) -> None:  # fmt: skip
        """Prepare the rewriting; no tool is asked before `rewrite` or `analyse_forward`."""
        self.module = module
        self.symbols = symbols
        self.program = program
        self.namespace = namespace
        self._prefix = prefix
        self._model_ordinal = model_ordinal
        self._path_of = path_of or ParameterPaths([module])
        self._late_observers = late_observers
        self._inlines_only = inlines_only
        self._history = history
        self.bodies: dict[Node, ControlFlowBodies] = {}
        self.left_out_counts: Counter[str] = Counter()
        # Nodes of autograd and leaves that the outputs lead to, by id; None if that is not known.
        self._reached_ids: set[int] | None = None
        self._analysis = GraphAnalysis(program.state, TENSORS) if analysis is None else analysis
        self._routines = NodeRoutines(program, None)
        self._occurrence_counts: Counter[int] = Counter()
        self._steps_by_node: dict[Node, list[OpStep]] = {}
        self._site_by_leaf_id: dict[int, BackwardSite] = {}
        self._actions_by_leaf_id: dict[int, Sequence[Action]] = {}
        self._backward_op_by_node_id: dict[int, BackwardOpWithRoutines] = {}
        self._analysed_leaf_ids: set[int] = set()
        self._unnamed_leaf_count = 0  # of leaves that are not parameters
        self._trials = RoutineTrials(self._routines, symbols, history)

    def rewrite(self) -> GraphModule | None:
        """Return a copy of the graph with routines in it; None if tools insert nothing.

        Notes for reports go to the program.  Raises SharedMemory for a graph that has to run op by op.
        """
        try:
            with uninstrumented():
                # Once, without data: which native ops each node calls, and which nodes of autograd they make.
                with self.symbols.without_data():
                    node_runs = run_graph(self.module, self.symbols.inputs, self.symbols.attribute_symbol)
                self.analyse_forward(node_runs)
                if self._wants_backward():
                    self._analyse_backward(node_runs)
                check_views(node_runs, self._steps_by_node)
                has_changed_bodies = any(bodies.are_changed() for bodies in self.bodies.values())
                is_changed = any(self.steps()) or self._site_by_leaf_id or has_changed_bodies
                with self.symbols.without_data():
                    copy = self._write_copy(node_runs) if is_changed else None
                self.report_left_out(node_runs)
                return copy
        except BaseException:
            self._analysis.drop_plans()  # plans of a graph that will not run must not be cached
            raise
        finally:
            self._analysis.release_symbols()

    def _wants_backward(self) -> bool:
        """Return True if a tool has routines for backward ops."""
        return any(stack.wants_backward for stack in self._analysis.stack.chain)

    def analyse_forward(self, node_runs: Mapping[Node, NodeRun]) -> None:
        """Have the tools analyse the forward ops of the graph, in order, and those in bodies."""
        self.symbols.record_runs(node_runs)
        for node, node_run in node_runs.items():
            bodies = analyse_bodies(node, self.module, node_runs, self.symbols, self._rewriting_of_body)
            if bodies is None:
                self._analyse_node(node_run)
            else:
                self.bodies[node] = bodies

    def _rewriting_of_body(self, body: GraphModule, symbols: GraphSymbols) -> FxRewriting:
        """Return the rewriting of a body of one of the graph's ops."""
        rewriting = FxRewriting(
            body, symbols, self.program, self.namespace, self._prefix, self._model_ordinal, self._analysis,
            self._history, self._path_of, inlines_only=True,
        )  # fmt: skip
        rewriting._occurrence_counts = self._occurrence_counts  # ops of equal places may be in two bodies
        return rewriting

    def steps(self) -> Iterator[OpStep]:
        """Yield the native ops of the graph."""
        for steps in self._steps_by_node.values():
            yield from steps

    def _analyse_node(self, node_run: NodeRun) -> None:
        """Have the tools analyse the native ops of a node, or report why they cannot be instrumented.

        Observers that run late, and routines that cannot run there, are taken out of the op's actions.
        Raises ActionError for a replacement that reads inputs of other ops.
        """
        node = node_run.node
        if node_run.obstacle:
            name = getattr(node.target, "__name__", str(node.target))
            self.program.report(name, node_run.obstacle, user_line_of(node))
        if node_run.replay is None:  # no native ops, or an obstacle
            return
        self._steps_by_node[node] = []
        for call in node_run.calls:
            facts = self._make_facts(node, call)
            facts.inputs = list(call.eager_call.inputs)
            plan = self._analysis.analyse_forward(facts, call.values)
            if plan.replace is not None and plan.replace.reads:
                error = ActionError(
                    f"{plan.replace} of {facts.name} is to read inputs of other ops, which graphs of "
                    "PyTorch do not hand on: replace one op alone, or run op by op"
                )
                raise facts.annotate_error(error, plan.replace)
            actions = plan if self._late_observers is None else self._late_observers.take_over(plan, facts)
            self._steps_by_node[node].append(OpStep(facts, self._without_refused(actions, facts, call)))

    def _without_refused(self, actions: Actions, facts: OpFacts, call: NativeCall) -> Actions:
        """Return the actions that can run at an op; refuse the others to their tools, and count the op.

        Within a transform a call of Python would get wrappers of a level that has ended; a body takes none.
        """
        if not (call.in_transform or self._inlines_only):
            return actions
        inlined_actions = Actions()
        inlined_actions.add(action for action in actions.all if self._routines.is_inlined(action))
        refused_actions = [action for action in actions.all if not self._routines.is_inlined(action)]
        for action in refused_actions:
            action.tool.refused(action, NO_PYTHON)
        if refused_actions:
            self.left_out_counts[facts.op_type] += 1
        return inlined_actions

    def report_left_out(self, node_runs: Mapping[Node, NodeRun]) -> None:
        """Report the ops in transforms and in bodies at which routines do not run, and backward ops there."""
        wants_backward = self._wants_backward()
        if not self._inlines_only:
            self._report_counts(IN_TRANSFORM, "", NO_PYTHON, self.left_out_counts)
        if wants_backward:
            backward_counts: Counter[str] = sum(
                (node_run.backward_counts for node_run in node_runs.values()), Counter()
            )
            self._report_counts(IN_TRANSFORM, "", NO_BACKWARD, backward_counts)
        for node, bodies in self.bodies.items():
            name, where = str(node.target), user_line_of(node)
            self._report_counts(name, where, NO_PYTHON, bodies.left_out_counts())
            if wants_backward:
                self._report_counts(name, where, NO_BACKWARD, bodies.backward_counts())
            bodies.report()

    def _report_counts(self, subject: str, where: str, reason: str, counts: Counter[str]) -> None:
        names = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
        if names:
            self.program.report(subject, f"{reason}: {names}", where)

    def _make_facts(self, node: Node, call: NativeCall) -> OpFacts:
        """Return the facts of a native op; its id is a hash of its place in the model and in the code.

        To be called once for an op: ops of one place are counted here.
        """
        scope, source = module_path_of(node, self._prefix), user_line_of(node)
        eager_call = call.eager_call
        value_parameters = [(value, self.symbols.parameter_of(value)) for value in eager_call.inputs]
        read_parameters = tuple(
            self._read_parameter(value, parameter)
            for value, parameter in value_parameters
            if parameter is not None
        )
        call_site = node.meta.get("stack_trace") or ""  # frames of the user's code, as text
        ordinals_and_parts = (item for read_parameter in read_parameters for item in read_parameter)
        place = digest(
            "graph", self._model_ordinal, scope, eager_call.op_type(), call_site, *ordinals_and_parts
        )
        # Ops of equal places are told apart by their order, as repeats in eager mode are.
        self._occurrence_counts[place] += 1
        return OpFacts(
            eager_call.op, digest(place, self._occurrence_counts[place]), self.namespace, eager_call.names,
            list(eager_call.inputs), attributes=eager_call.attributes(), scope=scope, source=source,
            op_type=eager_call.op_type(), variable_positions=eager_call.variable_positions(),
            graph=("graph", self.program.number),
            read_variables=lambda: read_parameters, read_value=self.symbols.read_value,
            variable_of=self.symbols.parameter_of, path_of=self._path_of, part_of=part_of,
            device_of=_device_of, compute=eager_call.as_function(),
            sample_count=call.samples,
        )  # fmt: skip

    def _read_parameter(self, value: torch.Tensor, variable: Any) -> tuple[int, str]:
        """Return the ordinal of the parameter that an op reads, and the part that a view reads, "" if all."""
        if value._base is None or value.numel() == variable.numel():
            return self.symbols.ordinal(variable), ""
        return self.symbols.ordinal(variable), f"{tuple(value.shape)}@{int(value.storage_offset())}"

    def _analyse_backward(self, node_runs: dict[Node, NodeRun]) -> None:
        """Have the tools analyse the backward ops of the graph; report those unlike eager mode's.

        The program gets the leaves with actions.
        """
        self._reached_ids = _ids_of_reached_nodes(node_runs)
        # From the outputs to the inputs, as a backward pass goes.
        for node_run in reversed(node_runs.values()):
            # Not strict: a node that cannot be replayed has calls but no steps.
            steps = self._steps_by_node.get(node_run.node, ())
            for call, step in reversed(list(zip(node_run.calls, steps, strict=False))):
                self._analyse_backward_of_call(call, step)
        self.program.leaves = list(self._watched_leaves(node_runs))
        unlike_eager = backward_views_unlike_eager(
            node_runs, self._backward_op_by_node_id, self._late_observers is not None
        )
        for facts, reason in unlike_eager:
            self.program.report(f"{facts.name} of {facts.op_type}", reason, facts.source)

    def _analyse_backward_of_call(self, call: NativeCall, step: OpStep) -> None:
        """Have the tools analyse backward ops of a native call, and of leaves that no later call reads."""
        for node, place in call.nodes:
            with self.symbols.without_data():
                incoming, outgoing = _gradients_without_data(node)
            site = self._analyse_backward_op(step.facts, node, place, incoming, outgoing)
            if site.actions:
                step.backward[place] = site
        for leaf in call.leaves:
            if call.nodes and self.symbols.is_leaf(leaf) and id(leaf) not in self._analysed_leaf_ids:
                self._analysed_leaf_ids.add(id(leaf))
                place = self._leaf_place(leaf)
                with self.symbols.without_data():
                    incoming = [_empty_like(leaf)]
                site = self._analyse_backward_op(step.facts, leaf, place, incoming, outgoing=[])
                if site.actions:
                    self._site_by_leaf_id[id(leaf)] = site

    def _watched_leaves(
        self, node_runs: Mapping[Node, NodeRun]
    ) -> Iterator[tuple[int | torch.Tensor, str, Sequence[Any]]]:
        """Yield the leaves with actions at their AccumulateGrad, in the form of `GraphProgram.leaves`."""
        # Placeholders are the first nodes: the index of one is its position among the graph's inputs.
        for i, (node, node_run) in enumerate(node_runs.items()):
            actions = self._actions_by_leaf_id.get(id(node_run.value))
            if actions is None:
                continue
            variable = self.symbols.parameter_of(node_run.value)
            path = None if variable is None else self._path_of(variable)
            leaf = i if node.op == "placeholder" else variable
            if leaf is not None:
                yield leaf, path or node.name, [action.tool for action in actions]

    def _leaf_place(self, leaf: torch.Tensor) -> int:
        """Return the place of a leaf's AccumulateGrad among backward ops, as eager mode numbers it.

        To be called once for a leaf: those that are not parameters are counted here.
        """
        variable = self.symbols.parameter_of(leaf)
        if variable is not None:
            return LEAF_PLACE + self.symbols.ordinal(variable)
        # Leaves that are not parameters come above all parameters, in the order of the pass.
        place = 2 * LEAF_PLACE + self._unnamed_leaf_count
        self._unnamed_leaf_count += 1
        return place

    def _analyse_backward_op(
        self, forward: OpFacts, node: Any, place: int, incoming: list[Any], outgoing: list[Any]
    ) -> BackwardSite:
        """Have the tools analyse a backward op; return its facts and the actions that the graph calls.

        Records the op if it has actions, also if late observers take them all over.
        node: of autograd, or a leaf, for its AccumulateGrad.  incoming, outgoing: gradients without data.
        """
        node_type = AccumulateGrad if isinstance(node, torch.Tensor) else type(node)
        backward_op_id = forward.backward_id(node_type.__name__, place)
        facts = forward.for_backward_op(node_type, backward_op_id, node_type is not AccumulateGrad)
        facts.grad_outputs = incoming
        actions: Actions = self._analysis.analyse_backward(facts, outgoing)
        has_actions = bool(actions)
        if has_actions and node_type is AccumulateGrad:
            self._actions_by_leaf_id[id(node)] = actions.all
        if self._late_observers is not None:
            # Compiled code leaves out backward ops that no output of the graph leads to.
            is_run = self._reached_ids is None or id(node) in self._reached_ids
            actions = self._late_observers.take_over(actions, facts, is_run)
        if has_actions:
            self._backward_op_by_node_id[id(node)] = BackwardOpWithRoutines(facts, bool(actions))
        return BackwardSite(facts, actions)

    def make_instrumented_nodes(self, node_runs: Mapping[Node, NodeRun]) -> dict[Node, InstrumentedCall]:
        """Return the calls in the place of nodes with routines; try the traceable routines first.

        Drops from each step the actions that the trial has shown not to run there.
        """
        calls: dict[Node, InstrumentedCall] = {}
        for node, steps in self._steps_by_node.items():
            replay = node_runs[node].replay
            if not any(steps) or replay is None:
                continue
            instrumented = calls[node] = InstrumentedNode(node.name, self.program, replay, steps)
            self._trials.try_routines_of_node(instrumented, node_runs[node], steps)
            for call, step in zip(node_runs[node].calls, steps, strict=True):
                step.actions = self._without_refused(step.actions, step.facts, call)
        return calls

    def _write_copy(self, node_runs: dict[Node, NodeRun]) -> GraphModule:
        """Return the copy of the graph in which nodes with routines are replaced.

        Traceable routines are tried first: a routine that cannot be traced is called as Python, and calls of
        Python need a token in the copy.  The program gets what decides which observers may wait.
        The node runs lose their calls.
        """
        # Before the trials, which may drop actions.
        steps_to_write = {node: steps for node, steps in self._steps_by_node.items() if any(steps)}
        calls = self.make_instrumented_nodes(node_runs)
        changed_bodies = [bodies for bodies in self.bodies.values() if bodies.are_changed()]
        held_by_bodies = [bodies.try_routines() for bodies in changed_bodies]
        leaves = self._make_instrumented_leaves(node_runs)
        actions = self._actions_in(steps_to_write.values())
        calls_python = not all(self._routines.is_inlined(action) for action in actions)
        copy = GraphCopy(self.module, self.program, calls_python)
        for node, call in calls.items():
            copy.replace_node(node, call, list(node_runs[node].module_tensors))
        for bodies, held_tensors in zip(changed_bodies, held_by_bodies, strict=True):
            bodies.write_into(copy, held_tensors)
        for node, call in leaves.items():
            copy.insert_before_readers(node, call)
        # With late observers a compiler traces the copy to its end, where waiting observers are called.
        if calls_python and self._late_observers is not None:
            hand_over = WaitingObserversCall("outputs", self.program)
            self.program.gathers_observers = copy.insert_before_output(hand_over)
            self.program.ordered_tools.update(id(action.tool) for action in actions if not can_wait(action))
            self.program.prompt_observers.update(observers_of_written_memory(node_runs, steps_to_write))
        # The tensors without data, and autograd's graph of them, end here: the copy keeps templates alone.
        for node_run in node_runs.values():
            node_run.forget_symbols()
        return copy.finish()

    def _make_instrumented_leaves(self, node_runs: Mapping[Node, NodeRun]) -> dict[Node, InstrumentedCall]:
        """Return the calls behind leaves with routines; try the traceable routines first."""
        calls: dict[Node, InstrumentedCall] = {}
        for node, node_run in node_runs.items():
            site = self._site_by_leaf_id.get(id(node_run.value))
            if site is not None:
                calls[node] = InstrumentedLeaf(node.name, self.program, site)
                self._trials.try_routines_of_backward_op(calls[node], site)
        return calls

    def _actions_in(self, steps_of_nodes: Iterable[Sequence[OpStep]]) -> list[Action]:
        """Return the actions at some steps, at their backward ops, and at leaves."""
        actions: list[Action] = []
        sites = [*self._site_by_leaf_id.values()]
        for step in (step for steps in steps_of_nodes for step in steps):
            actions += step.actions.all
            sites += step.backward.values()
        return [*actions, *(action for site in sites for action in site.actions.all)]


def _ids_of_reached_nodes(node_runs: Mapping[Node, NodeRun]) -> set[int] | None:
    """Return ids of autograd's nodes, and of leaves, that the graph's outputs and written inputs lead to.

    None if a higher-order op hides the way.
    """
    # Higher-order ops are not run without data, so autograd's graph has gaps there.
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in node_runs):
        return None
    # Inputs too: the graph may write them, and they then lead to nodes that it made.
    values = [node_run.value for node, node_run in node_runs.items() if is_input_or_output(node)]
    outputs = [tensor for tensor in tree_flatten(values)[0] if isinstance(tensor, torch.Tensor)]
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    # Held until the end, so that no two of them get the same id.
    reached_by_id: dict[int, Any] = {
        id(tensor): tensor for tensor in outputs if tensor.requires_grad and tensor.is_leaf
    }
    while waiting:
        node = waiting.pop()
        if id(node) not in reached_by_id:
            reached_by_id[id(node)] = node
            if type(node) is AccumulateGrad:
                reached_by_id[id(node.variable)] = node.variable
            waiting += [child for child, _ in node.next_functions if child is not None]
    return set(reached_by_id)


def _gradients_without_data(node: Any) -> tuple[list[Any], list[Any]]:
    """Return a backward op's incoming and outgoing gradients without data; None for an absent one."""
    incoming = [_empty_like_metadata(metadata) for metadata in node._input_metadata]
    outgoing: list[Any] = []
    for child, position in node.next_functions:
        if child is None:
            outgoing.append(None)
        elif type(child) is AccumulateGrad:
            outgoing.append(_empty_like(child.variable))
        else:
            outgoing.append(_empty_like_metadata(child._input_metadata[position]))
    return incoming, outgoing


def _empty_like_metadata(metadata: Any) -> torch.Tensor:
    return torch.empty(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device)


def _device_of(value: Any) -> str:
    return str(value.device) if isinstance(value, torch.Tensor) else ""


def _empty_like(leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(leaf.detach())
