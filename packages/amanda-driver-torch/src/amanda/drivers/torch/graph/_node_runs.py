"""The native ops of an FX graph's nodes, recorded in one run of the graph on tensors without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from amanda import interceptor
from amanda.backend import State
from amanda.scope import in_force
from torch.utils._pytree import tree_flatten, tree_map

from .._levels import all_layers, batch_sizes, in_transform, is_wrapped, without_transforms
from .._nodes import AccumulateGrad
from .._schema import flatten_outputs

if TYPE_CHECKING:
    from amanda.backend import Call
    from torch.fx import GraphModule, Node

sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class TemplateSlot:
    """Placeholder in a template for a tensor or a size that is known when the node runs; slot: its index."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class NativeCall:
    """One call of a native op, which the eager driver intercepts, within a node that ran without data.

    eager_call: as the eager driver binds it, with tensors without data.  args, kwargs: those of the call, or
    templates of them.  outputs: its results as tools see them, without the batches of a transform.
    results: the same as later calls take them, at their level under a transform.
    nodes: its backward ops, as `backward_nodes` yields them.
    leaves: the tensors among its inputs whose gradient is stored.
    in_transform: whether a transform of torch.func is around the call.  samples: that it computes at once.
    """

    def __init__(self, eager_call: Call, site: interceptor.Site, args: Any, kwargs: Any) -> None:
        """Hold a call that has yet to run: results, nodes and leaves are set by what records the call."""
        self.eager_call: Any = eager_call
        self.site = site
        self.args = args
        self.kwargs = kwargs
        self.outputs: Any = None
        self.results: Any = None
        self.in_transform = False
        self.samples = 1
        self.nodes: list[tuple[Any, int]] = []
        self.leaves: list[torch.Tensor] = []

    @property
    def values(self) -> list[Any]:
        """Return the outputs as tools see them: returned tensors, then tensors that the op only wrote."""
        returned, rebuild = flatten_outputs(self.outputs)
        values: list[Any]
        values, _ = self.eager_call.append_unreturned(self.outputs, self.eager_call.inputs, returned, rebuild)
        return values


class NodeReplay:
    """The native ops of a node with templates of their arguments, to be run again on other inputs.

    bind: makes the eager driver's call of a native call.  calls: in order.  result: template of the value.
    """

    def __init__(self, bind: Callable[..., Call], calls: list[NativeCall], result: Any) -> None:
        self.bind = bind
        self.calls = calls
        self.result = result

    def forget_symbols(self) -> None:
        """Drop the tensors without data that the graph was run on."""
        for call in self.calls:
            call.eager_call = call.outputs = call.results = None
            call.nodes, call.leaves = [], []


class CallRecorder:
    """Recorder of native calls, to which the interceptor brings them while it is in the place of a state."""

    def __init__(self) -> None:
        self.bind: Callable[..., Call] | None = None
        self.calls: list[NativeCall] = []

    def record(
        self, bind: Callable[..., Call], site: interceptor.Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a native call, and note it with the nodes that it makes; return its results.

        bind: makes the eager driver's call of a native call, and is held for replays.
        """
        self.bind = bind
        with uninstrumented():  # kernels in Python call ops of their own
            if in_transform():
                native_call = _record_in_transform(bind, site, args, kwargs)
                self.calls.append(native_call)
                return native_call.results
            native_call = NativeCall(bind(site, args, kwargs), site, args, kwargs)
            start = sequence_number()
            native_call.outputs = native_call.results = site.invoke(args, kwargs)
            # Written inputs lead to nodes, too, as those of an op that returns nothing.
            inputs = native_call.eager_call.inputs
            written_inputs = [inputs[i] for i in native_call.eager_call.written_positions]
            tensors = _tensors_in([native_call.outputs, written_inputs])
            native_call.nodes = list(backward_nodes(tensors, start, sequence_number()))
            native_call.leaves = [
                tensor for tensor in _tensors_in(inputs) if tensor.requires_grad and tensor.is_leaf
            ]
        self.calls.append(native_call)
        return native_call.outputs


def _record_in_transform(
    bind: Callable[..., Call], site: interceptor.Site, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NativeCall:
    """Run a native call within transforms, and record it with a tensor of a sample's shape per wrapper."""
    sample_by_id: dict[int, torch.Tensor] = {}
    batch_size_by_level: dict[int, int] = {}

    def sample_of(value: Any) -> Any:
        """Return the one plain tensor of a sample's shape for a wrapper; return any other value as it is.

        Notes the sizes of the wrapper's batches.
        """
        if not isinstance(value, torch.Tensor) or not is_wrapped(value):
            return value
        if id(value) not in sample_by_id:
            batch_size_by_level.update(batch_sizes(value))
            with without_transforms():
                sample = torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device)
            sample_by_id[id(value)] = sample
        return sample_by_id[id(value)]

    eager_call = bind(site, tree_map(sample_of, args), tree_map(sample_of, kwargs))
    native_call = NativeCall(eager_call, site, args, kwargs)
    native_call.in_transform = True
    native_call.results = site.invoke(args, kwargs)
    native_call.outputs = tree_map(sample_of, native_call.results)
    native_call.samples = prod(batch_size_by_level.values())
    return native_call


