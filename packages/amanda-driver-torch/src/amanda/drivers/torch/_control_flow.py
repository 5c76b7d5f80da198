"""Control flow of torch (`cond`, `while_loop`, `scan`, `map`), whose bodies run op by op in scopes.

Torch compiles each call of these ops with dynamo, and records the gradient of a body with make_fx: no tool
sees the recorded ops, and no routine acts on them. In scopes the bodies run as Python under autograd.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from amanda import interceptor
from amanda.backend import Patches, State, report_unseen
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ._levels import in_transform

ROUNDED_OTHERWISE = (
    "its body ran op by op under autograd, not as make_fx records it: numbers may be rounded otherwise than "
    "without tools, such as the gradient of a weight, which is summed over the steps in another order"
)
UNREAD = "weights that only the branch not taken reads have no gradient, rather than one of zeros"


def run_control_flow_op_by_op(patches: Patches) -> None:
    """Make torch's control flow run its bodies op by op in scopes, from the import of each op on."""
    for module, (class_name, run_op) in _OPS.items():
        patches.when_imported(module, functools.partial(_replace_call, patches, module, class_name, run_op))


def _replace_call(patches: Patches, module: str, class_name: str, run_op: Callable[..., Any]) -> None:
    """Make calls of a higher-order op go to `run_op` where tools see the program's ops.

    Does nothing if this torch lacks the class of the op.
    """
    op_class = getattr(sys.modules[module], class_name, None)
    if op_class is None:
        return
    original = vars(op_class)["__call__"]

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run_op(*args, **kwargs) if _runs_op_by_op() else original(self, *args, **kwargs)

    patches.set(op_class, "__call__", call)


def _runs_op_by_op() -> bool:
    """Return True if tools see the program's ops, and neither a mode nor a transform takes the call."""
    activation = interceptor.active()
    if activation is None or type(activation.state) is not State:  # but a recorder of graph mode
        return False
    return not torch._C._len_torch_dispatch_stack() and not in_transform()


def is_control_flow(function: Any) -> bool:
    """Return True for a function within torch that calls a higher-order op, and that torch compiles."""
    is_inner = "<locals>" in getattr(function, "__qualname__", "")
    return is_inner and getattr(function, "__module__", "") in _COMPILING_MODULES


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    """Run the branch that is taken, and return its outputs.

    Tensors that only the other branch reads get zeros as gradient, as in torch: with autograd on, that branch
    runs too, on tensors without data.
    """
    branch, skipped_branch = (true_fn, false_fn) if pred else (false_fn, true_fn)
    if not torch.is_grad_enabled():
        return branch(*operands)
    operands = _views_that_sum_gradients(operands)
    outputs = branch(*operands)
    return _with_zero_gradients(outputs, operands, _tensors_read_by(skipped_branch, operands))


def _while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (), **options: Any,
) -> Any:  # fmt: skip
    """Run the body while the condition holds; return the carried values in the form that the body gives.

    They are clones of the inputs if the body never runs.  Carried inputs on which no result depends get zeros
    as gradient.  Reports rounding.  options: of torch's op, unused.
    """
    operands = _views_that_sum_gradients(tuple(carried_inputs))
    values = operands
    carried_results: Any = None
    while cond_fn(*values, *additional_inputs):
        carried_results = body_fn(*values, *additional_inputs)
        values = tuple(tree_leaves(carried_results))
    if carried_results is None:
        return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
    _report_rounding("while_loop", values)
    return _with_zero_gradients(carried_results, operands)


