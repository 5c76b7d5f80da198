"""A call's arguments become inputs in schema order, and go back as they came."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from amanda.drivers.torch._schema import binding, flatten_outputs

X, W, B = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
M, N = torch.randn(3, 3), torch.randn(3, 3)
OUT, OTHER_OUT = torch.empty(3, 3), torch.empty(3, 3)
INDICES = torch.empty(3, dtype=torch.int64)
MASK = M > 0
Tensor = torch.Tensor

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], dict[str, Any]]
CALLS: list[Case] = [
    (torch.add, (M, N), {}, {"self": M, "other": N}),
    (torch.add, (M,), {"other": N}, {"self": M, "other": N}),
    (torch.add, (), {"other": N, "input": M}, {"self": M, "other": N}),
    (torch.add, (M, N), {"alpha": 2}, {"self": M, "other": N, "alpha": 2}),
    (torch.add, (M, N), {"out": OUT}, {"self": M, "other": N, "alpha": 1, "out": OUT}),
    (torch.add, (M, 2, N), {}, {"self": M, "other": N, "alpha": 2}),
    (Tensor.add, (M, 2, N), {}, {"self": M, "other": N, "alpha": 2}),
    (Tensor.__radd__, (M, 1), {}, {"self": M, "other": 1}),
    (torch.conv2d, (X, W, B, 2), {}, {"input": X, "weight": W, "bias": B, "stride": 2}),
    (
        torch.conv2d,
        (X, W),
        {"padding": 1},
        {"input": X, "weight": W, "bias": None, "stride": (1, 1), "padding": 1},
    ),
    (
        torch.conv2d,
        (X,),
        {"padding": "same", "weight": W},
        {"input": X, "weight": W, "bias": None, "stride": (1, 1), "padding": "same"},
    ),
    (Tensor.view, (M, 9), {}, {"self": M, "size": (9,)}),
    (Tensor.view, (M, 3, -1), {}, {"self": M, "size": (3, -1)}),
    (Tensor.view, (M, (3, -1)), {}, {"self": M, "size": (3, -1)}),
    (Tensor.view, (M, torch.int32), {}, {"self": M, "dtype": torch.int32}),
    (Tensor.permute, (M, 1, 0), {}, {"self": M, "dims": (1, 0)}),
    (torch.permute, (M, [1, 0]), {}, {"self": M, "dims": [1, 0]}),
    (
        Tensor.expand,
        (M, 2, 3, 3),
        {"implicit": False},
        {"self": M, "size": (2, 3, 3), "implicit": False},
    ),
    (torch.zeros, (2, 3), {}, {"size": (2, 3)}),
    (torch.zeros, ((2, 3),), {}, {"size": (2, 3)}),
    (
        torch.zeros,
        (2, 3),
        {"device": "cpu", "requires_grad": True},
        {"size": (2, 3), "dtype": None, "layout": None, "device": "cpu", "requires_grad": True},
    ),
    (
        torch.randint,
        (5, (2, 2)),
        {"device": "cpu"},
        {"high": 5, "size": (2, 2), "dtype": torch.int64, "layout": None, "device": "cpu"},
    ),
    (torch.arange, (2, 9, 2), {}, {"start": 2, "end": 9, "step": 2}),
    (torch.arange, (9,), {}, {"end": 9}),
    (Tensor.sum, (M, 0), {}, {"self": M, "dim": 0}),
    (Tensor.sum, (M,), {"axis": 0}, {"self": M, "dim": 0}),
    (torch.mean, (M, 0), {"keepdims": True}, {"self": M, "dim": 0, "keepdim": True}),
    (torch.max, (M, 1), {}, {"self": M, "dim": 1}),
    (torch.max, (M, N), {}, {"self": M, "other": N}),
    (
        torch.max,
        (M, 1),
        {"out": (OUT[0].clone(), INDICES)},
        {"self": M, "dim": 1, "out": ...},
    ),
    (torch.where, (MASK, M, N), {}, {"condition": MASK, "self": M, "other": N}),
    (Tensor.where, (M, MASK, N), {}, {"condition": MASK, "self": M, "other": N}),
    (Tensor.polygamma, (M, 1), {}, {"n": 1, "self": M}),
    (torch.cat, ([M, N], 1), {}, {"tensors": [M, N], "dim": 1}),
    (torch.cat, ((M, N),), {"dim": 1}, {"tensors": (M, N), "dim": 1}),
    (Tensor.to, (M, torch.float64), {}, {"self": M, "dtype": torch.float64}),
    (Tensor.to, (M, "cpu"), {}, {"self": M, "device": "cpu"}),
    (Tensor.to, (M, N), {}, {"self": M, "other": N}),
    (Tensor.to, (M,), {"dtype": torch.int8}, {"self": M, "dtype": torch.int8}),
    (Tensor.half, (M,), {}, {"self": M}),
    (Tensor.__getitem__, (M, (0, None)), {}, {"self": M, "index": (0, None)}),
    (Tensor.__setitem__, (M.clone(), 0, 1.0), {}, {"self": ..., "index": 0, "value": 1.0}),
    (torch.tensor, ([1, 2],), {"dtype": torch.int8}, {"data": [1, 2], "dtype": torch.int8}),
    (torch.addmm, (M, M, N), {"beta": 2}, {"self": M, "mat1": M, "mat2": N, "beta": 2}),
    (torch.addmm, (2, M, M, N), {}, {"self": M, "mat1": M, "mat2": N, "beta": 2}),
    (
        torch.addmm,
        (2, M, 3, M, N),
        {},
        {"self": M, "mat1": M, "mat2": N, "beta": 2, "alpha": 3},
    ),
    (torch.ops.aten.add.Tensor, (M, N), {"alpha": 2}, {"self": M, "other": N, "alpha": 2}),
    (torch.ops.aten.sum, (M, [0]), {}, {"self": M, "dim": [0]}),
    (torch.nonzero, (M,), {"as_tuple": True}, {"self": M, "as_tuple": True}),
]


def identical(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(identical, first, second))
    return first is second or (not isinstance(first, Tensor) and bool(first == second))


@pytest.mark.parametrize(("called", "args", "kwargs", "expected"), CALLS)
def test_inputs_stand_in_schema_order_and_go_back_as_given(
    called: Any, args: Any, kwargs: Any, expected: dict[str, Any]
) -> None:
    bound = binding(called, args, kwargs)
    inputs = bound.inputs(args, kwargs)
    assert bound.names == tuple(expected)
    pairs = zip(inputs, expected.values(), strict=True)
    assert all(value is ... or identical(value, bound_value) for bound_value, value in pairs)
    again, keywords = bound.call_arguments(inputs)
    assert identical(again, args)
    assert list(keywords) == list(kwargs)
    assert identical(list(keywords.values()), list(kwargs.values()))


@pytest.mark.filterwarnings("ignore:This overload:UserWarning", "ignore:An output:UserWarning")
@pytest.mark.parametrize(("called", "args", "kwargs"), [case[:3] for case in CALLS])
def test_torch_takes_the_listed_calls(called: Any, args: Any, kwargs: Any) -> None:
    called(*args, **kwargs)


def test_a_changed_input_arrives_where_the_user_put_it() -> None:
    bound = binding(torch.conv2d, (X, W), {"padding": 1})
    inputs = bound.inputs((X, W), {"padding": 1})
    inputs[bound.index("padding")] = 2
    assert bound.call_arguments(inputs) == ((X, W), {"padding": 2})


def test_a_filled_default_is_passed_only_when_changed() -> None:
    bound = binding(torch.conv2d, (X, W), {"padding": 1})
    inputs = bound.inputs((X, W), {"padding": 1})
    inputs[bound.index("bias")] = B
    args, kwargs = bound.call_arguments(inputs)
    assert kwargs == {"padding": 1, "bias": B}
    assert torch.equal(torch.conv2d(*args, **kwargs), torch.conv2d(X, W, B, padding=1))


@pytest.mark.parametrize("size", [(9,), (1, 9), [3, 3]])
def test_a_changed_size_is_spread_as_the_user_spread_it(size: Any) -> None:
    bound = binding(Tensor.view, (M, 3, 3))
    inputs = bound.inputs((M, 3, 3))
    inputs[1] = size
    args, _ = bound.call_arguments(inputs)
    assert args == (M, *size)


def test_a_changed_size_may_be_that_of_a_scalar() -> None:
    tensor = torch.ones(1)
    args, _ = binding(Tensor.view, (tensor, 1)).call_arguments([tensor, ()])
    assert Tensor.view(*args).shape == ()


def test_self_and_input_are_one_name() -> None:
    by_self, by_input = binding(torch.add, (M, N)), binding(torch.conv2d, (X, W))
    assert by_self.index("self") == by_self.index("input") == 0
    assert by_input.index("self") == by_input.index("input") == 0
    assert binding(torch.where, (MASK, M, N)).index("input") == 1


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(KeyError, match="no input 'wieght'; inputs are input, weight"):
        binding(torch.conv2d, (X, W)).index("wieght")


def test_one_form_of_call_is_bound_once() -> None:
    assert binding(torch.add, (M, N)) is binding(torch.add, (N, 2.0))
    assert binding(torch.max, (M, 1)) is binding(torch.max, (N, 0))
    assert binding(torch.max, (M, 1)) is not binding(torch.max, (M, N))


RUNNING = (torch.zeros(3), torch.ones(3))
WRITES: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]] = [
    (torch.add, (M, N), {}, []),
    (torch.add, (M, N), {"out": OUT}, ["out"]),
    (torch.add, (M, N), {"out": None}, []),
    (torch.max, (M, 1), {"out": (OUT[0], INDICES)}, ["out"]),
    (Tensor.add_, (M, N), {}, ["self"]),
    (Tensor.__iadd__, (M, N), {}, ["self"]),
    (Tensor.copy_, (M, N), {}, ["self"]),
    (Tensor.__setitem__, (M, 0, 1), {}, ["self"]),
    (torch.relu_, (M,), {}, ["self"]),
    (torch._foreach_add_, ([M, N], 1), {}, ["self"]),
    (torch.batch_norm, (X, None, None, *RUNNING, False, 0.1, 1e-5, True), {}, []),
    (
        torch.batch_norm,
        (X, None, None, *RUNNING, True, 0.1, 1e-5, True),
        {},
        ["running_mean", "running_var"],
    ),
    (torch.batch_norm, (X, None, None, None, None, True, 0.1, 1e-5, True), {}, []),
    (
        torch.instance_norm,
        (X, None, None, *RUNNING, True, 0.1, 1e-5, True),
        {},
        ["running_mean", "running_var"],
    ),
]


@pytest.mark.parametrize(("called", "args", "kwargs", "written"), WRITES)
def test_the_inputs_that_a_call_writes_are_known(
    called: Any, args: Any, kwargs: Any, written: list[str]
) -> None:
    bound = binding(called, args, kwargs)
    inputs = bound.inputs(args, kwargs)
    assert [bound.names[i] for i in bound.written_positions(inputs)] == written


def test_attributes_are_what_is_no_tensor_with_defaults() -> None:
    bound = binding(torch.conv2d, (X, W, None, 2))
    attributes = bound.attributes(bound.inputs((X, W, None, 2)))
    assert attributes == {"stride": 2, "padding": (0, 0), "dilation": (1, 1), "groups": 1}


def test_a_number_in_a_tensor_s_place_is_an_attribute() -> None:
    assert binding(torch.mul, (M, 2)).attributes([M, 2]) == {"other": 2}
    assert binding(torch.mul, (M, N)).attributes([M, N]) == {}
    assert binding(torch.cat, ([M, N],)).attributes([[M, N]]) == {"dim": 0}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float = 2.0) -> Tensor:
        return tensor * scale


class ScaledSeparately(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, scale: float = 2.0) -> Tensor:
        return tensor * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


@pytest.mark.parametrize("called", [Scaled, Scaled.apply, ScaledSeparately])
def test_a_function_s_inputs_have_the_names_of_its_forward(called: Any) -> None:
    assert binding(called, (M, 3.0)).names == ("tensor", "scale")


def test_a_custom_op_is_bound_by_its_own_schema() -> None:
    library = torch.library.Library("amanda_schema_test", "DEF")  # type: ignore[no-untyped-call]
    schema = "mix(Tensor x, Tensor(a!) state, float ratio=0.5, *, bool sign=False) -> ()"
    library.define(schema)  # type: ignore[no-untyped-call]
    op = torch.ops.amanda_schema_test.mix
    for called in (op, op.default):
        bound = binding(called, (M, N), {"sign": True})
        assert bound.names == ("x", "state", "ratio", "sign")
        assert bound.inputs((M, N), {"sign": True}) == [M, N, 0.5, True]
        assert bound.always_written == (1,)


def test_what_is_unknown_binds_in_the_order_of_the_call() -> None:
    bound = binding(Tensor.new, (M, 2), {"device": "cpu"})
    assert bound.names == ("arg0", "arg1", "device")
    assert bound.inputs((M, 2), {"device": "cpu"}) == [M, 2, "cpu"]
    assert bound.call_arguments([M, 2, "cpu"]) == ((M, 2), {"device": "cpu"})


def test_a_user_s_function_is_not_kept_alive() -> None:
    class Temporary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor

    binding(Temporary, (M,))
    gone = weakref.ref(Temporary)
    del Temporary
    gc.collect()
    assert gone() is None


OUTPUTS = [
    (M, [M]),
    (None, []),
    (3.5, [3.5]),
    ((M, N), [M, N]),
    ([M, N], [M, N]),
    ((), []),
    ((M, [M, N]), [M, [M, N]]),
    ([1, 2], [[1, 2]]),
    (torch.return_types.max((M, N)), [M, N]),
    (torch.nn.utils.rnn.PackedSequence(M, N, None, None), [M, N, None, None]),
]


@pytest.mark.parametrize(("output", "flat"), OUTPUTS)
def test_outputs_are_taken_apart_and_rebuilt_as_the_same_type(output: Any, flat: list[Any]) -> None:
    values, spec = flatten_outputs(output)
    assert identical(values, flat)
    rebuilt = spec(values)
    assert type(rebuilt) is type(output)
    assert identical(rebuilt, output)


def test_a_wrong_number_of_outputs_is_an_error() -> None:
    _, single = flatten_outputs(M)
    _, none = flatten_outputs(None)
    with pytest.raises(ValueError, match="too many values"):
        single([M, N])
    with pytest.raises(ValueError, match="expected no output, got 1"):
        none([M])
