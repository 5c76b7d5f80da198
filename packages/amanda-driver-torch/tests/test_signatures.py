"""The signatures agree with torch: with its type stubs, and with what its calls accept."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opinfo import op_db
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from amanda.drivers.torch._schema import binding
from amanda.drivers.torch._signatures import PYTHON_SIGNATURES, Signature, _aten_schemas, signatures
from amanda.drivers.torch._targets import by_callable, targets


def names(text: str) -> set[str]:
    return set(text.split())


WITHOUT_SCHEMA = {
    "new": "the legacy constructor, of many forms",
    "apply": "an autograd.Function: its forward names the inputs",
    "_from_blob": "wraps foreign memory, and is private",
}


def test_every_target_has_a_schema_or_a_reason_for_none() -> None:
    without = {
        target.name for target in targets()
        if target.name not in PYTHON_SIGNATURES and not _aten_schemas(target.canonical)
    }  # fmt: skip
    assert without == set(WITHOUT_SCHEMA)


def test_every_signature_binds_its_own_positional_call() -> None:
    for target in targets():
        for signature in signatures(target.callable):
            args = tuple(range(len(signature.positional)))
            bound = binding(target.callable, args)
            assert bound.call_arguments(bound.inputs(args)) == (args, {}), target


# Stubs that torch writes by hand, or generates for what is no schema, and that differ from
# what the running torch accepts or from its schemas' names.
STUBS_THAT_DIFFER = names("""
    hsmm nonzero tensor new new_ones new_tensor contiguous copy_ cpu cuda xpu random_ uniform_
    __getitem__ __setitem__ col2im elu_ fractional_max_pool2d fractional_max_pool3d gelu one_hot
    scaled_dot_product_attention mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight
    sparse_coo_tensor sparse_compressed_tensor sparse_bsc_tensor sparse_bsr_tensor
    sparse_csc_tensor sparse_csr_tensor
""")
# Keywords that torch's argument parser adds to schemas.
PYTHON_ONLY = {"out", "requires_grad", "names", "pin_memory", "dtype", "device", "layout"}


def stubs() -> Iterator[tuple[Any, ast.FunctionDef]]:
    """Each overload in torch's stubs, with what it describes."""
    folder = Path(torch.__file__).parent / "_C"
    for name in ("_VariableFunctions", "_nn"):
        module = ast.parse((folder / f"{name}.pyi").read_text())
        for stub in module.body:
            if isinstance(stub, ast.FunctionDef):
                yield getattr(getattr(torch._C, name), stub.name, None), stub
    for group in ast.parse((folder / "__init__.pyi").read_text()).body:
        if isinstance(group, ast.ClassDef) and group.name == "TensorBase":
            for stub in group.body:
                if isinstance(stub, ast.FunctionDef):
                    yield vars(torch._C.TensorBase).get(stub.name), stub


def describes(signature: Signature, stub: ast.FunctionDef) -> bool:
    names = [argument.name for argument in signature.arguments]
    positional = [names[i].replace("input", "self") for i in signature.positional]
    stated = [each.arg.replace("input", "self") for each in stub.args.posonlyargs + stub.args.args]
    if stub.args.vararg is not None:
        stated.append(stub.args.vararg.arg)
    keywords = {each.arg for each in stub.args.kwonlyargs}
    spread_alike = stub.args.vararg is None or signature.may_spread_size
    return positional == stated and keywords <= PYTHON_ONLY.union(names) and spread_alike


def test_every_overload_in_torch_s_stubs_is_a_signature() -> None:
    described = [(called, stub) for called, stub in stubs() if called in by_callable()]
    assert len(described) > 1900
    unlike = {
        stub.name
        for called, stub in described
        if not any(describes(signature, stub) for signature in signatures(called))
    }
    assert unlike == STUBS_THAT_DIFFER


