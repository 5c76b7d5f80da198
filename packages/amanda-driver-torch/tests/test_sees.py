"""Every op is seen, once, however it is called."""

import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import relu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Program = Callable[[], Any]
OpsOf = Callable[[Program], list[str]]

SQUARE = torch.eye(3) + 0.5
WHOLE = torch.tensor([1, 2, 3])
SPARSE = torch.eye(3).to_sparse()

OPERATORS = {
    "a + b": (lambda: SQUARE + SQUARE, "__add__"),
    "2 + a": (lambda: 2 + SQUARE, "__radd__"),
    "a - b": (lambda: SQUARE - SQUARE, "__sub__"),
    "2 - a": (lambda: 2 - SQUARE, "rsub"),
    "a * b": (lambda: SQUARE * SQUARE, "__mul__"),
    "2 * a": (lambda: 2 * SQUARE, "__rmul__"),
    "a / b": (lambda: SQUARE / SQUARE, "__truediv__"),
    "a // 2": (lambda: SQUARE // 2, "floor_divide"),
    "a % 2": (lambda: SQUARE % 2, "__mod__"),
    "2 % a": (lambda: 2 % SQUARE, "remainder"),
    "a ** 2": (lambda: SQUARE**2, "pow"),
    "2 ** a": (lambda: 2**SQUARE, "pow"),
    "a @ b": (lambda: SQUARE @ SQUARE, "__matmul__"),
    "-a": (lambda: -SQUARE, "neg"),
    "abs(a)": (lambda: abs(SQUARE), "abs"),
    "~i": (lambda: ~WHOLE, "__invert__"),
    "i & 1": (lambda: WHOLE & 1, "__and__"),
    "1 | i": (lambda: 1 | WHOLE, "__ror__"),
    "i ^ 1": (lambda: WHOLE ^ 1, "__xor__"),
    "i << 1": (lambda: WHOLE << 1, "__lshift__"),
    "a == b": (lambda: SQUARE == SQUARE, "__eq__"),
    "1 < a": (lambda: operator.lt(1, SQUARE), "__gt__"),
    "a[0]": (lambda: SQUARE[0], "__getitem__"),
    "a[0, 1:]": (lambda: SQUARE[0, 1:], "__getitem__"),
    "bool(a)": (lambda: bool(SQUARE.sum() > 0), "__bool__"),
    "int(i)": (lambda: int(WHOLE.sum()), "__int__"),
    "list(a)": (lambda: list(SQUARE), "unbind"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_one_op(name: str, ops_of: OpsOf) -> None:
    program, op = OPERATORS[name]
    assert ops_of(program).count(op) == 1


IN_PLACE = {
    operator.iadd: "__iadd__",
    operator.isub: "__isub__",
    operator.imul: "__imul__",
    operator.itruediv: "__idiv__",
    operator.ifloordiv: "__ifloordiv__",
    operator.ipow: "pow_",
    operator.imod: "__imod__",
}


@pytest.mark.parametrize("assign", IN_PLACE)
def test_an_augmented_assignment_is_one_op(assign: Any, ops_of: OpsOf) -> None:
    assert ops_of(lambda: assign(SQUARE.clone(), 2)) == ["clone", IN_PLACE[assign]]


PROPERTIES = ("T", "H", "mT", "mH", "real", "data")


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_that_makes_a_tensor_is_one_op(name: str, ops_of: OpsOf) -> None:
    assert ops_of(lambda: getattr(SQUARE, name)) == [name]


def test_queries_of_metadata_are_no_ops(ops_of: OpsOf) -> None:
    assert (
        ops_of(
            lambda: (
                SQUARE.shape, SQUARE.size(), SQUARE.dim(), SQUARE.stride(), SQUARE.numel(), SQUARE.dtype,
                SQUARE.is_contiguous(), SQUARE.is_floating_point(), SQUARE.device, SQUARE.requires_grad,
            )
        )
        == []
    )  # fmt: skip


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3),
        torch.nn.Parameter(torch.zeros(3), requires_grad=False),
        torch.zeros(3).as_subclass(Named),
    ],
    ids=["Tensor", "Parameter", "subclass"],
)
def test_indexing_is_seen_on_every_kind_of_tensor(tensor: torch.Tensor, ops_of: OpsOf) -> None:
    def program() -> None:
        tensor[0] = tensor[1]

    assert ops_of(program) == ["__getitem__", "__setitem__"]


