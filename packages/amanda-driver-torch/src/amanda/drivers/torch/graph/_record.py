"""The native ops of an FX graph's nodes: the graph is run once on tensors without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from amanda import interceptor
from amanda.backend import State
from amanda.scope import in_force
from torch.utils._pytree import tree_flatten, tree_map

from .._autograd import AccumulateGrad
from .._driver import TRANSFORM, WITHIN_TRANSFORM
from .._schema import flatten_outputs

if TYPE_CHECKING:
    from amanda.backend import Call
    from torch.fx import GraphModule, Node

sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Given:
    """Stands in a template for a tensor, or a size, that is known when the node runs; slot: its index."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class NativeCall:
    """One call of a native op within a node.

    call: as the eager driver has it, with tensors that have no data.  args, kwargs: templates.
    outputs: what it gave.  nodes: the backward ops that it made, as `backward_nodes` gives them.
    leaves: the tensors that it was given whose gradient is stored.
    """

    def __init__(self, call: Call, site: interceptor.Site, args: Any, kwargs: Any) -> None:
        self.call: Any = call
        self.site = site
        self.args = args
        self.kwargs = kwargs
        self.outputs: Any = None
        self.nodes: list[tuple[Any, int]] = []
        self.leaves: list[torch.Tensor] = []

    @property
    def values(self) -> list[Any]:
        """The outputs as tools see them: what the op returned, and what it only wrote."""
        call = self.call
        values: list[Any] = call.with_written(self.outputs, call.inputs, *flatten_outputs(self.outputs))[0]
        return values


class Replay:
    """The native ops that a node comes to.

    bind: the eager driver's view of a native call.  calls: in order.  result: template of what it gives.
    """

    def __init__(self, bind: Callable[..., Call], calls: list[NativeCall], result: Any) -> None:
        self.bind = bind
        self.calls = calls
        self.result = result

    def forget_symbols(self) -> None:
        """Drop the tensors that the graph was run on."""
        for call in self.calls:
            call.call = call.outputs = None
            call.nodes, call.leaves = [], []


