"""Each function that torch lists as overridable or not is an op, made of ops, or neither for a reason."""

import copy
import pickle
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.nn import functional, init
from torch.overrides import get_ignored_functions, get_testing_overrides

import amanda
from amanda.drivers.torch._targets import by_callable, why_excluded

from ._coverage import unseen
from ._tools import Watch
from ._variants import Sample, Variant, database


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_COMPUTATION = {
    "handles on storage, whose bytes are moved as a whole": names("""
        __deepcopy__ __reduce_ex__ _reduce_ex_internal __setstate__ share_memory_ is_shared storage
        _typed_storage storage_type untyped_storage
    """),
    "metadata and Python's protocol": names("""
        __len__ __hash__ __dir__ dim_order __dlpack_device__ __get__ __torch_function__ __init__
        __init_subclass__ __subclasshook__ __getattribute__ __setattr__ __delattr__
        _clear_non_serializable_cached_data typename is_tensor is_storage
    """),
    "hooks, and what starts a backward pass": names("""
        register_hook register_post_accumulate_grad_hook backward
    """),
    "numbers known by a symbol": names("""
        sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum _sym_sqrt _sym_cos _sym_cosh
        _sym_sin _sym_sinh _sym_tan _sym_tanh _sym_asin _sym_acos _sym_atan sym_fresh_size
    """),
    "collectives: a process group writes them, beside the operators": names("""
        broadcast all_reduce reduce all_reduce_coalesced all_gather all_gather_single
        all_gather_coalesced gather scatter reduce_scatter reduce_scatter_single all_to_all_single
        all_to_all isend irecv send recv
    """),
    "removed from torch; they raise": names("lstsq eig symeig solve reinforce"),
    "settings": names("""
        set_num_threads get_num_threads set_num_interop_threads get_num_interop_threads
        init_num_threads set_flush_denormal get_default_dtype get_default_device set_default_device
        set_default_tensor_type set_printoptions set_anomaly_enabled use_deterministic_algorithms
        are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled
        set_deterministic_debug_mode get_deterministic_debug_mode get_float32_matmul_precision
        set_float32_matmul_precision set_warn_always is_warn_always_enabled set_autocast_enabled
        set_autocast_dtype get_autocast_dtype set_autocast_cache_enabled clear_autocast_cache
        autocast_increment_nesting autocast_decrement_nesting set_autocast_cpu_enabled
        set_autocast_cpu_dtype get_autocast_cpu_dtype set_autocast_gpu_dtype get_autocast_gpu_dtype
        set_autocast_ipu_enabled set_autocast_ipu_dtype get_autocast_ipu_dtype
        set_autocast_xla_enabled set_autocast_xla_dtype get_autocast_xla_dtype get_device_module
    """),
    "the state of a generator": names("""
        get_rng_state set_rng_state manual_seed seed initial_seed thread_safe_generator
    """),
    "TorchScript's compiler and interpreter, transforms and files": names("""
        fork wait parse_ir parse_schema parse_type_comment unify_type_list
        merge_type_from_type_comment import_ir_module import_ir_module_from_buffer compile cond vmap
        export register_dataclass load save
    """),
    "the machinery of overrides": names("""
        _has_torch_function _has_torch_function_unary _has_torch_function_variadic
        _disabled_torch_dispatch_impl handle_torch_function
    """),
    "arithmetic on arguments": names("calculate_gain assert_int_or_pair _none_or_dtype boolean_dispatch"),
    "a call of one op, which no CPU has": names("scaled_grouped_mm"),
    "initialisers under their deprecated names": names("""
        uniform normal constant eye dirac xavier_uniform xavier_normal kaiming_uniform
        kaiming_normal orthogonal sparse
    """),
}

A = torch.tensor([[7.0, 2.0], [3.0, 5.0]])
N = torch.tensor([[7, 2], [3, 5]])
IMAGE = torch.arange(64.0).reshape(1, 1, 8, 8)
VOLUME = torch.arange(216.0).reshape(1, 1, 6, 6, 6)
EIGHTS, ONE = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
WHOLE = [functional.ScalingType.TensorWise]
SMALL = {"kernel_size": 2}