def _scan(
    combine_fn: Callable[..., Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    """Call the function for each row of `xs`; return the last carry and the stacked outputs.

    They have the form of the function's results.  Operands on which no result depends get zeros as gradient.
    Reports rounding.
    """
    operands = _views_that_sum_gradients((tuple(init), tuple(xs)))
    carry, stacked_rows = operands
    outputs_by_step: list[list[Any]] = []
    form: Any = None  # tree spec of what the function returns, the same for each step
    for row in zip(*(value.unbind(0) for value in stacked_rows), strict=True):
        results, form = tree_flatten(combine_fn(*carry, *row, *additional_inputs))
        carry = tuple(results[: len(init)])
        outputs_by_step.append(results[len(init) :])
    _report_rounding("scan", carry)
    carry_and_outputs = tree_unflatten([*carry, *_stack_steps(outputs_by_step)], form)
    return _with_zero_gradients(carry_and_outputs, operands)


def _map(f: Callable[..., Any], xs: Sequence[Any], pos_args: Sequence[Any]) -> Any:
    """Call the function for each row of `xs`; return the stacked results in the form of the function's.

    Operands on which no result depends get zeros as gradient.  Reports rounding.
    """
    operands = _views_that_sum_gradients((tuple(xs), tuple(pos_args)))
    stacked_rows, shared_values = operands
    results_by_row: list[list[Any]] = []
    form: Any = None  # tree spec of what the function returns, the same for each row
    row_count = len(stacked_rows[0])
    repeated_values = [_repeat_for_rows(value, row_count) for value in shared_values]
    for i, row in enumerate(zip(*(value.unbind(0) for value in stacked_rows), strict=True)):
        results, form = tree_flatten(f(*row, *(values[i] for values in repeated_values)))
        results_by_row.append(results)
    _report_rounding("map_impl", results_by_row[-1])
    return _with_zero_gradients(tree_unflatten(_stack_steps(results_by_row), form), operands)


def _repeat_for_rows(value: Any, row_count: int) -> Sequence[Any]:
    """Return an argument that all rows of `map` share as many times as there are rows.

    A computed tensor that needs a gradient is repeated by views of one expanded tensor, at which autograd
    sums the gradients of all rows at once, as torch does.
    """
    if not _needs_gradient(value) or isinstance(value, torch.nn.Parameter) or not torch.is_grad_enabled():
        return [value] * row_count
    with interceptor.Suspension():
        return value.expand(row_count, *value.shape).unbind(0)  # type: ignore[no-any-return]


def _stack_steps(results_by_step: Sequence[Sequence[Any]]) -> list[Any]:
    """Return each result with those of all steps stacked; a result that is no tensor is the last step's."""
    return [
        torch.stack(values_of_steps) if isinstance(values_of_steps[-1], torch.Tensor) else values_of_steps[-1]
        for values_of_steps in zip(*results_by_step, strict=True)
    ]


def _views_that_sum_gradients(operands: Any) -> Any:
    """Return a body's operands with views in the place of tensors that need a gradient.

    At a view autograd sums the gradients of the body before any others, as torch does: the order decides the
    last bits.  Parameters stay, so that tools know them; autograd sums their gradients in one place.
    Without autograd the operands are returned as they are.
    """

    def view(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            return value
        return value.view_as(value) if value.requires_grad else value

    if not torch.is_grad_enabled():
        return operands
    with interceptor.Suspension():
        return tree_map(view, operands)


class _ZeroGradients(torch.autograd.Function):
    """Identity on the first inputs, outputs of an op; the unread inputs after them get zeros as gradient."""

    @staticmethod
    def forward(ctx: Any, output_count: int, *tensors: torch.Tensor) -> Any:
        """Return views of the first `output_count` tensors; the others are unread."""
        ctx.forms_of_unread = [
            (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[output_count:]
        ]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:output_count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return no gradient for the count, those of the outputs as they are, and zeros for unread inputs.

        An unread input that needs no gradient gets None.
        """
        unread_need_gradient = ctx.needs_input_grad[1 + len(gradients) :]
        with interceptor.Suspension():
            zeros = [
                torch.zeros(shape, dtype=dtype, device=device) if needs_gradient else None
                for (shape, dtype, device), needs_gradient in zip(
                    ctx.forms_of_unread, unread_need_gradient, strict=True
                )
            ]
        return None, *gradients, *zeros


def _with_zero_gradients(
    outputs: Any, operands: Any, candidates: Iterable[torch.Tensor] | None = None
) -> Any:
    """Return outputs that all need a gradient, and through which tensors that none depends on get zeros.

    candidates: tensors that get zeros if no output depends on them; None for the operands.
    The outputs stay as they are with autograd off, if no operand needs a gradient and no candidate is unread,
    or if all need a gradient already and no candidate is unread.
    """
    if not torch.is_grad_enabled():
        return outputs
    leaves, form = tree_flatten(outputs)
    positions = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _can_need_gradient(leaf)
    ]
    results = [leaves[i] for i in positions]
    trained_operands = [value for value in tree_leaves(operands) if _needs_gradient(value)]
    unread_tensors = _tensors_without_path(trained_operands if candidates is None else candidates, results)
    all_need_gradient = all(result.requires_grad for result in results)
    if not unread_tensors and (not trained_operands or all_need_gradient):
        return outputs
    # If none is unread, a result that depends on no operand still gets a node, behind which are the operands.
    tensors_with_zeros = unread_tensors or trained_operands
    with interceptor.Suspension():
        new_results: Any = _ZeroGradients.apply(len(results), *results, *tensors_with_zeros)  # type: ignore[no-untyped-call]
    for i, result in zip(positions, new_results, strict=True):
        leaves[i] = result
    return tree_unflatten(leaves, form)


def _tensors_without_path(tensors: Iterable[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors on which no result depends, by autograd's graph."""
    reached_ids = {id(value) for value in _nodes_and_leaves_behind(results)}
    return [tensor for tensor in tensors if id(_node_or_leaf(tensor)) not in reached_ids]


def _can_need_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _node_or_leaf(tensor: torch.Tensor) -> Any:
    """Return what autograd's graph has for a tensor: its node, or the tensor itself if it is a leaf."""
    return tensor if tensor.grad_fn is None else tensor.grad_fn


def _nodes_and_leaves_behind(tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes of autograd that lead to some tensors, and the leaves at which these begin."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    yield from (tensor for tensor in tensors if tensor.grad_fn is None)
    visited: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node not in visited:
            visited.add(node)
            yield node
            if hasattr(node, "variable"):  # AccumulateGrad
                yield node.variable
            waiting += [child for child, _ in node.next_functions if child is not None]


class _ReadTensors(TorchFunctionMode):
    """Mode that collects, by `id`, the arguments of torch's functions that need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_by_id: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the arguments that need a gradient, unless autograd is off; return the function's result."""
        if torch.is_grad_enabled():
            for value in tree_leaves((args, kwargs)):
                if _needs_gradient(value):
                    self.tensor_by_id[id(value)] = value
        return func(*args, **(kwargs or {}))


def _tensors_read_by(branch: Callable[..., Any], operands: Any) -> list[torch.Tensor]:
    """Return the operands and the captured tensors that need a gradient and that a branch reads.

    The branch runs on tensors without data, as dynamo runs it without tools.  If it fails there, the list is
    empty, and a report says that weights of the branch get no zeros.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    operand_by_fake_id: dict[int, torch.Tensor] = {}

    def without_data(value: Any) -> Any:
        """Return a fake tensor for an operand, noted by the `id` of the fake; any other value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        fake: torch.Tensor = fake_mode.from_tensor(value.detach(), static_shapes=True)
        operand_by_fake_id[id(fake)] = value
        return fake.requires_grad_(value.requires_grad)

    try:
        with interceptor.Suspension():
            arguments = tree_map(without_data, operands)
            with _ReadTensors() as read_tensors, fake_mode:
                branch(*arguments)
    except Exception:  # of any kind: the branch may do what only values allow
        report_unseen("cond", UNREAD)
        return []
    tensors = [operand_by_fake_id.get(id(tensor), tensor) for tensor in read_tensors.tensor_by_id.values()]
    # A tensor without data that is no operand is a result within the branch.
    return [tensor for tensor in tensors if not hasattr(tensor, "fake_mode")]


def _report_rounding(name: str, results: Sequence[Any]) -> None:
    """Report that numbers may be rounded otherwise, if there will be gradients."""
    if any(map(_needs_gradient, results)):
        report_unseen(name, ROUNDED_OTHERWISE)


_PACKAGE = "torch._higher_order_ops"
_OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{_PACKAGE}.cond": ("CondOp", _cond),
    f"{_PACKAGE}.while_loop": ("WhileLoopOp", _while_loop),
    f"{_PACKAGE}.scan": ("ScanOp", _scan),
    f"{_PACKAGE}.map": ("MapImpl", _map),
}
_COMPILING_MODULES = frozenset({*_OPS, f"{_PACKAGE}.associative_scan", "torch.nn.attention.flex_attention"})