class Recorder:
    """Stands in for a state: the interceptor brings each native call here."""

    def __init__(self) -> None:
        self.bind: Callable[..., Call] | None = None
        self.calls: list[NativeCall] = []

    def record(
        self,
        bind: Callable[..., Call],
        site: interceptor.Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a native call, and note it; `bind` gives the eager driver's view of it."""
        self.bind = bind
        with uninstrumented():
            made = NativeCall(bind(site, args, kwargs), site, args, kwargs)
            start = sequence()
            made.outputs = site.invoke(args, kwargs)
            tensors = _tensors([made.outputs, [made.call.inputs[i] for i in made.call.mutable]])
            made.nodes = list(backward_nodes(tensors, start, sequence()))
            made.leaves = [one for one in _tensors(made.call.inputs) if one.requires_grad and one.is_leaf]
        self.calls.append(made)
        return made.outputs


def uninstrumented() -> AbstractContextManager[None]:
    """Context in which nothing is intercepted, also of what ops call in turn; the state stays known."""
    activation = interceptor.ACTIVATION.get(None)
    state = None if activation is None else activation.state
    return in_force(interceptor.Activation(None, state if type(state) is State else State(), False, False))


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record native calls."""
    recorder = Recorder()
    with in_force(interceptor.Activation(None, recorder, True, False)):
        yield recorder


def backward_nodes(tensors: Sequence[torch.Tensor], start: int, end: int) -> Iterator[tuple[Any, int]]:
    """The backward ops with numbers from `start` to before `end` that tensors hang on, outermost first.

    Each with its place among those of the op.
    """
    if start == end:
        return
    waiting = [one.grad_fn for one in tensors if one.requires_grad and one.grad_fn is not None]
    met: set[Any] = set()
    while waiting:
        node = waiting.pop(0)
        if node in met or type(node) is AccumulateGrad or not start <= node._sequence_nr() < end:
            continue
        met.add(node)
        yield node, node._sequence_nr() - start
        waiting += [child for child, _ in node.next_functions if child is not None]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(values)[0] if isinstance(one, torch.Tensor)]


class Unresolved(Exception):
    """A native call is given a value whose origin is not known."""


class Slots:
    """Numbers the values of one node: what it is given, then what its native ops give."""

    def __init__(self, given: Sequence[Any]) -> None:
        self._slots: dict[int, int] = {}
        self._kept: list[Any] = []
        for value in given:
            self.add(value)

    def add(self, value: Any) -> None:
        """Number the tensors and sizes in a value."""
        for leaf in tree_flatten(value)[0]:
            self._slots[id(leaf)] = len(self._kept)
            self._kept.append(leaf)

    def template(self, value: Any) -> Any:
        """A value with each tensor and size in it as a `Given`."""
        return tree_map(self._as_template, value)

    def _as_template(self, leaf: Any) -> Any:
        slot = self._slots.get(id(leaf))
        symbolic = isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        if slot is not None and (symbolic or not isinstance(leaf, (int, float, str, type(None)))):
            return Given(slot)
        if symbolic and not isinstance(leaf, torch.nn.Parameter):
            raise Unresolved(str(leaf))
        return leaf


def filled(template: Any, values: Sequence[Any]) -> Any:
    """A template with the values in their places."""
    return tree_map(lambda leaf: values[leaf.slot] if isinstance(leaf, Given) else leaf, template)


def replay_of(
    bind: Callable[..., Call], calls: Sequence[NativeCall], given: Sequence[Any], result: Any
) -> Replay:
    """The native calls of a node as templates.

    Raises Unresolved where one is given a size that was computed in between.
    """
    slots = Slots(given)
    made = []
    for call in calls:
        args, kwargs = slots.template(call.args), slots.template(call.kwargs)
        slots.add(call.outputs)
        template = NativeCall(call.call, call.site, args, kwargs)
        template.outputs, template.nodes, template.leaves = call.outputs, call.nodes, call.leaves
        made.append(template)
    return Replay(bind, made, slots.template(result))


class Ran:
    """A node that was run: its value, and the native calls that it came to.

    held: of a node that calls a module, the parameters and buffers of that by name.
    replay: None where there is none, for the reason `obstacle` where there are calls.
    what: is said not to be instrumented then; the node, where it is "".
    """

    def __init__(self, node: Node, value: Any, calls: list[NativeCall]) -> None:
        self.node = node
        self.value = value
        self.calls = calls
        self.held: dict[str, torch.Tensor] = {}
        self.replay: Replay | None = None
        self.obstacle = ""
        self.what = ""


def run(module: GraphModule, inputs: Sequence[Any], fetch: Callable[[str], Any]) -> dict[Node, Ran]:
    """Run a graph on tensors without data, whose mode is in force; what its nodes gave and came to.

    fetch: what a `get_attr` node gives.
    """
    ran: dict[Node, Ran] = {}
    values = iter(inputs)
    grad_enabled = torch.is_grad_enabled()
    transforms = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                ran[node] = Ran(node, next(values), [])
            elif node.op == "get_attr":
                ran[node] = Ran(node, fetch(node.target), [])
            elif node.op != "output":
                ran[node] = _ran(node, module, ran)
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(transforms)
        torch._C._set_grad_enabled(grad_enabled)
    return ran


def _ran(node: Node, module: GraphModule, ran: Mapping[Node, Ran]) -> Ran:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: ran[one].value)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        one = Ran(node, node.meta.get("example_value", node.meta.get("val")), [])
        inside = _inside(node, module)
        told = ": " + ", ".join(f"{count} {name}" for name, count in inside.items()) if inside else ""
        one.obstacle = f"ops inside of a higher-order op are not instrumented{told}"
        return one
    if _reads_number(node, args):
        return Ran(node, called(node, module)(*args, **kwargs), [])
    if torch._C._functorch.peek_interpreter_stack() is not None:
        one = Ran(node, called(node, module)(*args, **kwargs), [])
        one.obstacle, one.what = WITHIN_TRANSFORM, TRANSFORM
        return one
    with recording() as recorder:
        value = called(node, module)(*args, **kwargs)
    one = Ran(node, value, recorder.calls)
    if node.op == "call_module":
        own = module.get_submodule(str(node.target))
        named = [*own.named_parameters(), *own.named_buffers()]
        one.held = {f"{node.target}.{name}": tensor for name, tensor in named}
    if recorder.calls and recorder.bind is not None:
        given = [*(ran[each].value for each in node.all_input_nodes), *one.held.values()]
        try:
            one.replay = replay_of(recorder.bind, recorder.calls, given, value)
        except Unresolved as error:
            one.obstacle = f"it computes a size that is not known beforehand ({error})"
    return one


def _inside(node: Node, module: GraphModule) -> Counter[str]:
    """Ops of the graphs that a higher-order op is given, and of those in them, by name."""
    found: Counter[str] = Counter()
    for given in node.all_input_nodes:
        body = getattr(module, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule):
            for own in body.graph.nodes:
                if isinstance(own.target, torch._ops.HigherOrderOperator):
                    found += _inside(own, body)
                elif own.op.startswith("call_") and own.target is not getitem:
                    found[getattr(own.target, "__name__", str(own.target))] += 1
    return found


def _reads_number(node: Node, args: Sequence[Any]) -> bool:
    """Return True for a node that reads a number, which dynamo hands over as a tensor: it is no op."""
    if node.target != "item" or node.all_input_nodes[0].op != "placeholder":
        return False
    number = getattr(args[0], "item_memo", None)
    return isinstance(number, torch.SymFloat) and number.node.hint is not None


def called(node: Node, module: GraphModule) -> Callable[..., Any]:
    """Return what a node calls."""
    if node.op == "call_function":
        return node.target  # type: ignore[return-value]
    if node.op == "call_module":
        return module.get_submodule(node.target)  # type: ignore[arg-type]
    return _Method(str(node.target))


class _Method:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(own, self._name)(*args, **kwargs)
