"""Costs of the operators that an op of PyTorch calls inside, counted on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import visits
from amanda.tools.flops._table import ELEMENTWISE
from amanda.tools.kit import RequiredNames
from amanda.tools.mapping import torch_word

if TYPE_CHECKING:
    from torch import Tensor

_REQUIRED = RequiredNames(
    "amanda.tools.flops", "torch", "torch:UntypedStorage._cdata", "torch:Tensor._nested_tensor_size",
    "torch:_C.DisableTorchFunction", "torch:_C.DisableTorchFunctionSubclass",
    "torch:_C._dispatch_has_kernel", "torch:ops.aten.add.Tensor._schema",
    "torch._subclasses.fake_tensor:FakeTensor", "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils._pytree:tree_leaves", "torch.utils._pytree:tree_map_only",
)  # fmt: skip

_TAGS = frozenset({"Tag.pointwise", "Tag.reduction"})
"""Of operators that visit each element once."""

COMPILED = "CppFunction"
"""Name of a node that computes the gradient of a whole region of TorchScript."""


@dataclass
class InnerCosts:
    """Costs of the operators inside an op, and by name of each node of its backward pass, in order.

    unknown: names of the ops inside that no formula knows.  called: costs that no node has yet.
    """

    forward: Cost = field(default_factory=Cost)
    backward: dict[str, list[Cost]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    called: list[Cost] = field(default_factory=list)

    @property
    def backward_macs(self) -> int:
        """Multiply-accumulates of the nodes whose costs were not popped yet."""
        return sum(cost.macs for costs in self.backward.values() for cost in costs)

    def pop_cost_of(self, node: str) -> Cost | None:
        """Take out and return the cost of the next node of a name; the last one stays; None without any."""
        costs = self.backward.get(node)
        if not costs:
            return None
        # Nodes of one name run in the order in which they were counted.
        return costs.pop(0) if len(costs) > 1 else costs[0]

    def pop_total(self) -> Cost:
        """Return the cost of the operators called since the last time."""
        total = Cost(sum(cost.macs for cost in self.called), sum(cost.flops for cost in self.called))
        self.called.clear()
        return total


def count_costs_inside(
    context: amanda.OpContext, formulas: Mapping[str, Formula], complex_macs: int
) -> InnerCosts | None:
    """Run an op and its backward pass without data; return the costs of what they call, None on failure."""
    # complex_macs: real multiply-accumulates in a complex one.
    try:
        return _inner_costs(context, formulas, complex_macs) if can_run_without_data(context) else None
    except Exception:  # data decide, or there is no kernel without data: the op is reported by its name
        return None


def _inner_costs(context: amanda.OpContext, formulas: Mapping[str, Formula], complex_macs: int) -> InnerCosts:
    """Run an op and its backward pass on tensors without data; return the costs of what they call."""
    _REQUIRED.check()
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_leaves, tree_map_only

    inputs, differentiated = list(context.get_inputs()), iter(context["differentiated"])
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)]
    # The program's own fake tensors work in their own mode alone.
    modes_of_program = [value.fake_mode for value in tensors if isinstance(value, FakeTensor)]
    mode = modes_of_program[0] if modes_of_program else FakeTensorMode(allow_non_fake_inputs=True)
    differentiated_leaves: list[Tensor] = []

    def copy_without_data(tensor: Tensor) -> Tensor:
        """Return a tensor without data; of a differentiated one a clone, whose leaf goes into the list."""
        copy = _without_data(tensor, mode)
        # In the order of `context["differentiated"]`, which was read before `requires_grad` was hidden by
        # `detach`.
        if not next(differentiated):
            return copy
        differentiated_leaves.append(copy.requires_grad_())
        return copy.clone()  # an op in place may not write into a leaf

    costs = InnerCosts()
    with (
        torch._C.DisableTorchFunction(),
        # A mode of the program would see ops that the program never called.
        _disable_current_modes(),
        # In place of hooks of the program, which would see tensors that it never saved.
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        # Otherwise the JIT would take this run as a sample and specialise the program's function to its
        # shapes.
        torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
        torch.enable_grad(),
    ):
        inputs_without_data = tree_map_only(torch.Tensor, copy_without_data, inputs)
        # The counting mode is innermost, so it sees operators before the fake mode replaces their data.
        with mode, _counting_mode(costs, formulas, context["shape"], mode, complex_macs):
            results = tree_leaves(context.get_computation()(inputs_without_data))
            costs.forward = costs.pop_total()
            outputs = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
            if outputs and differentiated_leaves:
                _count_backward(outputs, differentiated_leaves, costs)
    return costs


def _without_data(tensor: Tensor, mode: Any) -> Tensor:
    """Return a tensor of a fake mode with the shape, strides, type and device of another."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(tensor, FakeTensor):
        return tensor.detach()
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        copy: Tensor = mode.from_tensor(tensor.detach())
        return copy
    with mode:  # what a subclass wraps is none of ours to read
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _count_backward(outputs: Sequence[Tensor], leaves: Sequence[Tensor], costs: InnerCosts) -> None:
    """Run the backward pass of outputs, and add the cost of each node to `costs`, under the node's name."""
    import torch

    def begin(grads: Any) -> None:
        costs.pop_total()

    def end(name: str, grad_inputs: Any, grad_outputs: Any) -> None:
        costs.backward.setdefault(name, []).append(costs.pop_total())

    hooks: list[Any] = []
    visited_nodes, nodes = set(), [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited_nodes:
            visited_nodes.add(node)
            # A node's operators run between its two hooks, so their costs are those of the node.
            hooks += [node.register_prehook(begin), node.register_hook(partial(end, node.name()))]
            nodes += [following for following, _ in node.next_functions]
    grads = [torch.ones_like(output) for output in outputs]
    # Not `backward`, which would write gradients into leaves.
    torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    for hook in hooks:
        hook.remove()


def _counting_mode(
    costs: InnerCosts, formulas: Mapping[str, Formula], shape: Callable[[Any], Any], fake_mode: Any,
    complex_macs: int,
) -> AbstractContextManager[Any]:  # fmt: skip
    """Return a mode that adds the cost of each operator that is dispatched to `costs`."""
    # fake_mode: tensors of the program that are met in it, as the weights of a module, lose their data.
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    def without_data(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else fake_mode.from_tensor(tensor)

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # else dynamo is imported

        def __torch_dispatch__(
            self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Call an operator without data, and add its cost, or its name to `costs.unknown`."""
            args, kwargs = tree_map_only(torch.Tensor, without_data, (args, kwargs or {}))
            result = op(*args, **kwargs)
            cost = _cost_of_call(op, args, kwargs, result, formulas, shape)
            values = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
            if cost is None:
                costs.unknown.add(op.overloadpacket.__name__)
            else:
                is_complex = any(value.is_complex() for value in values)
                costs.called.append(cost.with_complex(complex_macs) if is_complex else cost)
            return result

    return Counter()  # type: ignore[no-untyped-call]


def _cost_of_call(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, formulas: Mapping[str, Formula],
    shape: Callable[[Any], Any],
) -> Cost | None:  # fmt: skip
    """Return the cost of a call of an ATen operator, by its name or its tag; None where neither tells."""
    if op.namespace == "prim":
        return Cost()
    parameters = [argument.name for argument in op._schema.arguments]
    values = dict(zip(parameters, args, strict=False)) | dict(kwargs)
    inputs = [values[name] for name in parameters if name in values]
    name = op.overloadpacket.__name__
    formula = _formula_of_kernel(name, formulas)
    # PyTorch tags what is elementwise, which covers operators that no table has.
    if formula is None and _TAGS & {str(tag) for tag in op.tags}:
        formula = visits(1)
    outputs = result if isinstance(result, (list, tuple)) else [result]
    return None if formula is None else formula(Shapes.of(torch_word(name), inputs, outputs, shape, values))


def _formula_of_kernel(name: str, formulas: Mapping[str, Formula]) -> Formula | None:
    """Return the formula of a kernel, also of its variants in place and as a copy of a view.

    The gradient of an elementwise operator has the formula of that operator; None for others.
    """
    # In place and functional variants of an operator differ by a suffix.
    for spelling in (name, name.removesuffix("_"), name.removesuffix("_copy")):
        formula = formulas.get(spelling) or formulas.get(torch_word(spelling))
        if formula is not None:
            return formula
    stem, suffix, _ = name.removeprefix("_").partition("_backward")
    words = (torch_word(stem), torch_word(f"_{stem}")) if suffix else ()
    return next((formulas[word] for word in words if word in ELEMENTWISE), None)


_NODES_OF_VALUES = frozenset(f"prim::{name}" for name in """
    BroadcastSizes CallFunction CallMethod Constant DictConstruct GetAttr If ListConstruct ListUnpack Loop
    NumToTensor RaiseException TupleConstruct TupleIndex TupleSlice TupleUnpack Uninitialized Closure
    abs device dtype id isinstance layout max min ndim rangelist requires_grad shape unchecked_cast
    unchecked_unwrap_optional is_cuda is_meta is_nested is_sparse is_quantized
    """.split())  # fmt: skip
"""Nodes of TorchScript that make values of values, and run blocks."""
_READERS_OF_METADATA = frozenset(
    "aten::__is__ aten::__isnot__ aten::dim aten::is_contiguous aten::is_floating_point aten::len "
    "aten::numel aten::size aten::stride".split()
)
"""Operators of TorchScript alone that read no data of tensors."""
_CONTAINERS = ("prim::ListConstruct", "prim::DictConstruct")


def can_run_without_data(context: amanda.OpContext) -> bool:
    """Return True if an op is an operator of ATen, or a graph of TorchScript of such."""
    graph = getattr(getattr(context.get_op(), "_function", None), "inlined_graph", None)
    if graph is not None:
        return all(map(_can_node_run_without_data, _nodes(graph)))
    return _is_dispatched(f"aten::{context.get_forward_op_type()}")


def _is_dispatched(name: str) -> bool:
    """Return True for an operator of ATen that the dispatcher runs, where modes act, in any overload."""
    import torch

    operator = getattr(torch.ops.aten, name.partition("::")[2], None)
    overloads = [] if operator is None else operator.overloads()
    names = [name if overload == "default" else f"{name}.{overload}" for overload in overloads]
    return any(map(torch._C._dispatch_has_kernel, names))


def _nodes(block: Any) -> Iterator[Any]:
    """Yield the nodes of a block and of the blocks within."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def _can_node_run_without_data(node: Any) -> bool:
    """Return True for a node of TorchScript that can run without data, and without a trace in the program."""
    import torch

    kind = node.kind()
    if kind in _NODES_OF_VALUES:
        return True
    if not kind.startswith("aten::"):
        return False
    # Nodes of TorchScript have their schema as text alone.
    schema = torch._C.parse_schema(node.schema())
    aliases = [argument.alias_info for argument in schema.arguments]
    written_positions = [i for i, alias in enumerate(aliases) if alias and alias.is_write]
    name = f"{schema.name}.{schema.overload_name}".rstrip(".")
    if torch._C._dispatch_has_kernel(name):
        # A tensor is written where it has no data; a generator is the program's.
        return all(_is_of_tensors(schema.arguments[i]) for i in written_positions)
    if written_positions:  # a list, or a dict, which may be a module's
        inputs = list(node.inputs())
        return all(inputs[i].node().kind() in _CONTAINERS for i in written_positions)
    reads_data = any(map(_is_of_tensors, schema.arguments))
    makes_tensors = any(map(_is_of_tensors, schema.returns))
    return bool(schema.returns) and (kind in _READERS_OF_METADATA or not (reads_data or makes_tensors))


def _is_of_tensors(argument: Any) -> bool:
    return "Tensor" in str(argument.type)