def uninstrumented() -> AbstractContextManager[None]:
    """Return a context in which nothing is intercepted, but whose state is that in force, or a new one."""
    activation = interceptor.ACTIVATION.get(None)
    state = None if activation is None else activation.state
    return in_force(interceptor.Activation(None, state if type(state) is State else State(), False, False))


@contextmanager
def recording_calls() -> Iterator[CallRecorder]:
    """Record the native calls within the context."""
    recorder = CallRecorder()
    with in_force(interceptor.Activation(None, recorder, True, False)):
        yield recorder


def backward_nodes(tensors: Sequence[torch.Tensor], start: int, end: int) -> Iterator[tuple[Any, int]]:
    """Yield the nodes behind an op's tensors that the op has made, the outermost first.

    Those are the nodes with sequence numbers from `start` to before `end`.  Each comes with its place among
    the backward ops of the op.
    """
    if start == end:
        return
    waiting = [tensor.grad_fn for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None]
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop(0)  # breadth first, so that the outermost node of an op comes first
        if node in visited or type(node) is AccumulateGrad or not start <= node._sequence_nr() < end:
            continue
        visited.add(node)
        yield node, node._sequence_nr() - start
        waiting += [child for child, _ in node.next_functions if child is not None]


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


class Unresolved(Exception):
    """Error for a native call whose input comes from no known value."""


class SlotNumbers:
    """Numbering of the values of one node: its inputs, then the results of its native ops."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        """Number the inputs; an object among them twice has its last number."""
        self._slots: dict[int, int] = {}
        self._leaves: list[Any] = []
        for value in inputs:
            self.add(value)

    def add(self, value: Any) -> None:
        """Number the tensors and sizes in a value."""
        for leaf in tree_flatten(value)[0]:
            self._slots[id(leaf)] = len(self._leaves)
            self._leaves.append(leaf)  # kept, so that no other object gets its `id`

    def template(self, value: Any) -> Any:
        """Return a value with a `TemplateSlot` for each tensor and size in it."""
        return tree_map(self._slot_or_constant, value)

    def _slot_or_constant(self, leaf: Any) -> Any:
        """Return the slot of a leaf of arguments or results, or a constant as it is.

        Raises Unresolved for a tensor or symbol that is neither an input nor a result of the node.
        """
        slot = self._slots.get(id(leaf))
        is_symbolic = isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        # Small numbers and strings are the same object by chance: they are constants.
        if slot is not None and (is_symbolic or not isinstance(leaf, (int, float, str, type(None)))):
            return TemplateSlot(slot)
        # A parameter that a node's code refers to is the same in each run; other tensors are not.
        if is_symbolic and not isinstance(leaf, torch.nn.Parameter):
            raise Unresolved(str(leaf))
        return leaf


def fill_template(template: Any, values: Sequence[Any]) -> Any:
    """Return a template with values in its slots."""
    return tree_map(lambda leaf: values[leaf.slot] if isinstance(leaf, TemplateSlot) else leaf, template)


def make_replay(
    bind: Callable[..., Call], calls: Sequence[NativeCall], inputs: Sequence[Any], result: Any
) -> NodeReplay:
    """Return the native calls of a node with templates for arguments, in which inputs and results are slots.

    result: the node's value.  Raises Unresolved if a call takes a size that Python code of the node computed.
    """
    slots = SlotNumbers(inputs)
    template_calls = []
    for call in calls:
        args, kwargs = slots.template(call.args), slots.template(call.kwargs)
        slots.add(call.results)
        template_call = NativeCall(call.eager_call, call.site, args, kwargs)
        template_call.outputs = call.outputs
        template_call.nodes, template_call.leaves = call.nodes, call.leaves
        template_calls.append(template_call)
    return NodeReplay(bind, template_calls, slots.template(result))


class NodeRun:
    """A node that was run: its value and its native calls.

    module_tensors: if the node calls a module, the parameters and buffers of the module by name.
    replay: None if the node cannot be replayed, for the reason `obstacle`, or has no native call.
    backward_counts: backward ops that the node runs within a transform of torch.func, by name.
    """

    def __init__(self, node: Node, value: Any, calls: list[NativeCall]) -> None:
        """Hold a run without replay or obstacle, which are set by what runs the node."""
        self.node = node
        self.value = value
        self.calls = calls
        self.module_tensors: dict[str, torch.Tensor] = {}
        self.replay: NodeReplay | None = None
        self.obstacle = ""
        self.backward_counts: Counter[str] = Counter()

    def forget_symbols(self) -> None:
        """Drop the calls, with their tensors without data; the node's value stays."""
        self.calls.clear()
        if self.replay is not None:
            self.replay.forget_symbols()


def _is_step_of_transform(target: Any) -> bool:
    """Return True for a function by which torch.func enters, leaves and differentiates at a level."""
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch._functorch", "torch._C._functorch", "torch.autograd.forward_ad"))