MADE_OF_OPS: dict[str, Callable[[], Any]] = {
    "chain_matmul": lambda: torch.chain_matmul(A, A, A),
    "lobpcg": lambda: torch.lobpcg(torch.eye(9), k=1, niter=2),
    "adaptive_max_pool1d_with_indices": lambda: functional.adaptive_max_pool1d_with_indices(A[None], 1),
    "adaptive_max_pool2d_with_indices": lambda: functional.adaptive_max_pool2d_with_indices(IMAGE, 2),
    "adaptive_max_pool3d_with_indices": lambda: functional.adaptive_max_pool3d_with_indices(VOLUME, 2),
    "affine_grid": lambda: functional.affine_grid(torch.ones(1, 2, 3), [1, 1, 2, 2]),
    "dropout1d": lambda: functional.dropout1d(A[None]),
    "fold": lambda: functional.fold(torch.ones(1, 4, 4), (3, 3), (2, 2)),
    "fractional_max_pool2d_with_indices": lambda: functional.fractional_max_pool2d_with_indices(
        IMAGE, output_size=4, **SMALL
    ),
    "fractional_max_pool3d_with_indices": lambda: functional.fractional_max_pool3d_with_indices(
        VOLUME, output_size=3, **SMALL
    ),
    "gumbel_softmax": lambda: functional.gumbel_softmax(A),
    "lp_pool1d": lambda: functional.lp_pool1d(A[None], 2.0, 2),
    "lp_pool2d": lambda: functional.lp_pool2d(IMAGE, 2.0, 2),
    "lp_pool3d": lambda: functional.lp_pool3d(VOLUME, 2.0, 2),
    "max_pool1d_with_indices": lambda: functional.max_pool1d_with_indices(A[None], **SMALL),
    "max_pool2d_with_indices": lambda: functional.max_pool2d_with_indices(IMAGE, **SMALL),
    "max_pool3d_with_indices": lambda: functional.max_pool3d_with_indices(VOLUME, **SMALL),
    "upsample": lambda: functional.upsample(IMAGE, 16),
    "_canonical_mask": lambda: functional._canonical_mask(N > 3, "mask", None, "", torch.float32),
    "grouped_mm": lambda: functional.grouped_mm(
        torch.ones(2, 16, 16, dtype=torch.bfloat16), torch.ones(2, 16, 16, dtype=torch.bfloat16)
    ),
    "scaled_mm": lambda: functional.scaled_mm(EIGHTS, EIGHTS.t(), ONE, *WHOLE, ONE, *WHOLE),
    "uniform_": lambda: init.uniform_(A.clone()),
    "normal_": lambda: init.normal_(A.clone()),
    "constant_": lambda: init.constant_(A.clone(), 1.0),
    "kaiming_uniform_": lambda: init.kaiming_uniform_(A.clone()),
    "__floordiv__": lambda: A // 2,
    "__rfloordiv__": lambda: 2 // A,
    "__rlshift__": lambda: 2 << N,
    "__rrshift__": lambda: 2 >> N,
    "__array__": lambda: A.__array__(),
    "__array_wrap__": lambda: A.__array_wrap__(A.numpy()),
    "__contains__": lambda: 7.0 in A,
    "__format__": lambda: f"{A[0, 0]:.2f}",
    "__reversed__": lambda: reversed(A),
    "__repr__": lambda: repr(A),
    "__iter__": lambda: list(A),
    "__dlpack__": lambda: A.__dlpack__(),
    "module_load": lambda: A.module_load(A.clone()),
    "resize": lambda: A.clone().resize(4),
    "resize_as": lambda: A.clone().resize_as(A),
    "index": lambda: N[0, 0].__index__(),
    "pow": lambda: A.pow(2),
    "pow_": lambda: A.clone().pow_(2),
    "to_sparse_coo": lambda: A.to_sparse_coo(),
}

LISTS = {"overridable": get_testing_overrides, "ignored": get_ignored_functions}


@pytest.mark.parametrize("listed", LISTS)
@pytest.mark.filterwarnings("ignore")
def test_each_function_is_an_op_or_made_of_ops_or_has_a_reason(listed: str) -> None:
    explained = {name for reason in NO_COMPUTATION.values() for name in reason}
    in_database = {part.rpartition(".")[2] for op in database().values() for part in _names_in(op)}
    unexplained = []
    for each in LISTS[listed]():
        called = _called(each)
        name = _name(called)
        if isinstance(called, (bool, type, torch.Generator)) or _is_native(called):
            continue
        if not (name in explained or name in MADE_OF_OPS or name in in_database):
            unexplained.append(called)
    assert unexplained == []


@pytest.mark.parametrize("name", MADE_OF_OPS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_made_of_ops_computes_nothing_besides(name: str) -> None:
    watch = Watch()
    with amanda.apply(watch):
        unseen_parts = unseen(watch, Variant(name, MADE_OF_OPS[name]), Sample((), {}))
    assert unseen_parts is None
    assert watch.types


def test_each_name_with_a_reason_is_listed() -> None:
    listed = {_name(_called(each)) for group in LISTS.values() for each in group()}
    stale = {name for group in NO_COMPUTATION.values() for name in group} | MADE_OF_OPS.keys()
    assert stale - listed == set()


def test_moving_storage_as_a_whole_leaves_the_tensor_equal_under_a_tool() -> None:
    with amanda.apply(Watch()):
        assert torch.equal(copy.deepcopy(A), A)
        assert torch.equal(pickle.loads(pickle.dumps(A)), A)


def _called(each: Any) -> Any:
    """What a listed function is: a getset descriptor for the read of it."""
    owner = getattr(each, "__self__", None)
    return owner if type(owner).__name__ == "getset_descriptor" else each


def _is_native(called: Any) -> bool:
    """Whether it is one of torch's natives that is a target, or is none for the driver's own reason."""
    if isinstance(called, FunctionType):
        return False
    try:
        return called in by_callable() or why_excluded(called) is not None
    except TypeError:
        return False


def _name(called: Any) -> str:
    name: str = getattr(called, "__name__", str(called))
    if name == "fn":  # torch chooses between two functions, under a name that neither has
        name = next(
            key for key, value in {**vars(torch.functional), **vars(functional)}.items() if value is called
        )
    return name


def _names_in(op: Any) -> list[str]:
    called = [op.op, op.method_variant, op.inplace_variant, op.operator_variant, op.inplace_operator_variant]
    names = [getattr(function, "__name__", "") for function in called if function is not None]
    return [op.name, *(alias.name for alias in op.aliases), *names]
