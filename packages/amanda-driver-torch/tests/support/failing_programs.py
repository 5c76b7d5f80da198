"""Programs that fail with an error of torch's, or of their own, that a tool must not change."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape or (3,), requires_grad=True)


def non_leaf(*shape: int) -> Tensor:
    return leaf(*shape) * 1


def written(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def a_result_in_place() -> None:
    y = non_leaf().exp_()
    written(y)
    y.sum().backward()


def a_result_in_place_seen_by_autograd() -> None:
    y = non_leaf().exp_()
    y.add_(1)
    y.sum().backward()


def a_result() -> None:
    y = non_leaf().exp()
    written(y)
    y.sum().backward()


def a_leaf() -> None:
    x, y = leaf(), non_leaf()
    z = y * x
    written(x)
    z.sum().backward()


def a_tensor_without_gradient() -> None:
    x, y = torch.ones(3), non_leaf()
    z = y.mul_(x)
    written(x)
    z.sum().backward()


def a_leaf_that_a_view_was_multiplied_by() -> None:
    x, y = leaf(), non_leaf(4)
    y[:3].mul_(x)
    written(x)
    y.sum().backward()


def an_input_that_a_view_was_multiplied_by() -> None:
    x, y = non_leaf(), non_leaf(4)
    y[:3].mul_(x)
    x.add_(1)
    y.sum().backward()


def the_second_of_two_outputs() -> None:
    x, y = non_leaf(4).unsafe_split(2)[1], non_leaf(4)
    y[:2].mul_(x)
    written(x)
    y.sum().backward()


def a_view() -> None:
    view = non_leaf(4)[:3]
    view.exp_()
    written(view)
    view.sum().backward()


def a_view_used_before() -> None:
    y = non_leaf(4)
    view = y[:3]
    view.exp_()
    loss = view.sum()
    y.add_(1)
    loss.backward()


def a_view_that_is_gone() -> None:
    y = non_leaf(4)
    y[:3].exp_()
    written(y)
    y.sum().backward()


def a_view_multiplied_by_a_view() -> None:
    x, y = non_leaf(4), non_leaf(4)
    y[:3].mul_(x[1:])
    x.add_(1)
    y.sum().backward()


def a_view_of_doubles() -> None:
    y = non_leaf(2, 3).double()
    y.t().sigmoid_()
    written(y)
    y.sum().backward()


def the_base_of_a_view() -> None:
    y = non_leaf(4)
    y.exp_()
    written(y[:2])
    y.sum().backward()


def one_of_several() -> None:
    first, two, three = non_leaf(), non_leaf(), non_leaf(4)
    y = three[:3].addcmul_(first, two)
    written(two)
    y.sum().backward()


def in_double_backward() -> None:
    x = leaf()
    y = (x * 1).view(3)
    y.exp_()
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    written(y)
    grad.sum().backward()


def in_anomaly_mode() -> None:
    with torch.autograd.detect_anomaly():
        a_view()


def a_leaf_in_anomaly_mode() -> None:
    with torch.autograd.detect_anomaly():
        a_leaf_that_a_view_was_multiplied_by()


def a_result_in_anomaly_mode() -> None:
    with torch.autograd.detect_anomaly():
        a_result_in_place()


def of_a_checkpoint() -> None:
    x = non_leaf()
    y = checkpoint(lambda x: x.view(3).exp_().sin(), x * 1, use_reentrant=False)
    written(x)
    y.sum().backward()


def inside_a_checkpoint() -> None:
    def run(x: Tensor) -> Tensor:
        y = (x * 1).exp_()
        written(y)
        return y.sum()

    checkpoint(run, non_leaf(), use_reentrant=True).backward()


def a_tensor_of_the_users_function() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x = non_leaf()
    y: Tensor = Square.apply(x)
    written(x)
    y.sum().backward()


def backward_comes_twice() -> None:
    loss = non_leaf().exp().sum()
    loss.backward()
    loss.backward()


def backward_comes_twice_through_a_view() -> None:
    y = non_leaf(4)
    y[:3].exp_()
    y.sum().backward()
    y.sum().backward()


def backward_comes_twice_through_an_op_in_place() -> None:
    y = non_leaf().exp_()
    y.sum().backward()
    y.sum().backward()


def wrong_shapes() -> None:
    _ = non_leaf(2, 3) @ non_leaf(2, 3)


def wrong_shapes_in_a_layer() -> None:
    torch.nn.Linear(3, 2)(torch.ones(4, 4))


def wrong_types() -> None:
    torch.mm(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64))


def an_argument_is_missing() -> None:
    torch.matmul(torch.ones(2))  # type: ignore[call-arg]


def a_method_lacks_an_argument() -> None:
    torch.ones(2).addmm()  # type: ignore[call-overload]


def an_argument_too_many() -> None:
    torch.relu(torch.ones(2), 1, 2)  # type: ignore[call-arg]


def an_unknown_argument() -> None:
    torch.softmax(torch.ones(2), dim=0, nothing=1)  # type: ignore[call-overload]


def an_argument_of_another_type() -> None:
    torch.nn.functional.linear("x", "y")  # type: ignore[arg-type]


def an_operand_that_is_no_tensor() -> None:
    _ = torch.ones(2) + "x"  # type: ignore[operator]


def an_operand_of_a_power() -> None:
    _ = torch.ones(2) ** object()  # type: ignore[operator]


def a_comparison() -> None:
    _ = torch.ones(2) < object()  # type: ignore[operator]


def a_leaf_in_place() -> None:
    leaf().add_(1)


def a_view_of_a_leaf_in_place() -> None:
    leaf()[0] = 2


def a_view_of_several_in_place() -> None:
    non_leaf(4).split(2)[0].add_(1)


def a_gradient_of_no_scalar() -> None:
    non_leaf().backward()


def a_gradient_of_no_graph() -> None:
    torch.ones(()).backward()


def a_gradient_that_is_not_used() -> None:
    torch.autograd.grad(non_leaf().sum(), leaf())


def another_device() -> None:
    _ = torch.ones(2) + torch.ones(2, device="meta")


def a_copy_out_of_nothing() -> None:
    torch.ones(2, device="meta").to("cpu")


def a_value_without_data() -> None:
    torch.ones((), device="meta").item()


def an_index_out_of_range() -> None:
    _ = non_leaf()[5]


def too_many_indices() -> None:
    _ = non_leaf()[0, 0]


def an_index_of_a_tensor_out_of_range() -> None:
    _ = non_leaf()[torch.tensor([7])]


def an_embedding_out_of_range() -> None:
    F.embedding(torch.tensor([9]), non_leaf(2, 2))


def an_assigned_shape() -> None:
    non_leaf()[:2] = torch.ones(3)


def a_write_into_an_expanded_tensor() -> None:
    torch.ones(1).expand(3).add_(torch.ones(3))


def an_inference_tensor_is_saved() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
    (leaf() * x).sum().backward()


def a_truth_of_several() -> None:
    bool(non_leaf())


def an_array_that_needs_a_gradient() -> None:
    non_leaf().numpy()


def an_operator_of_a_library() -> None:
    torch.ops.aten.mm(torch.ones(2), torch.ones(2))


def an_overload_lacks_an_argument() -> None:
    torch.ops.aten.mm.default(torch.ones(2, 2))


def a_result_given_for_the_outcome() -> None:
    torch.add(non_leaf(), 1, out=non_leaf())


class Own(Exception):
    """Of the program."""


def raise_own_error() -> None:
    """Raise from another, with a note."""
    error = Own("of the program", 3)
    error.add_note("of the program")
    raise error from ValueError("before it")


def in_a_function_forward() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            raise_own_error()
            return x

    Failing.apply(non_leaf())


def in_a_function_backward() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise_own_error()
            return grad

    Failing.apply(non_leaf()).sum().backward()


def a_function_gives_too_many_gradients() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, grad

    Wrong.apply(non_leaf()).sum().backward()


def a_function_gives_a_gradient_of_another_shape() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.ones(7)

    Wrong.apply(non_leaf()).sum().backward()


def in_a_hook_of_a_tensor() -> None:
    y = non_leaf()
    y.register_hook(lambda grad: raise_own_error())
    y.sum().backward()


def a_hook_gives_a_gradient_of_another_shape() -> None:
    y = non_leaf()
    y.register_hook(lambda grad: torch.ones(7))
    y.sum().backward()


def in_a_hook_after_accumulation() -> None:
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda parameter: raise_own_error())
    (x * 2).sum().backward()


def in_a_hook_of_a_node() -> None:
    y: Any = non_leaf()
    y.grad_fn.register_hook(lambda *_: raise_own_error())
    y.sum().backward()


def in_a_hook_before_a_node() -> None:
    y: Any = non_leaf()
    y.grad_fn.register_prehook(lambda *_: raise_own_error())
    y.sum().backward()


def in_a_hook_of_a_module() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.register_forward_hook(lambda *_: raise_own_error())
    layer(non_leaf())


def in_a_backward_hook_of_a_module() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.register_full_backward_hook(lambda *_: raise_own_error())
    layer(non_leaf()).sum().backward()


def as_tensors_are_packed() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: raise_own_error(), lambda x: x):
        non_leaf()[:2].exp_()


def as_tensors_are_unpacked() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: raise_own_error()):
        y = non_leaf()
        y[:2].exp_()
    y.sum().backward()


def in_a_mode() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ == "relu":
                raise_own_error()
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.relu(non_leaf())


def in_a_subclass() -> None:
    class Sub(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ == "relu":
                raise_own_error()
            return super().__torch_function__(func, types, args, kwargs or {})

    torch.relu(torch.ones(3).as_subclass(Sub))


def nobody_implements_it() -> None:
    class Foreign:
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            return NotImplemented

    torch.add(Foreign(), torch.ones(2))  # type: ignore[call-overload]


def in_a_recomputation() -> None:
    calls: list[int] = []

    def run(x: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) > 1:
            raise_own_error()
        return x.exp()

    checkpoint(run, non_leaf(), use_reentrant=False).sum().backward()


def a_recomputation_saves_something_else() -> None:
    calls: list[int] = []

    def run(x: Tensor) -> Tensor:
        calls.append(0)
        return x.exp() if len(calls) > 1 else x.exp().sin()

    checkpoint(run, non_leaf(), use_reentrant=False).sum().backward()


_HELPERS = (leaf, non_leaf, written, raise_own_error)
FAILING: list[Callable[[], None]] = [
    member
    for member in list(globals().values())
    if getattr(member, "__module__", None) == __name__
    and not isinstance(member, type)
    and member not in _HELPERS
]
"""Each of them."""
