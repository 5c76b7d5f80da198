"""What is an operator, and what it is called."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import (
    TorchFunctionMode,
    get_ignored_functions,
    get_overridable_functions,
    get_testing_overrides,
)
from torch.utils._python_dispatch import TorchDispatchMode

from amanda.drivers.torch import _targets
from amanda.drivers.torch._targets import Target, by_callable, missing_paths, targets, why_excluded


def names(text: str) -> set[str]:
    return set(text.split())


# They give back no tensor and write none, yet what they give back depends on tensor data.
DATA_READERS = names("""
    item is_nonzero equal allclose _assert_async _linalg_check_errors _choose_qparams_per_tensor
    _cslt_sparse_mm_search _nested_tensor_from_mask_left_aligned
    _validate_compressed_sparse_indices _validate_sparse_coo_tensor_args
    _validate_sparse_compressed_tensor_args _validate_sparse_bsc_tensor_args
    _validate_sparse_bsr_tensor_args _validate_sparse_csc_tensor_args
    _validate_sparse_csr_tensor_args
""")
# They give back a tensor or are said to write one, and touch no data.
BOOKKEEPERS = names(
    "requires_grad_ retain_grad record_stream grad _add_batch_dim _remove_batch_dim _make_dual _unpack_dual"
)


def native_callables() -> list[Any]:
    kinds = _targets._KIND_BY_TYPE_NAME
    return [each for each in _targets._native_callables() if type(each).__name__ in kinds]


def overridable() -> Iterator[Any]:
    callables = {each for group in get_overridable_functions().values() for each in group}
    for each in callables | set(get_testing_overrides()) | set(get_ignored_functions()):
        read = getattr(each, "__self__", None)
        yield read if type(read).__name__ == "getset_descriptor" else each


def test_every_native_overridable_of_torch_is_a_target_or_excluded_for_a_reason() -> None:
    native = set(native_callables())
    of_tensors = [each for each in overridable() if each in native]
    assert len(of_tensors) > 1300
    unexplained = [each for each in of_tensors if each not in by_callable() and not why_excluded(each)]
    assert unexplained == []


def test_nothing_native_that_is_overridable_lies_outside_the_parts_looked_at() -> None:
    of_a_tensor = (type(torch.relu), type(torch.Tensor.add), type(torch.Tensor.T))
    native = set(native_callables())
    outside = {
        each.__name__
        for group in get_overridable_functions().values()
        for each in group
        if isinstance(each, of_a_tensor) and each not in native
    }
    assert outside == set()


def test_targets_are_exactly_what_gives_back_or_writes_a_tensor() -> None:
    surprises = set()
    for each in native_callables():
        name = each.__name__
        canonical = _targets.CANONICAL.get(name, name)
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{canonical}")
        if not schemas or canonical in DATA_READERS or name in BOOKKEEPERS:
            continue
        of_data = any(map(gives_or_writes_a_tensor, schemas))
        if of_data != (each in by_callable()):
            surprises.add(name)
    assert surprises == set()


def gives_or_writes_a_tensor(schema: Any) -> bool:
    if any(each.alias_info and each.alias_info.is_write for each in schema.arguments):
        return True
    return any("Tensor" in str(each.type) for each in schema.returns)


def test_data_readers_are_targets_and_bookkeepers_are_not() -> None:
    canonical = {target.canonical for target in targets()}
    assert canonical >= DATA_READERS
    assert not canonical & BOOKKEEPERS


def test_every_excluded_name_and_every_renamed_one_exists() -> None:
    existing = {
        getattr(getattr(each, "__func__", each), "__name__", None) for each in _targets._native_callables()
    }
    excluded = {name for names in _targets.EXCLUDED.values() for name in names}
    assert excluded <= existing
    assert set(_targets.CANONICAL) <= existing


def test_inplace_is_what_the_schema_says_of_the_first_argument() -> None:
    # Lists are sorted in place by TorchScript; the others write although their names say not.
    attention = ("_flash_attention", "_cudnn_attention")
    unlike = {"sort", *(f"{name}_forward_no_dropout_inplace" for name in attention)}
    for target in targets():
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{target.canonical}")
        written = [each.arguments[0].alias_info for each in schemas if each.arguments]
        if any("Tensor" in str(each) for each in schemas) and target.canonical not in unlike:
            assert target.inplace == any(each and each.is_write for each in written), target


EXPRESSIONS: dict[str, tuple[Callable[[Any, Any], Any], ...]] = {
    "add": (lambda a, b: a + b, lambda a, _: 1 + a, torch.add, lambda a, b: a.add(b)),
    "mul": (lambda a, b: a * b, lambda a, _: 2 * a),
    "sub": (lambda a, b: a - b,),
    "rsub": (lambda a, _: 1 - a,),
    "div": (lambda a, b: a / b,),
    "floor_divide": (lambda a, b: a // b,),
    "remainder": (lambda a, b: a % b,),
    "neg": (lambda a, _: -a,),
    "eq": (lambda a, b: a == b,),
    "ne": (lambda a, b: a != b,),
    "lt": (lambda a, b: a < b,),
    "le": (lambda a, b: a <= b,),
    "gt": (lambda a, b: a > b,),
    "ge": (lambda a, b: a >= b,),
    "pow": (lambda a, _: a**2, lambda a, _: 2**a),
    "abs": (lambda a, _: abs(a),),
    "bitwise_and": (lambda a, b: a & b, lambda a, _: 1 & a),
    "bitwise_or": (lambda a, b: a | b, lambda a, _: 1 | a),
    "bitwise_xor": (lambda a, b: a ^ b, lambda a, _: 1 ^ a),
    "bitwise_not": (lambda a, _: ~a,),
    "add_": (operator.iadd, lambda a, b: a.add_(b)),
    "mul_": (operator.imul,),
    "sub_": (operator.isub,),
    "floor_divide_": (operator.ifloordiv,),
    "remainder_": (operator.imod,),
    "bitwise_and_": (operator.iand,),
    "bitwise_or_": (operator.ior,),
    "bitwise_xor_": (operator.ixor,),
    "detach": (lambda a, _: a.detach(),),
    "clone": (lambda a, _: a.clone(),),
}
CASES = [(name, each) for name, group in EXPRESSIONS.items() for each in group]


class Targets(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = by_callable().get(func)
        if target is None and not hasattr(func, "__code__"):
            raise AssertionError(f"{func} is no target")
        self.names += [target.canonical] if target else []
        return func(*args, **(kwargs or {}))


class Reached(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def observed(mode: Any, expression: Callable[[Any, Any], Any]) -> list[str]:
    a, b = torch.tensor([5, 6]), torch.tensor([2, 3])
    with mode:
        expression(a, b)
    names: list[str] = mode.names
    return names


@pytest.mark.parametrize(("name", "expression"), CASES)
def test_an_expression_has_the_name_of_the_aten_operator_it_reaches(
    name: str, expression: Callable[[Any, Any], Any]
) -> None:
    reached = observed(Reached(), expression)
    assert reached[0] == name
    names = observed(Targets(), expression)
    assert names in ([name], []), "seen is empty where Python code calls the operator"


# They reach the operator they are named for by way of others, or of none that is dispatched.
INDIRECT = {"__matmul__", "__getitem__", "__setitem__"}
DUNDERS = [
    target
    for target in targets()
    if target.name.startswith("__")
    and target.canonical not in ("item", "is_nonzero")
    and target.name not in INDIRECT
]


@pytest.mark.parametrize("target", DUNDERS, ids=lambda target: target.name)
def test_an_operator_s_method_has_the_name_of_the_aten_operator_it_reaches(target: Target) -> None:
    operands = 1 if target.canonical == "bitwise_not" else 2
    dtype = torch.float32 if "div" in target.name else torch.int64
    with Reached() as reached:
        target.callable(*(torch.tensor([6, 4], dtype=dtype) for _ in range(operands)))
    # ATen has the shifts twice; ours have the name that `torch.bitwise_left_shift` has.
    expected = target.name if "shift" in target.name else target.canonical
    assert expected in reached.names


@pytest.mark.parametrize(
    ("called", "canonical"),
    [
        (torch.Tensor.__matmul__, "matmul"),
        (torch.Tensor.__getitem__, "getitem"),
        (torch.Tensor.__setitem__, "setitem"),
        (torch.Tensor.T, "numpy_T"),
        (torch.Tensor.mT, "mT"),
        (torch.Tensor.data, "data"),
        (torch.Tensor.half, "to"),
        (torch.Tensor.cuda, "to"),
        (torch.Tensor.__bool__, "is_nonzero"),
        (torch.Tensor.__float__, "item"),
        (torch.Tensor.tolist, "tolist"),
        (torch.conv2d, "conv2d"),
        (torch.nn.functional.linear, "linear"),
        (torch.nn.functional.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (torch.lstm, "lstm"),
        (torch.zeros, "zeros"),
        (torch.tensor, "tensor"),
        (torch.from_numpy, "from_numpy"),
        (torch._foreach_add_, "_foreach_add_"),
        (torch._fused_adam_, "_fused_adam_"),
        (torch.linalg.svd, "linalg_svd"),
        (torch.fft.fft, "fft_fft"),
        (torch.special.erf, "special_erf"),
        (vars(torch._C._FunctionBase)["apply"], "autograd_function"),
    ],
)
def test_canonical_name(called: Any, canonical: str) -> None:
    assert by_callable()[called].canonical == canonical


@pytest.mark.parametrize(
    "query",
    [
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.is_contiguous),
        *(torch.Tensor.numel, torch.Tensor.data_ptr, torch.Tensor.requires_grad_, torch.numel),
        *(torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.grad, torch.is_floating_point),
        *(torch.result_type, torch.can_cast, torch.promote_types, torch.Tensor.__len__),
    ],
)
def test_a_query_of_metadata_is_no_operator(query: Any) -> None:
    assert query not in by_callable()
    assert why_excluded(query) is not None


def test_a_torch_without_some_parts_still_lists_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_paths() == []
    complete = len(targets())
    monkeypatch.delattr(torch._C, "_sparse")
    monkeypatch.delattr(torch._C, "_FunctionBase")
    by_callable.cache_clear()
    _targets._all_targets.cache_clear()
    try:
        assert missing_paths() == ["torch._C._sparse", "torch._C._FunctionBase", "Function.apply"]
        assert 0 < complete - len(targets()) < 20
    finally:
        monkeypatch.undo()
        by_callable.cache_clear()
        _targets._all_targets.cache_clear()
        targets()  # not first within a scope, where detours may be in the places of functions
