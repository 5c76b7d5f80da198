"""Targets: the native callables of the running torch that are operators, and the name of each.

An operator reads or writes tensor data; a query of metadata, global state or
autograd's bookkeeping does not. Pure-Python functions (`torch.einsum`,
`torch.nn.functional.relu`, `Tensor.split`) are absent: what they call natively is here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from ._collectives import collectives

Kind = Literal["function", "method", "getset", "slot", "classmethod"]


@dataclass(frozen=True, slots=True)
class Target:
    """One native callable to intercept.

    callable: the builtin, method descriptor, getset descriptor (its read), slot wrapper
        or classmethod descriptor itself.
    canonical: the ATen operator that a call reaches, without its overload.
    inplace: whether the call writes its first argument, as its name says.
    """

    callable: Any
    kind: Kind
    name: str
    canonical: str
    inplace: bool


NAMESPACES = ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
LOOSE_FUNCTIONS = ("_from_dlpack", "_to_dlpack", "_to_dlpack_versioned")
SLOTS = ("__getitem__", "__setitem__")
TENSOR_PROPERTIES = ("T", "H", "mT", "mH", "real", "imag", "data")

# Names for which the ATen operator is called otherwise; every other keeps its own. Where ATen
# has one operator twice (`__lshift__`), the spelled-out name stands for both.
CANONICAL = {
    **{f"__{name}__": name for name in ("add", "mul", "sub", "matmul", "eq", "ne", "lt", "le")},
    **{f"__{name}__": name for name in ("gt", "ge", "getitem")},
    "__radd__": "add", "__rmul__": "mul", "__div__": "div", "__truediv__": "div",
    "__floordiv__": "floor_divide", "__mod__": "remainder", "__and__": "bitwise_and",
    "__rand__": "bitwise_and", "__or__": "bitwise_or", "__ror__": "bitwise_or", "__xor__": "bitwise_xor",
    "__rxor__": "bitwise_xor", "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
    "__invert__": "bitwise_not", "__iadd__": "add_", "__imul__": "mul_", "__isub__": "sub_",
    "__idiv__": "div_", "__ifloordiv__": "floor_divide_", "__imod__": "remainder_",
    "__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_",
    "__ilshift__": "bitwise_left_shift_", "__irshift__": "bitwise_right_shift_", "__setitem__": "setitem",
    "__bool__": "is_nonzero", "__nonzero__": "is_nonzero",
    **{f"__{name}__": "item" for name in ("float", "complex", "int", "long", "index")},
    **dict.fromkeys(("bfloat16", "byte", "char", "double", "cdouble", "float", "cfloat"), "to"),
    **dict.fromkeys(("bool", "half", "chalf", "int", "long", "short", "type"), "to"),
    **dict.fromkeys(("cpu", "cuda", "xpu", "ipu", "mtia"), "to"),
    "T": "numpy_T", "H": "matrix_H", "as_subclass": "alias", "spmm": "mm", "dsmm": "mm", "hsmm": "hspmm",
    "saddmm": "sspaddmm", "_to_dlpack": "to_dlpack", "_to_dlpack_versioned": "to_dlpack",
    "_from_dlpack": "from_dlpack", "apply": "autograd_function",
}  # fmt: skip


def _name_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# `is_*` and every property outside TENSOR_PROPERTIES are metadata by rule; these by name.
EXCLUDED = {
    "metadata of a tensor": _name_set("""
        size stride dim ndimension numel nelement element_size dense_dim sparse_dim _nnz _dimI
        _dimV storage_offset get_device qscheme q_scale q_zero_point q_per_channel_axis __len__
        _is_view _is_zerotensor _has_compatible_shallow_copy_type _debug_has_internal_overlap
        _nested_get_ragged_idx _assert_tensor_metadata _fused_sdp_choice _use_cudnn_ctc_loss
        _use_miopen_ctc_loss cudnn_is_acceptable
    """),
    "type promotion": _name_set("can_cast promote_types result_type"),
    "a handle on storage": _name_set("data_ptr const_data_ptr untyped_storage"),
    "autograd's bookkeeping": _name_set("""
        requires_grad_ retain_grad _make_dual _unpack_dual _view_func _view_func_unsafe _rev_view_func_unsafe
    """),
    "the allocator's bookkeeping": _name_set("record_stream"),
    "the bookkeeping of vmap": _name_set("_add_batch_dim _remove_batch_dim"),
    "state of the library": _name_set("""
        _cufft_clear_plan_cache _cufft_get_plan_cache_max_size _cufft_get_plan_cache_size
        _cufft_set_plan_cache_max_size _nnpack_available _use_cudnn_rnn_flatten_weight
        _print _propagate_xla_data
    """),
    "symbolic shapes": _name_set("""
        sym_constrain_range sym_constrain_range_for_size _assert_scalar
    """),
    "the Python object, not its data": _name_set("""
        __new__ __delitem__ _make_subclass _make_wrapper_subclass _dtensor__new__ _fix_weakref
        _use_count
    """),
    "argument parsing": _name_set("_parse_to"),
}
DATA_QUERIES = frozenset(["is_nonzero"])

_KIND_BY_TYPE_NAME: dict[str, Kind] = {
    "builtin_function_or_method": "function",
    "method_descriptor": "method",
    "getset_descriptor": "getset",
    "wrapper_descriptor": "slot",
    "classmethod_descriptor": "classmethod",
}


def why_excluded(called: Any) -> str | None:
    """Return why a native callable of torch is not an operator, in words; None for an operator."""
    name: str = getattr(called, "__name__", str(called))
    if type(called).__name__ == "getset_descriptor":
        return None if name in TENSOR_PROPERTIES else "metadata of a tensor"
    if name.startswith("is_") and name not in DATA_QUERIES:
        return "metadata of a tensor"
    return next((reason for reason, names in EXCLUDED.items() if name in names), None)


def targets() -> tuple[Target, ...]:
    """Return every operator of the running torch, each native callable once.

    Callables are told apart by identity: `torch.mm` equals `torch.dsmm`, which calls the same C function.
    """
    by_callable()  # filled before anything is intercepted, which may change the hash of a callable
    return _all_targets()


@cache
def _all_targets() -> tuple[Target, ...]:
    """Return the native operators of torch and of its process groups; found once per process."""
    targets_by_id: dict[int, Target] = {}
    for called in _native_callables():
        # The types of native callables have no public names in Python.
        kind = _KIND_BY_TYPE_NAME.get(type(called).__name__)
        if kind is None or id(called) in targets_by_id or why_excluded(called) is not None:
            continue
        name = called.__name__
        canonical = CANONICAL.get(name, name)
        targets_by_id[id(called)] = Target(called, kind, name, canonical, _is_inplace(canonical))
    targets_of_groups = (
        Target(called, "function", f"ProcessGroup.{method}", canonical, inplace=False)
        for method, canonical, called in collectives()
    )
    return *targets_by_id.values(), *targets_of_groups


@cache
def by_callable() -> dict[Any, Target]:
    """Return the targets by their callable; of equal callables, the target with the operator's name."""
    targets_by_callable: dict[Any, Target] = {}
    for target in _all_targets():
        # `torch.mm` equals `torch.dsmm`, so one of them gives the key its name.
        if target.callable not in targets_by_callable or target.name == target.canonical:
            targets_by_callable[target.callable] = target
    return targets_by_callable


