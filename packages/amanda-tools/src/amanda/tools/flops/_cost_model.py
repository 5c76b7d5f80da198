"""The cost of ops and of their backward ops, and the facts that decide it: formula, shapes, bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import amanda
from amanda import interceptor
from amanda.tools.flops._by_shape import AnyContext, ShapedContext
from amanda.tools.flops._cost import Components, Cost, Extents, Formula, Shapes, are_known, components, size
from amanda.tools.flops._formulas import attention_backward, no_cost
from amanda.tools.flops._inside import COMPILED, InnerCosts, count_costs_inside
from amanda.tools.flops._table import (
    CONTRACTIONS,
    COPIES,
    ELEMENTWISE,
    FORMULAS,
    MOVES,
    bytes_of,
    count_bytes,
    factors_of_node,
    gradients_of_factors,
)
from amanda.tools.kit import leaves, torch_tensors
from amanda.tools.mapping import local, share, torch_shape


def write_pytorch_facts(context: amanda.OpContext) -> None:
    """Write into the context of an op of PyTorch what costs depend on, and the functions that compute it.

    Parameters that it reads, gradients that it takes, complex numbers, views, and whether it is a function:
    an autograd.Function, or an operator of a library; either may call ops in Python.  The first call counts.
    """
    # A later analysis finds these facts, and may see the value of a tool, as a masked weight, in the place of
    # a parameter: the first counts.
    if context.is_backward() or context["backward_macs"] is _backward_macs:
        return
    from torch._C import DisableTorchFunction

    inputs = context.get_inputs()
    # An optimizer reads parameters to update them, which are not parameters of a layer.
    parameters = _parameters_read(context, inputs) if context["phase"] == "forward" else ()
    context["parameters_read"] = [(interceptor.ordinal(value), local(value).numel()) for value in parameters]
    context["backward_macs"] = _backward_macs
    context["batch_first"] = bool(context.get_attrs().get("batch_first"))
    context["extents"] = extents
    context["run_inside"] = count_costs_inside
    context["is_function"] = isinstance(context.get_op(), type) or "::" in context.get_forward_op_type()
    # Attributes of a tensor subclass may run code of the program.
    with DisableTorchFunction():
        tensors = torch_tensors(inputs)
        context["differentiated"] = [value.requires_grad for value in tensors]
        context["is_complex"] = any(value.dtype.is_complex for value in tensors)
    context["is_view"] = is_view


def _parameters_read(context: amanda.OpContext, inputs: Sequence[Any]) -> Iterator[Any]:
    """Yield the parameters that an op of PyTorch reads, and not those of which it reads a view."""
    from torch.nn import Parameter

    variables: Iterable[Any] = leaves(inputs)
    if not context.is_eager():  # its values stand for parameters, which the context has
        variables = (
            context.get_variable(i, item)
            for i, value in enumerate(inputs)
            for item, tensor in (enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)])
            if getattr(tensor, "_base", None) is None
        )
    return (variable for variable in variables if isinstance(variable, Parameter))


def extents(value: Any) -> Any:
    """Return a tensor's shape, of a nested tensor those of its components; None of what is not a tensor."""
    import torch

    if not isinstance(value, torch.Tensor):
        return torch_shape(value)
    with torch._C.DisableTorchFunction(), amanda.disabled():
        try:
            return Components(_component_shapes(value)) if value.is_nested else torch_shape(value)
        except (NotImplementedError, RuntimeError):  # the lengths have no values, as on the device meta
            return torch_shape(value)


