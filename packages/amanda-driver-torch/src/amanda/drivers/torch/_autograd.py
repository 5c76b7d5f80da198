"""Backward passes: which nodes of autograd each op made, and hooks at the nodes that tools instrument."""

import functools
import operator
import sys
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.autograd.graph
from amanda import interceptor
from amanda.backend import BackwardStep, EagerDriver, Patches, State, Trace
from amanda.interceptor import NATIVE, Graphs, HookRegistrar, Mark, Suspension, uninterrupted
from amanda.scope import in_force
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._compiled_callables import report_leaves
from ._levels import all_layers, drop_ended_batches, is_run_by_transform, leaves_no_graph
from ._node_layout import find_node_layout
from ._nodes import (
    AccumulateGrad,
    NodeHooks,
    QuickHooks,
    free_without_recursion,
    is_switched_off,
    register_hooks_without_handles,
    remove_hook_handles,
)
from ._overrides import WithoutTorchFunction, reading_context
from ._repeated_passes import PassCounts, PassOutsideScopes, is_running
from ._saved_tensors import hide_unpack_frame
from ._shared_nodes import PASS_ID, NodeSharing, value_for_pass_caller

# A backward op's place among those of its op is its sequence number after the op's first. Leaves have none,
# so their places begin far above; places of backward ops of backward ops begin above those, by order.
LEAF_PLACE = 1 << 32
_ORDER_STEP = 1 << 40

_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_marked_graphs = Graphs(
    tensors=torch.Tensor, leaf=AccumulateGrad, maker="grad_fn", base="_base", next="next_functions",
    notes="metadata", number="_sequence_nr", key="amanda", sampled=free_without_recursion,
    layout=find_node_layout() if NATIVE else None,
)  # fmt: skip


class NodeBracket:
    """Context around an op, which notes autograd's sequence numbers as it is made, entered and left.

    Nodes with numbers from `start` to before `end` were made within the context.
    """

    __slots__ = ("begin", "end", "start")

    def __init__(self) -> None:
        self.begin = _sequence_number()

    def __enter__(self) -> "NodeBracket":
        self.start = self.end = _sequence_number()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end = _sequence_number()