def missing_paths() -> list[str]:
    """Return the paths, such as "Tensor.T", that this module reads and the running torch lacks."""
    tensor_class = getattr(torch._C, "TensorBase", None)
    function_class = getattr(torch._C, "_FunctionBase", None)
    required: list[tuple[str, Any, str]] = [
        *(("torch._C", torch._C, name) for name in (*NAMESPACES, "TensorBase", "_FunctionBase")),
        *(("Tensor", tensor_class, name) for name in (*SLOTS, *TENSOR_PROPERTIES)),
        ("Function", function_class, "apply"),
    ]
    return [f"{path}.{name}" for path, owner, name in required if not hasattr(owner, name)]


def _native_callables() -> Iterator[Any]:
    """Yield the native callables of torch's namespaces, tensors and autograd functions, and other values."""
    native = torch._C
    for namespace in (getattr(native, name, None) for name in NAMESPACES):
        for name in dir(namespace):
            if name not in _OBJECT_NAMES:
                yield getattr(namespace, name)
    yield from (getattr(native, name, None) for name in LOOSE_FUNCTIONS)
    yield from vars(getattr(native, "TensorBase", object)).values()
    yield vars(getattr(native, "_FunctionBase", object)).get("apply")


_OBJECT_NAMES = frozenset(dir(object))


def _is_inplace(canonical: str) -> bool:
    # ATen's in-place operators end with one underscore; `__setitem__` and its like are Python's.
    return canonical == "setitem" or (canonical.endswith("_") and not canonical.endswith("__"))