def _component_shapes(nested: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the components of a nested tensor."""
    import torch

    # The older strided layout has its sizes in one tensor, the jagged one in offsets.
    if nested.layout is not torch.jagged:
        yield from map(tuple, nested._nested_tensor_size().tolist())
        return
    lengths, ragged = nested.lengths(), nested._ragged_idx
    outer, inner = nested.shape[1:ragged], nested.shape[ragged + 1 :]
    for length in (nested.offsets().diff() if lengths is None else lengths).tolist():
        yield (*outer, length, *inner)


def is_view(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Return True if all outputs lie in the memory of an input; False without outputs."""
    import torch

    with torch._C.DisableTorchFunction():
        input_storages = {_storage(local(tensor)) for tensor in torch_tensors(inputs)}
        storages = [_storage(local(tensor)) for tensor in torch_tensors(outputs)]
    # Outputs without memory of their own, such as sparse ones, count as copies.
    return bool(storages) and None not in storages and input_storages.issuperset(storages)


def _storage(tensor: Any) -> int | None:
    """Return the address of a tensor's memory; None for a tensor without a single one."""
    import torch

    try:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass, with its own methods, need not know
            # The address of the C++ object, which all views of one memory share.
            return int(torch.Tensor.untyped_storage(tensor)._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones have several
        return None


_PRODUCTS_OF_COMPLEX_CONVOLUTION = 3
"""Convolutions of real numbers by which torch computes one of complex numbers."""


def _backward_macs(context: amanda.OpContext) -> int:
    """Return the multiply-accumulates of a node: of the products that make each gradient that it gives."""
    outgoing, incoming = context.get_grad_inputs() or [], context.get_grad_outputs() or []
    incoming_grad = next((grad for grad in incoming if grad is not None), None)
    if incoming_grad is None:
        return 0  # where no gradient enters, none leaves
    is_complex = "complex" in str(incoming_grad.dtype)  # of a tensor, or of extents
    # Positions of the gradients of the two factors of a matrix product, among those that the node gives.
    factors = factors_of_node(context.get_backward_op().__name__)
    if factors is None:
        layer_macs = _macs_of_recurrent_layer(context)
        return _macs_of_factors(context, is_complex) if layer_macs is None else layer_macs
    first_grad, second_grad = (outgoing[i] if i < len(outgoing) else None for i in factors)
    result_size, macs = prod(incoming_grad.shape), 0
    if first_grad is not None:
        macs += round(result_size * (first_grad.shape[-1] if first_grad.dim() else 1) * share([first_grad]))
    if second_grad is not None:
        # The gradient of a factor (k, m) is a product over the n rows of the result: n k m again.
        depth = second_grad.shape[-2:][0] if second_grad.dim() else 1  # of a vector its length
        macs += round(result_size * depth * share([second_grad]))
    return macs * (context.get("complex_products", 1) if is_complex else 1)


def _macs_of_factors(context: amanda.OpContext, is_complex: bool) -> int:
    """Return the op's own multiply-accumulates, times the products that make the node's gradients."""
    outgoing, cost = context.get_grad_inputs() or [], context.get("cost")
    macs = cost.macs if cost else 0
    if context["is_complex"] and not is_complex:
        # The forward cost counts all real products of a complex convolution, a real gradient needs one of
        # them.
        macs = round(macs / _PRODUCTS_OF_COMPLEX_CONVOLUTION)
    if context.get_backward_op().__name__.startswith("ConvolutionBackwardBackward"):
        # Double backward: gradients of data and kernel enter, those of the output, the data and the kernel
        # leave.  Each that enters is convolved for the gradient of the output, and once more for that of the
        # other.
        incoming_count = sum(grad is not None for grad in (context.get_grad_outputs() or [])[:2])
        is_present = [grad is not None for grad in outgoing[:3]]
        return int(incoming_count * is_present[0] + sum(is_present[1:])) * macs
    return macs * gradients_of_factors(context["backward_type"].removesuffix("_backward"), outgoing)


def _macs_of_recurrent_layer(context: amanda.OpContext) -> int | None:
    """Return the multiply-accumulates of a node of oneDNN's LSTM, one layer one way; None for other nodes.

    Its gradients are those of the input, the weights of the input and of the state, two biases, and states.
    The gradient of the state goes back through every step but the first, whose state is given.
    """
    if not context.get_backward_op().__name__.startswith("MkldnnRnnLayer"):
        return None
    # Gradients that the node gives.
    outgoing, input_shape = context.get_grad_inputs() or [], context.get_inputs()[0].shape
    batch, steps = input_shape[:2] if context["batch_first"] else input_shape[1::-1]
    hidden = next(grad for grad in context.get_grad_outputs() or [] if grad is not None).shape[-1]
    data, data_weights, state_weights, _, _, state = outgoing[:6]
    macs_per_row = sum(grad.numel() for grad in (data_weights, state_weights) if grad is not None)
    if data is not None:
        macs_per_row += data.shape[-1] * _GATES * hidden
    state_macs = _GATES * hidden**2 * batch * (steps if state is not None else steps - 1)
    return int(steps * batch * macs_per_row + state_macs)


_GATES = 4
"""Of an LSTM."""

LIBRARIES = ("c10d::", "_c10d_functional", "fsdp::")
"""Of ops that move tensors between processes, which cost bytes alone."""

OF_NESTED = ("_transformer_encoder_layer_fwd",)
"""Types whose formulas read nested tensors, which have no shape, themselves."""


def formula_of(names: tuple[str, str]) -> Formula | None:
    """Return the built-in formula of an op by its names, the framework's and the word; None without one."""
    if names[0].startswith(LIBRARIES):
        return no_cost
    if names[0].endswith("Dataset") or "DatasetV" in names[0]:
        return no_cost  # what its functions compute is in no op
    return next((FORMULAS[name] for name in names if name in FORMULAS), None)


def is_free(context: amanda.OpContext, names: tuple[str, str]) -> bool:
    """Return True for an op that computes nothing and moves no bytes, whatever its shapes are.

    Of an op that may copy, `is_always_or_never_view` has been checked.
    """
    if context["in_place"] or names[1] not in MOVES or formula_of(names) is not no_cost:
        return False
    return COPIES.isdisjoint(names) or bool(context["is_view"]((), ()))


def shapes_of(context: AnyContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> Shapes:
    """Return the shapes that a formula of the op is given."""
    return Shapes.of(
        context["type"], inputs, outputs, context["shape"], context.get_attrs(),
        context["weight_index"], context["weight_layout"],
    )  # fmt: skip


def has_shapes(names: tuple[str, str], shapes: Shapes) -> bool:
    """Return True if a formula has all that it reads."""
    return names[0] in OF_NESTED or shapes.are_known


def bytes_moved(context: AnyContext, names: tuple[str, str], outputs: Sequence[Any]) -> int:
    """Return the bytes that one execution reads and writes; 0 for an op that gives a view."""
    inputs, in_place = context.get_inputs(), context["in_place"]
    if not in_place and names[1] in MOVES and context["is_view"](inputs, outputs):
        return 0
    input_bytes, output_bytes = ([bytes_of(context, [value]) for value in side] for side in (inputs, outputs))
    return count_bytes(names, input_bytes, output_bytes, in_place)


# Names of PyTorch's nodes that give a view of the gradient that enters; cached, since each node is asked.
_gives_view = lru_cache(1024)(
    re.compile(
        r"(Unsafe)?(Adjoint|Alias|Mt|MT|Permute|Squeeze|T|Transpose|Unsqueeze|View)Backward\d*"
    ).fullmatch
)


def gradient_bytes(context: AnyContext, grads: Sequence[Any]) -> int:
    """Return the bytes that a backward op moves to give these gradients; 0 where it gives a view."""
    if _gives_view(context.get_backward_op().__name__):
        return 0
    return bytes_of(context, [*(context.get_grad_outputs() or []), *grads])


def write_default_facts(context: amanda.OpContext) -> None:
    """Write into the context of an op what `write_pytorch_facts` does, as far as any framework tells it."""
    # Backward ops share the context of their forward op: what is there already was written at that op.
    if "parameters_read" not in context:
        weight_index = context["weight_index"]
        context["parameters_read"] = []
        if weight_index is not None:
            elements = size(context["shape"](context.get_inputs()[weight_index]))
            context["parameters_read"] = [(("weight", context.get_op_id()), elements)]
        context["backward_macs"] = _macs_of_each_gradient
        context["extents"] = context["shape"]
        context["run_inside"] = None
        context["is_function"] = False
        context["is_view"] = lambda inputs, outputs: False


def _macs_of_each_gradient(context: amanda.OpContext) -> int:
    """Return as many as the op takes, for the gradient of each factor that a backward op gives."""
    kind = context["backward_type"].removesuffix("_backward")
    count = gradients_of_factors(kind, context.get_grad_inputs() or [])
    return count * (context["cost"].macs if context["cost"] else 0)


NO_WORK = MOVES | {"accumulate_grad"}

logger = logging.getLogger("amanda")


class OpCostModel:
    """Compute costs by a program's own formulas and by the built-in ones.

    custom: formulas by a word, or a framework's name of an op.  complex_macs: real MACs in a complex one.
    """

    def __init__(self, custom: Mapping[str, Formula], complex_macs: int) -> None:
        self.custom, self._complex_macs = dict(custom), complex_macs

    def complex_products(self, context: AnyContext) -> int:
        """Return the number of real multiply-accumulates in one of the op: 1, or more for complex numbers."""
        # Integers take no part: an index beside complex numbers does not make a product half real.
        dtypes = [str(context["dtype"](value)) for value in leaves(context.get_inputs())]
        floats = [name for name in dtypes if name.startswith(("complex", "float", "bfloat"))]
        are_complex = [name.startswith("complex") for name in floats]
        if not any(are_complex):
            return 1
        # Complex by real takes two real products, whatever the method.
        return self._complex_macs if all(are_complex) else min(self._complex_macs, 2)

    def cost_of_op(
        self, names: tuple[str, str], shapes: Shapes, source: str, products: int = 1
    ) -> Cost | None:
        """Return an op's cost by a formula; None without one or shapes, and, with a warning, if it fails."""
        # products: as `complex_products` gives them.
        # The program's own formulas come first, and their errors reach the program.
        custom_formula = next((self.custom[name] for name in names if name in self.custom), None)
        formula = custom_formula or formula_of(names)
        if formula is no_cost:
            return Cost()
        if formula is None or not has_shapes(names, shapes):
            return None
        try:
            component_costs = [
                (formula(replace(shapes, inputs=inputs, outputs=outputs)), count)
                for (inputs, outputs), count in components([shapes.inputs, shapes.outputs])
            ]
        except Exception as error:  # an unusual call is not worth the user's program
            if custom_formula is not None:
                raise
            logger.warning("no FLOPs for %s at %s: %r", names[0], source, error)
            return None
        total = _total(component_costs)
        # A formula of the program counts complex products as the program likes.
        return total if custom_formula or products == 1 else total.with_complex(products)

    def inner_costs_of(self, context: AnyContext) -> InnerCosts | None:
        """Run an op once without data; return the costs of the operators it calls, kept in the context.

        None where the framework cannot run an op without data, and where that fails.
        """
        if "inner_costs" not in context:
            run = context["run_inside"]
            context["inner_costs"] = run and run(context, {**FORMULAS, **self.custom}, self._complex_macs)
        inner_costs: InnerCosts | None = context["inner_costs"]
        return inner_costs

    def cost_of_backward_op(
        self, context: AnyContext, backward_type: str, gradients: Sequence[Any]
    ) -> Cost | None:
        """Return the cost of a backward op that gives these gradients; None if it is not known.

        The cost of a node within a composite op is taken out of the op's inner costs.
        """
        word, shape = backward_type.removesuffix("_backward"), context["shape"]
        if backward_type in self.custom:
            return self.custom[backward_type](shapes_of(context, context.get_grad_outputs() or [], gradients))
        if word == "scaled_dot_product_attention":
            return _attention_backward_cost(context, share(gradients))
        # Also double backward: its type has the suffix twice, and its products are those of the same op.
        if word.removesuffix("_backward") in CONTRACTIONS:
            return Cost.of_macs(context["backward_macs"](context))
        if word in NO_WORK:
            return Cost()
        # A composite op, such as a loss, has a node for each inner operator, which were run without data.
        if word not in ELEMENTWISE and context.get_backward_order() == 1:
            inner_costs, node_name = self.inner_costs_of(context), context.get_backward_op().__name__
            cost = inner_costs.pop_cost_of(node_name) if inner_costs else None
            if cost is not None:
                return cost
            if inner_costs and node_name == COMPILED and inner_costs.backward_macs:
                return None  # how many of its products there are, torch does not tell
            # The op itself, and no inner operator: of a formula for the whole op no gradient's cost follows.
            has_own_formula = context["run_inside"] and word in FORMULAS
            if word == context["type"] and (context["cost"] is None or has_own_formula):
                return None
        # The gradient of what is elementwise takes about one operation for each element.
        return Cost(0, sum(size(shape(local(grad))) for grad in gradients))

    def cost_of_gradients(
        self, context: amanda.OpContext, names: tuple[str, str], op_shapes: Shapes, incoming: Sequence[Any],
        outgoing: Sequence[Any],
    ) -> Cost | None:  # fmt: skip
        """Return the cost of a backward op by shapes that are known as it runs; None where they are not.

        names, op_shapes: of its op.  incoming, outgoing: shapes of gradients.
        """
        if not are_known([*op_shapes.inputs, *op_shapes.outputs, *incoming, *outgoing]):
            return None
        costs, dtype = [], context["element_type"]
        sides = [op_shapes.inputs, op_shapes.outputs, incoming, outgoing]
        for (inputs, outputs, *grads), count in components(sides):
            component_shapes = replace(op_shapes, inputs=inputs, outputs=outputs)
            shaped_context = ShapedContext(
                context, [[_stand_in(shape, dtype) for shape in side] for side in (inputs, outputs, *grads)]
            )
            forward_cost = self.cost_of_op(names, component_shapes, "", context["complex_products"])
            shaped_context["cost"] = forward_cost
            present_grads = [grad for grad in shaped_context.get_grad_inputs() if grad is not None]
            cost = self.cost_of_backward_op(shaped_context, context["backward_type"], present_grads)
            if cost is None:
                return None
            costs.append((cost, count))
        return _total(costs)


def _total(costs: Sequence[tuple[Cost, int]]) -> Cost:
    macs = sum(macs * count for (macs, _), count in costs)
    return Cost(macs, sum(flops * count for (_, flops), count in costs))


def _stand_in(shape: Any, dtype: Any) -> Any:
    """Return what stands for a tensor of a shape and an element type, or for a list of tensors."""
    if isinstance(shape, list):
        return [_stand_in(inner, dtype) for inner in shape]
    return None if shape is None else Extents(shape, dtype)


def _attention_backward_cost(context: AnyContext, part: float) -> Cost | None:
    """Return the cost of a fused backward kernel, which gives gradients of queries, keys and values.

    0 where no gradient enters; None where a shape is not known.  part: the share of this process.
    """
    incoming = next((value for value in context.get_grad_outputs() or [] if value is not None), None)
    if incoming is None:
        return Cost()
    is_attention_op = context["type"] == "scaled_dot_product_attention"
    # A gradient has the shape of its input: it stands for an input that the context does not have.
    inputs = context.get_inputs()[:3] if is_attention_op else [None] * 3
    outgoing = [*(context.get_grad_inputs() or []), None, None, None]
    operands = [grad if value is None else value for value, grad in zip(inputs, outgoing, strict=False)]
    # The kernel's cost depends on queries, keys and values; without one of their shapes it cannot be told.
    if any(value is None for value in operands):
        return None
    shapes = [context["shape"](value) for value in (incoming, *operands)]
    return attention_backward(Shapes("", shapes, ())).part(part)