def _backward_counts(outputs: Any) -> Counter[str]:
    """Count by name the backward ops behind outputs whose gradient the graph computes within a transform."""
    waiting = [tensor.grad_fn for tensor in all_layers(_tensors_in(outputs)) if tensor.grad_fn is not None]
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited.add(node)
            waiting += [child for child, _ in node.next_functions if child is not None]
    return Counter(type(node).__name__ for node in visited if type(node) is not AccumulateGrad)


def run_graph(
    module: GraphModule, inputs: Sequence[Any], attribute_value: Callable[[str], Any]
) -> dict[Node, NodeRun]:
    """Run a graph on tensors without data, whose mode is in force; return the run of each node but output.

    Autograd and transforms are as before in the end.
    attribute_value: returns the value of a `get_attr` node by its target.
    """
    node_runs: dict[Node, NodeRun] = {}
    remaining_inputs = iter(inputs)
    grad_enabled = torch.is_grad_enabled()
    # Nodes may switch gradients and enter transforms; if a node raises, its counterpart never runs.
    transform_depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                node_runs[node] = NodeRun(node, next(remaining_inputs), [])
            elif node.op == "get_attr":
                node_runs[node] = NodeRun(node, attribute_value(node.target), [])
            elif node.op != "output":
                node_runs[node] = _run_node(node, module, node_runs)
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(transform_depth)
        torch._C._set_grad_enabled(grad_enabled)
    return node_runs


def _run_node(node: Node, module: GraphModule, node_runs: Mapping[Node, NodeRun]) -> NodeRun:
    """Run a node, and record its native calls, or the obstacle to instrumenting it.

    A higher-order op is not run, and no calls are recorded of nodes that are no op of the program.
    """
    args, kwargs = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda input_node: node_runs[input_node].value
    )
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _run_of_higher_order_op(node, module)
    if _reads_wrapped_number(node, args):
        return NodeRun(node, callee(node, module)(*args, **kwargs), [])
    if _is_step_of_transform(node.target):
        value = callee(node, module)(*args, **kwargs)
        node_run = NodeRun(node, value, [])
        if getattr(node.target, "__name__", "") == "_autograd_grad":
            node_run.backward_counts = _backward_counts(args[0])
        return node_run
    with recording_calls() as recorder:
        value = callee(node, module)(*args, **kwargs)
    node_run = NodeRun(node, value, recorder.calls)
    if node.op == "call_module":
        submodule = module.get_submodule(str(node.target))
        named_tensors = [*submodule.named_parameters(), *submodule.named_buffers()]
        node_run.module_tensors = {f"{node.target}.{name}": tensor for name, tensor in named_tensors}
    if not recorder.calls or recorder.bind is None:
        return node_run
    inputs = [node_runs[input_node].value for input_node in node.all_input_nodes]
    inputs += node_run.module_tensors.values()
    try:
        node_run.replay = make_replay(recorder.bind, recorder.calls, inputs, value)
    except Unresolved as error:
        node_run.obstacle = f"it computes a size that is not known beforehand ({error})"
    return node_run


def _run_of_higher_order_op(node: Node, module: GraphModule) -> NodeRun:
    """Return a record for a higher-order op, which is not run, with the value that dynamo or the export has.

    Its obstacle names the ops inside, which are not instrumented.
    """
    node_run = NodeRun(node, node.meta.get("example_value", node.meta.get("val")), [])
    inner_counts = _count_ops_inside(node, module)
    names = ", ".join(f"{count} {name}" for name, count in inner_counts.items())
    names = f": {names}" if names else ""
    node_run.obstacle = f"ops inside of a higher-order op are not instrumented{names}"
    return node_run


def _count_ops_inside(node: Node, module: GraphModule) -> Counter[str]:
    """Count the ops, by name, of the graphs among a higher-order op's inputs, and of graphs within these."""
    counts: Counter[str] = Counter()
    for input_node in node.all_input_nodes:
        body = getattr(module, str(input_node.target), None) if input_node.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule):
            for inner_node in body.graph.nodes:
                if isinstance(inner_node.target, torch._ops.HigherOrderOperator):
                    counts += _count_ops_inside(inner_node, body)
                elif inner_node.op.startswith("call_") and inner_node.target is not getitem:
                    counts[getattr(inner_node.target, "__name__", str(inner_node.target))] += 1
    return counts


def _reads_wrapped_number(node: Node, args: Sequence[Any]) -> bool:
    """Return True for a node by which dynamo unwraps a number that it passes as a tensor: no op."""
    if node.target != "item" or node.all_input_nodes[0].op != "placeholder":
        return False
    number = getattr(args[0], "item_memo", None)
    return isinstance(number, torch.SymFloat) and number.node.hint is not None


def callee(node: Node, module: GraphModule) -> Callable[..., Any]:
    """Return what a node calls; for a method, a callable that takes the receiver first."""
    if node.op == "call_function":
        return node.target  # type: ignore[return-value]
    if node.op == "call_module":
        return module.get_submodule(node.target)  # type: ignore[arg-type]
    return _MethodByName(str(node.target))


class _MethodByName:
    """Callable that calls a method of its first argument."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, receiver: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(receiver, self._name)(*args, **kwargs)
