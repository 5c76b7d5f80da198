"""Costs of an op of PyTorch by what it calls inside, counted on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.flops._cost import Cost, Formula, Shapes
from amanda.tools.flops._formulas import visits
from amanda.tools.flops._scripted import may_run_again
from amanda.tools.flops._table import ELEMENTWISE
from amanda.tools.kit import RequiredNames
from amanda.tools.mapping import torch_word

if TYPE_CHECKING:
    from torch import Tensor

_REQUIRED = RequiredNames(
    "amanda.tools.flops",
    "torch",
    "torch:UntypedStorage._cdata",
    "torch:Tensor._nested_tensor_size",
    "torch:_C.DisableTorchFunction",
    "torch:_C.DisableTorchFunctionSubclass",
    "torch:_C._dispatch_has_kernel",
    "torch:ops.aten.add.Tensor._schema",
    "torch._subclasses.fake_tensor:FakeTensor",
    "torch._subclasses.fake_tensor:FakeTensorMode",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils._pytree:tree_leaves",
    "torch.utils._pytree:tree_map_only",
)

_TAGS = frozenset({"Tag.pointwise", "Tag.reduction"})
"""Of operators that visit each element once."""

COMPILED = "CppFunction"
"""Name of a node that computes the gradient of a whole region of TorchScript."""


@dataclass
class Inside:
    """The cost of an op, and of each node of its backward pass by the node's name, in order of execution.

    unknown: names of the ops inside that no formula knows.
    """

    forward: Cost = field(default_factory=Cost)
    backward: dict[str, list[Cost]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    _called: list[Cost] = field(default_factory=list)

    @property
    def backward_macs(self) -> int:
        """Multiply-accumulates of the nodes that were not asked for."""
        return sum(cost.macs for costs in self.backward.values() for cost in costs)

    def next_of(self, node: str) -> Cost | None:
        """Return the cost of the next node of a name; the last one stands for those that follow."""
        costs = self.backward.get(node)
        if not costs:
            return None
        return costs.pop(0) if len(costs) > 1 else costs[0]

    def add(self, name: str, cost: Cost | None) -> None:
        """Note a call of an operator."""
        if cost is None:
            self.unknown.add(name)
        else:
            self._called.append(cost)

    def take(self) -> Cost:
        """Return the cost of what was called since the last time."""
        total = Cost(sum(one.macs for one in self._called), sum(one.flops for one in self._called))
        self._called.clear()
        return total


def inside(context: amanda.OpContext, formulas: Mapping[str, Formula], complex_macs: int) -> Inside | None:
    """Run an op and its backward pass without data and add up what they call; None where that fails.

    complex_macs: multiply-accumulates of real numbers in one of complex numbers.
    """
    try:
        return _counted(context, formulas, complex_macs) if may_run_again(context) else None
    except Exception:  # data decide, or there is no kernel without data: the op is reported by its name
        return None


def _counted(context: amanda.OpContext, formulas: Mapping[str, Formula], complex_macs: int) -> Inside:
    _REQUIRED.check()
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    inputs, wanted = list(context.get_inputs()), iter(context["differentiated"])
    given = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
    modes = [one.fake_mode for one in given if isinstance(one, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)
    leaves: list[Tensor] = []

    def twin(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            made = tensor.detach()
        elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            with mode:  # what a subclass wraps is none of ours to read
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
        else:
            made = mode.from_tensor(tensor.detach())
        if not next(wanted):
            return made
        leaves.append(made.requires_grad_())
        return made.clone()  # an op in place may not write into a leaf

    found = Inside()
    with _unseen(), torch.enable_grad():
        twins = tree_map_only(torch.Tensor, twin, inputs)
        with mode, _counter(found, formulas, context["shape"], mode, complex_macs):
            made = tree_leaves(context.get_computation()(twins))
            found.forward = found.take()
            outputs = [one for one in made if isinstance(one, torch.Tensor) and one.requires_grad]
            if outputs and leaves:
                _count_backward(outputs, leaves, found)
    return found


@contextmanager
def _unseen() -> Iterator[None]:
    """Keep what runs from the program's modes, its hooks on saved tensors, and the profiles of the JIT."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
    ):
        yield


def _count_backward(outputs: Sequence[Tensor], leaves: Sequence[Tensor], found: Inside) -> None:
    import torch

    def begin(grads: Any) -> None:
        found.take()

    def end(name: str, grad_inputs: Any, grad_outputs: Any) -> None:
        found.backward.setdefault(name, []).append(found.take())

    hooks: list[Any] = []
    seen, nodes = set(), [one.grad_fn for one in outputs]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            hooks += [node.register_prehook(begin), node.register_hook(partial(end, node.name()))]
            nodes += [one for one, _ in node.next_functions]
    grads = [torch.ones_like(one) for one in outputs]
    torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    for hook in hooks:
        hook.remove()


def _counter(
    found: Inside, formulas: Mapping[str, Formula], shape: Callable[[Any], Any], fake: Any, complex_macs: int
) -> AbstractContextManager[Any]:
    """Return a mode that adds what is dispatched to `found`.

    fake: the mode; tensors of the program that are met in it, as the weights of a module, lose their data.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    def without_data(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else fake.from_tensor(tensor)

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # else dynamo is imported

        def __torch_dispatch__(
            self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given: Any = tree_map_only(torch.Tensor, without_data, (args, kwargs or {}))
            made = op(*given[0], **given[1])
            cost = _cost_of_call(op, given[0], given[1], made, formulas, shape)
            values = (one for one in tree_leaves(given) if isinstance(one, torch.Tensor))
            if cost is not None and any(one.is_complex() for one in values):
                cost = cost.with_complex(complex_macs)
            found.add(op.overloadpacket.__name__, cost)
            return made

    return Counter()  # type: ignore[no-untyped-call]


def _cost_of_call(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Any,
    formulas: Mapping[str, Formula],
    shape: Callable[[Any], Any],
) -> Cost | None:
    """Return the cost of a call of an ATen operator, by its name or its tag; None where neither tells."""
    if op.namespace == "prim":
        return Cost()
    parameters = [one.name for one in op._schema.arguments]
    values = dict(zip(parameters, args, strict=False)) | dict(kwargs)
    inputs = [values[name] for name in parameters if name in values]
    name = op.overloadpacket.__name__
    formula = _formula(name, formulas)
    if formula is None and _TAGS & {str(tag) for tag in op.tags}:
        formula = visits(1)
    outputs = made if isinstance(made, (list, tuple)) else [made]
    return None if formula is None else formula(Shapes.of(torch_word(name), inputs, outputs, shape, values))


def _formula(name: str, formulas: Mapping[str, Formula]) -> Formula | None:
    """Return the formula of a kernel: in place, a copy of a view, or the gradient of what is elementwise."""
    for spelling in (name, name.removesuffix("_"), name.removesuffix("_copy")):
        formula = formulas.get(spelling) or formulas.get(torch_word(spelling))
        if formula is not None:
            return formula
    stem, found, _ = name.removeprefix("_").partition("_backward")
    words = (torch_word(stem), torch_word(f"_{stem}")) if found else ()
    return next((formulas[one] for one in words if one in ELEMENTWISE), None)