LIBRARIES = {
    "fft": (lambda: torch.fft.fftn(SQUARE), "fft_fftn"),
    "linalg": (lambda: torch.linalg.svd(SQUARE), "linalg_svd"),
    "special": (lambda: torch.special.erf(SQUARE), "special_erf"),
    "sparse": (lambda: torch.sparse.mm(SPARSE, SQUARE), "_sparse_mm"),
    "nested": (lambda: torch.nested.nested_tensor([SQUARE, SQUARE]), "nested_tensor"),
    "factory": (lambda: torch.zeros(2), "zeros"),
    "random": (lambda: torch.randn(2), "randn"),
    "data": (lambda: torch.tensor([1, 2]), "tensor"),
    "list": (lambda: SQUARE.tolist(), "tolist"),
    "equal": (lambda: torch.equal(SQUARE, SQUARE), "equal"),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_function_of_a_library_is_one_op(name: str, ops_of: OpsOf) -> None:
    program, op = LIBRARIES[name]
    assert ops_of(program) == [op]


COMPOSITES = {
    "relu": (lambda x: F.relu(x), ["relu"]),
    "cross_entropy": (lambda x: F.cross_entropy(x, WHOLE - 1), ["__sub__", "cross_entropy_loss"]),
    "layer_norm": (lambda x: F.layer_norm(x, (3,)), ["layer_norm"]),
    "dropout": (lambda x: F.dropout(x), ["dropout"]),
    "gumbel_softmax": (
        lambda x: F.gumbel_softmax(x),
        ["empty_like", "exponential_", "log", "neg", "__add__", "__truediv__", "softmax"],
    ),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), ["einsum"]),
    "norm": (lambda x: torch.norm(x), ["linalg_vector_norm"]),
    "split": (lambda x: torch.split(x, 1), ["split"]),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_what_a_composite_calls_is_seen(name: str, ops_of: OpsOf) -> None:
    composite, ops = COMPOSITES[name]
    assert ops_of(lambda: composite(SQUARE)) == ops


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_is_seen_inside(need_weights: bool, ops_of: OpsOf) -> None:
    attention = torch.nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 1, 4)
    ops = ops_of(lambda: attention(x, x, x, need_weights=need_weights))
    inner = ["bmm", "softmax", "bmm"] if need_weights else ["scaled_dot_product_attention"]
    assert [op for op in ops if op in {*inner, "linear"}] == ["linear", *inner, "linear"]


def test_a_name_imported_before_the_scope_is_seen(ops_of: OpsOf) -> None:
    assert ops_of(lambda: relu(SQUARE)) == ["relu"]


def test_a_bound_method_taken_before_the_scope_is_seen(ops_of: OpsOf) -> None:
    method = SQUARE.add
    assert ops_of(lambda: method(1)) == ["add"]


def test_a_dict_keyed_by_callables_of_torch_still_works_in_the_scope(ops_of: OpsOf) -> None:
    keys = [torch.relu, torch.Tensor.add, torch.Tensor.__getitem__, torch.Tensor.T, torch._C._nn.gelu, F.relu]
    table = {key: i for i, key in enumerate(keys)}
    again: list[Any] = []
    ops_of(lambda: again.extend(table[key] for key in keys))
    assert again == [*range(6)] * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_an_autograd_function_is_an_op_named_as_its_class(ops_of: OpsOf) -> None:
    square = Square.apply
    assert ops_of(lambda: square(SQUARE)) == ["Square", "__mul__"]


def test_a_fused_composite_of_a_transformer_layer_is_one_op(ops_of: OpsOf) -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    x = torch.randn(1, 3, 4)
    with torch.no_grad():
        assert ops_of(lambda: layer(x)) == ["_transformer_encoder_layer_fwd"]


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Overriding(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """Holds a tensor, and computes on that in `__torch_dispatch__`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(values: Any) -> list[Any]:
            return [
                unwrapped(value)
                if isinstance(value, list)
                else value.inner
                if isinstance(value, cls)
                else value
                for value in values
            ]

        result = func(*unwrapped(args), **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


def _program(x: torch.Tensor) -> None:
    weight = SQUARE[:2]
    y = F.linear(x, weight)
    y = torch.relu(y) + 1
    y = torch.cat([y[0], y[1]]) * 2
    y = F.softmax(y, -1)
    y.view(-1).sum()
    y.clone().add_(1)
    -(2 - y) / 2 == y  # noqa: B015


PLAIN = [
    "__getitem__", "linear", "relu", "__add__", "__getitem__", "__getitem__", "cat", "__mul__", "softmax",
    "view", "sum", "clone", "add_", "rsub", "neg", "__truediv__", "__eq__",
]  # fmt: skip


@pytest.mark.parametrize("modes", [(), (Function,), (Dispatch,), (Function, Dispatch), (Dispatch, Dispatch)])
def test_an_op_is_seen_once_under_modes(modes: tuple[type[Any], ...], ops_of: OpsOf) -> None:
    def program() -> None:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            _program(SQUARE)

    assert ops_of(program) == PLAIN


@pytest.mark.parametrize("kind", [Named, Overriding])
def test_an_op_on_a_tensor_subclass_is_seen_once(kind: type[torch.Tensor], ops_of: OpsOf) -> None:
    x = SQUARE.as_subclass(kind)
    assert [op for op in ops_of(lambda: _program(x)) if op != "as_subclass"] == PLAIN


@pytest.mark.parametrize("kind", [Named, Overriding])
def test_giving_a_result_the_class_of_a_subclass_is_no_op(kind: type[torch.Tensor], ops_of: OpsOf) -> None:
    x = SQUARE.as_subclass(kind)
    assert ops_of(lambda: torch.relu(x) + 1) == ["relu", "__add__"]
    assert ops_of(lambda: SQUARE.as_subclass(kind)) == ["as_subclass"]


def test_an_op_on_a_wrapper_is_seen_once(ops_of: OpsOf) -> None:
    x = Wrapper(SQUARE)
    assert ops_of(lambda: _program(x)) == PLAIN