class Autograd(EagerDriver):
    """The part of the driver that maps backward ops to forward ops and instruments them."""

    @abstractmethod
    def driver_of_pass(self) -> "Autograd":
        """Return this driver for the routines of a backward pass that starts now."""

    def capture_backward_ops(self) -> NodeBracket:
        """Return a context that brackets the nodes made by an op."""
        return NodeBracket()

    def backward_ops_between(self, before_routines: int, op_start: int, op_end: int) -> NodeBracket:
        """Return the bracket of these sequence numbers, which native code has read."""
        bracket = NodeBracket.__new__(NodeBracket)
        bracket.begin, bracket.start, bracket.end = before_routines, op_start, op_end
        return bracket

    def attach_trace(self, trace: Trace, bracket: NodeBracket, values: list[Any]) -> None:
        """Attach the trace to the nodes of the op's results, if any; a pass finds the others from there."""
        if bracket.start != bracket.end:
            _marked_graphs.mark(values, Mark(trace, bracket.begin, bracket.start, bracket.end))

    def native_trace_marker(self, trace: Trace, writes_input: bool) -> Any:
        """Return a marker by which native code attaches the trace to the nodes that executions make.

        writes_input: whether the op may write a view, whose base then has a new node that is marked too.
        """
        return _marked_graphs.marker(trace, writes_input)

    def patch_backward_passes(self, patches: Patches) -> None:
        """Patch torch to hook nodes for the tools in backward passes, and to register these hooks faster."""
        # `torch.autograd` has imported the function by name: both modules need the patch.
        for module in (torch.autograd.graph, torch.autograd):
            patches.set(module, _RUN_BACKWARD, self._run_with_hooks(getattr(module, _RUN_BACKWARD)))
        register_hooks_without_handles(patches)

    def _run_with_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap torch's run of a backward pass: hook the nodes before the pass, and remove the hooks after."""

        # `is_running` finds frames of this function by its name, and reads `backward_pass` there.
        def run_backward(caller: FrameType, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            """Run a pass with hooks at the nodes that tools instrument; as torch does if there is none.

            Reports leaves of compiled graphs, and enables double backward if the pass makes a graph.  Hooks
            of interrupted passes are removed first; plans learn in the end which backward ops are analysed.
            Repeats outside of module calls are counted anew after the pass.
            """
            activation, is_transform = interceptor.active(), is_run_by_transform(caller)
            backward_pass: _BackwardPass | PassOutsideScopes
            gradients, keeps_graph, create_graph, inputs, accumulates = _pass_options(*args, **kwargs)
            if create_graph and is_transform and leaves_no_graph(outputs, gradients):
                create_graph = False
            if activation is not None:
                report_leaves(activation.state, outputs, accumulates)
                if create_graph:
                    _enable_double_backward(activation.state)
            # The fast way for programs that no tool has a backward routine for: no node carries a mark.
            if is_switched_off() or (activation is not None and not Mark.alive()):
                interceptor.reset_root()
                return original(outputs, *args, **kwargs)
            remove_abandoned_hooks()
            if activation is None:
                backward_pass = PassOutsideScopes(_nodes_behind)
            else:
                backward_pass = _BackwardPass(
                    self.driver_of_pass(), activation.state, create_graph, keeps_graph, is_transform,
                    is_whole=accumulates and not inputs, caller=caller,
                )  # fmt: skip
            token = PASS_ID.set(id(backward_pass))
            try:
                uninterrupted(lambda: backward_pass.add_hooks(outputs))
                result = original(outputs, *args, **kwargs)
                backward_pass.has_run_all = True
            except RuntimeError as error:
                hide_unpack_frame(error)
                raise
            finally:
                try:
                    uninterrupted(backward_pass.remove_hooks)
                finally:  # also where an interrupt that was delayed is raised
                    PASS_ID.reset(token)
                    interceptor.reset_root()
            backward_pass.mark_backward_ops_analysed(may_run_again=keeps_graph)
            return result

        @functools.wraps(original)
        def run_in_scope(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            """Run a pass in the scope of its caller."""
            # A pass within a pass may run on a thread of the engine, to which no context variable comes.
            caller_activation = activation_of_pass_caller()
            with nullcontext() if caller_activation is None else in_force(caller_activation):
                return run_backward(sys._getframe(1), outputs, *args, **kwargs)

        return run_in_scope


def _pass_options(
    grad_tensors: Sequence[Any] = (), keep_graph: bool = False, create_graph: bool = False,
    inputs: Sequence[Any] = (), allow_unreachable: bool = False, accumulate_grad: bool = False,
) -> tuple[Sequence[Any], bool, bool, Sequence[Any], bool]:  # fmt: skip
    """Return gradients, keep_graph, create_graph, inputs and accumulate_grad of a call of the engine."""
    return grad_tensors, bool(keep_graph), bool(create_graph), inputs, bool(accumulate_grad)


_RUN_BACKWARD = "_engine_run_backward"


def activation_of_pass_caller() -> interceptor.Activation | None:
    """Return the activation of the caller of a backward pass, on a thread that autograd's engine started.

    None on other threads, and where torch does not bring the caller's context to the engine's threads.
    """
    if interceptor.ACTIVATION.get(None) is not None:
        return None
    activation: interceptor.Activation | None = value_for_pass_caller(interceptor.ACTIVATION)
    return activation


def _enable_double_backward(state: State) -> None:
    """Make plans expect backward ops of backward ops; report if backward ops were analysed without.

    Does nothing if no tool has routines at backward ops.
    """
    stack = state.stack
    if stack is None or not any(tools.wants_backward for tools in stack.chain):
        return
    if stack.enable_double_backward():  # True where it has invalidated plans
        state.report(
            "the first differentiation of gradients",
            "it came after passes without one; backward ops of backward ops are seen from the next on",
        )


class _BackwardPass(NodeSharing):
    """One backward pass of autograd: its marked nodes, each mapped to an op's execution, and its hooks there.

    Its hooks act in this pass alone, also where others that are under way run the same nodes.
    """

    _lock: ClassVar[threading.Lock] = PassCounts.unhooked.lock

    def __init__(
        self, driver: Autograd, state: State, create_graph: bool, keeps_graph: bool, is_transform: bool,
        is_whole: bool, caller: FrameType,
    ) -> None:  # fmt: skip
        """is_transform: whether torch.func runs the pass, which stores no gradient in a leaf.

        is_whole: whether the pass runs every node, and not only those on the way to some inputs.
        caller: frame that starts the pass.
        """
        self._driver = driver
        self._is_transform = is_transform
        self._state = state
        self._create_graph = create_graph
        self._is_last = not (create_graph or keeps_graph)
        # Backward ops that have not run yet, by the trace's id.
        self._pending_counts: Counter[int] = Counter()
        self._node_handles: list[tuple[Any, Any]] = []  # each node with a hook's handle
        self._traces_with_steps: list[Trace] = []
        self._shapes_by_trace_id: dict[int, Any] = {}  # of executions, which have several backward ops
        self._marked_nodes: list[tuple[Any, Mark, int]] = []  # with the sequence number of each
        self.thread = threading.get_ident()
        stack = state.stack
        # A pass of several stacks repeats no counts: what this stack knows, another one's plans may change.
        is_alone = stack is not None and len(stack.chain) == 1 and state.reuses_native_hooks
        may_repeat = is_alone and is_whole and self._is_last and not is_transform
        self.has_run_all = self.is_adding_hooks = False
        # None: it neither repeats the counts of an earlier pass nor is repeated.
        self._counts = PassCounts.of(stack.passes, caller) if stack is not None and may_repeat else None

    def add_hooks(self, outputs: Sequence[Any]) -> None:
        """Have tools analyse new backward ops behind `outputs`, and hook nodes for routines; a hot path.

        Does nothing if the pass may repeat the counts of an earlier one.
        Leaves in a transform get none.
        The pass is under way from here on, until `remove_hooks`.
        """
        if self._can_repeat_earlier_pass(outputs):
            return
        self._find_marked_nodes(outputs)
        try:
            self._hook_marked_nodes()
        finally:
            PassCounts.unhooked.note_hooks_added(self)

    def _hook_marked_nodes(self) -> None:
        """Analyse and hook the marked nodes, as `add_hooks` says."""
        # Looked up once, since the loop runs for every node of every pass.
        may_reuse_hooks = self._state.reuses_native_hooks and not (self._create_graph or self._is_transform)
        stack, shared_ids = self._state.stack, self._shared_ids
        add_handle = self._node_handles.append
        # Of leaves that are not parameters; the mark is of the op that used a leaf first.
        last_index_by_mark_id: dict[int, int] = {}
        remaining_nodes = self._marked_nodes
        if NATIVE and may_reuse_hooks and not shared_ids:  # most nodes of most passes
            remaining_nodes = HookRegistrar.register_all(
                remaining_nodes, stack, AccumulateGrad, torch.nn.Parameter, LEAF_PLACE, self._node_handles
            )
        for node, mark, sequence_number in remaining_nodes:
            node_type, trace = type(node), mark.trace
            is_leaf = node_type is AccumulateGrad
            # The backward op's place among those of its op, see LEAF_PLACE.
            if not is_leaf:
                place = sequence_number - mark.start
            elif isinstance(node.variable, torch.nn.Parameter):
                place = LEAF_PLACE + interceptor.ordinal(node.variable)
            else:
                # A leaf that is not a parameter has no ordinal: its place is above all parameters, by index.
                last_index_by_mark_id[id(mark)] = last_index_by_mark_id.get(id(mark), -1) + 1
                place = 2 * LEAF_PLACE + last_index_by_mark_id[id(mark)]
            if is_leaf and self._is_transform:  # a transform stores no gradient in a leaf
                continue
            if mark.order:  # of a backward op of backward ops
                place += mark.order * _ORDER_STEP
            plan = trace.plan
            if may_reuse_hooks and plan.stack is stack:
                key = node_type, place
                native_hooks = plan.backward.native_hooks.get(key) or BackwardStep.native_hooks(
                    self._driver, trace, *key
                )
                if native_hooks is not None:
                    # Analysed before: its hooks are native or bound functions that need no step object.
                    before, after, after_alone, hooks_for_shapes = native_hooks
                    if hooks_for_shapes is not None:  # they depend on the shapes of vmaps' batches
                        before, after, after_alone, _ = hooks_for_shapes(self._shapes_at(mark))
                    if before is not None and after_alone is not None and before.is_idle:
                        before, after = None, after_alone  # a hook costs more than most routines
                    if shared_ids:
                        before, after = self.hook_of_pass(node, before), self.hook_of_pass(node, after)
                    if before is not None:
                        add_handle((node, node.register_prehook(before)))
                    if after is not None:
                        add_handle((node, node.register_hook(after)))
                    continue
            self._analyse_and_hook(node, mark, place, is_leaf)

    def _can_repeat_earlier_pass(self, outputs: Sequence[Any]) -> bool:
        """Return True if an earlier pass has the counts of this one, which `remove_hooks` then repeats.

        If not, notes the form of the graph, if it has one, so that `remove_hooks` learns the counts.
        """
        # Another pass may have hooks at nodes of this one, and a hook of the program may take gradients away.
        if self._counts is None or self.under_way or NodeHooks.of_program:
            return False
        with WithoutTorchFunction():
            roots = [_root(output) for output in outputs]
            graph_form = 0 if None in roots else _marked_graphs.form(roots)
            if graph_form == 0:  # an output is a leaf, or some nodes run code of the program or of routines
                return False
            form = graph_form, *(output.output_nr for output in outputs)
            return self._counts.look_up(form, lambda: _marked_graphs.behind(roots), self)

    def _repeat_or_learn_counts(self) -> None:
        """Count as the earlier pass did, or learn what the hooks have counted; a failed pass is reported."""
        if self._counts is None:
            return
        if self.has_run_all:
            self._counts.repeat_or_learn(self._node_handles, [mark for _, mark, _ in self._marked_nodes])
        elif self._counts.drop_counts_to_repeat():
            self._state.report(
                "a backward pass that failed", "tools that count executions have not counted its backward ops"
            )

    def _find_marked_nodes(self, outputs: Sequence[Any]) -> None:
        """Note the marked nodes behind `outputs`, and share those that other passes have.

        Lists the pass among those under way, for passes on other threads.
        """
        with WithoutTorchFunction():
            marked_nodes = _marked_graphs.marked([_root(output) for output in outputs])
        # Passes on other threads may add their hooks now: which nodes are shared is decided under the lock.
        with self._lock:
            PassCounts.unhooked.wait_for_other_threads()
            self._marked_nodes = marked_nodes
            self.is_adding_hooks = True
            self.begin(outputs, PassCounts.unhooked.wait_for_hooks)

    def list_nodes(self) -> Sequence[Any]:
        """Return all nodes of the pass's graph, also those without marks."""
        return _nodes_behind(self._outputs)

    def _analyse_and_hook(self, node: Any, mark: Mark, place: int, is_leaf: bool) -> None:
        """Run the tools' analyses of a node's backward op, and hook the node if routines or analyses are due.

        Under create_graph each node is hooked, to mark the nodes that it makes.  Ends the learning of counts.
        """
        trace = mark.trace
        if self._counts is not None:
            self._counts.learn_nothing()  # a step object may do more than count
        self._traces_with_steps.append(trace)
        step = BackwardStep(
            self._driver, trace, type(node), place, self._state, replaceable=not is_leaf,
            order=mark.order + 1, shapes=self._shapes_at(mark),
        )  # fmt: skip
        if step.has_work or self._create_graph:
            self._pending_counts[id(trace)] += 1
            hooks = _StepHooks(step, mark, self._driver, self._note_backward_op_run)
            for register, hook in ((node.register_prehook, hooks.before), (node.register_hook, hooks.after)):
                self._node_handles.append((node, register(self.hook_of_pass(node, hook))))

    def _shapes_at(self, mark: Mark) -> Any:
        """Return the shapes of the execution that made a node, without batches of vmaps that have ended."""
        # Native code leaves shapes at marks, and runs no routine under a vmap: these have no batches.
        shapes = mark.shapes or self._shapes_by_trace_id.get(id(mark.trace))
        if shapes is None:
            shapes = self._shapes_by_trace_id[id(mark.trace)] = drop_ended_batches(mark.trace.shapes)
        return shapes

    def remove_hooks(self) -> None:
        """Count, and remove the pass's hooks.

        An interrupt may come at any step: another call then does the rest.
        """
        try:
            self._repeat_or_learn_counts()
        finally:
            with self._lock:
                # An interrupted call may have removed some: to remove a hook twice does nothing.
                remove_hook_handles(self._node_handles)
                self.end()
                PassCounts.unhooked.remove(self)

    def _note_backward_op_run(self, trace: Trace) -> None:
        """Count a backward op of an op as run; after the last drop the inputs and outputs of the op.

        The values stay if another pass may come through the graph.
        """
        self._pending_counts[id(trace)] -= 1
        if self._is_last and not self._pending_counts[id(trace)]:
            trace.drop_values()

    def mark_backward_ops_analysed(self, may_run_again: bool) -> None:
        """Record in their plans that all backward ops of the pass's ops are analysed; drop the ops' values.

        Leaves out ops that may get more backward ops, as all may under create_graph.
        may_run_again: whether another pass may come through the graph.
        """
        # Under create_graph an op gets more backward ops later.
        if self._create_graph or not self._traces_with_steps:
            return
        second_order_plans = {id(mark.trace.plan) for _, mark, _ in self._marked_nodes if mark.order}
        for trace in {id(trace): trace for trace in self._traces_with_steps}.values():
            # Once a stack differentiates twice, an op that no second-order pass has reached may get more too.
            may_get_more = trace.stack.double_backward and id(trace.plan) not in second_order_plans
            if not may_get_more:
                self._driver.mark_backward_analysed(trace, may_run_again)


def remove_abandoned_hooks() -> None:
    """Remove the hooks of passes on this thread that an interrupt ended before they could remove these."""
    # An interrupt may have skipped the `finally` of `run_backward`.
    for backward_pass in (*_BackwardPass.under_way, *PassCounts.unhooked.passes):
        if backward_pass.thread == threading.get_ident() and not is_running(backward_pass):
            uninterrupted(backward_pass.remove_hooks)


class _StepHooks(QuickHooks):
    """Hooks before and after one node of autograd, which run the routines of tools at its backward op."""

    def __init__(
        self, step: BackwardStep, mark: Mark, driver: Autograd, on_done: Callable[[Trace], None]
    ) -> None:
        """Hold the step of a node; on_done: called with the op's trace after each of its backward ops."""
        self._step = step
        self._driver = driver
        self._mark = mark
        self._on_done = on_done
        # Sequence number of the first node that the computation of this one makes, under create_graph.
        self._first_number = 0

    def before(self, grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the gradients for the node after the routines before it; None if none has changed."""
        if is_switched_off():
            return None
        with Suspension(), reading_context():
            grads = self._step.run_before(grad_outputs)
        self._first_number = _sequence_number()
        return _tuple_if_changed(grad_outputs, grads)

    def after(self, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the node's gradients after the routines behind it; None if none has changed.

        Marks the nodes that the node made under create_graph, and counts the backward op as run.
        """
        if is_switched_off():
            return None
        # Before the routines run, whose own ops would take sequence numbers too.
        self._mark_second_order(grad_inputs)
        with Suspension(), reading_context():
            grads = self._step.run_after(grad_inputs, grad_outputs)
        self._on_done(self._mark.trace)
        return _tuple_if_changed(grad_inputs, grads)

    def _mark_second_order(self, grad_inputs: tuple[Any, ...]) -> None:
        """Mark the nodes that a node made under create_graph, if any, as backward ops of the same op."""
        end = _sequence_number()
        if end == self._first_number or not torch.is_grad_enabled():
            return
        trace = self._mark.trace.copy_for_double_backward(self._mark.shapes)
        start = self._first_number  # no routine before the op has made nodes that belong to it
        mark = Mark(trace, start, start, end, self._mark.order + 1)
        with WithoutTorchFunction():
            _marked_graphs.mark(all_layers(grad_inputs), mark, False)  # False: without bases


def _nodes_behind(outputs: Sequence[Any]) -> list[Any]:
    """Return all nodes of the graph of a pass, also that of an output that is a leaf."""
    with WithoutTorchFunction():
        leaves = [output for output in outputs if _root(output) is None and output.requires_grad]
        roots = [*map(_root, outputs), *(get_gradient_edge(leaf).node for leaf in leaves)]
        return _marked_graphs.behind(roots)


def _root(output: Any) -> Any:
    """Return the node behind an output of a pass; None for a leaf."""
    return output.node if isinstance(output, GradientEdge) else output.grad_fn


def _tuple_if_changed(old: tuple[Any, ...], new: list[Any]) -> tuple[Any, ...] | None:
    """Return the new gradients, or None, which torch takes as no change, if all are the old objects."""
    return None if len(old) == len(new) and all(map(operator.is_, old, new)) else tuple(new)