# The same call gives other values from one time to the next.
UNSTEADY = {
    "linalg_lstsq": "in the last bits",
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "empty_permuted"), "uninitialised"),
    **dict.fromkeys(("new_empty", "new_empty_strided"), "uninitialised"),
}
KEYWORDS_UNTRIED = {
    **UNSTEADY,
    "as_strided": "needs the storage, which the copies made here do not keep",
}


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list):
        return type(first) is type(second) and all(map(is_same, first, second))
    if not isinstance(first, torch.Tensor):
        return bool(first == second) or first != first
    if first.layout is not torch.strided or first.is_nested or first.is_quantized:
        return str(first) == str(second)
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and bool(((first == second) | (first != first)).all())


class RoundTrip(TorchFunctionMode):
    """Binds every call of a target, checks the way back, and calls by the arguments rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: set[Any] = set()
        self.faults: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = by_callable().get(func)
        if target is None:
            return func(*args, **kwargs)
        self.checked.add(func)
        bound = binding(func, args, kwargs)
        again, keywords = bound.call_arguments(bound.inputs(args, kwargs))
        if not (same_objects(again, args) and same_objects(keywords, kwargs)):
            self.faults.append((func, args, kwargs, again, keywords))
        if target.kind in ("function", "method") and target.name not in KEYWORDS_UNTRIED:
            self.try_by_keyword(func, args, kwargs, is_method=target.kind == "method")
        return func(*again, **keywords)

    def try_by_keyword(self, func: Any, args: Any, kwargs: Any, *, is_method: bool) -> None:
        """The call spelled with the names of its inputs is the same call, to us and to torch."""
        bound = binding(func, args, kwargs)
        inputs = bound.inputs(args, kwargs)
        if any(name.startswith("arg") for name in bound.names):
            return
        spelled = {
            "input" if name == "self" else name: value
            for name, value in zip(bound.names, inputs, strict=True)
        }
        receiver = (spelled.pop("input"),) if is_method else ()
        rebound = binding(func, receiver, spelled)
        if not same_objects(rebound.inputs(receiver, spelled), inputs):
            self.faults.append((func, bound.names, rebound.names))
        state = torch.get_rng_state()
        by_position = func(*tree_map(copied, args), **tree_map(copied, kwargs))
        torch.set_rng_state(state)
        by_name = func(*tree_map(copied, receiver), **tree_map(copied, spelled))
        torch.set_rng_state(state)
        if not is_same(by_position, by_name):
            self.faults.append((func, bound.names, by_position, by_name))


def same_objects(first: Any, second: Any) -> bool:
    """Whether two lists, or two dicts in their order, hold the same objects."""
    if isinstance(first, dict):
        return list(first) == list(second) and all(first[name] is second[name] for name in first)
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def samples() -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Calls of torch's own operator tests: name, callable, arguments."""
    preferred = (torch.float32, torch.int64, torch.bool, torch.complex64)
    for op in op_db():
        dtype = next((each for each in preferred if each in op.dtypes), None)
        if dtype is None or op.name.startswith("jiterator"):
            continue  # for CUDA alone
        for sample in itertools.islice(samples_of(op, dtype), 4):
            variants = {op.op, op.method_variant, op.operator_variant} - {None}
            for variant in sorted(variants, key=repr):
                yield op.name, variant, (sample.input, *sample.args), sample.kwargs


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    samples = op.sample_inputs("cpu", dtype)
    while True:
        try:
            yield next(samples)
        except (StopIteration, RuntimeError, NotImplementedError):
            return  # some are made on CUDA only


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_calls_of_torch_s_own_tests_survive_the_round_trip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without a GPU torch.manual_seed notes a stack trace for each kind it might seed later.
    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
    mode, errors, unlike, calls = RoundTrip(), [], [], 0
    for name, called, args, kwargs in samples():
        torch.manual_seed(0)
        try:
            expected = called(*tree_map(copied, args), **tree_map(copied, kwargs))
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            continue
        torch.manual_seed(0)
        calls += 1
        try:
            with mode:
                actual = called(*tree_map(copied, args), **tree_map(copied, kwargs))
        except Exception as error:
            errors.append((name, called, error))
            continue
        if not is_same(expected, actual) and name.replace(".", "_") not in UNSTEADY:
            unlike.append(name)
    assert errors == []
    assert mode.faults == []
    assert unlike == []
    assert calls > 3500
    assert len(mode.checked) > 700
